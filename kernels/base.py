"""The face every kernel backend shows to the models: tensors and page tables, nothing of requests."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.kv8 import narrow, stored_dim

HUGE_PAGE = 2 << 20  # bytes


@dataclass(frozen=True, slots=True)
class AttnMeta:
    """All that attention may read of a step. int32 on CPU unless said otherwise; FlashInfer's own arrays.

    Row i owns query tokens `qo_indptr[i]:qo_indptr[i+1]` and pages
    `kv_indices[kv_indptr[i]:kv_indptr[i+1]]`; its kv_len is (pages-1)*page_size + last_page_len[i] and counts
    this step's tokens. The causal mask is aligned to the end.
    """

    page_size: int
    qo_indptr: Tensor  # [rows+1]
    kv_indptr: Tensor  # [rows+1]
    kv_indices: Tensor  # [total pages]
    last_page_len: Tensor  # [rows]
    kv_lens: Tensor  # [rows]
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens] int64, page * page_size + offset
    copy_src: Tensor  # [copies] int64 slots
    copy_dst: Tensor  # [copies] int64 slots
    share_indptr: Tensor  # [groups+1] rows of a group share their first pages
    share_n_pages: Tensor  # [groups]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer is."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    window: int = -1  # keys a query sees besides itself; -1: all
    soft_cap: float = 0.0  # cap * tanh(x / cap) on scaled scores; 0: off


class KVStore:
    """Paged keys and values of every layer: `[n_pages, page_size, n_kv_heads, head_dim]` each (NHD).

    In int8 a head takes four elements more, for its scale (`kernels.kv8`).
    """

    def __init__(
        self,
        n_layers: int,
        n_pages: int,
        page_size: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (n_pages, page_size, n_kv_heads, stored_dim(head_dim, dtype))
        self.page_size = page_size
        pools = _zeros(2 * n_layers, shape, dtype, device)
        self.k, self.v = pools[:n_layers], pools[n_layers:]

    def store(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k, v `[tokens, n_kv_heads, head_dim]` at `slots`."""
        for pool, rows in ((self.k[layer], k), (self.v[layer], v)):
            as_bytes(pool).flatten(0, 1)[slots] = as_bytes(narrow(rows, pool.dtype))

    def copy(self, layer: int, src: Tensor, dst: Tensor) -> None:
        """Copy slots within one layer; no destination is also a source."""
        for pool in (self.k[layer], self.v[layer]):
            flat = as_bytes(pool).flatten(0, 1)
            flat[dst] = flat[src]


def as_bytes(x: Tensor) -> Tensor:
    """8-bit floats as bytes, which torch can index everywhere; other types as they are."""
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x


def _zeros(n: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> list[Tensor]:
    """n tensors of zeros; on the CPU in memory that is taken when it is first written, in huge pages where there are
    any: rows' pages lie far apart, and with 4 KB each the CPU would look up addresses for longer than it reads."""
    if torch.device(device).type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n)]
    n_bytes = n * math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, n_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a wish: without huge pages it works as well
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE
    return list(whole[begin : begin + n_bytes].view(dtype).view(n, *shape).unbind())


Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [out, in] still in ggml blocks. `data` is uint8 [out, bytes a row]; rows stand alone, so
    row ranges of several weights of one `qtype` ("Q4_1", "Q8_0", ...) may be stacked."""

    data: Tensor
    qtype: str
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One pre-norm layer for a backend that runs whole layers: grouped-query attention, then a gated MLP."""

    norm_before_attention: Tensor
    qkv: Linear  # queries, keys and values stacked
    q_norm: Tensor | None  # [head_dim], before the rotation
    k_norm: Tensor | None
    out: Linear
    norm_before_mlp: Tensor
    gate_up: Linear
    down: Linear
    spec: LayerSpec

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.gate_up, self.down


class FusedDecoder(Protocol):
    """All layers of a model in one call."""

    def __call__(self, embedded: Tensor, meta: AttnMeta, kv: KVStore) -> Tensor:
        """Embedded tokens [tokens, hidden] -> residual stream after the last layer, before the final norm."""
        ...


@runtime_checkable
class FusedOps(Protocol):
    """What a backend offers besides `Ops` when it runs a whole decoder in one call."""

    def decoder(self, layers: Sequence[DecoderLayer], eps: float, cos_sin: Tensor) -> FusedDecoder | None:
        """The layers (made of this backend's linears) as one call, or None: run them operation by operation."""
        ...


@runtime_checkable
class QuantizedOps(Protocol):
    """What a backend offers besides `Ops` when it computes on quantised weights as they are."""

    def quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None = None) -> Linear | None:
        """A linear layer that keeps `weight` quantised, or None: dequantise it and call `linear`."""
        ...


@runtime_checkable
class RopeAttendOps(Protocol):
    """What a backend offers besides `Ops` when it rotates and stores in one step."""

    def rope_attend(
        self,
        layer: int,
        qkv: tuple[Tensor, Tensor, Tensor],
        positions: Tensor,
        cos_sin: Tensor,
        kv: KVStore,
        meta: AttnMeta,
        spec: LayerSpec,
    ) -> Tensor:
        """`rope`, then `attend`. Shapes as there."""
        ...


@runtime_checkable
class PackedOps(Protocol):
    """What a backend offers besides `Ops` when a packed weight also serves as the embedding."""

    def embedding_of(self, layer: Linear) -> Callable[[Tensor], Tensor] | None:
        """Token ids [n] -> float32 rows [n, in] of `layer`'s weight, or None: keep the weight beside it."""
        ...


class Ops(Protocol):
    """The operations a model is written in. One implementation a backend, chosen once at start.

    Law: every operation gives a token's result from that token's own row only, bit for bit, whatever the
    other rows are and however many.
    """

    name: str
    default_dtype: torch.dtype  # of weights and activations where the user names none

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Pack `weight` [out, in] once and return x [tokens, in] -> [tokens, out]."""
        ...

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2h] -> silu(first half) * second half, [tokens, h]."""
        ...

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate (neox halves) q [tokens, heads, d] and k; cos_sin [max positions, d] float32 = cos | sin."""
        ...

    def plan(self, meta: AttnMeta, spec: LayerSpec) -> None:
        """Once a step and distinct LayerSpec, before the layers run."""
        ...

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, kv: KVStore, meta: AttnMeta, spec: LayerSpec
    ) -> Tensor:
        """Store k, v at meta.slots, run meta's copies in this layer, then attend. Returns [tokens, heads, d]."""
        ...
