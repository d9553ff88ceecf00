"""A device without hardware that keeps queued work and runs it as late as the events allow.

Nothing moves until the host waits for an event; then exactly the work that this event needs is run. So a stream
that forgot to wait for another sees its data before it arrived, and a host that rewrites a buffer too early
changes what a queued copy carries. With a seed, streams also move by themselves at random moments.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class Ticket:
    """One recording of an event."""

    stream: LateStream
    done: bool = False


class LateEvent:
    def __init__(self) -> None:
        self.ticket: Ticket | None = None

    def synchronize(self) -> None:
        if self.ticket is not None:
            self.ticket.stream.advance_to(self.ticket)

    def query(self) -> bool:
        if self.ticket is not None and not self.ticket.done:
            self.ticket.stream.advance()
        return self.ticket is None or self.ticket.done


class LateStream:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._queue: deque[Callable[[], None] | Ticket | LateEvent | tuple[str, Ticket | None]] = deque()

    def run(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self._device.breathe()

    def wait(self, event: LateEvent) -> None:
        if self._device.honours_waits:
            self._queue.append(("wait", event.ticket))

    def record(self, event: LateEvent) -> None:
        event.ticket = Ticket(self)
        self._queue.append(event.ticket)
        self._device.breathe()

    def keep(self, tensor: Tensor) -> None:
        """Memory is never given away here."""

    def advance(self) -> None:
        """Run the next thing in the queue, and first whatever it waits for."""
        if not self._queue:
            return
        item = self._queue.popleft()
        if isinstance(item, Ticket):
            item.done = True
        elif isinstance(item, tuple):
            if item[1] is not None:
                item[1].stream.advance_to(item[1])
        else:
            with torch.inference_mode():
                item()

    def advance_to(self, ticket: Ticket) -> None:
        while not ticket.done:
            self.advance()


class LateDevice:
    """Satisfies `Device`. `honours_waits` off is a device on which streams ignore each other."""

    torch_device = torch.device("cpu")

    def __init__(self, seed: int | None = None, *, honours_waits: bool = True) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._streams: list[LateStream] = []
        self.honours_waits = honours_waits

    def stream(self) -> LateStream:
        self._streams.append(LateStream(self))
        return self._streams[-1]

    def event(self) -> LateEvent:
        return LateEvent()

    def timer(self) -> LateEvent:
        return LateEvent()

    def seconds(self, start: LateEvent, end: LateEvent) -> float:
        return 1e-3

    def pinned(self, n_bytes: int) -> Tensor:
        return torch.full((n_bytes,), 0x7F, dtype=torch.uint8)

    def synchronize(self) -> None:
        for stream in self._streams:
            while stream._queue:
                stream.advance()

    def breathe(self) -> None:
        """A moment in which the device may or may not get on with its work."""
        if self._random is not None:
            for _ in range(self._random.randrange(4)):
                self._random.choice(self._streams).advance()
