"""Regular expressions of the JSON numbers inside an interval. Bounds are exact decimals.

Bounded non-integers are written without exponent and with at most `_SLACK` digits more than their bound, so two
texts that differ also differ as doubles and an exclusive bound stays exclusive after parsing.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

from runtime.grammar.regular import DIGIT, EMPTY, NOTHING, Regex, alt, chars, lit, opt, repeat, seq

MAX_BOUND_DIGITS = 40
_WIDE = Context(prec=2 * MAX_BOUND_DIGITS + 2)  # no sum of bounds is rounded
_SLACK = 12
_STRICT_ZEROS = 4
_EXACT = Decimal(10) ** 11  # below it, `bound + 10**-_STRICT_ZEROS` and the bound are different doubles
_TAIL = repeat(DIGIT, 0, _SLACK)
_NONZERO = chars((0x31, 0x39))
_ANY_FRACTION = opt(seq(lit("."), repeat(DIGIT, 1, _SLACK)))

ANY_INTEGER = alt(lit("0"), seq(opt(lit("-")), _NONZERO, repeat(DIGIT)))
ANY_NUMBER = seq(
    opt(lit("-")),
    alt(lit("0"), seq(_NONZERO, repeat(DIGIT))),
    opt(seq(lit("."), repeat(DIGIT, 1))),
    opt(seq(chars("eE"), opt(chars("+-")), DIGIT, opt(DIGIT))),
)


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of an interval."""

    value: Decimal
    strict: bool = False


def integers(low: Bound | None, high: Bound | None) -> Regex:
    """Integers of the interval, `-0` and leading zeros excluded; NOTHING if there is none."""
    if low is None and high is None:
        return ANY_INTEGER
    least, most = _first_integer(low), _last_integer(high)
    branches: list[Regex] = []
    if most is None or most >= 0:
        branches.append(_naturals(max(least or 0, 0), most))
    if least is None or least < 0:
        smallest = 1 if most is None else max(1, -most)
        branches.append(seq(lit("-"), _naturals(smallest, None if least is None else -least)))
    return alt(*branches)


def numbers(low: Bound | None, high: Bound | None) -> Regex:
    """Numbers of the interval; NOTHING if it is empty."""
    if low is None and high is None:
        return ANY_NUMBER
    low, high = _shift(low, 1), _shift(high, -1)
    branches: list[Regex] = []
    if high is None or high.value > 0 or (high.value == 0 and not high.strict):
        floor = low if low is not None and low.value >= 0 else Bound(Decimal(0))
        branches.append(_positives(floor, high))
    if low is None or low.value < 0:
        mirrored = None if low is None else Bound(low.value.copy_negate(), low.strict)
        smallest = Bound(Decimal(0), True)
        if high is not None and high.value < 0:
            smallest = Bound(high.value.copy_negate(), high.strict)
        branches.append(seq(lit("-"), _positives(smallest, mirrored)))
    return alt(*branches)


def _first_integer(low: Bound | None) -> int | None:
    if low is None:
        return None
    first = int(low.value.to_integral_value(ROUND_CEILING))
    return first + 1 if low.strict and first == low.value else first


def _last_integer(high: Bound | None) -> int | None:
    if high is None:
        return None
    last = int(high.value.to_integral_value(ROUND_FLOOR))
    return last - 1 if high.strict and last == high.value else last


def _shift(bound: Bound | None, towards: int) -> Bound | None:
    """Where a double cannot tell a value just past a strict bound from it, keep a distance of 1."""
    if bound is None or not bound.strict or abs(bound.value) < _EXACT:
        return bound
    return Bound(_WIDE.add(bound.value, Decimal(towards)))


def _naturals(low: int, high: int | None) -> Regex:
    """Integers from low >= 0, without sign and leading zeros."""
    if high is not None and low > high:
        return NOTHING
    first = str(low)
    if high is None:
        longer = seq(_NONZERO, repeat(DIGIT, len(first)))
        return alt(_same_length(first, "9" * len(first)), longer)
    last = str(high)
    if len(first) == len(last):
        return _same_length(first, last)
    between = [seq(_NONZERO, repeat(DIGIT, n - 1, n - 1)) for n in range(len(first) + 1, len(last))]
    bottom = _same_length(first, "9" * len(first))
    return alt(bottom, *between, _same_length("1" + "0" * (len(last) - 1), last))


def _same_length(low: str, high: str) -> Regex:
    """Digit strings of one length, lexicographically from low to high."""
    if not low:
        return EMPTY
    rest = len(low) - 1
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return seq(chars((ord(low[0]), ord(high[0]))), repeat(DIGIT, rest, rest))
    if low[0] == high[0]:
        return seq(lit(low[0]), _same_length(low[1:], high[1:]))
    inner = chars((ord(low[0]) + 1, ord(high[0]) - 1))
    return alt(
        seq(lit(low[0]), _same_length(low[1:], "9" * rest)),
        seq(inner, repeat(DIGIT, rest, rest)),
        seq(lit(high[0]), _same_length("0" * rest, high[1:])),
    )


def _positives(low: Bound, high: Bound | None) -> Regex:
    """Decimals from low >= 0 up, without sign."""
    if high is not None and (low.value > high.value or (low.value == high.value and (low.strict or high.strict))):
        return NOTHING
    whole, fraction = _split(low.value)
    floor = (fraction, low.strict)
    if high is None:
        return alt(seq(lit(str(whole)), _fraction(floor, None)), seq(_naturals(whole + 1, None), _ANY_FRACTION))
    top, top_fraction = _split(high.value)
    ceiling = (top_fraction, high.strict)
    if whole == top:
        return seq(lit(str(whole)), _fraction(floor, ceiling))
    return alt(
        seq(lit(str(whole)), _fraction(floor, None)),
        seq(_naturals(whole + 1, top - 1), _ANY_FRACTION),
        seq(lit(str(top)), _fraction(None, ceiling)),
    )


def _split(value: Decimal) -> tuple[int, str]:
    """Whole part and fraction digits without trailing zeros."""
    whole, _, fraction = format(value, "f").partition(".")
    return int(whole), fraction.rstrip("0")


_End = tuple[str, bool] | None  # digits still to compare with, and whether the bound is strict


def _fraction(low: _End, high: _End) -> Regex:
    """What may follow the whole part: nothing, or '.' and digits."""
    digits = _digits(low, high)
    body = NOTHING if digits == NOTHING else seq(lit("."), digits)
    if body == NOTHING:
        return EMPTY if _zero_fits(low, high) else NOTHING
    return opt(body) if _zero_fits(low, high) else body


def _zero_fits(low: _End, high: _End) -> bool:
    """Whether stopping here (all further digits zero) is inside."""
    above = low is None or low == ("", False)
    below = high is None or high[0] != "" or not high[1]
    return above and below


def _digits(low: _End, high: _End) -> Regex:
    """One or more digits, compared digit by digit with the bounds."""
    if low == ("", False):
        low = None
    if low is None and high is None:
        return repeat(DIGIT, 1, _SLACK)
    if low == ("", True) and high is None:
        return seq(repeat(lit("0"), 0, _STRICT_ZEROS - 1), _NONZERO, _TAIL)
    if high is not None and high[0] == "":
        return NOTHING if high[1] or low is not None else repeat(lit("0"), 1, _SLACK)
    branches: list[Regex] = []
    for digit in "0123456789":
        next_low, next_high = _advance(low, digit, 1), _advance(high, digit, -1)
        if next_low == "out" or next_high == "out":
            continue
        more, ends = _digits(next_low, next_high), _zero_fits(next_low, next_high)  # type: ignore[arg-type]
        branches.append(seq(lit(digit), opt(more) if ends else more))
    return _group_digits(branches)


def _advance(end: _End, digit: str, side: int) -> _End | str:
    """The bound after one digit: free (None), still to compare, or "out" of the interval."""
    if end is None:
        return None
    digits, strict = end
    wanted = digits[0] if digits else "0"
    if digit == wanted:
        return digits[1:], strict
    inside = digit > wanted if side > 0 else digit < wanted
    return None if inside else "out"


def _group_digits(branches: list[Regex]) -> Regex:
    """Merge branches that differ in their first digit only."""
    tails: dict[Regex, list[Regex]] = {}
    for branch in branches:
        if branch == NOTHING:
            continue
        items = getattr(branch, "items", (branch,))
        tails.setdefault(seq(*items[1:]), []).append(items[0])
    return alt(*(seq(alt(*firsts), tail) for tail, firsts in tails.items()))
