"""Stop expressions: the match that ends first, alike at any chunking and on both sides of the process border."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.params import SamplingParams
from runtime.scheduler.stops import StopMatcher
from runtime.text.stop_regex import ScannedFilter, automaton

PATTERNS = ["[0-9]+", "a+b", "(END|STOP)!", "x{2,3}y", "[^a]é", "b.c", "(ab|ba)*c", "\\n\\s*Q:"]


def shown(
    text: bytes, patterns: list[str], cuts: list[int] = (), *, stops=(), include=False
) -> tuple[bytes, str | None]:
    one = ScannedFilter(stops, patterns, include_stop=include)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    out = b"".join(one.push(text[a:b]) for a, b in itertools.pairwise(edges))
    if one.hit is None:
        out += one.finish()
    return out, None if one.hit is None else one.hit.decode()


def naive(text: str, patterns: list[str]) -> str:
    """The text before the match that ends first, the leftmost of those; found by trying every place."""
    for end in range(1, len(text) + 1):
        for begin in range(end):
            if any(re.fullmatch(p, text[begin:end], re.ASCII) for p in patterns):
                return text[:begin]
    return text


@given(
    st.text("ab01cxyé!ENDSTOP\nQ: ", max_size=24),
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(0, 40), max_size=8),
)
def test_any_chunking_cuts_where_trying_everything_does(text, patterns, cuts):
    out, hit = shown(text.encode(), patterns, cuts)
    assert out.decode() == naive(text, patterns)
    assert (hit is not None) == (out.decode() != text)


def test_strings_and_expressions_stand_side_by_side():
    assert shown(b"one END 2", ["[0-9]"], stops=["END"]) == (b"one ", "END")
    assert shown(b"one 2 END", ["[0-9]"], stops=["END"]) == (b"one ", "[0-9]")
    assert shown(b"one 2", ["[0-9]"], include=True) == (b"one 2", "[0-9]")


def test_only_what_may_become_a_match_is_held_back():
    one = ScannedFilter((), ["a+b"])
    assert [one.push(piece) for piece in (b"xa", b"a", b"c", b"a", b"b")] == [b"x", b"", b"aac", b"", b""]


def test_the_scheduler_stops_at_the_token_where_the_text_is_cut():
    matcher = StopMatcher.of(SamplingParams(stop_regex=("[0-9]{2}",)), frozenset())
    pieces = [b"a", b"1", b" ", b"4", b"2"]
    verdicts = [matcher.push(i, piece) for i, piece in enumerate(pieces)]
    assert verdicts[:4] == [None] * 4
    assert (verdicts[4].matched, verdicts[4].n_drop) == ("[0-9]{2}", 2)


@pytest.mark.parametrize(
    "pattern", ["(", "a*", "", "(?=a)b", "(a{1,200}){1,200}", "x" * 2000, "\\bx", "(" * 400 + "x" + ")" * 400]
)
def test_what_cannot_be_followed_is_refused(pattern):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(stop_regex=(pattern,)).validate(100)
    assert caught.value.param == "stop_regex"


def test_a_hostile_expression_costs_no_more_than_its_size():
    began = time.process_time()
    automaton.cache_clear()
    assert shown(b"a" * 3000 + b"!", ["(a+)+b"])[1] is None
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    "pattern", ["(.?){450}\\x00", "(.*){480}\\x00", "((.?){20}){20}\\x00", "[b-eg-zA-Za]{1,990}\\x00"]
)
def test_a_character_costs_at_most_a_visit_to_every_state(pattern):
    one = ScannedFilter((), [pattern])
    one.push(b"a" * 100)
    began = time.process_time()
    one.push(b"a" * 100)
    assert time.process_time() - began < 0.5  # it was several seconds
    assert len(one.finish()) == 200
