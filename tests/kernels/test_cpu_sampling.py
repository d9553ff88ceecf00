"""Native draws: the same tokens as the readable race in torch, whatever the filters and the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import NativeOps
from kernels.sampling import SamplingRows, draw
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
