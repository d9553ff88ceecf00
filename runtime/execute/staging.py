"""One copy a step: a plan's small arrays travel to the device in one pinned buffer, results come home in another."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from runtime.execute.streams import Device

_ALIGN = 16  # bytes; every array starts on such a border
_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


class Upload:
    """A pinned buffer and its twin on the device, both grown when a step needs more.

    `write` may run only when the step that used the buffers before is done; `copy` is queued after it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._twin = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def write(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Lay the arrays out in the pinned buffer. Returns their views on the device, filled by `copy`."""
        places, size = {}, 0
        for name, array in arrays.items():
            places[name] = size
            size += -(-array.nbytes // _ALIGN) * _ALIGN
        self._grow(size)
        self._used = size
        host = self._host.numpy()
        for name, array in arrays.items():
            host[places[name] : places[name] + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        return {name: self._view(places[name], array) for name, array in arrays.items()}

    def copy(self) -> None:
        """Copy what was written to the device, on the current stream."""
        self._twin[: self._used].copy_(self._host[: self._used], non_blocking=True)

    def _grow(self, size: int) -> None:
        if size > len(self._host):
            size = 1 << (size - 1).bit_length()
            self._host = self._device.pinned(size)
            # empty: filling it would run on another stream than the copy
            self._twin = torch.empty(size, dtype=torch.uint8, device=self._device.torch_device)

    def _view(self, place: int, array: np.ndarray) -> Tensor:
        return self._twin[place : place + array.nbytes].view(_TORCH[array.dtype]).view(array.shape)


class Download:
    """Results on their way home: queued copies into pinned memory of this step's own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._arrays: dict[str, Tensor] = {}

    def expect(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pinned room for one result."""
        n_bytes = max(1, int(np.prod(shape))) * dtype.itemsize
        room = self._device.pinned(n_bytes)[: int(np.prod(shape)) * dtype.itemsize].view(dtype).view(shape)
        self._arrays[name] = room
        return room

    def numpy(self, name: str) -> np.ndarray:
        """The result; only after the copy is done."""
        return self._arrays[name].numpy()
