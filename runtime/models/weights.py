"""Where weights come from. Names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`) for every source."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from kernels.base import QuantizedWeight
from runtime.errors import ModelLoadError


class WeightSource(Protocol):
    """Tensors by name, read lazily. Raises ModelLoadError for one that is missing or broken."""

    def tensor(self, name: str) -> Tensor:
        """The tensor in floating point, [out, in] for a linear layer."""
        ...

    def quantized(self, name: str) -> QuantizedWeight | None:
        """The tensor still in its quantised blocks, or None if it is stored in floating point."""
        ...


class DummyWeights:
    """Random weights of given shapes, made on `device`: the same for the same name and seed on one kind of device."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        seed: int = 0,
        scale: float = 0.02,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._shapes = shapes
        self._seed, self._scale = seed, scale
        self._device, self._dtype = device, dtype

    def tensor(self, name: str) -> Tensor:
        shape = self._shapes.get(name)
        if shape is None:
            raise ModelLoadError(f"The model has no tensor named {name!r}.")
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()) + self._seed)
        values = torch.empty(shape, device=self._device, dtype=self._dtype)
        return values.normal_(0.0, self._scale, generator=generator)

    def quantized(self, name: str) -> QuantizedWeight | None:
        return None


class TensorDict:
    """Weights held in a dictionary."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def tensor(self, name: str) -> Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise ModelLoadError(f"The model has no tensor named {name!r}.") from None

    def quantized(self, name: str) -> QuantizedWeight | None:
        return None


def stack_quantized(parts: list[QuantizedWeight | None]) -> QuantizedWeight | None:
    """Weights of one block type stacked along their rows; None if one is missing or the types differ."""
    present = [part for part in parts if part is not None]
    if len(present) < len(parts) or len({(part.qtype, part.shape[1]) for part in present}) != 1:
        return None
    data = torch.cat([part.data for part in present]) if len(present) > 1 else present[0].data
    return QuantizedWeight(data, present[0].qtype, (sum(part.shape[0] for part in present), present[0].shape[1]))
