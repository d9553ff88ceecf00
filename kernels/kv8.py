"""Keys and values in 8 bits: int8 with a scale a token and head, or 8-bit floats as they are.

A head's int8 row is `head_dim` quants followed by its float32 scale, so a slot stays one piece of memory and is copied
as one. All of it is arithmetic on single elements, so backends agree to the bit on what is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # the largest finite value
SCALE_BYTES = 4
_TINY = 1e-30


def stored_dim(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` that one head of one token takes."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., head_dim] as it is stored, [..., stored_dim] of `dtype`. What is too large becomes the largest value."""
    if dtype == torch.int8:
        return _to_int8(x.float())
    if dtype in FP8:
        return x.float().clamp(-FP8[dtype], FP8[dtype]).to(dtype)
    return x.to(dtype)


def widen(rows: Tensor, head_dim: int) -> Tensor:
    """Stored rows [..., stored_dim] -> float32 [..., head_dim]."""
    if rows.dtype != torch.int8:
        return rows.float()
    scale = rows[..., head_dim:].contiguous().view(torch.float32)
    return rows[..., :head_dim].float() * scale


def _to_int8(x: Tensor) -> Tensor:
    """A row with NaN or infinity gets the scale NaN; one of next to nothing gets 0."""
    peak = x.abs().amax(dim=-1, keepdim=True)
    finite = torch.isfinite(peak)
    safe = finite & (peak >= _TINY)
    scale = torch.where(safe, peak / 127, torch.where(finite, 0.0, torch.nan))
    quants = torch.where(safe, torch.round(x * (127 / torch.where(safe, peak, 1.0))), 0.0).to(torch.int8)
    return torch.cat([quants, scale.contiguous().view(torch.int8)], dim=-1)
