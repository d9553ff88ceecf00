"""Reads the regular expressions of requests: the part of ECMA-262's syntax that is regular.

Groups capture nothing, `\\d \\w \\s` are ASCII as in JSON Schema's dialect (`\\s` with Unicode spaces), lazy
quantifiers match the same texts as greedy ones. Look-around, back-references, word boundaries and flags are refused.
Anchors are honoured where they can be resolved exactly: at the ends of the expression or of a top-level branch.
"""

from __future__ import annotations

from runtime.grammar.regular import (
    ANY_TEXT,
    DIGIT,
    EMPTY,
    MAX_CHAR,
    Class,
    Regex,
    alt,
    chars,
    complement,
    repeat,
    seq,
)

MAX_GROUPS = 200  # nesting
MAX_REPEAT = 1_000_000
_WORD = chars((0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A), "_")
_SPACE = chars("\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff", (0x2000, 0x200A))
_DOT = complement(chars("\n\r\u2028\u2029"))
_SETS = {
    "d": DIGIT,
    "D": complement(DIGIT),
    "w": _WORD,
    "W": complement(_WORD),
    "s": _SPACE,
    "S": complement(_SPACE),
}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_SYNTAX = frozenset("^$\\.*+?()[]{}|/-")


class RegexError(ValueError):
    """The expression is malformed or not regular; the message says where."""


def parse_full(pattern: str) -> Regex:
    """An expression that must match the whole text (the `regex` kind)."""
    return _Parser(pattern, search=False).parse()


def parse_search(pattern: str) -> Regex:
    """A JSON Schema `pattern`: it may match anywhere, unless it is anchored. Returns the whole-text equivalent."""
    return _Parser(pattern, search=True).parse()


class _Parser:
    """Recursive descent over the pattern's characters."""

    def __init__(self, pattern: str, *, search: bool) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0
        self._search = search

    def parse(self) -> Regex:
        regex = self._branches(top=True)
        if self._at < len(self._text):
            raise self._error("unbalanced ')'")
        return regex

    def _error(self, what: str) -> RegexError:
        return RegexError(f"{what} at position {self._at}")

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _take(self, token: str) -> bool:
        if self._text.startswith(token, self._at):
            self._at += len(token)
            return True
        return False

    def _branches(self, *, top: bool) -> Regex:
        """`top`: the branch spans from the text's start to its end, so anchors and search apply to it."""
        found = [self._branch(top)]
        while self._take("|"):
            found.append(self._branch(top))
        return alt(*found)

    def _branch(self, top: bool) -> Regex:
        starts = ends = False
        while top and self._take("^"):
            starts = True
        if top and self._search and (whole := self._sole_group(starts)) is not None:
            return whole
        items: list[Regex] = []
        while (c := self._peek()) and c not in "|)":
            if c == "$":
                if not top or not self._ends_branch():
                    raise self._error("'$' is supported only at the end of the expression or of a top-level branch;")
                ends = True
                continue
            items.append(self._quantified())
        body = seq(*items)
        if top and self._search:
            return seq(EMPTY if starts else ANY_TEXT, body, EMPTY if ends else ANY_TEXT)
        return body

    def _ends_branch(self) -> bool:
        """Skip a run of '$' when a branch ends after it."""
        after = self._at
        while after < len(self._text) and self._text[after] == "$":
            after += 1
        if after == len(self._text) or self._text[after] in "|)":
            self._at = after
            return True
        return False

    def _sole_group(self, anchored: bool) -> Regex | None:
        """A branch that is one whole unanchored group, such as `(^a$|^b$)`: anchors inside it are at the top."""
        if anchored or self._peek() != "(":
            return None
        start = self._at
        if not self._open_group():
            return None
        inner = None
        try:
            inner = self._branches(top=True)
            closed = self._take(")") and self._peek() in ("", "|", ")")
        except RegexError:
            closed = False
        self._depth -= 1
        if closed:
            return inner
        self._at = start
        return None

    def _quantified(self) -> Regex:
        item = self._atom()
        while (bounds := self._quantifier()) is not None:
            low, high = bounds
            if high is not None and low > high:
                raise self._error("numbers of a quantifier out of order")
            item = repeat(item, low, high)
            self._take("?")  # lazy: same language
            if self._peek() in ("*", "+"):
                raise self._error("nothing to repeat")
        return item

    def _quantifier(self) -> tuple[int, int | None] | None:
        for token, low, high in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._take(token):
                return low, high
        if self._peek() != "{":
            return None
        start = self._at
        self._at += 1
        low_text = self._digits()
        comma = self._take(",")
        high_text = self._digits() if comma else low_text
        if not low_text or not self._take("}"):
            self._at = start
            return None
        for number in (low_text, high_text or "0"):
            if len(number) > 7 or int(number) > MAX_REPEAT:
                raise self._error(f"repeat count above {MAX_REPEAT}")
        return int(low_text), int(high_text) if high_text else None

    def _digits(self) -> str:
        start = self._at
        while self._peek() and self._peek() in "0123456789":
            self._at += 1
        return self._text[start : self._at]

    def _atom(self) -> Regex:
        c = self._peek()
        if c == "(":
            return self._group()
        if c in "*+?":
            raise self._error("nothing to repeat")
        if c == "^":
            raise self._error("'^' is supported only at the start of the expression or of a top-level branch;")
        self._at += 1
        if c == ".":
            return _DOT
        if c == "[":
            return self._class()
        if c == "\\":
            return self._escape(in_class=False)
        return chars(c) if not 0xD800 <= ord(c) <= 0xDFFF else self._lone_surrogate()

    def _lone_surrogate(self) -> Regex:
        raise self._error("a lone surrogate")

    def _open_group(self) -> bool:
        """Consume a group's opening; False (nothing consumed) if it is not a plain group."""
        start = self._at
        self._at += 1
        self._depth += 1
        if self._depth > MAX_GROUPS:
            raise self._error(f"groups nested more than {MAX_GROUPS} deep")
        if self._take("?:"):
            return True
        if self._take("?<") and self._peek() not in ("=", "!"):
            while self._peek() and self._peek() != ">":
                self._at += 1
            if self._take(">"):
                return True
        elif self._peek() != "?" and self._text[start + 1 : start + 3] != "?<":
            return True
        self._at, self._depth = start, self._depth - 1
        return False

    def _group(self) -> Regex:
        if not self._open_group():
            kind = self._text[self._at : self._at + 4]
            name = "look-around" if kind.startswith(("(?=", "(?!", "(?<=", "(?<!")) else "this kind of group or flag"
            raise self._error(f"{name} is not regular or not supported: '{kind}'")
        inner = self._branches(top=False)
        if not self._take(")"):
            raise self._error("missing ')'")
        self._depth -= 1
        return inner

    def _escape(self, *, in_class: bool) -> Class:
        c = self._peek()
        if not c:
            raise self._error("a lone '\\'")
        self._at += 1
        if c in _SETS:
            return _SETS[c]
        if c in _CONTROLS:
            if c == "0" and self._peek().isdigit():
                raise self._error("octal escapes are not supported;")
            return chars(_CONTROLS[c])
        if c == "b" and in_class:
            return chars("\b")
        if c in "xu":
            return self._code_point(c)
        if c == "c" and self._peek().isascii() and self._peek().isalpha():
            self._at += 1
            return chars(chr(ord(self._text[self._at - 1]) % 32))
        if c in _SYNTAX or not (c.isalnum() or c == "_"):
            return chars(c)
        name = {"b": "word boundaries", "B": "word boundaries", "p": "\\p{..}", "P": "\\P{..}", "k": "back-references"}
        what = "back-references" if c.isdigit() else name.get(c, f"the escape '\\{c}'")
        raise self._error(f"unsupported: {what};")

    def _code_point(self, kind: str) -> Class:
        digits = ""
        if kind == "u" and self._take("{"):
            while self._peek() not in ("", "}"):
                digits += self._peek()
                self._at += 1
            self._take("}")
        else:
            width = 2 if kind == "x" else 4
            digits, self._at = self._text[self._at : self._at + width], self._at + width
            if len(digits) != width:
                raise self._error(f"an incomplete '\\{kind}' escape")
        try:
            value = int(digits, 16)
        except ValueError:
            raise self._error(f"a malformed '\\{kind}' escape") from None
        if value > MAX_CHAR or not digits.isalnum():
            raise self._error(f"a malformed '\\{kind}' escape")
        if 0xD800 <= value < 0xDC00 and self._take("\\u"):
            low = self._code_point_value()
            value = 0x10000 + ((value - 0xD800) << 10) + (low - 0xDC00)
        if 0xD800 <= value <= 0xDFFF:
            raise self._error("a lone surrogate")
        return Class(((value, value),))

    def _code_point_value(self) -> int:
        digits, self._at = self._text[self._at : self._at + 4], self._at + 4
        try:
            value = int(digits, 16)
        except ValueError:
            raise self._error("a malformed '\\u' escape") from None
        if not 0xDC00 <= value <= 0xDFFF:
            raise self._error("a lone surrogate")
        return value

    def _class(self) -> Class:
        negated = self._take("^")
        parts: list[Class] = []
        while (c := self._peek()) != "]":
            if not c:
                raise self._error("missing ']'")
            low = self._class_item()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                low = self._range(low, self._class_item())
            parts.append(low)
        self._at += 1
        merged = alt(*parts)
        cls = merged if isinstance(merged, Class) else Class(())
        return complement(cls) if negated else cls

    def _class_item(self) -> Class:
        c = self._peek()
        self._at += 1
        if c == "\\":
            return self._escape(in_class=True)
        if 0xD800 <= ord(c) <= 0xDFFF:
            raise self._error("a lone surrogate")
        return chars(c)

    def _range(self, low: Class, high: Class) -> Class:
        start, end = low.single, high.single
        if start is None or end is None:
            merged = alt(low, high, chars("-"))  # [\w-.]: the dash stands for itself
            return merged if isinstance(merged, Class) else Class(())
        if start > end:
            raise self._error("a character range out of order")
        return chars((start, end))
