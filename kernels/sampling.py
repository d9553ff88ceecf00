"""Sampling: one vectorised pass over the logits of a step. A row's result never depends on its batch.

The logits may lie on a GPU: which rows are drawn, filtered or reported is decided from the host's copy of the
parameters, so nothing here waits for the device.

Order for each row: adjustments (repetition, addition, bitmask), then greedy where the temperature is 0,
otherwise temperature, top-k, top-p (of what top-k left), min-p, and a draw.

The draw is an exponential race: token v wins that minimises `E(v) / p(v)`, with `E(v) = -log1p(-u(v))` and `u(v)`
a hash of (seed, counter, v). That is an exact sample of p (the Gumbel-max trick without its two logarithms),
needs no order of the vocabulary, and is the same number on every backend and in every batch. Filters only
set probabilities to zero, so the same seed keeps its choice while the winner survives the filter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference import row_sum

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_HEAD = 256  # best tokens among which most cuts lie
_ROWS_AT_ONCE = 64  # rows whose vocabulary-wide temporaries are alive together


class LogitAdjust(Protocol):
    """Changes to one row's logits, applied in this order: repetition, addition, mask, forced."""

    @property
    def rep_ids(self) -> npt.NDArray[Any] | None: ...
    @property
    def rep_penalty(self) -> float: ...
    @property
    def add_ids(self) -> npt.NDArray[Any] | None: ...
    @property
    def add_values(self) -> npt.NDArray[Any] | None: ...
    @property
    def mask(self) -> npt.NDArray[Any] | None: ...
    @property
    def forced(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row is sampled. Tensors [rows] on the CPU; `seed` holds the uint64's bits as int64."""

    temperature: Tensor  # float32; 0 greedy
    top_k: Tensor  # int64; 0 or less: off
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seed: Tensor  # int64
    counter: Tensor  # int64


Draw = Callable[[Tensor, SamplingRows], Tensor]  # logits [rows, vocab], all temperatures above 0 -> tokens [rows]
Race = Callable[[Tensor, Tensor], Tensor]  # weights [rows, vocab] and keys [rows] -> tokens [rows]


@dataclass(frozen=True, slots=True)
class Samples:
    """What was drawn, on the logits' device. `logprobs` are of the raw distribution; NaN where not wanted."""

    tokens: Tensor  # [rows] int64
    logprobs: Tensor  # [rows] float32
    top_ids: Tensor  # [rows, n_top] int64, -1 beyond the vocabulary
    top_logprobs: Tensor  # [rows, n_top] float32
    failed: Tensor  # [rows] bool: every token masked, or NaN or +inf among the logits


def sample(
    logits: Tensor,
    rows: SamplingRows,
    adjusts: Sequence[tuple[int, LogitAdjust]] = (),
    *,
    want_logprob: Tensor | None = None,
    n_top: int = 0,
    draw_with: Draw | None = None,
) -> Samples:
    """Draw one token a row from `logits` [rows, vocab] float32. `adjusts` are (row, change) pairs.

    `draw_with` is a backend's own `draw`: the same filters and the same race, faster.
    """
    race = draw_with or draw
    parts = [
        _sample_part(logits, rows, adjusts, want_logprob, n_top, race, start, min(start + _ROWS_AT_ONCE, len(logits)))
        for start in range(0, max(len(logits), 1), _ROWS_AT_ONCE)
    ]
    if len(parts) == 1:
        return parts[0]
    return Samples(*(torch.cat([getattr(part, name) for part in parts]) for name in Samples.__slots__))


def _sample_part(
    logits: Tensor,
    rows: SamplingRows,
    adjusts: Sequence[tuple[int, LogitAdjust]],
    want_logprob: Tensor | None,
    n_top: int,
    race: Draw,
    start: int,
    stop: int,
) -> Samples:
    part = slice(start, stop)
    raw = logits[part]
    mine = [(row - start, change) for row, change in adjusts if start <= row < stop]
    adjusted = adjust_logits(raw, mine) if mine else raw
    peak, tokens = adjusted.max(dim=-1)  # NaN if any logit is; the lowest id of equals
    failed = ~torch.isfinite(peak)
    drawn = torch.nonzero(rows.temperature[part] > 0).flatten()
    if len(drawn):  # a failed row's draw is garbage that nobody reads
        chosen = SamplingRows(*(getattr(rows, name)[part][drawn] for name in SamplingRows.__slots__))
        at = upload(drawn, logits.device)
        tokens[at] = race(adjusted[at], chosen)
    for row, change in mine:
        if change.forced >= 0:
            tokens[row] = change.forced
            failed[row] = False
    wanted = torch.zeros(len(raw), dtype=torch.bool) if want_logprob is None else want_logprob[part]
    logprobs, top_ids, top_logprobs = report(raw, tokens, wanted, n_top)
    return Samples(tokens, logprobs, top_ids, top_logprobs, failed)


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A small CPU tensor on `device`, without waiting for what the device is doing."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def adjust_logits(logits: Tensor, adjusts: Sequence[tuple[int, LogitAdjust]]) -> Tensor:
    """A copy of `logits` with each (row, change) applied."""
    out = logits.clone()
    put = lambda values, dtype: upload(torch.as_tensor(values, dtype=dtype), logits.device)
    for row, change in adjusts:
        line = out[row]
        if change.rep_ids is not None and change.rep_penalty != 1.0:
            ids = put(change.rep_ids, torch.long)
            old = line[ids]
            line[ids] = torch.where(old > 0, old / change.rep_penalty, old * change.rep_penalty)
        if change.add_ids is not None:
            line.index_add_(0, put(change.add_ids, torch.long), put(change.add_values, torch.float32))
        if change.mask is not None:
            line.masked_fill_(~unpack_mask(put(change.mask, torch.int32), len(line)), -torch.inf)
    return out


def unpack_mask(words: Tensor, vocab_size: int) -> Tensor:
    """int32 words, little bit order -> bool [vocab_size]. Tokens beyond the words are not allowed."""
    bits = (words.long()[:, None] >> torch.arange(32, device=words.device)) & 1
    allowed = bits.flatten()[:vocab_size].bool()
    return F.pad(allowed, (0, vocab_size - len(allowed)))


def draw(logits: Tensor, rows: SamplingRows, *, race_with: Race | None = None) -> Tensor:
    """One token a row [rows] from finite-peaked `logits` [rows, vocab], all temperatures above 0.

    `race_with` is a backend's own `race`: the same winners, faster.
    """
    return (race_with or race)(weigh(logits, rows), upload(noise_keys(rows.seed, rows.counter), logits.device))


def weigh(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Unnormalised probabilities [rows, vocab] after the filters; the best token has 1."""
    put = lambda values: upload(values, logits.device)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / put(rows.temperature.clamp(min=1e-6))[:, None]
    weights = torch.exp(scaled)
    _cut(weights, rows)
    if (rows.min_p > 0).any():
        weights.masked_fill_(weights < put(rows.min_p)[:, None], 0.0)
    return weights


def race(weights: Tensor, keys: Tensor) -> Tensor:
    """The token of each row of `weights` [rows, vocab] that wins the exponential race of its key [rows]."""
    return (weights.double() / _noise_of(keys, weights.shape[1])).max(dim=-1).indices


def _cut(weights: Tensor, rows: SamplingRows) -> None:
    """Zero, in place, the weights that top-k and top-p take away."""
    vocab = weights.shape[1]
    cut = torch.nonzero(((rows.top_k > 0) & (rows.top_k < vocab)) | (rows.top_p < 1)).flatten()
    if not len(cut):
        return
    put = lambda values: upload(values, weights.device)
    at, top_p = put(cut), put(rows.top_p[cut].double())
    top_k = put(torch.where(rows.top_k[cut] > 0, rows.top_k[cut], vocab))
    mine = weights[at]
    if weights.device.type == "cpu" and vocab > _HEAD:
        found = _cut_by_head(mine, top_k, top_p)
        rest = torch.nonzero(~found).flatten()
        if len(rest):
            mine[rest] = _cut_by_sorting(mine[rest], top_k[rest], top_p[rest])
    else:
        mine = _cut_by_sorting(mine, top_k, top_p)
    weights[at] = mine


def _cut_by_sorting(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The weights that stay, by a whole sort. Equal weights: the lower id comes first."""
    ordered, ids = weights.sort(dim=-1, descending=True, stable=True)
    ordered.masked_fill_(torch.arange(weights.shape[1], device=weights.device) >= top_k[:, None], 0.0)
    mass = ordered.double()
    # the first token always stays: nothing comes before it and top_p is above 0
    ordered.masked_fill_(mass.cumsum(dim=-1) - mass >= top_p[:, None] * row_sum(mass), 0.0)
    return torch.zeros_like(ordered).scatter_(1, ids, ordered)


def _cut_by_head(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The same in place, for rows whose cut lies among their best _HEAD tokens and between two different weights.

    The sorted head then tells the smallest weight that stays. Returns which rows those are; the others are untouched.
    """
    raw = weights.topk(_HEAD, dim=-1).values
    rank = torch.arange(_HEAD)
    head = raw.double().masked_fill_(rank >= top_k[:, None], 0.0)
    among = top_k <= _HEAD
    mass = row_sum(head)
    if not among.all():
        mass = torch.where(among[:, None], mass, row_sum(weights.double()))
    stays = (head.cumsum(dim=-1) - head < top_p[:, None] * mass) & (rank < top_k[:, None])
    n_stay = stays.sum(dim=-1, keepdim=True)
    border, after = raw.gather(1, n_stay - 1), raw.gather(1, n_stay.clamp(max=_HEAD - 1))
    found = (n_stay < _HEAD) & (after < border)
    weights.masked_fill_(weights < torch.where(found, border, 0.0), 0.0)
    return found[:, 0]


def exponential_noise(seed: Tensor, counter: Tensor, vocab_size: int) -> Tensor:
    """Standard exponential variates [rows, vocab_size], float64, a pure function of (seed, counter, token)."""
    return _noise_of(noise_keys(seed, counter), vocab_size)


def noise_keys(seed: Tensor, counter: Tensor) -> Tensor:
    """What a row's random stream depends on, in one int64 [rows]."""
    return _mix(_mix(seed + _GOLDEN) ^ (counter * _GOLDEN))


def _noise_of(key: Tensor, vocab_size: int) -> Tensor:
    bits = _mix(key[:, None] + torch.arange(1, vocab_size + 1, device=key.device) * _GOLDEN)
    uniform = (((bits >> 11) & (2**53 - 1)).double() + 0.5) * 2.0**-53  # in (0, 1)
    return -torch.log1p(-uniform)


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 (wrapping) tensors."""
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift right of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def report(logits: Tensor, tokens: Tensor, wanted: Tensor, n_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of `tokens` where wanted, and the best `n_top` of every row, of the raw distribution."""
    (n_rows, vocab), device = logits.shape, logits.device
    logprobs = torch.full((n_rows,), torch.nan, device=device)
    top_ids = torch.full((n_rows, n_top), -1, dtype=torch.long, device=device)
    top_logprobs = torch.full((n_rows, n_top), torch.nan, device=device)
    rows = torch.arange(n_rows) if n_top else torch.nonzero(wanted).flatten()
    if len(rows):
        at, asked = upload(rows, device), upload(wanted[rows], device)
        table = torch.log_softmax(logits[at], dim=-1)
        chosen = table.gather(1, tokens[at, None])[:, 0]
        logprobs[at] = torch.where(asked, chosen, torch.nan)
        if n_top:
            best = table.topk(min(n_top, vocab), dim=-1)
            top_ids[:, : best.indices.shape[1]] = best.indices
            top_logprobs[:, : best.values.shape[1]] = best.values
    return logprobs, top_ids, top_logprobs
