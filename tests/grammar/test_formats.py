"""String formats against judges that are not ours: nothing they refuse is taken, what is narrowed is listed."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.grammar.formats import _PATTERNS, ANNOTATIONS, ENFORCED, INTEGER_BITS, regex_of
from runtime.grammar.regular import fullmatch, lengths
from tests.grammar.keywords import ROWS
from tests.grammar.toolkit import FORMATS, is_valid

NAMES = pytest.mark.parametrize("name", sorted(ENFORCED))
NARROWED: dict[str, list[str]] = {
    "date": ["0999-12-31"],
    "date-time": ["0999-12-31T00:00:00Z", "2024-02-29t10:00:00z", "2024-02-29T10:00:00.1234567890Z"],
    "time": ["10:00:00z", "10:00:00.1234567890Z"],
    "duration": ["P1Y1D", "PT1H1S", "P1.5D", "PT1234567890S"],
    "email": ['"a b"@c.org', "a@[1.2.3.4]", "a.b.c@d.org", "a" * 31 + "@b"],
    "hostname": ["a" * 31, "a.", "a.b.c.d.e.f.g.h.i"],
    "ipv4": [],
    "ipv6": ["::ffff:1.2.3.4"],
    "json-pointer": [],
    "uri": ["http://[::1]/", "http://me@a.org/", "http://a_b/", "http:///x", "x:"],
    "uuid": [],
}


def test_every_format_has_a_judge_and_a_row() -> None:
    """A judge that takes everything would be none: it refuses what the row of its format calls bad."""
    rows = {row.keyword.removeprefix("format: "): row for row in ROWS if row.keyword.startswith("format: ")}
    assert set(rows) - {"any other"} >= ANNOTATIONS
    for name in ENFORCED | set(INTEGER_BITS):
        assert name in FORMATS.checkers, name
        assert rows[name].bad
        assert not any(is_valid(rows[name].schema, text) for text in rows[name].bad), name


@NAMES
def test_texts_of_a_format_convince_its_judge(name: str) -> None:
    texts = st.from_regex(re.compile(_PATTERNS[name], re.ASCII), fullmatch=True)

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(text=texts, at=st.integers(0, 99), char=st.sampled_from('-:.+Zz/@%~09aATPé"\\ \n') | st.just(""))
    def check(text: str, at: int, char: str) -> None:
        assert fullmatch(regex_of(name), text), text
        assert FORMATS.conforms(text, name), text
        at = at % (len(text) + 1)
        for near in (text[:at] + char + text[at:], text[:at] + char + text[at + 1 :]):
            assert not fullmatch(regex_of(name), near) or FORMATS.conforms(near, name), near

    check()


@NAMES
def test_what_is_narrowed_is_valid_and_not_taken(name: str) -> None:
    for text in NARROWED[name]:
        assert FORMATS.conforms(text, name), text
        assert not fullmatch(regex_of(name), text), text


def test_the_longest_name_and_address_are_within_their_standards() -> None:
    assert (lengths(regex_of("hostname"))[1] or 999) <= 253
    assert (lengths(regex_of("email"))[1] or 999) <= 254
