"""Normal form to grammar: which texts spell the values of a node.

Properties come in the schema's order, then other keys. A schema that lists properties (even none: `{}`) and says
nothing of others closes its objects. Separators are ", " and ": ", or on request flexible whitespace: at most one blank
or line break and 16 blanks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, gcd, lcm
from typing import Any, NoReturn

from runtime.grammar.arrays import array_body
from runtime.grammar.empty import is_empty
from runtime.grammar.jsontext import QUOTE, plain_only, quoted, text_of
from runtime.grammar.keywords import check_multiples
from runtime.grammar.locate import keyword_place
from runtime.grammar.nodes import (
    Anything,
    Array,
    KeyPattern,
    Literal,
    Never,
    Node,
    Number,
    Object,
    Ref,
    String,
    TooComplex,
    Union,
    conj,
    conj_all,
    json_text,
    string_matches,
)
from runtime.grammar.numbers import integers, numbers
from runtime.grammar.objects import Entries, object_body
from runtime.grammar.regular import ANY_CHAR, ANY_TEXT, Regex, alt, chars, lengths, lit, none_of, repeat, seq
from runtime.grammar.rules import (
    EMPTY_TEXT,
    NOTHING_FITS,
    ROOT,
    Expr,
    Grammar,
    Leaf,
    Native,
    Rule,
    Text,
    choice,
    join,
    optional,
    prune,
)
from runtime.grammar.schema import Normaliser, cannot, implied, refuse
from runtime.grammar.work import step

MAX_RULES = 20_000
_MAX_DOUBLE_INT = 10**15
_BLANKS = Leaf(seq(chars("\n "), repeat(chars(" "), 0, 16)))


@dataclass(frozen=True, slots=True)
class Spacing:
    """`comma` and `colon` between values, `pad` inside brackets; texts for values written in one fixed spelling."""

    comma: Expr
    colon: Expr
    pad: Expr
    comma_text: str = ", "
    colon_text: str = ": "


FIXED = Spacing(Text(", "), Text(": "), EMPTY_TEXT)
_PAD = optional(_BLANKS)
FLEXIBLE = Spacing(join(_PAD, Text(","), _PAD), join(_PAD, Text(":"), _PAD), _PAD)


def json_grammar(normaliser: Normaliser, spacing: Spacing = FIXED) -> Grammar:
    """The grammar of a schema document. Raises InvalidRequest if no value can match."""
    grammar = prune(Emitter(normaliser, spacing).document())
    if grammar.root == NOTHING_FITS:
        refuse("", "no value can match this schema.")
    return grammar


def schema_grammar(schema: Any, whitespace: str) -> Grammar:
    """The grammar of a parsed schema document."""
    try:
        return json_grammar(Normaliser(schema), FLEXIBLE if whitespace == "flexible" else FIXED)
    except (TooComplex, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        refuse("", f"too complex: {why}.")


class Emitter:
    """Collects rules. Each definition and each free-form value is one rule, so recursion is a reference."""

    def __init__(self, normaliser: Normaliser, spacing: Spacing) -> None:
        self._resolve = normaliser.resolve
        self._root = normaliser.root
        self._document = normaliser.document
        self._spacing = spacing
        self._rules: dict[str, Expr] = {}
        self._named: dict[str, str] = {}
        self._scalars: dict[Number | String, Expr] = {}

    def document(self) -> dict[str, Expr]:
        self._rules[ROOT] = self.expr(self._root())
        return self._rules

    def rule(self, key: str, make: Callable[[], Expr]) -> Expr:
        """The rule of a key, made once; a reference while it is being made."""
        if key not in self._named:
            name = self._named[key] = f"r{len(self._named)}"
            self._rules[name] = NOTHING_FITS
            self._rules[name] = make()
        return Rule(self._named[key])

    def fresh(self, expr: Expr) -> Expr:
        """A reference to a new rule for an expression that is used more than once."""
        if isinstance(expr, (Text, Rule)):
            return expr
        if len(self._named) > MAX_RULES:
            raise TooComplex(f"it needs more than {MAX_RULES} rules")
        return self.rule(f"fresh {len(self._named)}", lambda: expr)

    def expr(self, node: Node) -> Expr:
        step()
        node = implied(node)
        match node:
            case Anything():
                return self.rule("anything", self._anything)
            case Never():
                return NOTHING_FITS
            case Literal(values):
                return choice(Text(json_text(v, self._spacing.comma_text, self._spacing.colon_text)) for v in values)
            case Number() | String():
                return self._scalar(node)
            case Array():
                return self._array(node)
            case Object():
                return self._object(node)
            case Union(nodes):
                return choice(self.expr(n) for n in nodes)
            case Ref(name):
                return self.rule(f"ref {name}", lambda: self.expr(self._resolve(name)))
        raise TypeError(node)

    def _scalar(self, node: Number | String) -> Expr:
        """Equal nodes share one leaf object: schemas repeat them by the hundred, and leaves are large to compare."""
        if node not in self._scalars:
            self._scalars[node] = self._placed(number_expr(node) if isinstance(node, Number) else string_expr(node))
        return self._scalars[node]

    def _placed(self, expr: Expr) -> Expr:
        """The expression with the place of its keyword, should a printer refuse it."""
        if not isinstance(expr, (Leaf, Native)):
            return expr
        return replace(expr, where=keyword_place(self._document, expr.where, expr.what))

    def _cannot(self, node: Array | Object, error: TooComplex) -> NoReturn:
        cannot(keyword_place(self._document, node.where, str(error)), str(error))

    def _anything(self) -> Expr:
        literals = choice(Text(word) for word in ("null", "true", "false"))
        values = [self.expr(node) for node in (Object(), Array(), String(), Number())]
        return choice([*values, literals])

    def unique(self, word: str) -> str:
        """A key prefix nobody else has."""
        return f"{word} {len(self._named)}"

    def both(self, a: Node, b: Node) -> Node:
        return conj(a, b, self._resolve)

    def plain(self, node: Node) -> Node:
        """The node behind a reference."""
        return implied(self._resolve(node.name) if isinstance(node, Ref) else node)

    def _array(self, node: Array) -> Expr:
        try:
            body = array_body(node, self._spacing.comma, self)
        except TooComplex as error:
            self._cannot(node, error)
        return _bracketed("[", body, "]", self._spacing.pad)

    def _object(self, node: Object) -> Expr:
        try:
            body = object_body(self._entries(node), self)
        except TooComplex as error:
            self._cannot(node, error)
        return _bracketed("{", body, "}", self._spacing.pad)

    def _entries(self, node: Object) -> Entries:
        known = dict.fromkeys(node.props) | dict.fromkeys(sorted(node.required - node.props.keys()))
        fixed: list[tuple[Expr, bool]] = []
        for key in known:
            value = self.expr(conj_all(node.key_nodes(key), self._resolve))
            if value != NOTHING_FITS:
                entry = join(Text(text_of(key)), self._spacing.colon, value)
                fixed.append((self.fresh(entry), key in node.required))
            elif key in node.required:
                return Entries((), (NOTHING_FITS,), self._spacing.comma, 1, None, node.where)
        others = tuple(self._other_entries(node, tuple(known)))
        return Entries(tuple(fixed), others, self._spacing.comma, node.min_props, node.max_props, node.where)

    def _other_entries(self, node: Object, known: tuple[str, ...]) -> list[Expr]:
        """Entries whose keys are not listed: by pattern, and additional ones."""
        names = _merge_names(node.names)
        entries: list[Expr] = []
        for subset, rest in _splits(node.patterns):
            value = self.expr(conj_all((p.node for p in subset), self._resolve))
            match, never = tuple(p.regex for p in subset), tuple(p.regex for p in rest)
            key = self._placed(_key(names, known, match, never, node.where))
            entries.append(join(key, self._spacing.colon, value))
        closed = node.open and (node.listed or bool(node.patterns))
        if not closed and not isinstance(node.additional, Never):
            key = self._placed(_key(names, known, (), tuple(p.regex for p in node.patterns), node.where))
            entries.append(join(key, self._spacing.colon, self.expr(node.additional)))
        return [e for e in entries if e != NOTHING_FITS]


def _bracketed(opening: str, body: Expr, closing: str, pad: Expr) -> Expr:
    if pad == EMPTY_TEXT:
        return join(Text(opening), body, Text(closing))
    return join(Text(opening), pad, body, pad, Text(closing))


def _splits(patterns: tuple[KeyPattern, ...]) -> list[tuple[list[KeyPattern], list[KeyPattern]]]:
    """Every way a key can match some of the patterns and none of the rest."""
    if len(patterns) > 3:
        raise TooComplex("more than 3 patternProperties in one object")
    result = []
    for bits in range(1, 1 << len(patterns)):
        subset = [p for i, p in enumerate(patterns) if bits >> i & 1]
        result.append((subset, [p for i, p in enumerate(patterns) if not bits >> i & 1]))
    return result


def _merge_names(names: tuple[String, ...]) -> String:
    highs = [n.max_len for n in names if n.max_len is not None]
    return String(
        max((n.min_len for n in names), default=0),
        min(highs) if highs else None,
        tuple(p for n in names for p in n.patterns),
        tuple(e for n in names for e in n.excluded),
    )


def _key(names: String, known: tuple[str, ...], match: tuple[Regex, ...], never: tuple[Regex, ...], where: str) -> Expr:
    constraint = String(names.min_len, names.max_len, names.patterns + match, names.excluded + known, where=where)
    if never:
        return string_expr(constraint, never, "keys that must not match a pattern")
    return string_expr(constraint, what="keys under several constraints")


def string_expr(node: String, never: tuple[Regex, ...] = (), what: str = "") -> Expr:
    """A JSON string. Lengths that a pattern keeps anyway, and exclusions it never meets, cost nothing."""
    low, high = node.min_len, node.max_len
    for shortest, longest in (lengths(p) for p in node.patterns):
        low = 0 if shortest >= low else low
        high = None if longest is not None and high is not None and longest <= high else high
    if high is not None and node.min_len > high:
        return NOTHING_FITS
    parts = list(node.patterns)
    if low or high is not None:
        parts.append(repeat(ANY_CHAR, low, high))
    excluded = tuple(e for e in node.excluded if string_matches(String(low, high, node.patterns), e))
    forbidden = list(never)
    if excluded and not parts:
        parts.append(none_of(excluded))
    else:
        forbidden += [alt(*(lit(word) for word in excluded))] if excluded else []
    first, *others = parts or [ANY_TEXT]
    if (others or forbidden) and is_empty((first, *others), tuple(forbidden)):
        return NOTHING_FITS
    return Leaf(
        quoted(first),
        also=tuple(quoted(p) for p in others),
        never=tuple(quoted(p) for p in forbidden),
        narrow=seq(QUOTE, plain_only(first), QUOTE) if not others and not forbidden else None,
        where=node.where,
        what=what or _describe(node),
    )


def _describe(node: String) -> str:
    sized = "minLength and maxLength" if node.min_len or node.max_len is not None else ""
    if node.patterns and sized:
        return "a pattern or format together with minLength or maxLength"
    return sized or ("a pattern with counted groups" if node.patterns else "excluded values")


def number_expr(node: Number) -> Expr:
    if not node.multiples:
        regex = integers(node.low, node.high) if node.integer else numbers(node.low, node.high)
        return Leaf(regex, where=node.where, what="the number's range")
    step = _common_multiple(map(Fraction, node.multiples))
    if not _has_multiple(node, step):
        return NOTHING_FITS
    where = f"{node.where}/multipleOf"
    check_multiples(node, where)  # again: merging may have brought the bound beside it
    schema: dict[str, object] = {"type": "integer" if node.integer else "number", "multipleOf": _plain(step, where)}
    for bound, plain, strict in (
        (node.low, "minimum", "exclusiveMinimum"),
        (node.high, "maximum", "exclusiveMaximum"),
    ):
        if bound is not None:
            schema[strict if bound.strict else plain] = _plain(Fraction(bound.value), where)
    return Native(json.dumps(schema), where=where, what="multipleOf")


def _common_multiple(steps: Iterable[Fraction]) -> Fraction:
    steps = tuple(steps)
    return Fraction(lcm(*(s.numerator for s in steps)), gcd(*(s.denominator for s in steps)))


def _has_multiple(node: Number, step: Fraction) -> bool:
    """Whether the interval holds a multiple of the step (a whole one, for integers)."""
    if node.low is None or node.high is None:
        return True
    if node.integer:
        step = _common_multiple((step, Fraction(1)))
    low, high = Fraction(node.low.value), Fraction(node.high.value)
    least = ceil(low / step) * step
    if node.low.strict and least == low:
        least += step
    return least < high or (least == high and not node.high.strict)


def _plain(value: Fraction, where: str) -> int | float:
    """A number that its reader, which computes with doubles, cannot take for another."""
    if abs(value) > _MAX_DOUBLE_INT or Fraction(repr(float(value))) != value:
        cannot(where, "multipleOf with numbers of more than 15 digits")
    return int(value) if value.denominator == 1 else float(value)
