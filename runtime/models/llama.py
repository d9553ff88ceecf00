"""Llama, Mistral and SmolLM2: plain grouped-query attention; Mistral's window comes with the config."""

from __future__ import annotations

from torch import Tensor

from kernels.base import AttnMeta, KVStore
from kernels.steps import WholeStep
from runtime.models.decoder import Trunk
from runtime.models.layers import Attention, Block, Builder


class Llama:
    """Satisfies `Model`."""

    def __init__(self, build: Builder, context_length: int) -> None:
        self.config = build.config
        self.trunk = Trunk(build, context_length)
        self.blocks = [Block(build, layer, Attention(build, layer)) for layer in range(build.config.n_layers)]
        self.trunk.fuse(self.blocks)

    def forward(self, tokens: Tensor, positions: Tensor, meta: AttnMeta, kv: KVStore) -> Tensor:
        return self.trunk.run(self.blocks, tokens, positions, meta, kv)

    @property
    def whole_step(self) -> WholeStep | None:
        return self.trunk.whole_step

    def logits(self, hidden: Tensor) -> Tensor:
        return self.trunk.logits(hidden)
