"""The reference backend: plain torch, slow and obvious. It is the oracle the fast backends are tested against.

It keeps the law of `Ops` bit for bit in float32, and this is how:

- **Linear.** BLAS picks another summation order for another number of rows. oneDNN's prepacked product does
  not on the machines seen so far, so each weight shape is probed once (`RowSafeLinear`): if any number of rows
  changes one bit, that shape falls back to tiles of a fixed size, zero-padded, which every GEMM treats alike.
- **Attention.** Keys are visited in blocks of `KEY_BLOCK` aligned to position 0 and merged in that order. A block
  wholly outside a query's view adds exact zeros, so a result depends on the query's own keys and nothing else.
- **Sums** run over one row at a time; element-wise steps use only operations whose vector and scalar paths
  agree to the bit (torch's own sigmoid and silu do not; exp, division and square root do).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.base import AttnMeta, KVStore, LayerSpec, Linear, as_bytes
from kernels.kv8 import widen

ROW_TILE = 16  # rows of a padded GEMM
MAX_ROWS = 256  # rows of one unpadded GEMM
PROBED_ROWS = (1, 2, 3, 4, 5, 8, 13, 16, 31, 64)
QUERY_TILE = 4  # query tokens of one score product
KEY_BLOCK = 64  # keys of one score product


class ReferenceOps:
    """Every operation of `Ops` on torch tensors. Holds the plan of the current step, so one a runner."""

    name = "reference"
    default_dtype = torch.float32

    def __init__(self) -> None:
        self._row_safe: dict[tuple[int, int, torch.dtype], bool] = {}
        self._tiles: _Tiles | None = None

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        layer = RowSafeLinear(weight, bias)
        shape = (*weight.shape, weight.dtype)
        if shape not in self._row_safe:
            self._row_safe[shape] = layer.probe()
        layer.tiled = not self._row_safe[shape]
        return layer

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return weight[ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        mean_square = row_sum(wide * wide) / wide.shape[-1]
        return (wide / torch.sqrt(mean_square + eps)).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, d/2] each
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def plan(self, meta: AttnMeta, spec: LayerSpec) -> None:
        if self._tiles is None or self._tiles.meta is not meta:
            self._tiles = _Tiles.of(meta)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, kv: KVStore, meta: AttnMeta, spec: LayerSpec
    ) -> Tensor:
        kv.store(layer, k, v, meta.slots)
        if len(meta.copy_src):
            kv.copy(layer, meta.copy_src, meta.copy_dst)
        self.plan(meta, spec)
        assert self._tiles is not None
        return paged_attention(q, kv.k[layer], kv.v[layer], self._tiles, spec)


class RowSafeLinear:
    """x [tokens, in] -> [tokens, out], each row's bits independent of the number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.tiled = False
        self._packed = _pack(weight)
        self._weight = None if self._packed is not None else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.tiled:
            padded = F.pad(x, (0, 0, 0, -len(x) % ROW_TILE))
            return torch.cat([self._product(tile) for tile in padded.split(ROW_TILE)])[: len(x)]
        if len(x) <= MAX_ROWS:
            return self._product(x)
        return torch.cat([self._product(part) for part in x.split(MAX_ROWS)])

    def probe(self) -> bool:
        """True if products of any number of rows agree to the bit, at the present number of threads."""
        generator = torch.Generator().manual_seed(1)
        dtype = self._weight.dtype if self._weight is not None else self._packed.dtype  # type: ignore[union-attr]
        x = torch.randn(max(PROBED_ROWS), self.in_features, generator=generator).to(dtype)
        whole = self._product(x)
        return all(torch.equal(self._product(x[-n:]), whole[-n:]) for n in PROBED_ROWS)

    def _product(self, x: Tensor) -> Tensor:
        if self._packed is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), self._packed, self.bias, "none", [], "")


def _pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's blocked layout, or None where this torch has no such product for it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available() or weight.dtype == torch.float16:
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROW_TILE)
        torch.ops.mkldnn._linear_pointwise(
            torch.zeros(1, weight.shape[1], dtype=weight.dtype), packed, None, "none", [], ""
        )
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    return packed


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept. torch splits a single long row over its threads, two rows never."""
    if x.numel() == x.shape[-1]:
        return torch.cat([x, x]).sum(dim=-1, keepdim=True)[: len(x)]
    return x.sum(dim=-1, keepdim=True)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The step cut into query tiles: up to QUERY_TILE neighbouring query tokens of one row each."""

    meta: AttnMeta
    token: Tensor  # [tiles, QUERY_TILE] flat query token; padding repeats the tile's last
    position: Tensor  # [tiles, QUERY_TILE] its position in the sequence
    real: Tensor  # [tiles, QUERY_TILE] bool
    slots: Tensor  # [tiles, blocks * KEY_BLOCK] where each key lies; past the end the row's first slot
    n_keys: Tensor  # [tiles] keys up to and with the tile's last query
    n_blocks: int

    @staticmethod
    def of(meta: AttnMeta) -> _Tiles:
        starts, counts, rows = _cut(meta.qo_indptr)
        q_end = meta.qo_indptr[1:].long()[rows]
        lane = torch.arange(QUERY_TILE)
        token = torch.minimum(starts[:, None] + lane, (starts + counts - 1)[:, None])
        kv_len = meta.kv_lens.long()[rows]
        position = kv_len[:, None] - q_end[:, None] + token
        n_keys = position.amax(dim=1) + 1
        n_blocks = int(-(-n_keys.max() // KEY_BLOCK)) if len(n_keys) else 0
        key = torch.arange(n_blocks * KEY_BLOCK)
        key = torch.where(key < n_keys[:, None], key, 0)  # never a slot the row does not own
        page_at = meta.kv_indptr.long()[rows][:, None] + key // meta.page_size
        slots = meta.kv_indices.long()[page_at] * meta.page_size + key % meta.page_size
        return _Tiles(meta, token, position, lane < counts[:, None], slots, n_keys, n_blocks)


def _cut(qo_indptr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First token, number of tokens and row of every query tile."""
    starts, counts, rows = [], [], []
    bounds = qo_indptr.tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for start in range(begin, end, QUERY_TILE):
            starts.append(start)
            counts.append(min(QUERY_TILE, end - start))
            rows.append(row)
    as_long = lambda values: torch.tensor(values, dtype=torch.long)
    return as_long(starts), as_long(counts), as_long(rows)


def paged_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, tiles: _Tiles, spec: LayerSpec) -> Tensor:
    """q [tokens, heads, d] over the paged keys; all arithmetic in float32. Returns q's shape and dtype."""
    n_tiles, group = len(tiles.token), spec.n_heads // spec.n_kv_heads
    queries = q.float()[tiles.token].view(n_tiles, QUERY_TILE, spec.n_kv_heads, group, spec.head_dim)
    queries = queries.permute(0, 2, 1, 3, 4).reshape(n_tiles, spec.n_kv_heads, QUERY_TILE * group, spec.head_dim)
    best = torch.full((*queries.shape[:3], 1), -torch.inf)
    total = torch.zeros_like(best)
    mixed = torch.zeros_like(queries)
    k_slots, v_slots = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
    for block in range(tiles.n_blocks):
        begin = block * KEY_BLOCK
        live = torch.nonzero(tiles.n_keys > begin).flatten()
        slots = tiles.slots[live, begin : begin + KEY_BLOCK]
        seen = _visible(tiles.position[live], begin, spec.window).repeat_interleave(group, dim=1).unsqueeze(1)
        keys = _rows(k_slots, slots, spec).permute(0, 2, 3, 1)  # [live, kv_heads, d, KEY_BLOCK]
        values = _rows(v_slots, slots, spec).permute(0, 2, 1, 3)
        scores = _product(queries[live], keys) * spec.scale
        if spec.soft_cap:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        new_best = torch.maximum(best[live], scores.amax(dim=-1, keepdim=True))
        anchor = new_best.clamp(min=torch.finfo(torch.float32).min)  # finite, so -inf - anchor is never NaN
        weights = torch.exp(scores - anchor)
        keep = torch.exp(best[live] - anchor)
        total[live] = total[live] * keep + weights.sum(dim=-1, keepdim=True)
        mixed[live] = mixed[live] * keep + _product(weights, values)
        best[live] = new_best
    out = (mixed / total).view(n_tiles, spec.n_kv_heads, QUERY_TILE, group, spec.head_dim)
    out = out.permute(0, 2, 1, 3, 4).reshape(n_tiles, QUERY_TILE, spec.n_heads, spec.head_dim)
    result = torch.empty(q.shape, dtype=q.dtype)
    result[tiles.token[tiles.real]] = out[tiles.real].to(q.dtype)
    return result


def _rows(pool: Tensor, slots: Tensor, spec: LayerSpec) -> Tensor:
    """[live, KEY_BLOCK, kv_heads, d] in float32."""
    return widen(as_bytes(pool)[slots].view(pool.dtype), spec.head_dim)


def _visible(position: Tensor, begin: int, window: int) -> Tensor:
    """[tiles, QUERY_TILE, KEY_BLOCK]: which keys of the block a query at `position` may see."""
    distance = position[:, :, None] - torch.arange(begin, begin + KEY_BLOCK)
    seen = distance >= 0
    return seen & (distance <= window) if window >= 0 else seen


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product; every matrix of the batch has the same shape whatever the step looks like."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).view(*a.shape[:-1], b.shape[-1])
