"""How long programs stay away between their requests: learned from those that came back, for those that say nothing."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

MAX_PROGRAMS = 1 << 14
OWN, ALL = 5, 511  # gaps remembered: of one program, of all together


class Rhythm:
    """The last gaps of each program and of all together. Only programs that have a name of their own are watched."""

    def __init__(self) -> None:
        self._left: dict[str, float] = {}  # when each program that is away ended its last request
        self._own: dict[str, deque[float]] = {}
        self._ring: deque[float] = deque()
        self._sorted: list[float] = []  # the same gaps as the ring

    def came(self, program: str, now: float) -> None:
        """The program sends a request."""
        left = self._left.pop(program, None)
        if left is None:
            return
        gap = now - left
        own = self._own.pop(program, None) or deque(maxlen=OWN)
        own.append(gap)
        self._own[program] = own  # last in order: who was not heard of for long is forgotten first
        if len(self._own) > MAX_PROGRAMS:
            del self._own[next(iter(self._own))]
        self._ring.append(gap)
        insort(self._sorted, gap)
        if len(self._ring) > ALL:
            del self._sorted[bisect_left(self._sorted, self._ring.popleft())]

    def gone(self, program: str, now: float) -> None:
        """The program's request ended."""
        self._left.pop(program, None)
        self._left[program] = now
        if len(self._left) > MAX_PROGRAMS:
            del self._left[next(iter(self._left))]

    def expect(self, program: str) -> float | None:
        """Seconds after which it may well be back: its shortest gap lately, and never more than is usual for all.

        The shortest and not the middle one, because what is kept too long costs one place and what is thrown away
        just before it comes back costs a whole prompt.
        """
        own = self._own.get(program)
        if not self._sorted:
            return None
        usual = self._sorted[len(self._sorted) // 2]
        return usual if not own else min(usual, *own)
