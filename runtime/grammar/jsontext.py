"""How JSON values are written: one spelling for every character, so that regular operations on texts are exact.

Characters stand for themselves except `"`, `\\` and the control characters, which have one escape each. That is a
bijection: the intersection of two encoded languages is the encoding of their intersection.
"""

from __future__ import annotations

import json

from runtime.grammar.regular import (
    ANY_CHAR,
    Alt,
    Class,
    Regex,
    Repeat,
    Seq,
    alt,
    chars,
    intersect,
    lit,
    repeat,
    seq,
    subtract,
)

_SHORT = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", '"': '"', "\\": "\\"}
_ESCAPED = chars((0, 0x1F), '"\\')
PLAIN_CHAR = subtract(ANY_CHAR, _ESCAPED)
QUOTE = lit('"')


def encode(regex: Regex) -> Regex:
    """The JSON spelling (without quotes) of every text the expression matches."""
    match regex:
        case Class():
            return _encode_class(regex)
        case Seq(items):
            return seq(*(encode(i) for i in items))
        case Alt(items):
            return alt(*(encode(i) for i in items))
        case Repeat(item, low, high):
            return repeat(encode(item), low, high)
    raise TypeError(regex)


def _encode_class(cls: Class) -> Regex:
    plain, special = intersect(cls, PLAIN_CHAR), intersect(cls, _ESCAPED)
    if not special.ranges:
        return plain
    members = [chr(c) for low, high in special.ranges for c in range(low, high + 1)]
    short = chars("".join(_SHORT[c] for c in members if c in _SHORT))
    long = _hex_codes([ord(c) for c in members if c not in _SHORT])
    return alt(plain, seq(lit("\\"), alt(short, long)))


def _hex_codes(codes: list[int]) -> Regex:
    """`u00..` spellings, grouped by their first digit."""
    groups = [(first, "".join(f"{c % 16:x}" for c in codes if c // 16 == first)) for first in (0, 1)]
    return alt(*(seq(lit(f"u00{first}"), chars(digits)) for first, digits in groups if digits))


ANY_JSON_CHAR = encode(ANY_CHAR)


def quoted(regex: Regex) -> Regex:
    """A JSON string whose value the expression matches."""
    return seq(QUOTE, encode(regex), QUOTE)


def plain_only(regex: Regex) -> Regex:
    """The texts of the expression that need no escape: what a printer without escapes in repeats can write."""
    match regex:
        case Class():
            return intersect(regex, PLAIN_CHAR)
        case Seq(items):
            return seq(*(plain_only(i) for i in items))
        case Alt(items):
            return alt(*(plain_only(i) for i in items))
        case Repeat(item, low, high):
            return repeat(plain_only(item), low, high)
    raise TypeError(regex)


def text_of(value: str) -> str:
    """The JSON spelling of a string, quotes included; the same one that `encode` gives."""
    return json.dumps(value, ensure_ascii=False)
