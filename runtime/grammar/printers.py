"""Grammars as text: EBNF for xgrammar, Lark for llguidance. A printer refuses what its reader cannot enforce."""

from __future__ import annotations

import json
from functools import lru_cache

from runtime.grammar.jsontext import PLAIN_CHAR
from runtime.grammar.regular import MAX_CHAR, Alt, Class, Regex, Repeat, Seq, complement
from runtime.grammar.rules import ROOT, Choice, Expr, Grammar, Join, Leaf, Many, Native, Rule, Text

MAX_TEXT = 512 * 1024
_MAX_UNROLL = 8
_MAX_REPEATED_TEXT = 24
_MAX_LEAF_COST = 128
_WIDE_COST = 48
_NARROW = 16  # characters: digits, hex digits
_MAX_FORCED_COST = 4096
MAX_NARROW_COST = 1_000_000
_ESCAPES = (
    1,
    3,
    7,
    15,
    31,
    63,
    127,
    255,
    511,
    1023,
)  # how many, and between them an equal share of the other characters
_MIN_SHARE = 3


class CannotPrint(ValueError):
    """`where` is the JSON pointer, `what` the feature this backend has no means for."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(what)
        self.where = where
        self.what = what


def to_ebnf(grammar: Grammar, *, narrow: bool = False) -> str:
    """EBNF whose masks stay cheap.

    `narrow`: no other backend is at hand. In counted repeats that are too long to unroll escapes then stand only some
    way apart (a subset), leaves that cannot be written even so have no escapes, and dearer patterns are tried.
    """
    return _Ebnf(narrow).document(grammar)


def to_lark(grammar: Grammar) -> str:
    return _Lark().document(grammar)


class _Ebnf:
    """Repeats of single characters stay repeats; other unbounded ones become right-recursive rules, because that is
    what the mask compiler handles ahead of time (a starred group costs it tens of milliseconds a mask)."""

    def __init__(self, narrow: bool) -> None:
        self._narrow = narrow
        self._lines: list[str] = []
        self._size = 0
        self._leaves: dict[Leaf, str] = {}
        self._seen: dict[int, str] = {}  # by identity: hashing a leaf walks its whole expression
        self._stars: dict[tuple[Regex, str], str] = {}
        self._rests = 0
        self._cost = 0

    def document(self, grammar: Grammar) -> str:
        for name, expr in grammar.rules.items():
            self._define(name, self._expr(expr))
        return "\n".join(self._lines) + "\n"

    def _define(self, name: str, body: str) -> None:
        self._size += len(body)
        if self._size > MAX_TEXT:
            raise CannotPrint("", "a grammar this large")
        self._lines.append(f"{name} ::= {body}")

    def _expr(self, expr: Expr) -> str:
        match expr:
            case Text(text):
                return _ebnf_string(text)
            case Rule(name):
                return name
            case Leaf():
                return self._leaf(expr)
            case Native():
                raise CannotPrint(expr.where, expr.what)
            case Join(items):
                return " ".join(self._expr(i) for i in items) or '""'
            case Choice(items):
                return "(" + " | ".join(self._expr(i) for i in items) + ")"
            case Many(item, low, high):
                return f"({self._expr(item)})" + _ebnf_count(low, high)
        raise TypeError(expr)

    def _leaf(self, leaf: Leaf) -> str:
        if id(leaf) not in self._seen:
            if leaf not in self._leaves:
                name = self._leaves[leaf] = f"t{len(self._leaves)}"
                self._define(name, self._leaf_body(leaf))
            self._seen[id(leaf)] = self._leaves[leaf]
        return self._seen[id(leaf)]

    def _spend(self, cost: int) -> None:
        """Bound the work of compiling one leaf: states it unrolls to, those of nearly any character counting more."""
        self._cost += cost
        if self._cost > (_MAX_FORCED_COST if self._narrow else _MAX_LEAF_COST):
            raise CannotPrint("", "a pattern of this size")

    def _leaf_body(self, leaf: Leaf) -> str:
        self._cost = 0
        if not leaf.also and not leaf.never:
            try:
                return self._regex(leaf.regex, '""')
            except CannotPrint:
                if not self._narrow or leaf.narrow is None:
                    raise CannotPrint(leaf.where, leaf.what) from None
                self._cost = -MAX_NARROW_COST
                return self._regex(leaf.narrow, '""')
        raise CannotPrint(leaf.where, leaf.what)

    def _regex(self, regex: Regex, rest: str) -> str:
        """The expression followed by `rest`."""
        match regex:
            case Class():
                self._spend(1 if regex.ranges[-1:] != PLAIN_CHAR.ranges[-1:] else _WIDE_COST)
                return f"{_ebnf_class(regex)} {rest}"
            case Seq(items):
                literal = ""
                for item in reversed(items):
                    if isinstance(item, Class) and item.single is not None:
                        literal = chr(item.single) + literal
                        continue
                    rest, literal = _ebnf_prefix(literal, rest), ""
                    rest = self._regex(item, rest)
                return _ebnf_prefix(literal, rest)
            case Alt(items):
                rest = self._shared(rest)
                return "(" + " | ".join(self._regex(i, rest) for i in items) + ")"
            case Repeat(item, low, high):
                return self._repeat(item, low, high, rest)
        raise TypeError(regex)

    def _shared(self, rest: str) -> str:
        """A text short enough to stand in several places: what follows an alternative belongs into it, so that a
        loop inside ends where the leaf goes on and not in an empty text."""
        if len(rest) <= _MAX_REPEATED_TEXT:
            return rest
        name = f"c{self._rests}"
        self._rests += 1
        self._define(name, rest)
        return name

    def _repeat(self, item: Regex, low: int, high: int | None, rest: str) -> str:
        if isinstance(item, Class):
            width = sum(b - a + 1 for a, b in item.ranges)
            self._spend(max(low, high or 0) // (1 if width > _NARROW else 8))
            return f"{_ebnf_class(item)}{_ebnf_count(low, high)} {rest}"
        if max(low, high or 0) > _MAX_UNROLL:
            if self._narrow and isinstance(item, Alt) and isinstance(item.items[0], Class):
                return self._runs(item.items[0], Alt(item.items[1:]), low, high, rest)
            raise CannotPrint("", "counted groups")
        if high is None:
            text = self._star(item, rest)
        else:
            text = '""'
            for _ in range(high - low):
                text = f'({self._regex(item, text)} | "")'
            text = f"{text} {rest}"
        for _ in range(low):
            text = self._regex(item, text)
        if len(text) > MAX_TEXT:
            raise CannotPrint("", "counted groups this large")
        return text

    def _runs(self, plain: Class, other: Alt, low: int, high: int | None, rest: str) -> str:
        """At least `low` characters that are plain, then plain ones and others: as many as one likes, or so many of
        each that they cannot be more than `high`.

        A counted repeat of either takes tens of milliseconds a mask, more the longer it is; a repeat of runs of plain
        characters that end in another one takes microseconds.
        """
        rest, cls = self._shared(rest), _ebnf_class(plain)
        self._spend(4 * _WIDE_COST)
        if high is None:
            text = self._star(Alt((plain, *other.items)), rest)
        else:
            room, escaped = high - low, self._regex(other, '""')
            branches = [f"{cls}{{0,{room}}} {rest}"] if room else [rest]
            for n in _ESCAPES:
                share = (room - n) // (n + 1)
                if share < _MIN_SHARE:
                    break
                name = f"x{self._rests}"
                self._rests += 1
                self._define(name, f"{cls}{{0,{share}}} {escaped}")
                branches.append(f"{name}{{0,{n}}} {cls}{{0,{share}}} {rest}")
            text = "(" + " | ".join(branches) + ")"
        return f"{cls}{{{low}}} {text}" if low else text

    def _star(self, item: Regex, rest: str) -> str:
        if (item, rest) in self._stars:
            return self._stars[item, rest]
        name = self._stars[item, rest] = f"s{len(self._stars)}"
        steps = item.items if isinstance(item, Alt) else (item,)
        self._define(name, " | ".join([rest, *(self._regex(step, name) for step in steps)]))
        return name


def _ebnf_prefix(literal: str, rest: str) -> str:
    return f"{_ebnf_string(literal)} {rest}" if literal else rest


def _ebnf_count(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return "?" if (low, high) == (0, 1) else f"{{{low},{high}}}"


def _ebnf_string(text: str) -> str:
    return '"' + "".join(_ebnf_char(ord(c)) for c in text) + '"'


@lru_cache(1024)
def _ebnf_char(code: int) -> str:
    if chr(code).isascii() and (chr(code).isalnum() or chr(code) in " _,:;.!#$%&'()*+/<=>?@`{|}~"):
        return chr(code)
    return _ebnf_code(code)


def _ebnf_code(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _ebnf_class(cls: Class) -> str:
    """A class that reaches the last code point is written as what it leaves out: compiled far more cheaply.

    Surrogates are left out by name, or their three bytes, which are no UTF-8, would be taken as a character.
    """
    negated = bool(cls.ranges) and cls.ranges[-1][1] == MAX_CHAR
    shown = (*complement(cls).ranges, (0xD800, 0xDFFF)) if negated else cls.ranges
    pairs = (_ebnf_range_char(a) + ("" if a == b else "-" + _ebnf_range_char(b)) for a, b in shown)
    return f"[{'^' if negated else ''}{''.join(pairs)}]"


def _ebnf_range_char(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else _ebnf_code(code)


class _Lark:
    """Rules are parsed, leaves become terminals. So do fixed texts one of which is to come: the parser would follow
    each of thousands by itself and give up, and where one begins another it would take the shorter."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._leaves: dict[Leaf, str] = {}
        self._words: dict[tuple[Expr, ...], str] = {}
        self._seen: dict[int, str] = {}  # by identity: hashing a leaf walks its whole expression

    def document(self, grammar: Grammar) -> str:
        for name, expr in grammar.rules.items():
            self._lines.append(f"{'start' if name == ROOT else name}: {self._expr(expr)}")
        text = "\n".join(self._lines) + "\n"
        if len(text) > MAX_TEXT:
            raise CannotPrint("", "a grammar this large")
        return text

    def _expr(self, expr: Expr) -> str:
        match expr:
            case Text(text):
                return _lark_string(text)
            case Rule(name):
                return name
            case Leaf():
                return self._leaf(expr)
            case Native(schema):
                return f"%json {schema}"
            case Join(items):
                return " ".join(self._expr(i) for i in items) or '""'
            case Choice(items):
                words = [item.text for item in items if isinstance(item, Text)]
                return self._one_of(items, words) if len(words) == len(items) and all(words) else self._either(items)
            case Many(item, low, high):
                return f"({self._expr(item)})" + _ebnf_count(low, high)
        raise TypeError(expr)

    def _either(self, items: tuple[Expr, ...]) -> str:
        return "(" + " | ".join(self._expr(i) for i in items) + ")"

    def _one_of(self, items: tuple[Expr, ...], words: list[str]) -> str:
        if items not in self._words:
            name = self._words[items] = f"W{len(self._words)}"
            self._lines.append(f"{name}: /{'|'.join(''.join(_rust_char(ord(c)) for c in word) for word in words)}/")
        return self._words[items]

    def _leaf(self, leaf: Leaf) -> str:
        if id(leaf) in self._seen:
            return self._seen[id(leaf)]
        if leaf not in self._leaves:
            name = self._leaves[leaf] = f"T{len(self._leaves)}"
            parts = [f"/{rust_regex(r)}/" for r in (leaf.regex, *leaf.also)]
            parts += [f"~/{rust_regex(r)}/" for r in leaf.never]
            self._lines.append(f"{name}: {' & '.join(parts)}")
        self._seen[id(leaf)] = self._leaves[leaf]
        return self._leaves[leaf]


def _lark_string(text: str) -> str:
    """A JSON string; DEL has to be escaped in it too, or the reader takes it for no token at all."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def rust_regex(regex: Regex) -> str:
    """The expression in the syntax of Rust's regex crate, safe between slashes."""
    match regex:
        case Class(pairs):
            if regex.single is not None:
                return _rust_char(regex.single)
            return "[" + "".join(_rust_char(a) + ("" if a == b else "-" + _rust_char(b)) for a, b in pairs) + "]"
        case Seq(items):
            return "".join(rust_regex(i) if not isinstance(i, Alt) else f"(?:{rust_regex(i)})" for i in items)
        case Alt(items):
            return "|".join(rust_regex(i) for i in items)
        case Repeat(item, low, high):
            inner = rust_regex(item)
            return (inner if isinstance(item, Class) else f"(?:{inner})") + _ebnf_count(low, high)
    raise TypeError(regex)


def _rust_char(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:x}}}"
