"""Quantised linear layers behind one protocol: a method packs a float weight once and returns the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.base import Linear

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
TINY = 1e-12  # keeps the scale of an all-zero row finite


QuantizeRows = Callable[[Tensor], tuple[Tensor, Tensor]]


class LinearMethod(Protocol):
    """How linear layers keep their weights and multiply. AWQ or GPTQ would be two more of these."""

    name: str

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """`weight` [out, in] in floating point, packed once -> x [tokens, in] -> [tokens, out] in x's dtype."""
        ...


class Unquantized:
    """Weights as they are."""

    name = "none"

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return lambda x: F.linear(x, weight, bias)


class Fp8Online:
    """Weights in e4m3 with one scale an output row, activations quantised as they come with one scale a token.

    The product is torch's scaled one. A layer whose sides are no multiples of 16 stays as it is. `quantize` is a
    backend's own `quantize_rows`: the same numbers, faster.
    """

    name = "fp8"

    def __init__(self, quantize: QuantizeRows | None = None) -> None:
        self._quantize = quantize or quantize_rows

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if weight.shape[0] % 16 or weight.shape[1] % 16:
            return Unquantized().pack(weight, bias)
        values, scale = self._quantize(weight)
        return Fp8Linear(values, scale.t().contiguous(), bias, self._quantize)


class Fp8Linear:
    """x [tokens, in] -> [tokens, out]."""

    def __init__(self, values: Tensor, scale: Tensor, bias: Tensor | None, quantize: QuantizeRows) -> None:
        self._values = values.t()  # [in, out], columns contiguous, as the product wants it
        self._scale = scale  # [1, out]
        self._bias = bias
        self._quantize = quantize

    def __call__(self, x: Tensor) -> Tensor:
        values, scale = self._quantize(x)
        rows = F.ScalingType.RowWise
        out = F.scaled_mm(values, self._values, scale, rows, self._scale, rows, output_dtype=torch.bfloat16)
        out = out.to(x.dtype)
        return out if self._bias is None else out + self._bias


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 values, float32 scale [rows, 1]) with values * scale near x; the largest of a row becomes 448."""
    scale = x.abs().amax(dim=-1, keepdim=True).float().clamp(min=TINY) / FP8_MAX
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def make_method(name: str, quantize: QuantizeRows | None = None) -> LinearMethod:
    """`name` is none or fp8. Raises ValueError for another, RuntimeError where torch lacks the scaled product."""
    if name == "none":
        return Unquantized()
    if name != "fp8":
        raise ValueError(f"the GPU backend has quantisation none and fp8, not {name!r}")
    if not hasattr(F, "scaled_mm"):
        raise RuntimeError(f"fp8 needs torch.nn.functional.scaled_mm, which torch {torch.__version__} lacks")
    return Fp8Online(quantize)
