"""Text by pieces: the pieces always join to the whole, and never show what a later piece would take back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.text.detokenizer import IncrementalDetokenizer

BYTES = [bytes([i]) for i in range(256)]


class Vocab:
    """Gives each distinct piece an id."""

    def __init__(self) -> None:
        self.table: list[bytes] = []

    def ids(self, *pieces: str | bytes) -> list[int]:
        out = []
        for piece in pieces:
            data = piece.encode() if isinstance(piece, str) else piece
            if data not in self.table:
                self.table.append(data)
            out.append(self.table.index(data))
        return out


def run(pieces: list[str], *, k: int = 1, **options) -> tuple[list[str], str | None]:
    """The deltas of a scripted answer, k pieces a step."""
    vocab = Vocab()
    ids = vocab.ids(*pieces)
    detokenizer = IncrementalDetokenizer(vocab.table, **options)
    deltas = [detokenizer.push(ids[i : i + k]) for i in range(0, len(ids), k)]
    return [*deltas, detokenizer.finish()], detokenizer.stop_hit


@pytest.mark.parametrize("k", [1, 2, 3, 9])
@pytest.mark.parametrize(
    ("stops", "pieces", "text", "hit"),
    [
        (["\nUser:"], ["hi", "\nUs", "er", ":", "x"], "hi", "\nUser:"),
        (["\nUser:"], ["a", "\n", "b"], "a\nb", None),
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["END", "ENDING"], ["the ", "ENDI", "NG x"], "the ", "END"),
        (["b c d", "c"], ["a b", " c", " d"], "a b ", "c"),
        (["five"], ["four, ", "five", ", six"], "four, ", "five"),
        (["é!"], ["caf", "é", "!", "z"], "caf", "é!"),
        (["zz"], ["a", "z"], "az", None),
    ],
)
def test_a_stop_string_cuts_the_same_text_at_any_step_size(k, stops, pieces, text, hit):
    deltas, stop_hit = run(pieces, k=k, stops=stops)
    assert "".join(deltas) == text
    assert stop_hit == hit


def test_the_stop_is_kept_to_its_last_byte_when_asked_for():
    deltas, hit = run(["xa", "by"], stops=["ab"], include_stop=True)
    assert ("".join(deltas), hit) == ("xab", "ab")


def test_only_a_possible_start_of_a_stop_is_held_back():
    deltas, _ = run(["so ", "E", "N", "X", "E"], stops=["END"])
    assert deltas == ["so ", "", "", "ENX", "", "E"]


@pytest.mark.parametrize("n_bytes", [1, 2, 3])
def test_an_unfinished_character_at_the_end_is_one_replacement(n_bytes):
    detokenizer = IncrementalDetokenizer(BYTES)
    assert [detokenizer.push([b]) for b in "😀".encode()[:n_bytes]] == [""] * n_bytes
    assert detokenizer.finish() == "\ufffd"


def test_a_character_the_prompt_began_is_given_once_and_no_other_prompt_text():
    detokenizer = IncrementalDetokenizer(BYTES, prompt_tail_ids=b"Hello \xe2\x82")
    assert [detokenizer.push([0xAC]), detokenizer.push(b"!"), detokenizer.finish()] == ["€", "!", ""]


def test_a_character_the_answer_does_not_go_on_with_is_dropped():
    detokenizer = IncrementalDetokenizer(BYTES, prompt_tail_ids=b"Hello \xe2\x82")
    assert [detokenizer.push(b"A"), detokenizer.finish()] == ["A", ""]


def test_special_tokens_are_hidden_unless_asked_for():
    vocab = Vocab()
    ids = vocab.ids("a", "<eos>")
    assert IncrementalDetokenizer(vocab.table, {1}).push(ids) == "a"
    assert IncrementalDetokenizer(vocab.table, {1}, skip_special=False).push(ids) == "a<eos>"


@settings(max_examples=300)
@given(
    text=st.text(alphabet="ab€😀\n", max_size=30),
    stops=st.lists(st.text(alphabet="ab€\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 90), max_size=12),
    include=st.booleans(),
)
def test_any_chunking_gives_the_same_text(text, stops, cuts, include):
    data = text.encode()

    def joined(edges: list[int]) -> tuple[str, str | None]:
        detokenizer = IncrementalDetokenizer(BYTES, stops=stops, include_stop=include)
        bounds = [0, *sorted(min(e, len(data)) for e in edges), len(data)]
        deltas = [detokenizer.push(data[a:b]) for a, b in pairwise(bounds)]
        assert not any("\ufffd" in delta for delta in deltas)
        return "".join([*deltas, detokenizer.finish()]), detokenizer.stop_hit

    whole, hit = joined([])
    assert joined(cuts) == (whole, hit)
    assert joined(list(range(len(data)))) == (whole, hit)
    if hit is None:
        assert whole == text
        assert not any(stop in text for stop in stops)
    elif not include:
        assert text.startswith(whole + hit)


@settings(max_examples=300)
@given(data=st.binary(max_size=24), tail=st.binary(max_size=4), cuts=st.lists(st.integers(0, 24), max_size=8))
def test_bytes_that_are_no_text_are_replaced_alike_at_any_chunking(data, tail, cuts):
    def joined(edges: list[int]) -> str:
        detokenizer = IncrementalDetokenizer(BYTES, prompt_tail_ids=tail)
        bounds = [0, *sorted(min(e, len(data)) for e in edges), len(data)]
        pieces = [detokenizer.push(data[a:b]) for a, b in pairwise(bounds)]
        return "".join([*pieces, detokenizer.finish()])

    assert joined(cuts) == joined([])
