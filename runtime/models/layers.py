"""The parts the supported architectures share. Each packs its weights once, through the backend's `Ops`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.base import AttnMeta, KVStore, LayerSpec, Linear, Ops, PackedOps, QuantizedOps, RopeAttendOps
from kernels.quant import LinearMethod
from runtime.errors import ModelLoadError
from runtime.models.config import ModelConfig
from runtime.models.weights import WeightSource, stack_quantized


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token ids -> rows in the model's dtype."""

    read: Callable[[Tensor], Tensor]
    layer: Linear | None  # whose packed weight the rows are read from, if any

    def __call__(self, ids: Tensor) -> Tensor:
        return self.read(ids)


@dataclass(frozen=True, slots=True)
class Builder:
    """Reads weights by name, checks their shapes, casts them and hands them to the backend."""

    config: ModelConfig
    source: WeightSource
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    keep_quantized: bool = True  # let the backend compute on ggml blocks where it can
    method: LinearMethod | None = None  # quantises float weights as they are loaded
    precise_method: LinearMethod | None = None  # the same for the vocabulary head

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor of `shape` in the model's dtype, on its device."""
        found = self.source.tensor(name)
        if tuple(found.shape) != shape:
            raise ModelLoadError(
                f"The tensor {name!r} of model {self.config.name!r} has shape {tuple(found.shape)}; expected {shape}."
            )
        return found.to(device=self.device, dtype=self.dtype)

    def linear(
        self, names: tuple[str, ...], outs: tuple[int, ...], n_in: int, *, bias: bool = False, precise: bool = False
    ) -> Linear:
        """One product for the stacked projections `names` (without `.weight`), of `outs` rows each.

        `precise` layers (the vocabulary head) have a method of their own, or keep float weights as they are.
        """
        stacked_bias = self._stack([f"{name}.bias" for name in names], [(out,) for out in outs]) if bias else None
        if self.keep_quantized and isinstance(self.ops, QuantizedOps):
            blocks = stack_quantized([self.source.quantized(f"{name}.weight") for name in names])
            if blocks is not None and blocks.shape == (sum(outs), n_in):
                layer = self.ops.quantized_linear(blocks, stacked_bias)
                if layer is not None:
                    return layer
        weight = self._stack([f"{name}.weight" for name in names], [(out, n_in) for out in outs])
        method = self.precise_method if precise else self.method
        if method is not None:
            return method.pack(weight, stacked_bias)
        return self.ops.linear(weight, stacked_bias)

    def embedding(self, name: str, shape: tuple[int, int], tied: Linear | None) -> Embedding:
        """Rows [n, shape[1]] of token ids. `tied` is the head made of the same weight, if any.

        Where the backend can, rows are read from a packed weight, so a quantised one is never expanded.
        """
        if isinstance(self.ops, PackedOps):
            layer = tied or self.linear((name,), (shape[0],), shape[1], precise=True)
            read = self.ops.embedding_of(layer)
            if read is not None:
                return Embedding(lambda ids: read(ids).to(self.dtype), layer)
        weight = self.tensor(f"{name}.weight", shape)
        return Embedding(lambda ids: self.ops.embedding(ids, weight), None)

    def _stack(self, names: list[str], shapes: list[tuple[int, ...]]) -> Tensor:
        parts = [self.tensor(name, shape) for name, shape in zip(names, shapes, strict=True)]
        return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


class Attention:
    """Grouped-query self-attention with rotary positions and, for some models, normed queries and keys."""

    def __init__(self, build: Builder, layer: int, *, qk_norm: bool = False) -> None:
        c, prefix = build.config, f"model.layers.{layer}.self_attn"
        self.ops, self.layer, self.eps = build.ops, layer, c.norm_eps
        self._rope_attend = build.ops.rope_attend if isinstance(build.ops, RopeAttendOps) else None
        self.spec = self.spec_of(c, layer)
        self.sizes = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.n_kv_heads * c.head_dim)
        projections = tuple(f"{prefix}.{name}_proj" for name in "qkv")
        self.qkv = build.linear(projections, self.sizes, c.hidden_size, bias=c.qkv_bias)
        self.out = build.linear((f"{prefix}.o_proj",), (c.hidden_size,), self.sizes[0], bias=c.output_bias)
        self.q_norm = build.tensor(f"{prefix}.q_norm.weight", (c.head_dim,)) if qk_norm else None
        self.k_norm = build.tensor(f"{prefix}.k_norm.weight", (c.head_dim,)) if qk_norm else None

    @staticmethod
    def spec_of(c: ModelConfig, layer: int) -> LayerSpec:
        return LayerSpec(c.n_heads, c.n_kv_heads, c.head_dim, c.head_dim**-0.5, window=c.window(layer))

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor, meta: AttnMeta, kv: KVStore) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]; the tokens' keys and values are stored on the way."""
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.spec.head_dim)) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q = self.ops.rms_norm(q, self.q_norm, self.eps)
            k = self.ops.rms_norm(k, self.k_norm, self.eps)
        if self._rope_attend is not None:
            mixed = self._rope_attend(self.layer, (q, k, v), positions, cos_sin, kv, meta, self.spec)
        else:
            q, k = self.ops.rope(q, k, positions, cos_sin)
            mixed = self.ops.attend(self.layer, q, k, v, kv, meta, self.spec)
        return self.out(mixed.flatten(1))


class Mlp:
    """The gated feed-forward part: down(silu(gate(x)) * up(x))."""

    def __init__(self, build: Builder, layer: int) -> None:
        c, prefix = build.config, f"model.layers.{layer}.mlp"
        wide = c.intermediate_size
        self.ops = build.ops
        gate_up = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self.gate_up = build.linear(gate_up, (wide, wide), c.hidden_size, bias=c.mlp_bias)
        self.down = build.linear((f"{prefix}.down_proj",), (c.hidden_size,), wide, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.ops.silu_mul(self.gate_up(x)))


class Block:
    """Pre-norm attention and feed-forward around one residual stream."""

    def __init__(self, build: Builder, layer: int, attention: Attention) -> None:
        c, prefix = build.config, f"model.layers.{layer}"
        self.ops, self.eps = build.ops, c.norm_eps
        self.attention = attention
        self.mlp = Mlp(build, layer)
        self.norm_before_attention = build.tensor(f"{prefix}.input_layernorm.weight", (c.hidden_size,))
        self.norm_before_mlp = build.tensor(f"{prefix}.post_attention_layernorm.weight", (c.hidden_size,))

    def forward(
        self,
        delta: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        cos_sin: Tensor,
        meta: AttnMeta,
        kv: KVStore,
    ) -> tuple[Tensor, Tensor]:
        """(what to add, residual so far), both [tokens, hidden]; the addition is fused with the next norm."""
        if residual is None:
            x, residual = self.ops.rms_norm(delta, self.norm_before_attention, self.eps), delta
        else:
            x, residual = self.ops.add_rms_norm(delta, residual, self.norm_before_attention, self.eps)
        x = self.attention.forward(x, positions, cos_sin, meta, kv)
        x, residual = self.ops.add_rms_norm(x, residual, self.norm_before_mlp, self.eps)
        return self.mlp.forward(x), residual
