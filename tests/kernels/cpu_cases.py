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
    """x as the quantised products see it: int8 in groups of 32, symmetric."""
    groups = x.view(len(x), -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    safe = torch.where(scale == 0, 1, scale)
    return (torch.round(groups / safe) * safe).view(x.shape)
