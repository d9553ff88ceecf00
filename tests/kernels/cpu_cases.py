"""What the native kernels' tests share."""

from __future__ import annotations

import os

import gguf
import torch
from torch import Tensor

from kernels.base import QuantizedWeight
from kernels.build import load_extension

FORCED = os.environ.get("RAMET_KERNEL_VARIANT")  # test this one alone, which may be emulated
# those this CPU runs, best first; "portable" is always the last
VARIANTS: list[str] = [FORCED] if FORCED else load_extension().variants()
BF16_DOTS = ("avx512bf16", "amx")  # variants whose products round activations to bfloat16 where the weight is one


def quantized(weight: Tensor, qtype: str) -> tuple[QuantizedWeight, Tensor]:
    """`weight` in blocks of `qtype`, and what those blocks mean exactly."""
    kind = gguf.GGMLQuantizationType[qtype]
    blocks = gguf.quantize(weight.numpy(), kind)
    exact = torch.from_numpy(gguf.dequantize(blocks, kind).copy())
    return QuantizedWeight(torch.from_numpy(blocks), qtype, (weight.shape[0], weight.shape[1])), exact


def int8_groups(x: Tensor) -> Tensor:
    """x as the quantised products see it: int8 in groups of 32, symmetric.

    These are the kernels' own float32 operations: after any other a value between two levels may go to the other one.
    """
    groups = x.view(len(x), -1, 32)
    peak = groups.abs().amax(-1, keepdim=True)
    most = torch.full_like(peak, 127)  # a tensor, since torch makes of `127 / x` a reciprocal and a product
    levels = torch.round(groups * (most / torch.where(peak == 0, 1, peak)))
    return (levels * (peak / most)).view(x.shape)
