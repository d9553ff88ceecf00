"""The small operations round attention and the products, fused: in Triton on a GPU, in plain torch elsewhere.

Both classes give a row's result from that row alone. `fused_for` chooses once, at start.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.quant import FP8, FP8_MAX, TINY, quantize_rows
from kernels.reference import ReferenceOps
from kernels.sampling import race

HEADS = 8  # heads a program
RACE_BLOCK = 1024  # tokens of the vocabulary a program
GATE_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Pools:
    """One layer's keys and values, [n_pages, page_size, kv heads, d]."""

    k: Tensor
    v: Tensor


class Fused(Protocol):
    """What a GPU backend computes besides attention and products."""

    name: str

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); may write over both."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, pools: Pools, slots: Tensor
    ) -> Tensor:
        """q rotated, contiguous; rotated k, and v, written at `slots` of the pools (saturated where those are FP8)."""
        ...

    def quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(e4m3 values, float32 scale [rows, 1])."""
        ...

    def merge_chunks(self, parts: Tensor, lse: Tensor, indptr: Tensor, out: Tensor) -> None:
        """out [rows, heads, d] from `parts` [chunks, heads, d] and their base-2 lse [chunks, heads]; row i is made of
        the chunks indptr[i]:indptr[i+1], merged in that order."""
        ...

    def race(self, weights: Tensor, keys: Tensor) -> Tensor:
        """The token of each row [rows, vocab] that wins; see `kernels.sampling.race`."""
        ...


def fused_for(device: torch.device) -> Fused:
    """Triton's kernels on a GPU where Triton is installed, otherwise torch's operations."""
    if device.type != "cuda":
        return TorchFused()
    try:
        return TritonFused()
    except ImportError:
        return TorchFused()


class TorchFused:
    """Plain torch on any device."""

    name = "torch"

    def __init__(self) -> None:
        self._plain = ReferenceOps()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._plain.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._plain.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._plain.silu_mul(gate_up)

    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, pools: Pools, slots: Tensor
    ) -> Tensor:
        q, k = self.rotate(q, k, positions, cos_sin)
        store(pools, k, v, slots)
        return q

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        return self._plain.rope(q, k, positions.long(), cos_sin)

    def quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_rows(x)

    def merge_chunks(self, parts: Tensor, lse: Tensor, indptr: Tensor, out: Tensor) -> None:
        n_rows = len(indptr) - 1
        chunk = torch.arange(len(parts), device=out.device)
        row_of = torch.bucketize(chunk, indptr[1:].long(), right=True)  # padding belongs to row n_rows
        at = row_of[:, None].expand_as(lse)
        top = torch.full((n_rows + 1, lse.shape[1]), -torch.inf, device=out.device).scatter_reduce_(0, at, lse, "amax")
        weight = torch.exp2(lse - top[row_of])
        total = torch.zeros_like(top).index_add_(0, row_of, weight)[:n_rows]
        shape = (n_rows + 1, *out.shape[1:])
        mixed = torch.zeros(shape, device=out.device).index_add_(0, row_of, parts.float() * weight.unsqueeze(-1))
        out.copy_(mixed[:n_rows] / total.unsqueeze(-1))

    def race(self, weights: Tensor, keys: Tensor) -> Tensor:
        return race(weights, keys)


def store(pools: Pools, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write k, v [tokens, kv heads, d] at `slots`. FP8 pools are written as bytes, saturated."""
    for pool, new in ((pools.k, k), (pools.v, v)):
        flat = pool.flatten(0, 1)
        if pool.dtype == FP8:
            flat, new = flat.view(torch.uint8), new.float().clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
        flat[slots] = new.to(flat.dtype)


def copy_slots(pools: Pools, source: Tensor, target: Tensor) -> None:
    """Copy slots within a layer; no target is also a source. As bytes, since FP8 tensors cannot be indexed."""
    if len(source):
        for pool in (pools.k, pools.v):
            flat = pool.flatten(0, 1).view(torch.uint8)
            flat[target] = flat[source]


class TritonFused:
    """Own Triton kernels. Raises ImportError where Triton is not installed."""

    name = "triton"

    def __init__(self) -> None:
        self._kernels: Any = importlib.import_module("kernels.triton_kernels")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        self._launch("rms_norm", (len(rows),), rows, weight, out, rows.stride(0), rows.shape[1], eps, **_row(rows))
        return out.view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert x.is_contiguous()
        assert residual.is_contiguous()
        self._launch("add_rms_norm", (len(x),), x, residual, weight, x.shape[1], eps, **_row(x))
        return x, residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        assert gate_up.is_contiguous()
        n = gate_up.shape[1] // 2
        out = torch.empty(len(gate_up), n, dtype=gate_up.dtype, device=gate_up.device)
        self._launch("silu_mul", (len(out), -(-n // GATE_BLOCK)), gate_up, out, n, BLOCK=GATE_BLOCK, num_warps=4)
        return out

    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, pools: Pools, slots: Tensor
    ) -> Tensor:
        (n, n_heads, d), n_kv_heads = q.shape, k.shape[1]
        assert q.stride(2) == k.stride(2) == v.stride(2) == 1
        assert pools.k.is_contiguous()
        assert pools.v.is_contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        parts = -(-n_heads // HEADS) + 2 * -(-n_kv_heads // HEADS)
        strides = [part.stride(axis) for part in (q, k, v) for axis in (0, 1)]
        tensors = (q, k, v, out, pools.k, pools.v, positions, slots, cos_sin)
        sizes = {"HALF": d // 2, "HEADS": HEADS, "FP8_MAX": FP8_MAX}
        self._launch("rope_store", (n, parts), *tensors, *strides, n_heads, n_kv_heads, **sizes, num_warps=4)
        return out

    def quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        values = torch.empty(x.shape, dtype=FP8, device=x.device)
        scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
        limits = {"TINY": TINY, "FP8_MAX": FP8_MAX}
        self._launch("quantize_rows", (len(x),), x, values, scales, x.shape[1], **limits, **_row(x))
        return values, scales

    def merge_chunks(self, parts: Tensor, lse: Tensor, indptr: Tensor, out: Tensor) -> None:
        n, n_heads, d = out.shape
        assert out.is_contiguous()
        grid = (n, -(-n_heads // HEADS))
        self._launch("merge_chunks", grid, parts, lse, indptr, out, n_heads, HEAD_DIM=d, HEADS=HEADS, num_warps=4)

    def race(self, weights: Tensor, keys: Tensor) -> Tensor:
        n, vocab = weights.shape
        blocks = -(-vocab // RACE_BLOCK)
        best = torch.empty(n, blocks, dtype=torch.float64, device=weights.device)
        place = torch.empty(n, blocks, dtype=torch.long, device=weights.device)
        weights = weights.contiguous()
        self._launch("race", (n, blocks), weights, keys, best, place, vocab, BLOCK=RACE_BLOCK, num_warps=4)
        return place.gather(1, best.max(dim=-1, keepdim=True).indices)[:, 0]

    def _launch(self, name: str, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if grid[0]:
            getattr(self._kernels, name)[grid](*args, **options)


def _row(x: Tensor) -> dict[str, int]:
    """A whole row a program: the block that holds it and the warps for that."""
    block = 1 << (x.shape[-1] - 1).bit_length()
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
