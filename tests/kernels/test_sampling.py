"""The sampler against a plain numpy oracle, statistically, and row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.sampling import Samples, SamplingRows, _cut, _cut_by_sorting, exponential_noise, sample, unpack_mask

VOCAB = 70


@dataclass(frozen=True)
class Change:
    """One row's adjustments, as the scheduler sends them."""

    rep_ids: Any = None
    rep_penalty: float = 1.0
    add_ids: Any = None
    add_values: Any = None
    mask: Any = None
    forced: int = -1


def rows(n: int, **fields: Any) -> SamplingRows:
    """`n` rows with the given fields (a number for all, or one each); the others are off."""
    kinds = {
        "temperature": (torch.float32, 1.0),
        "top_k": (torch.long, 0),
        "top_p": (torch.float32, 1.0),
        "min_p": (torch.float32, 0.0),
        "seed": (torch.long, 0),
        "counter": (torch.long, range(n)),
    }
    values = {}
    for name, (dtype, default) in kinds.items():
        value = fields.get(name, default)
        values[name] = torch.tensor(list(value) if hasattr(value, "__iter__") else [value] * n, dtype=dtype)
    return SamplingRows(**values)


def random_logits(n: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The filtered distribution of one row, the slow way."""
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    keep = order[:top_k] if top_k > 0 else order
    mass, chosen, so_far = sum(p[token] for token in keep), [], 0.0
    for token in keep:
        if so_far >= top_p * mass and chosen:
            break
        chosen.append(token)
        so_far += p[token]
    out = np.zeros_like(p)
    out[[token for token in chosen if p[token] >= min_p * p.max()]] = 1
    return out * p / (out * p).sum()


FILTERS = [
    {},
    {"temperature": 0.5},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"top_p": 1e-6},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(filters: dict[str, float]) -> None:
    n = 20_000
    logits = random_logits(1, seed=1, vocab=30)
    drawn = sample(logits.expand(n, -1), rows(n, seed=9, **filters)).tokens
    settings_of_row = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
    expected = kept(logits[0].double().numpy(), **settings_of_row)
    counts = np.bincount(drawn.numpy(), minlength=30)
    assert not counts[expected == 0].any()
    error = np.sqrt(expected * (1 - expected) * n) + 1e-9
    assert (np.abs(counts - expected * n) < 4.5 * error + 2).all()  # the 2 is for tokens expected less than once


@pytest.mark.parametrize(
    "filters", [{"top_k": 30}, {"top_p": 0.6}, {"top_p": 0.9, "top_k": 200}, {"top_p": 0.999}], ids=str
)
@pytest.mark.parametrize("levels", [0, 7], ids=["distinct", "many equal"])
def test_cuts_of_a_large_vocabulary_keep_the_same_tokens_as_sorting(filters: dict[str, float], levels: int) -> None:
    """Large vocabularies are cut by their best tokens alone where that is enough; equal weights: lowest ids stay."""
    logits = random_logits(6, seed=4, vocab=3000)
    if levels:
        logits = (logits * levels / 10).round() / levels * 10
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    by_head, wanted = weights.clone(), rows(6, **filters)
    _cut(by_head, wanted)
    top_k = torch.where(wanted.top_k > 0, wanted.top_k, 3000)
    assert torch.equal(by_head, _cut_by_sorting(weights, top_k, wanted.top_p.double()))


def test_temperature_0_takes_the_best_and_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 1.0, 2.0]])
    assert sample(logits, rows(2, temperature=0)).tokens.tolist() == [1, 0]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_row_never_depends_on_its_batch(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 90))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    logits = random_logits(n, seed=int(rng.integers(1000)))
    fields = {
        "temperature": rng.choice([0.0, 0.7, 1.5], n).tolist(),
        "top_k": rng.choice([0, 1, 7, 500], n).tolist(),
        "top_p": rng.choice([1.0, 0.9, 0.3], n).tolist(),
        "min_p": rng.choice([0.0, 0.2], n).tolist(),
        "seed": rng.integers(-(2**62), 2**62, n).tolist(),
        "counter": rng.integers(0, 10**6, n).tolist(),
    }
    together = sample(logits, rows(n, **fields), want_logprob=torch.ones(n, dtype=torch.bool), n_top=3)
    i = data.draw(st.integers(0, n - 1))
    one = rows(1, **{name: [values[i]] for name, values in fields.items()})
    alone = sample(logits[i : i + 1], one, want_logprob=torch.ones(1, dtype=torch.bool), n_top=3)
    for name in Samples.__slots__:
        assert torch.equal(getattr(alone, name)[0], getattr(together, name)[i]), name


def test_the_stream_is_a_function_of_seed_and_counter() -> None:
    noise = exponential_noise(torch.tensor([5, 5, 6, 5]), torch.tensor([0, 1, 0, 0]), 1000)
    assert torch.equal(noise[0], noise[3])
    assert not (noise[0] == noise[1]).any()
    assert not (noise[0] == noise[2]).any()
    assert (noise > 0).all()


def test_the_noise_is_exponential_and_uncorrelated() -> None:
    noise = exponential_noise(torch.arange(200), torch.full((200,), 3), 500)
    assert abs(noise.mean().item() - 1) < 0.02
    assert abs(noise.var().item() - 1) < 0.05
    assert np.abs(np.corrcoef(noise.numpy()[:50]) - np.eye(50)).max() < 0.25
    by_counter = exponential_noise(torch.zeros(200, dtype=torch.long), torch.arange(200), 500)
    assert abs(np.corrcoef(by_counter[:-1].ravel(), by_counter[1:].ravel())[0, 1]) < 0.01


def test_adjustments_apply_in_order() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0]])
    change = Change(
        rep_ids=np.array([0, 1], np.int32),
        rep_penalty=4.0,
        add_ids=np.array([3, 2], np.int32),
        add_values=np.array([0.75, -np.inf], np.float32),
    )
    # 2/4, -2*4, banned, 0.75
    drawn = sample(logits, rows(1, temperature=0), [(0, change)], want_logprob=torch.tensor([True]))
    assert drawn.tokens.tolist() == [3]
    assert drawn.logprobs.item() == pytest.approx(torch.log_softmax(logits, -1)[0, 3].item())


def test_a_bitmask_holds_for_greedy_and_drawn_rows_and_ends_at_the_vocabulary() -> None:
    words = np.array([0, 1 << 5, -1], np.int32)  # 37, and 64 up
    assert torch.nonzero(unpack_mask(torch.as_tensor(words), VOCAB)).flatten().tolist() == [37, *range(64, VOCAB)]
    logits = random_logits(40)
    changes = [(row, Change(mask=words)) for row in range(40)]
    drawn = sample(logits, rows(40, temperature=[0.0, 5.0] * 20), changes).tokens
    assert set(drawn.tolist()) <= {37, *range(64, VOCAB)}


def test_a_forced_token_is_taken_and_its_logprob_reported() -> None:
    logits = random_logits(2)
    drawn = sample(logits, rows(2), [(1, Change(forced=4))], want_logprob=torch.tensor([False, True]))
    assert drawn.tokens[1] == 4
    assert torch.isnan(drawn.logprobs[0])
    assert drawn.logprobs[1] == torch.log_softmax(logits, -1)[1, 4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_hopeless_rows_fail_and_leave_the_others(temperature: float) -> None:
    logits = random_logits(5)
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 0] = torch.inf
    nothing = Change(mask=np.zeros(3, np.int32))
    drawn = sample(logits, rows(5, temperature=temperature), [(4, nothing)])
    assert drawn.failed.tolist() == [False, True, True, True, True]
    assert drawn.tokens[0] == sample(logits[:1], rows(1, temperature=temperature)).tokens[0]


def test_alternatives_are_of_the_raw_distribution_best_first() -> None:
    logits = random_logits(3)
    wanted = torch.tensor([True, False, True])
    changes = [(0, Change(add_ids=np.array([2]), add_values=np.array([100.0])))]
    drawn = sample(logits, rows(3, temperature=0), changes, want_logprob=wanted, n_top=4)
    assert drawn.tokens[0] == 2
    table = torch.log_softmax(logits, -1)
    values, ids = table.sort(descending=True)
    assert torch.equal(drawn.top_ids, ids[:, :4])
    assert torch.equal(drawn.top_logprobs, values[:, :4])
    assert drawn.logprobs[0] == table[0, 2]


def test_more_alternatives_than_tokens_are_padded() -> None:
    drawn = sample(random_logits(1, vocab=3), rows(1), n_top=5)
    assert drawn.top_ids[0, 3:].tolist() == [-1, -1]
    assert torch.isnan(drawn.top_logprobs[0, 3:]).all()


def test_an_empty_step_has_empty_samples() -> None:
    assert sample(torch.zeros(0, VOCAB), rows(0)).tokens.shape == (0,)


def test_extreme_temperatures_and_logits_stay_finite() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [-1e30, -2e30, -3e30]])
    drawn = sample(logits, rows(2, temperature=[1e-30, 100.0]))
    assert drawn.tokens.tolist() == [0, 0]
    assert not drawn.failed.any()
