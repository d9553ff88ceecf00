"""The products that torch ships for a CPU, behind one face, so that they run beside ours on the same shapes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor], Tensor]  # float32 x [rows, in] -> [rows, out]
GROUP = 32


def bfloat16(weight: Tensor) -> Product:
    narrow = weight.bfloat16()
    return lambda x: F.linear(x.bfloat16(), narrow)


def float32(weight: Tensor) -> Product:
    return lambda x: F.linear(x, weight)


def int8_weights(weight: Tensor) -> Product:
    """One scale an output row; activations stay bfloat16."""
    scale = weight.abs().amax(dim=1) / 127
    quants, scale = torch.round(weight / scale[:, None]).to(torch.int8), scale.bfloat16()
    return lambda x: torch._weight_int8pack_mm(x.bfloat16(), quants, scale)


def int4_weights(weight: Tensor) -> Product:
    """Scale and zero in groups of 32; activations stay bfloat16."""
    n, k = weight.shape
    groups = weight.view(n, k // GROUP, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = (high - low) / 15
    quants = torch.round((groups - low[..., None]) / scale[..., None]).clamp(0, 15).int().view(n, k)
    packed = torch._convert_weight_to_int4pack_for_cpu(quants, 1)
    zeros = low + 8 * scale  # the product takes q - 8
    both = torch.stack([scale, zeros], dim=-1).transpose(0, 1).contiguous().bfloat16()
    return lambda x: torch._weight_int4pack_mm_for_cpu(x.bfloat16(), packed, GROUP, both)


def int8_both(weight: Tensor) -> Product:
    """oneDNN's int8 product: one scale an output row, one scale and zero for all activations of a call."""
    n, k = weight.shape
    scale = weight.abs().amax(dim=1) / 127
    packed = torch.ops.onednn.qlinear_prepack(torch.round(weight / scale[:, None]).to(torch.int8), [1, k])
    zeros = torch.zeros(n, dtype=torch.int32)

    def product(x: Tensor) -> Tensor:
        step = float(x.abs().amax()) / 127
        quants = torch.quantize_per_tensor(x, step, 128, torch.quint8).int_repr()
        return torch.ops.onednn.qlinear_pointwise.default(
            quants, step, 128, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    return product


PRODUCTS: dict[str, tuple[Callable[[Tensor], Product], float]] = {  # name -> maker, bytes a weight
    "torch F.linear float32": (float32, 4),
    "torch F.linear bfloat16": (bfloat16, 2),
    "torch _weight_int8pack_mm": (int8_weights, 1),
    "torch _weight_int4pack_mm_for_cpu": (int4_weights, 0.5 + 4 / GROUP),
    "oneDNN qlinear_pointwise int8": (int8_both, 1),
}
