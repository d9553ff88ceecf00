"""The scheduler's pure parts: sharing, copies, budgets, victims, stops, logit adjustments, counters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.params import SamplingParams
from runtime.scheduler.batch import Copies
from runtime.scheduler.budget import StepTimeModel, prefill_budget, water_fill
from runtime.scheduler.retract import Candidate, choose_victim
from runtime.scheduler.sampling import PenaltyState, ban_in_mask, build_adjust
from runtime.scheduler.share import share_groups
from runtime.scheduler.stats import RING, Rate, Recent
from runtime.scheduler.stops import Stop, StopMatcher
from runtime.text.stops import StopFilter

# -- sharing -------------------------------------------------------------------------------------------------------


def groups(tables: list[list[int]]) -> list[tuple[set[int], int]]:
    """[(rows, shared pages)] of the groups found."""
    sharing = share_groups([np.array(t, np.int32) for t in tables])
    assert sorted(sharing.order) == list(range(len(tables)))
    ends = sharing.indptr.tolist()
    return [(set(sharing.order[ends[g] : ends[g + 1]]), n) for g, n in enumerate(sharing.n_pages.tolist())]


def test_rows_below_one_prefix_form_a_group() -> None:
    assert groups([[1, 2, 3], [9], [1, 2, 4]]) == [({0, 2}, 2)]


def test_rows_that_share_nothing_form_none() -> None:
    assert groups([[1], [2], []]) == []


def test_the_cut_that_saves_most_page_reads_wins() -> None:
    deep = [[1, 2, 3, 4, 5, 6, 7, 8, r] for r in range(20, 24)]
    shallow = [[1, r] for r in range(30, 32)]
    # all six share one page (saves 5); the four alone share eight (save 24)
    assert groups([*deep, *shallow]) == [({0, 1, 2, 3}, 8)]
    wide = [[1, 2, 3, r] for r in range(40, 48)]
    assert groups([*wide[:4], *wide[4:]]) == [(set(range(8)), 3)]


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=8))
def test_groups_share_what_they_say(paths: list[list[int]]) -> None:
    """Page ids as a tree gives them: equal only where the whole path before is equal."""
    tables = [[hash(tuple(p[: i + 1])) % 2**30 for i in range(len(p))] for p in paths]
    for rows, n in groups(tables):
        assert len(rows) > 1
        assert n > 0
        assert len({tuple(tables[r][:n]) for r in rows}) == 1


# -- copies --------------------------------------------------------------------------------------------------------


def test_copies_read_from_the_first_source_of_a_chain() -> None:
    copies = Copies(4)
    copies.add(10, 20, 2)
    copies.add(20, 30, 3)  # slots 0 and 1 of page 20 are being written; slot 2 is page 20's own
    copies.add(30, 40, 1)
    src, dst = copies.arrays()
    assert src.tolist() == [40, 41, 40, 41, 82, 40]
    assert dst.tolist() == [80, 81, 120, 121, 122, 160]
    assert not set(src.tolist()) & set(dst.tolist())


# -- budgets -------------------------------------------------------------------------------------------------------


def taught(steps: list[tuple[int, int, float]]) -> StepTimeModel:
    model = StepTimeModel()
    for n_tokens, kv, seconds in steps * 10:
        model.observe(n_tokens, kv, seconds)
    return model


def seconds(n_tokens: int, kv: int) -> float:
    return 0.010 + n_tokens * 50e-6 + kv * 1e-7


MIXED = [(n, kv, seconds(n, kv)) for n, kv in ((8, 4000), (8, 9000), (72, 8000), (264, 20000), (40, 100))]


def test_step_time_is_learned() -> None:
    model = taught(MIXED)
    for n_tokens, kv in ((8, 5000), (136, 8000), (520, 30000)):
        assert model.predict(n_tokens, kv) == pytest.approx(seconds(n_tokens, kv), rel=0.05)


def test_step_time_coefficients_are_never_negative() -> None:
    model = taught([(8, 100, 0.02), (200, 50, 0.01)])
    assert min(model.coefficients()) >= 0


def budget(model: StepTimeModel, **changes: Any) -> int:
    given: dict[str, Any] = {"n_decode": 8, "kv_read": 8000, "max_step_tokens": 1024, "inflation": 1.5, "floor": 64}
    return prefill_budget(model, **{**given, **changes})


def test_prefill_may_stretch_a_decode_step_by_half() -> None:
    model = taught(MIXED)
    base = seconds(8, 8000)
    allowed = budget(model)
    assert seconds(8 + allowed, 8000 + allowed) <= 1.5 * base
    assert seconds(8 + allowed, 8000) >= 1.35 * base
    assert 64 <= budget(model, kv_prefill=20_000) < allowed


def test_full_chunks_run_when_nothing_streams() -> None:
    assert budget(taught(MIXED), n_decode=0) == 1024


def test_full_chunks_run_when_nobody_reads_along() -> None:
    assert budget(taught(MIXED), watched=False) == 1024 - 8
    assert budget(taught(MIXED), watched=False, max_step_tokens=8) == 0


def test_prompts_always_move() -> None:
    slow = taught([(8, 8000, 0.001), (72, 8000, 1.0)])
    assert budget(slow) == 64
    assert budget(StepTimeModel()) == 64
    assert budget(slow, max_step_tokens=20) == 12


def test_the_model_is_not_trusted_far_beyond_what_it_has_seen() -> None:
    flat = taught([(8, 8000, 0.01), (72, 8000, 0.01)])
    assert budget(flat) == 144


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(0, 600), st.integers(1, 200))
def test_shares_add_up_and_small_demands_are_met_first(sizes: list[int], total: int, cap: int) -> None:
    shares = water_fill(sizes, total, cap)
    assert sum(shares) <= total
    assert all(0 <= share <= min(size, cap) for share, size in zip(shares, sizes, strict=True))
    unmet = [share for share, size in zip(shares, sizes, strict=True) if share < min(size, cap)]
    if unmet:
        assert sum(shares) == total
        assert max(shares) - min(unmet) <= 1


# -- victims -------------------------------------------------------------------------------------------------------


def test_the_victim_frees_most_for_least() -> None:
    rows = [Candidate(1, 0, 9, 1, False), Candidate(2, 0, 4, 64, False), Candidate(3, 0, 4, 20, False)]
    assert choose_victim(rows, protect=1) == 3


def test_the_oldest_is_never_a_victim() -> None:
    assert choose_victim([Candidate(1, 0, 9, 1, False)], protect=1) is None


def test_equals_are_told_apart_by_age_and_by_what_they_have_to_catch_up() -> None:
    assert choose_victim([Candidate(2, 0, 4, 16, False), Candidate(3, 0, 4, 16, False)], protect=1) == 3
    assert choose_victim([Candidate(2, 0, 4, 16, False), Candidate(3, 0, 4, 16, True)], protect=1) == 2
    assert choose_victim([Candidate(2, 0, 4, 16, False), Candidate(3, 5, 9, 1, False)], protect=1) == 2


def test_one_that_frees_nothing_is_spared() -> None:
    assert choose_victim([Candidate(2, 0, 0, 0, False)], protect=1) is None


def test_where_every_page_is_shared_the_youngest_holder_goes_first() -> None:
    rows = [Candidate(2, 0, 0, 0, False, shared_pages=5), Candidate(3, 0, 0, 0, False, shared_pages=5)]
    assert choose_victim([Candidate(1, 0, 3, 9, False), *rows], protect=1) == 3


# -- stops ---------------------------------------------------------------------------------------------------------


def stopped(pieces: list[bytes], *stops: str) -> tuple[int, Stop] | None:
    """(tokens until the stop, the stop)."""
    matcher = StopMatcher.of(SamplingParams(stop=stops), frozenset())
    for n, piece in enumerate(pieces, 1):
        stop = matcher.push(1000 + n, piece)
        if stop is not None:
            return n, stop
    return None


def test_stops_are_found_across_tokens_and_say_what_spells_them() -> None:
    assert stopped([b"hi", b"\nUs", b"er", b":", b"x"], "\nUser:") == (4, Stop("\nUser:", 3))
    assert stopped([b"a", b"\n", b"b"], "\nUser:") is None
    assert stopped([b"a", b"a", b"a", b"b"], "aab") == (4, Stop("aab", 3))
    assert stopped([b"xa", b"by"], "ab") == (2, Stop("ab", -1))  # begins inside a token
    assert stopped([b"x", b"END", b"ING"], "END", "ENDING") == (2, Stop("END", 1))
    assert stopped([b"\xf0\x9f", b"\x98\x80"], "😀") == (2, Stop("😀", 2))


@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_scheduler_and_frontend_stop_at_the_same_byte(text: str, stops: list[str], data: Any) -> None:
    pieces, rest = [], text.encode()
    while rest:
        n = data.draw(st.integers(1, 3))
        pieces.append(rest[:n])
        rest = rest[n:]
    found = stopped(pieces, *stops)
    shown, stop_filter = b"", StopFilter(stops)
    for n, piece in enumerate(pieces, 1):
        shown += stop_filter.push(piece)
        if stop_filter.hit is not None:
            assert found is not None
            assert found[0] == n
            assert found[1].matched == stop_filter.hit.decode()
            if found[1].n_drop > 0:
                assert shown == b"".join(pieces[: n - found[1].n_drop])
            return
    assert found is None


# -- logits --------------------------------------------------------------------------------------------------------


def test_penalties_count_only_what_was_said_repetition_also_what_was_asked() -> None:
    state = PenaltyState(np.array([5, 6, 5], np.int32))
    for token in (7, 7, 6):
        state.push(token)
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=1.0, repetition_penalty=1.2)
    rep, ids, values = state.terms(params)
    assert sorted(rep.tolist()) == [5, 6, 7]
    assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == {7: -2.0, 6: -1.5}


@given(st.lists(st.integers(0, 300), max_size=200))
def test_penalty_counts_are_those_of_the_output(said: list[int]) -> None:
    state = PenaltyState(np.array([1, 2, 3], np.int32))
    for token in said:
        state.push(token)
    _, ids, values = state.terms(SamplingParams(frequency_penalty=1.0))
    assert {t: -int(v) for t, v in zip(ids.tolist(), values.tolist(), strict=True)} == {t: said.count(t) for t in said}


def test_penalty_counts_outgrow_their_first_arrays() -> None:
    state = PenaltyState(np.arange(50, dtype=np.int32), list(range(300)) * 2)
    rep, ids, values = state.terms(SamplingParams(frequency_penalty=1.0, repetition_penalty=2.0))
    assert sorted(rep.tolist()) == list(range(300))
    assert sorted(ids.tolist()) == list(range(300))
    assert set(values.tolist()) == {-2.0}


def words(*allowed: int, vocab: int = 64) -> Any:
    bits = np.zeros(vocab, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def test_ends_are_banned_in_the_mask_unless_nothing_else_is_left() -> None:
    assert ban_in_mask(words(1, 5, 63), [1, 63]).tolist() == words(5).tolist()
    assert ban_in_mask(words(1), [1]).tolist() == words(1).tolist()


def test_one_adjustment_holds_bias_banned_ends_and_penalties() -> None:
    params = SamplingParams(logit_bias={9: 2.0}, min_tokens=3, stop_token_ids=(8,), presence_penalty=1.0)
    state = PenaltyState(np.zeros(0, np.int32), [7])
    adjust = build_adjust(4, params, n_said=1, end_ids=[1], penalties=state)
    assert adjust.sample == 4
    assert adjust.add_ids is not None
    assert adjust.add_values is not None
    got = dict(zip(adjust.add_ids.tolist(), adjust.add_values.tolist(), strict=True))
    assert got == {7: -1.0, 9: 2.0, 1: -np.inf, 8: -np.inf}
    later = build_adjust(4, params, n_said=3, end_ids=[1], penalties=state)
    assert later.add_ids is not None
    assert 1 not in later.add_ids.tolist()


# -- counters ------------------------------------------------------------------------------------------------------


def test_recent_keeps_the_last_values_and_the_total() -> None:
    recent = Recent()
    for i in range(RING + 100):
        recent.add(float(i))
    summary = recent.summary()
    assert summary["max"] == RING + 99
    assert summary["total"] == sum(range(RING + 100))
    assert summary["p50"] == pytest.approx(100 + RING / 2, abs=1)


def test_rate_is_growth_over_a_window() -> None:
    rate = Rate()
    for now, count in ((0.0, 0), (0.5, 50), (2.0, 300)):
        rate.look(count, now)
    assert rate.per_second == 150.0
