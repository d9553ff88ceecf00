"""Native draws: the same tokens as the readable race in torch, whatever the filters and the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import NativeOps
from kernels.sampling import Samples, SamplingRows, draw, report, sample
from runtime.step import Adjust
from tests.kernels.cpu_cases import VARIANTS


def rows_of(
    n: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingRows:
    full = lambda value, dtype=torch.float32: torch.full((n,), value, dtype=dtype)
    return SamplingRows(
        full(temperature), full(top_k, torch.long), full(top_p), full(min_p),
        torch.arange(n) * 7919 - 3, torch.arange(n) * 31,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from([1, 5, 97, 1000, 5003]),
    spread=st.sampled_from([0.1, 3.0, 12.0]),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 50, 10_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-4]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    variant=st.sampled_from(VARIANTS),
)
def test_draws_are_the_readable_ones(
    vocab: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float, variant: str
) -> None:
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    rows = rows_of(8, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    native = NativeOps(variant=variant, threads=2).draw(logits, rows)
    assert (native == draw(logits, rows)).sum() >= 7  # one border case of rounding may fall either way


def test_equal_logits_keep_the_lower_ids() -> None:
    drawn = NativeOps(threads=1).draw(torch.zeros(200, 50), rows_of(200, top_k=3))
    assert set(drawn.tolist()) == {0, 1, 2}


def test_a_rows_draw_does_not_depend_on_its_batch() -> None:
    logits, rows = torch.randn(9, 4000) * 4, rows_of(9, top_p=0.8)
    together = NativeOps(threads=2).draw(logits, rows)
    for i in range(9):
        one = SamplingRows(*(getattr(rows, name)[i : i + 1] for name in SamplingRows.__slots__))
        assert NativeOps(threads=1).draw(logits[i : i + 1], one)[0] == together[i]


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
def test_rows_without_a_distribution_draw_something_in_range(value: float) -> None:
    logits = torch.randn(3, 100)
    logits[1] = value
    drawn = NativeOps(threads=1).draw(logits, rows_of(3, top_p=0.5))
    assert ((drawn >= 0) & (drawn < 100)).all()
    assert drawn[0] == NativeOps(threads=1).draw(logits[:1], rows_of(1, top_p=0.5))[0]


def test_frequencies_are_the_probabilities() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    n = 20_000
    rows = SamplingRows(*(torch.full((n,), v) for v in (1.0,)), torch.zeros(n, dtype=torch.long), torch.ones(n),
                        torch.zeros(n), torch.zeros(n, dtype=torch.long), torch.arange(n))  # fmt: skip
    drawn = NativeOps(threads=2).draw(p.log().expand(n, 4).contiguous(), rows)
    assert (drawn.bincount(minlength=4) / n - p).abs().max() < 0.012


def changes(vocab: int) -> list[tuple[int, Adjust]]:
    """Every kind of change, one or several a row."""
    rng = np.random.default_rng(vocab)
    words = rng.integers(-(2**31), 2**31, -(-vocab // 32), dtype=np.int64).astype(np.int32)
    ids = np.unique(rng.integers(0, vocab, 9))
    values = rng.normal(size=len(ids)).astype(np.float32) * 3
    return [
        (1, Adjust(sample=1, rep_ids=ids, rep_penalty=1.7)),
        (2, Adjust(sample=2, add_ids=ids, add_values=values)),
        (3, Adjust(sample=3, mask=words)),
        (4, Adjust(sample=4, rep_ids=ids, rep_penalty=0.5, add_ids=ids, add_values=values, mask=words[:-1])),
        (5, Adjust(sample=5, mask=np.zeros_like(words))),  # nothing is allowed: the row fails
        (6, Adjust(sample=6, mask=np.zeros_like(words), forced=vocab - 1)),
    ]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("vocab", [64, 1000, 5003])
@pytest.mark.parametrize("n_top", [0, 3, 20])
def test_one_call_does_what_the_readable_passes_do(vocab: int, n_top: int, variant: str) -> None:
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab)) * 5
    logits[8, 7] = torch.nan
    rows = rows_of(9)
    rows.temperature[::2] = 0.0
    wanted = torch.arange(9) % 3 == 0
    before = logits.clone()
    ours = NativeOps(variant=variant, threads=2).sample(logits, rows, changes(vocab), want_logprob=wanted, n_top=n_top)
    theirs = sample(logits, rows, changes(vocab), want_logprob=wanted, n_top=n_top)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert torch.equal(ours.failed, theirs.failed)
    assert ours.failed.tolist() == [False] * 5 + [True, False, False, True]
    good = ~ours.failed
    assert torch.equal(ours.tokens[good], theirs.tokens[good])
    same_report(ours, theirs, good)


def same_report(ours: Samples, theirs: Samples, rows: torch.Tensor) -> None:
    assert torch.equal(ours.top_ids[rows], theirs.top_ids[rows])
    for name in ("logprobs", "top_logprobs"):
        mine, yours = getattr(ours, name)[rows], getattr(theirs, name)[rows]
        torch.testing.assert_close(mine, yours, atol=2e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_given_tokens_are_reported_like_drawn_ones(variant: str) -> None:
    logits = torch.randn(5, 700) * 6
    logits[2] = logits[2].masked_fill(torch.arange(700) % 2 == 0, -torch.inf)
    tokens, wanted = torch.tensor([0, 699, 2, 3, 4]), torch.tensor([True, True, True, False, True])
    ours = NativeOps(variant=variant, threads=2).report(logits, tokens, wanted, 5)
    for mine, yours in zip(ours, report(logits, tokens, wanted, 5), strict=True):
        torch.testing.assert_close(mine, yours, atol=2e-5, rtol=1e-5, equal_nan=True)


def test_more_tops_than_tokens_and_equal_logits() -> None:
    sampled = NativeOps(threads=1).sample(torch.zeros(1, 3), rows_of(1, temperature=0.0), n_top=5)
    assert sampled.tokens.tolist() == [0]
    assert sampled.top_ids.tolist() == [[0, 1, 2, -1, -1]]
    assert sampled.top_logprobs[0, 3:].isnan().all()


def test_a_change_outside_the_vocabulary_is_refused() -> None:
    wrong = Adjust(sample=0, add_ids=np.array([10]), add_values=np.array([1.0], np.float32))
    with pytest.raises(RuntimeError, match="token 10 of a vocabulary of 10"):
        NativeOps(threads=1).sample(torch.zeros(1, 10), rows_of(1), [(0, wrong)])
