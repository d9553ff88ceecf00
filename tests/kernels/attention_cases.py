"""Ragged attention problems with a float64 oracle: scattered pages, a poisoned pool, any page size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.base import AttnMeta, KVStore, LayerSpec


@dataclass
class Problem:
    """What `attend` gets, and the logical keys and values the answer must come from."""

    meta: AttnMeta
    kv: KVStore
    q: Tensor
    k: Tensor
    v: Tensor
    keys: list[Tensor]  # one a row, [kv_len, kv_heads, d]
    values: list[Tensor]


def make_problem(
    spec: LayerSpec, lens: list[tuple[int, int]], page_size: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Problem:
    """`lens` are (q_len, kv_len) pairs. Slots that no row owns hold NaN."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    n_pages = [-(-kv_len // page_size) for _, kv_len in lens]
    total = sum(n_pages)
    pages = rng.permutation(2 * total)[:total]
    kv = KVStore(1, 2 * total, page_size, spec.n_kv_heads, spec.head_dim, dtype)
    kv.k[0].fill_(torch.nan)
    kv.v[0].fill_(torch.nan)
    keys, values, new_slots, at = [], [], [], 0
    for (q_len, kv_len), n in zip(lens, n_pages, strict=True):
        shape = (kv_len, spec.n_kv_heads, spec.head_dim)
        k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        slots = torch.tensor([int(pages[at + p // page_size]) * page_size + p % page_size for p in range(kv_len)])
        old = kv_len - q_len
        kv.store(0, k[:old], v[:old], slots[:old])
        keys.append(k)
        values.append(v)
        new_slots.append(slots[old:])
        at += n
    meta = make_meta(lens, page_size, n_pages, pages.tolist(), torch.cat(new_slots))
    q = torch.randn(sum(q for q, _ in lens), spec.n_heads, spec.head_dim, generator=generator).to(dtype)
    new_k, new_v = (
        torch.cat([part[-q_len:] for part, (q_len, _) in zip(parts, lens, strict=True)]) for parts in (keys, values)
    )
    return Problem(meta, kv, q, new_k, new_v, keys, values)


def make_meta(
    lens: list[tuple[int, int]], page_size: int, n_pages: list[int], pages: list[int], slots: Tensor
) -> AttnMeta:
    """The arrays of rows with `lens`, whose pages follow each other in `pages`."""
    i32 = lambda values: torch.tensor(values, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.long)
    return AttnMeta(
        page_size=page_size,
        qo_indptr=i32(np.cumsum([0, *(q for q, _ in lens)]).tolist()),
        kv_indptr=i32(np.cumsum([0, *n_pages]).tolist()),
        kv_indices=i32(pages),
        last_page_len=i32([kv - (n - 1) * page_size for (_, kv), n in zip(lens, n_pages, strict=True)]),
        kv_lens=i32([kv for _, kv in lens]),
        positions=i32([p for q, kv in lens for p in range(kv - q, kv)]),
        slots=slots,
        copy_src=none,
        copy_dst=none,
        share_indptr=i32([0]),
        share_n_pages=i32([]),
    )


def oracle(problem: Problem, spec: LayerSpec) -> Tensor:
    """Dense attention in float64 over each row's logical keys and values, [tokens, heads, d]."""
    outs, group = [], spec.n_heads // spec.n_kv_heads
    bounds = problem.meta.qo_indptr.tolist()
    for row, (keys, values) in enumerate(zip(problem.keys, problem.values, strict=True)):
        q = problem.q[bounds[row] : bounds[row + 1]].double()
        k, v = (part.double().repeat_interleave(group, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        if spec.soft_cap:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden = (distance < 0) | ((distance > spec.window) if spec.window >= 0 else torch.zeros_like(distance).bool())
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(outs)
