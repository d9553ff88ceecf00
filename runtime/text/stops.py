"""The stop rule, on bytes. One rule for the scheduler, which ends the request, and the text a client sees.

The match that *ends* first wins; of those that end together, the longest. So the answer is the same however
the bytes are cut into pieces. Bytes that may still turn out to begin a stop are held back: the longest
suffix that is a proper prefix of some stop, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class StopHit(NamedTuple):
    """Which stop matched, and where in the bytes searched: [start, end)."""

    stop: bytes
    start: int
    end: int


def find_stop(data: bytes, stops: Iterable[bytes]) -> StopHit | None:
    """The first stop to be complete in `data`, None when there is none."""
    best: StopHit | None = None
    for stop in stops:
        start = data.find(stop)
        if start < 0:
            continue
        end = start + len(stop)
        if best is None or (end, start) < (best.end, best.start):
            best = StopHit(stop, start, end)
    return best


def held_length(data: bytes, stops: Iterable[bytes]) -> int:
    """Length of the longest suffix of `data` that is a proper prefix of a stop."""
    longest = 0
    for stop in stops:
        at = max(0, len(data) - len(stop) + 1)
        while (at := data.find(stop[:1], at)) >= 0 and len(data) - at > longest:
            if stop.startswith(data[at:]):
                longest = len(data) - at
                break
            at += 1
    return longest


class StopFilter:
    """Bytes in, bytes that are safe to show out. After a match (`hit`) nothing more comes out."""

    def __init__(self, stops: Iterable[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stop.encode() for stop in stops if stop))
        self._include = include_stop
        self._held = b""
        self.hit: bytes | None = None

    def push(self, data: bytes) -> bytes:
        """The bytes that became safe."""
        if self.hit is not None:
            return b""
        data = self._held + data
        found = find_stop(data, self._stops)
        if found is not None:
            self.hit, self._held = found.stop, b""
            return data[: found.end if self._include else found.start]
        keep = held_length(data, self._stops)
        self._held = data[len(data) - keep :]
        return data[: len(data) - keep]

    def finish(self) -> bytes:
        """What was held back in vain."""
        data, self._held = self._held, b""
        return data
