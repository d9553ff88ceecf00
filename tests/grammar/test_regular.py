"""Regular expressions as values: read as ECMA means them, exact intervals, formats inside their standards."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.formats import ENFORCED, regex_of
from runtime.grammar.jsontext import encode
from runtime.grammar.numbers import Bound, integers, numbers
from runtime.grammar.printers import rust_regex
from runtime.grammar.regex import RegexError, parse_full, parse_search
from runtime.grammar.regular import chars, complement, fullmatch, intersect, lengths, nested_repeat, none_of

FEW = settings(max_examples=25)
PATTERNS = [
    "^a+$",
    "b+",
    "^x",
    "x$",
    "^cat$|^dog$",
    "(^a$|^b$)",
    "^[a-c]{2,3}(-\\d+)?$",
    "a|b",
    "",
    "^$",
    "[^a-c]",
    "^(a|b)*c$",
]
PATTERNS += [
    "[\\w.-]+",
    "x\\.y",
    "(?:a)(b)",
    "(a|^b)|c",
    "(a$)|d",
    "^(a|b)$|d",
    "a{2}",
    "a??b*?",
    "\\x61",
    "^\\u0062$",
    "[\\d-]",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@FEW
@given(text=st.text("abcdxyt-1.og2", max_size=6) | st.sampled_from(["cat", "dog", "catdog"]))
def test_a_pattern_searches_as_the_standard_does(pattern: str, text: str) -> None:
    assert fullmatch(parse_search(pattern), text) == bool(re.search(pattern, text))


@pytest.mark.parametrize("pattern", ["a+", "(ab?)*c", "[a-c]{1,3}|x", "a.b", "\\d\\d?"])
@FEW
@given(text=st.text("abcx1", max_size=5))
def test_a_full_match_is_of_the_whole_text(pattern: str, text: str) -> None:
    assert fullmatch(parse_full(pattern), text) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)b",
        "a\\b",
        "(a)\\1",
        "(?i)a",
        "(",
        "a)",
        "[a",
        "*a",
        "a**",
        "\\p{L}",
        "a{3,1}",
        "x^",
        "a$b",
        "[z-a]",
        "(?<!a)b",
        "\\",
    ],
)
def test_what_is_not_regular_is_refused(pattern: str) -> None:
    with pytest.raises(RegexError, match="position"):
        parse_search(pattern)


EDGES = ("0", "1", "-1", "5", "-4", "0.5", "-0.5", "12.34", "0.05", "99", "1000", "-7", "1E+3", "2.50", "-0.001")
BOUNDS = st.none() | st.builds(Bound, st.sampled_from([Decimal(x) for x in EDGES]), st.booleans())
NEAR = st.sampled_from([Decimal(x) for x in ("0", "0.1", "-0.1", "0.001", "-0.0001", "1", "-1", "17")])


def inside(value: Decimal, low: Bound | None, high: Bound | None) -> bool:
    above = low is None or value > low.value or (value == low.value and not low.strict)
    below = high is None or value < high.value or (value == high.value and not high.strict)
    return above and below


@settings(max_examples=200)
@given(low=BOUNDS, high=BOUNDS, shift=NEAR, at_low=st.booleans())
def test_intervals_are_exact(low: Bound | None, high: Bound | None, shift: Decimal, at_low: bool) -> None:
    base = low if at_low else high
    value = (base.value if base else Decimal(0)) + shift
    text = format(value, "f")
    if not text.startswith("-0") or value != 0:
        assert fullmatch(numbers(low, high), text) == inside(value, low, high)
    if value == int(value):
        assert fullmatch(integers(low, high), str(int(value))) == inside(value, low, high)


@given(value=st.integers(), low=st.integers(), high=st.integers())
def test_integer_ranges_of_any_size(value: int, low: int, high: int) -> None:
    regex = integers(Bound(Decimal(low)), Bound(Decimal(high)))
    assert fullmatch(regex, str(value)) == (low <= value <= high)


@given(day=st.dates(datetime.date(1000, 1, 1)))
def test_every_day_is_a_date(day: datetime.date) -> None:
    assert fullmatch(regex_of("date"), day.isoformat())


@given(year=st.integers(1000, 9999), month=st.integers(0, 13), day=st.integers(28, 32))
def test_no_other_day_is(year: int, month: int, day: int) -> None:
    text = f"{year:04d}-{month:02d}-{day:02d}"
    try:
        real = bool(datetime.date.fromisoformat(text))
    except ValueError:
        real = False
    assert fullmatch(regex_of("date"), text) == real


@given(st.ip_addresses())
def test_every_address_is_of_its_format(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    assert fullmatch(regex_of(f"ipv{address.version}"), str(address))


@given(st.text("0123456789abcdef:", max_size=20))
def test_no_other_text_is_an_address(text: str) -> None:
    if fullmatch(regex_of("ipv6"), text):
        assert ipaddress.IPv6Address(text)


@given(st.uuids())
def test_every_uuid_is_of_its_format(value: object) -> None:
    assert fullmatch(regex_of("uuid"), str(value))


def test_formats_are_bounded_and_small() -> None:
    for name in ENFORCED:
        assert nested_repeat(regex_of(name)) <= 200, name
        assert lengths(regex_of("hostname"))[1] <= 253


@FEW
@given(st.text(max_size=8).filter(lambda t: not any("\ud800" <= c <= "\udfff" for c in t)))
def test_there_is_one_spelling_of_every_text(text: str) -> None:
    spelled = json.dumps(text, ensure_ascii=False)[1:-1]
    assert fullmatch(encode(parse_full("[^]*")), spelled)
    assert not fullmatch(encode(none_of([text])), spelled)
    assert fullmatch(encode(none_of([text + "x"])), spelled)


@given(words=st.sets(st.text("ab", max_size=3), max_size=4), text=st.text("abc", max_size=4))
def test_none_of_is_the_complement(words: set[str], text: str) -> None:
    assert fullmatch(none_of(words), text) == (text not in words)


RANGES = st.lists(st.tuples(st.integers(0, 0x11000), st.integers(0, 40)), max_size=4).map(
    lambda pairs: chars(*((a, a + n) for a, n in pairs))
)


@given(a=RANGES, b=RANGES, char=st.integers(0, 0x11000).filter(lambda c: not 0xD800 <= c <= 0xDFFF))
def test_classes_are_sets(a: object, b: object, char: int) -> None:
    def holds(cls: object) -> bool:
        return fullmatch(cls, chr(char))  # type: ignore[arg-type]

    assert holds(complement(a)) != holds(a)  # type: ignore[arg-type]
    assert holds(intersect(a, b)) == (holds(a) and holds(b))  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", ["a/b", "[/\\\\^\\]-]", "\\n\\t", "é😀", "[^a]{2,}"])
def test_rust_text_holds_no_slash_and_no_line_break(pattern: str) -> None:
    assert not set("/\n") & set(rust_regex(parse_full(pattern)))
