"""The table of rotary angles, one for all layers: `[positions, head_dim]` float32, cos | sin."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runtime.models.config import RopeConfig


def cos_sin_table(rope: RopeConfig, head_dim: int, n_positions: int) -> Tensor:
    """Cosines then sines of position * frequency, each half `[n_positions, head_dim / 2]`."""
    angles = torch.arange(n_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_scale(rope)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position of each of the head_dim / 2 rotation planes."""
    base = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / base
    if rope.frequency_factors:
        return plain / torch.tensor(rope.frequency_factors, dtype=torch.float32)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(base, rope, head_dim)
    return plain


def attention_scale(rope: RopeConfig) -> float:
    """What yarn multiplies queries and keys by; 1 for the others."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    assert rope.original_context is not None
    wavelength = 2 * math.pi / plain
    longest, shortest = rope.original_context / rope.low_freq_factor, rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    mixed = (1 - blend) * plain / rope.factor + blend * plain
    stretched = torch.where(wavelength > longest, plain / rope.factor, plain)
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, mixed, stretched)


def _yarn(base: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Planes that turn more than beta_fast times over the original context are kept, slow ones interpolated."""
    assert rope.original_context is not None
    low, high = (_plane_of(turns, rope, head_dim) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return (1 / (rope.factor * base)) * ramp + (1 / base) * (1 - ramp)


def _plane_of(turns: float, rope: RopeConfig, head_dim: int) -> float:
    """The (fractional) rotation plane that makes `turns` full turns over the original context."""
    assert rope.original_context is not None
    return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
