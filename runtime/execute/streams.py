"""What the GPU runner needs of a device: streams that run work in order, events between them, pinned memory.

On CUDA, `Stream.run` calls the work at once with the stream current, so every kernel in it is queued, not waited
for. A test's device keeps the work and runs it as late as the events allow: a missing wait, or a host that
rewrites a buffer too early, then gives wrong tokens without any GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream's queue."""

    def synchronize(self) -> None:
        """Make the host wait for the point; returns at once if the event was never recorded."""
        ...

    def query(self) -> bool:
        """True once the point is reached (or was never recorded)."""
        ...


class Stream(Protocol):
    """A queue of device work."""

    def run(self, work: Callable[[], None]) -> None:
        """Queue what `work` does. Host memory that it reads must stay as it is until the work is done."""
        ...

    def wait(self, event: Event) -> None:
        """Later work of this stream starts after `event`."""
        ...

    def record(self, event: Event) -> None:
        """Move `event` to the present end of the queue."""
        ...

    def keep(self, tensor: Tensor) -> None:
        """Called by work of this stream that reads a tensor made on another: its memory is not given away before."""
        ...


class Device(Protocol):
    """Makes streams, events and memory."""

    torch_device: torch.device

    def stream(self) -> Stream: ...

    def event(self) -> Event: ...

    def timer(self) -> Event:
        """An event whose moment can be read."""
        ...

    def seconds(self, start: Event, end: Event) -> float:
        """Time between two timers that were reached."""
        ...

    def pinned(self, n_bytes: int) -> Tensor:
        """uint8 host memory that copies to and from the device without waiting."""
        ...

    def synchronize(self) -> None: ...


class CudaDevice:
    """The GPU through torch."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        torch.cuda.set_device(device)

    def stream(self) -> Stream:
        return _CudaStream(torch.cuda.Stream(self.torch_device))

    def event(self) -> Event:
        return torch.cuda.Event()

    def timer(self) -> Event:
        return torch.cuda.Event(enable_timing=True)

    def seconds(self, start: Event, end: Event) -> float:
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end) / 1e3

    def pinned(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream), torch.inference_mode():
            work()

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)

    def record(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        event.record(self._stream)

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)
