"""Cursors: stop ids exactly where the text is complete, token-wise rollback, budgets, clean failures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.errors import RequestFailed
from runtime.grammar.backends import BackendName, make_backend
from runtime.grammar.cursor import Counters, GrammarCursor, MaskBudget
from runtime.grammar.marker import MAX_GAP, MarkedCompiled, Marker
from runtime.grammar.pieces import Pieces, packed_row
from runtime.grammar.protocol import Cursor, Vocabulary
from runtime.messages import GrammarSpec
from tests.grammar.toolkit import Toolkit, allowed, schema_spec

BACKENDS = pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
DIGITS = GrammarSpec(kind="regex", spec="[0-9]{3}")


def feed(kit: Toolkit, cursor: Cursor, text: str) -> int:
    """Accept the text; the number of tokens it took."""
    tokens = kit.pieces.split(text.encode())
    for token in tokens:
        assert cursor.accept(token), (text, token)
    return len(tokens)


@BACKENDS
def test_stop_ids_are_legal_exactly_where_the_text_is_complete(kit: Toolkit, backend: BackendName) -> None:
    cursor = kit.compile(DIGITS, backend).cursor()
    stops = set(kit.vocab.stop_ids)
    for digit in "123":
        assert not stops & set(allowed(cursor, kit.n_words))
        assert not cursor.can_stop
        assert not any(cursor.accept(s) for s in stops)
        feed(kit, cursor, digit)
    assert set(allowed(cursor, kit.n_words)) == stops
    assert cursor.can_stop
    assert cursor.done


@BACKENDS
def test_every_stop_id_ends_it_and_nothing_follows(kit: Toolkit, backend: BackendName) -> None:
    for stop in kit.vocab.stop_ids:
        cursor = kit.compile(DIGITS, backend).cursor()
        feed(kit, cursor, "123")
        assert cursor.accept(stop)
        assert cursor.done
        assert not cursor.accept(stop)
        assert not cursor.accept(kit.pieces.split(b"4")[0])
        assert set(allowed(cursor, kit.n_words)) == set(kit.vocab.stop_ids)


@BACKENDS
def test_complete_is_not_done_while_more_may_follow(kit: Toolkit, backend: BackendName) -> None:
    cursor = kit.compile(GrammarSpec(kind="regex", spec="[0-9]{1,3}"), backend).cursor()
    feed(kit, cursor, "1")
    assert cursor.can_stop
    assert not cursor.done


@BACKENDS
def test_rollback_is_token_wise_and_exact(kit: Toolkit, backend: BackendName) -> None:
    cursor = kit.compile(schema_spec({"type": "array", "items": {"type": "integer"}}), backend).cursor()
    before = [allowed(cursor, kit.n_words)]
    for token in kit.pieces.split(b"[12, 3]"):
        assert cursor.accept(token)
        before.append(allowed(cursor, kit.n_words))
    assert cursor.accept(kit.vocab.stop_ids[0])
    cursor.rollback(1)
    assert not cursor.accept(kit.pieces.split(b"x")[0])  # a refusal leaves no trace
    for expected in reversed(before[:-1]):
        cursor.rollback(1)
        assert np.array_equal(allowed(cursor, kit.n_words), expected)


@BACKENDS
def test_forks_go_their_own_ways(kit: Toolkit, backend: BackendName) -> None:
    first = kit.compile(GrammarSpec(kind="choices", spec='["cat", "cow", "dog"]'), backend).cursor()
    feed(kit, first, "c")
    second = first.fork()
    feed(kit, first, "at")
    feed(kit, second, "ow")
    assert first.done
    assert second.done


@BACKENDS
def test_a_control_token_is_never_text(kit: Toolkit, backend: BackendName) -> None:
    cursor = kit.compile(schema_spec({"type": "string"}), backend).cursor()
    feed(kit, cursor, '"a')
    assert not kit.vocab.control_ids & set(allowed(cursor, kit.n_words))
    assert not any(cursor.accept(token) for token in kit.vocab.control_ids)


@BACKENDS
def test_ids_past_the_vocabulary_are_never_allowed(backend: BackendName) -> None:
    pieces = (b"a", b"b", b"<end>")
    vocab = Vocabulary(pieces, 40, (2,), frozenset({2}))  # the model's logits are padded to 40
    engine = make_backend(backend, vocab, Pieces(vocab))
    kit = Toolkit(vocab, Pieces(vocab), {backend: engine})
    cursor = kit.compile(GrammarSpec(kind="regex", spec="[^x]+"), backend).cursor()
    assert set(allowed(cursor, kit.n_words)) == {0, 1}
    assert cursor.accept(0)
    assert set(allowed(cursor, kit.n_words)) == {0, 1, 2}


def test_fill_checks_its_row(kit: Toolkit) -> None:
    cursor = kit.compile(DIGITS).cursor()
    with pytest.raises(ValueError, match="int32"):
        cursor.fill(np.zeros(3, np.int32))


class SlowMatcher:
    """A matcher whose masks take `cost` on the test's clock and allow `ids`."""

    complete = False
    remembered = None
    near_end = False
    place = None

    def __init__(self, clock: list[float], cost: float, ids: tuple[int, ...] = (1,)) -> None:
        self.clock, self.cost, self.ids = clock, cost, ids

    def mask(self, row: np.ndarray) -> bool:
        self.clock[0] += self.cost
        row[:] = packed_row(self.ids, 64)
        return True

    def advance(self, token: int) -> bool:
        return True

    def failure(self) -> str | None:
        return None


def budgeted(cost: float, **options: Any) -> GrammarCursor:
    clock = [0.0]
    matcher: Any = SlowMatcher(clock, cost, **options)
    return GrammarCursor(matcher, frozenset({9}), packed_row([9], 64), Counters(), MaskBudget(), lambda: clock[0])


def test_a_request_has_a_budget_for_masks() -> None:
    row = np.zeros(2, np.int32)
    cheap, slow, worst = budgeted(0.01), budgeted(0.06), budgeted(1.5)
    for _ in range(100):
        assert cheap.fill(row)
        assert cheap.accept(1)
    for _ in range(2):
        assert slow.fill(row)
        assert slow.fill(row)  # at the same place: computed once
        assert slow.accept(1)
    with pytest.raises(RequestFailed, match="too costly"):
        slow.fill(row)
    with pytest.raises(RequestFailed, match="1500 ms"):
        worst.fill(row)


def test_an_all_masked_row_is_that_requests_error() -> None:
    with pytest.raises(RequestFailed, match="allows no token"):
        budgeted(0.0, ids=()).fill(np.zeros(2, np.int32))


MARK = "</think>"


@pytest.fixture
def marked(kit: Toolkit) -> MarkedCompiled:
    answer = kit.compile(schema_spec({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}))
    return MarkedCompiled(answer.cursor, Marker(kit.vocab, MARK), answer.n_bytes)


@pytest.mark.parametrize("thought", ["", "hm", "a < b </thin", "</think", "<</thi</"])
@pytest.mark.parametrize("gap", ["", "\n", "\n\n"])
def test_free_until_the_marker_then_the_grammar(kit: Toolkit, marked: MarkedCompiled, thought: str, gap: str) -> None:
    cursor = marked.cursor()
    pieces = [*kit.pieces.split(thought.encode()), *kit.pieces.split(MARK.encode()), *kit.pieces.split(gap.encode())]
    for token in pieces:
        assert token in set(allowed(cursor, kit.n_words)), kit.vocab.token_bytes[token]
        assert not cursor.can_stop
        assert cursor.accept(token)
    feed(kit, cursor, '{"a": 1}')
    assert cursor.done


def test_no_token_ends_the_marker_and_starts_the_answer(kit: Toolkit, marked: MarkedCompiled) -> None:
    cursor = marked.cursor()
    feed(kit, cursor, "</think")
    spilling = [i for i, piece in enumerate(kit.vocab.token_bytes) if piece.startswith(b">") and piece.strip(b">\n")]
    assert spilling
    assert not set(spilling) & set(allowed(cursor, kit.n_words))
    assert not cursor.accept(spilling[0])


def test_thinking_cannot_stop_and_forces_nothing(kit: Toolkit, marked: MarkedCompiled) -> None:
    cursor = marked.cursor()
    free = set(allowed(cursor, kit.n_words))
    assert free == set(range(kit.vocab.vocab_size)) - set(kit.vocab.stop_ids)
    assert not cursor.accept(kit.vocab.stop_ids[0])
    assert cursor.forced_tokens(9) == []
    feed(kit, cursor, MARK)
    assert cursor.forced_tokens(9) == []  # a line break may still come
    feed(kit, cursor, "\n" * MAX_GAP)
    assert cursor.forced_tokens(9) != []
    assert not cursor.accept(kit.pieces.split(b"\n")[0])


def test_a_marked_cursor_rolls_back_and_forks_across_the_marker(kit: Toolkit, marked: MarkedCompiled) -> None:
    cursor = marked.cursor()
    n = feed(kit, cursor, "so" + MARK + "\n") + feed(kit, cursor, '{"a": 1')
    twin = cursor.fork()
    cursor.rollback(n)
    feed(kit, cursor, MARK + '{"a": 23}')
    feed(kit, twin, "0}")
    assert cursor.done
    assert twin.done
