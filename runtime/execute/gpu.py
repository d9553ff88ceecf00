"""One GPU as the loader and the bench see it: its name, its memory, its streams, its graphs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from runtime.execute.graphs import Capture, CudaCapture
from runtime.execute.streams import CudaDevice, Device


class Gpu(Protocol):
    """All that is asked of a GPU besides running kernels. Tests put a CPU behind it."""

    torch_device: torch.device
    name: str
    capability: tuple[int, int]
    total_bytes: int

    def bus_id(self) -> str:
        """PCI address, like 0000:3b:00.0."""
        ...

    def free_bytes(self) -> int:
        """Memory that could still be taken."""
        ...

    def allocated_bytes(self) -> int:
        """Memory in this process's tensors."""
        ...

    def peak_bytes(self, work: Callable[[], Any]) -> int:
        """The most that tensors took during `work`, beyond what they took before."""
        ...

    def busy_of(self, work: Callable[[], Any]) -> tuple[float, float]:
        """(seconds in which the device ran anything during `work`, wall seconds of `work`)."""
        ...

    def tidy(self) -> None:
        """Wait for the device, and give back what no tensor uses."""
        ...

    def device(self) -> Device: ...

    def capture(self) -> Capture: ...


class CudaGpu:
    """A GPU through torch."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        properties: Any = torch.cuda.get_device_properties(device)
        self._properties = properties
        self.name = str(properties.name)
        self.capability = (int(properties.major), int(properties.minor))
        self.total_bytes = int(properties.total_memory)

    def bus_id(self) -> str:
        p = self._properties
        return f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.torch_device))

    def peak_bytes(self, work: Callable[[], Any]) -> int:
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = self.allocated_bytes()
        work()
        torch.cuda.synchronize(self.torch_device)
        return int(torch.cuda.max_memory_allocated(self.torch_device)) - before

    def busy_of(self, work: Callable[[], Any]) -> tuple[float, float]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.cuda.synchronize(self.torch_device)
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize(self.torch_device)
            wall = time.perf_counter() - begin
        ran = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        return covered([(event.time_range.start, event.time_range.end) for event in ran]) / 1e6, wall

    def tidy(self) -> None:
        gc.collect()  # runners and graphs refer to each other
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()

    def device(self) -> Device:
        return CudaDevice(self.torch_device)

    def capture(self) -> Capture:
        return CudaCapture(self.torch_device)


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of (start, end)."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
