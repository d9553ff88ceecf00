"""A GPU that is none: the CPU, a device that runs its queue late, and the package's stand-in, for the loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.flashinfer import FlashInferOps
from kernels.select import Choice
from runtime.execute.graphs import Capture, EagerCapture
from runtime.execute.streams import Device
from tests.kernels.fake_flashinfer import FakePackage
from tests.runtime.late_device import LateDevice


class FakeGpu:
    """Satisfies `Gpu`."""

    torch_device = torch.device("cpu")
    name = "Fake H100"
    capability = (9, 0)
    total_bytes = 8 << 30

    def __init__(self, *, free_bytes: int = 4 << 30, peak_bytes: int = 1 << 20) -> None:
        self._free, self._peak = free_bytes, peak_bytes
        self.n_tidied = 0

    def bus_id(self) -> str:
        return "0000:3b:00.0"

    def free_bytes(self) -> int:
        return self._free

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self, work: Callable[[], Any]) -> int:
        work()
        return self._peak

    def busy_of(self, work: Callable[[], Any]) -> tuple[float, float]:
        work()
        return 0.5, 1.0

    def tidy(self) -> None:
        self.n_tidied += 1

    def device(self) -> Device:
        return LateDevice()

    def capture(self) -> Capture:
        return EagerCapture()


def fake_choice(capability: tuple[int, int] = (9, 0)) -> Choice:
    """The backend over the stand-in for the package."""
    return Choice(FlashInferOps(torch.device("cpu"), FakePackage(), capability=capability), "a stand-in")
