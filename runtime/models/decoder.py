"""The decoder every supported architecture is: embedding, blocks, final norm, vocabulary head."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.base import AttnMeta, DecoderLayer, FusedDecoder, FusedOps, KVStore, LayerSpec
from kernels.steps import DecoderEnds, WholeStep, WholeStepOps
from runtime.models.config import ModelConfig
from runtime.models.layers import Block, Builder
from runtime.models.rope import cos_sin_table


class Model(Protocol):
    """What the runner runs."""

    config: ModelConfig
    blocks: list[Block]

    def forward(self, tokens: Tensor, positions: Tensor, meta: AttnMeta, kv: KVStore) -> Tensor:
        """Token ids and positions [tokens] -> normed hidden states [tokens, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of chosen tokens [n, hidden] -> float32 logits [n, vocab]."""
        ...

    @property
    def whole_step(self) -> WholeStep | None:
        """`forward`, `logits` and sampling in one call, where the backend has that."""
        ...


class Trunk:
    """Embedding, final norm, head and rotary table: the part around an architecture's own blocks."""

    def __init__(self, build: Builder, context_length: int) -> None:
        c = build.config
        self.ops, self.eps = build.ops, c.norm_eps
        self.final_norm = build.tensor("model.norm.weight", (c.hidden_size,))
        head = "model.embed_tokens" if c.tied else "lm_head"
        self.head = build.linear((head,), (c.vocab_size,), c.hidden_size, precise=True)
        shape = (c.vocab_size, c.hidden_size)
        self.embed = build.embedding("model.embed_tokens", shape, self.head if c.tied else None)
        self.cos_sin = cos_sin_table(c.rope, c.head_dim, context_length).to(build.device)
        self.whole_step: WholeStep | None = None
        self._float32 = build.dtype == torch.float32
        self._fused: FusedDecoder | None = None
        self._specs: list[LayerSpec] = []

    def fuse(self, blocks: list[Block]) -> None:
        """Let the backend run all blocks in one call, if it can. Called once, when the blocks are made."""
        self._specs = distinct_specs(blocks)
        if isinstance(self.ops, FusedOps):
            self._fused = self.ops.decoder([decoder_layer(block) for block in blocks], self.eps, self.cos_sin)
        # A narrower type would round what passes between the ends and the layers, which one call does not.
        layer = self.embed.layer if self._float32 else None
        if self._fused is not None and layer is not None and isinstance(self.ops, WholeStepOps):
            ends = DecoderEnds(layer, self.final_norm, self.head)
            self.whole_step = self.ops.whole_step(self._fused, ends)

    def run(self, blocks: list[Block], tokens: Tensor, positions: Tensor, meta: AttnMeta, kv: KVStore) -> Tensor:
        for spec in self._specs:
            self.ops.plan(meta, spec)
        if self._fused is not None:
            embedded = self.embed(tokens)
            hidden = self._fused(embedded, meta, kv).to(embedded.dtype)
            return self.ops.rms_norm(hidden, self.final_norm, self.eps)
        delta, residual = self.embed(tokens), None
        for block in blocks:
            delta, residual = block.forward(delta, residual, positions, self.cos_sin, meta, kv)
        assert residual is not None
        hidden, _ = self.ops.add_rms_norm(delta, residual, self.final_norm, self.eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).float()


def decoder_layer(block: Block) -> DecoderLayer:
    """A block's parts, as a backend that runs whole layers takes them."""
    attention, mlp = block.attention, block.mlp
    return DecoderLayer(
        norm_before_attention=block.norm_before_attention,
        qkv=attention.qkv,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        out=attention.out,
        norm_before_mlp=block.norm_before_mlp,
        gate_up=mlp.gate_up,
        down=mlp.down,
        spec=attention.spec,
    )


def distinct_specs(blocks: list[Block]) -> list[LayerSpec]:
    """The LayerSpecs of the blocks, each once, in order of first use."""
    return list(dict.fromkeys(block.attention.spec for block in blocks))
