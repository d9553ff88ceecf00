"""Regular expressions of the JSON numbers inside an interval. Bounds are exact decimals.

Bounded non-integers are written without exponent and with at most `_SLACK` digits more than their bound (zeros right
behind a strict one not counted). A text is inside as it stands and once it is parsed as a double: one that would be
rounded onto a strict bound is left out. Integers keep their digits, as in every reader that has integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from operator import ge, gt, le, lt
from typing import Any

from runtime.grammar.regular import DIGIT, EMPTY, NOTHING, Regex, alt, chars, lit, opt, repeat, seq

MAX_BOUND_DIGITS = 40
_SLACK = 12
_WIDE = Context(prec=4 * MAX_BOUND_DIGITS + _SLACK)  # nothing done to a bound is rounded
_EXACT = 2**53  # up to it every integer is a double
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
    places = _SLACK + max(len(_split(end.value)[1]) for end in (low, high) if end is not None)
    first, last = _kept_off(low, 1, places), _kept_off(high, -1, places)
    as_doubles = _between(first, last, places)
    if not any(map(_is_large, (low, high))):
        return as_doubles
    return alt(as_doubles, integers(low if _is_large(low) else first, high if _is_large(high) else last))


def _is_large(bound: Bound | None) -> bool:
    """Whether integers next to it may not be doubles; texts of integers are read exactly."""
    return bound is not None and abs(bound.value) >= _EXACT


def _between(low: Bound | None, high: Bound | None, places: int) -> Regex:
    branches: list[Regex] = []
    if high is None or high.value > 0 or (high.value == 0 and not high.strict):
        floor = low if low is not None and low.value >= 0 else Bound(Decimal(0))
        branches.append(_positives(floor, high, places))
    if low is None or low.value < 0:
        mirrored = None if low is None else Bound(low.value.copy_negate(), low.strict)
        smallest = Bound(Decimal(0), True)
        if high is not None and high.value < 0:
            smallest = Bound(high.value.copy_negate(), high.strict)
        branches.append(seq(lit("-"), _positives(smallest, mirrored, places)))
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


def _kept_off(bound: Bound | None, towards: int, places: int) -> Bound | None:
    """The bound, or where a text of so many decimal places could be rounded past it, the first that is not."""
    if bound is None:
        return None
    unit = Decimal(towards).scaleb(-places, _WIDE)
    nearest = _WIDE.add(bound.value, unit) if bound.strict else bound.value
    if _holds(nearest, bound, towards):
        return bound
    steps = 1
    while not _holds(_WIDE.fma(unit, Decimal(steps), bound.value), bound, towards):
        steps *= 2
    missed = steps // 2
    while steps - missed > 1:
        middle = (steps + missed) // 2
        if _holds(_WIDE.fma(unit, Decimal(middle), bound.value), bound, towards):
            steps = middle
        else:
            missed = middle
    return Bound(_WIDE.fma(unit, Decimal(steps), bound.value))


def _holds(value: Decimal, bound: Bound, towards: int) -> bool:
    """Whether a number is inside, exactly and as doubles; beyond 2**53 also one of them exactly and one as a double."""
    inside: Any = (gt if bound.strict else ge) if towards > 0 else (lt if bound.strict else le)
    pairs: list[tuple[Any, Any]] = [(value, bound.value), (float(value), float(bound.value))]
    if _is_large(bound):
        pairs += [(value, float(bound.value)), (float(value), bound.value)]
    return all(inside(a, b) for a, b in pairs)


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


def _positives(low: Bound, high: Bound | None, places: int) -> Regex:
    """Decimals from low >= 0 up, without sign, of so many places next to a bound."""
    if high is not None and (low.value > high.value or (low.value == high.value and (low.strict or high.strict))):
        return NOTHING
    whole, fraction = _split(low.value)
    floor = (fraction, low.strict)
    if high is None:
        first = seq(lit(str(whole)), _fraction(floor, None, places))
        return alt(first, seq(_naturals(whole + 1, None), _ANY_FRACTION))
    top, top_fraction = _split(high.value)
    ceiling = (top_fraction, high.strict)
    if whole == top:
        return seq(lit(str(whole)), _fraction(floor, ceiling, places))
    return alt(
        seq(lit(str(whole)), _fraction(floor, None, places)),
        seq(_naturals(whole + 1, top - 1), _ANY_FRACTION),
        seq(lit(str(top)), _fraction(None, ceiling, places)),
    )


def _split(value: Decimal) -> tuple[int, str]:
    """Whole part and fraction digits without trailing zeros."""
    whole, _, fraction = format(value, "f").partition(".")
    return int(whole), fraction.rstrip("0")


_End = tuple[str, bool] | None  # digits still to compare with, and whether the bound is strict


def _fraction(low: _End, high: _End, places: int) -> Regex:
    """What may follow the whole part: nothing, or '.' and digits."""
    digits = _digits(low, high, places)
    body = NOTHING if digits == NOTHING else seq(lit("."), digits)
    if body == NOTHING:
        return EMPTY if _zero_fits(low, high) else NOTHING
    return opt(body) if _zero_fits(low, high) else body


def _zero_fits(low: _End, high: _End) -> bool:
    """Whether stopping here (all further digits zero) is inside."""
    above = low is None or low == ("", False)
    below = high is None or high[0] != "" or not high[1]
    return above and below


def _digits(low: _End, high: _End, room: int) -> Regex:
    """One to `room` digits, compared digit by digit with the bounds."""
    if low == ("", False):
        low = None
    if room == 0:
        return NOTHING
    if low is None and high is None:
        return repeat(DIGIT, 1, room)
    if low == ("", True) and high is None:
        return seq(repeat(lit("0"), 0, room - 1), _NONZERO, repeat(DIGIT, 0, room - 1))
    if high is not None and high[0] == "":
        return NOTHING if high[1] or low is not None else repeat(lit("0"), 1, room)
    alike: dict[tuple[_End, _End], str] = {}
    for digit in "0123456789":
        next_low, next_high = _advance(low, digit, 1), _advance(high, digit, -1)
        if not isinstance(next_low, str) and not isinstance(next_high, str):
            alike[next_low, next_high] = alike.get((next_low, next_high), "") + digit
    branches: list[Regex] = []
    for (next_low, next_high), digits in alike.items():
        more = _digits(next_low, next_high, room - 1)
        branches.append(seq(chars(digits), opt(more) if _zero_fits(next_low, next_high) else more))
    return alt(*branches)


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
