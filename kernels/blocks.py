"""Float weights into ggml's blocks of 32, so that the native backend keeps them as it keeps a GGUF's."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.base import Linear, Ops, QuantizedOps, QuantizedWeight

GROUP = 32
QTYPES = {"int8": "Q8_0", "q4": "Q4_1"}


class GgmlBlocks:
    """A `LinearMethod`: `name` is int8 (Q8_0) or q4 (Q4_1). What does not fit stays in floating point."""

    def __init__(self, ops: Ops, name: str) -> None:
        self.name = name
        self._ops = ops

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if isinstance(self._ops, QuantizedOps) and weight.shape[1] % GROUP == 0:
            layer = self._ops.quantized_linear(quantize_blocks(weight, QTYPES[self.name]), bias)
            if layer is not None:
                return layer
        return self._ops.linear(weight, bias)


def quantize_blocks(weight: Tensor, qtype: str) -> QuantizedWeight:
    """`weight` [out, in] rounded to the nearest Q8_0 or Q4_1; in must be a multiple of 32."""
    n_out, n_in = weight.shape
    groups = weight.float().reshape(n_out, n_in // GROUP, GROUP)
    packed = _q8_0(groups) if qtype == "Q8_0" else _q4_1(groups)
    return QuantizedWeight(packed.reshape(n_out, -1), qtype, (n_out, n_in))


def _q8_0(groups: Tensor) -> Tensor:
    """[..., 34] bytes: the scale, then 32 int8."""
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
    quants = torch.round(groups / _nonzero(scale)).clamp(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), quants.view(torch.uint8)], dim=-1)


def _q4_1(groups: Tensor) -> Tensor:
    """[..., 20] bytes: scale, minimum, then 16 bytes whose low halves are the first 16 quants."""
    low = groups.amin(-1, keepdim=True).half()
    scale = ((groups.amax(-1, keepdim=True) - low.float()) / 15).half()
    quants = torch.round((groups - low.float()) / _nonzero(scale)).clamp(0, 15).to(torch.uint8)
    halves = quants[..., :16] | (quants[..., 16:] << 4)
    return torch.cat([scale.view(torch.uint8), low.view(torch.uint8), halves], dim=-1)


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1, scale).float()
