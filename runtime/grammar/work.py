"""How much reading one grammar may take. Small schemas can multiply out to millions of steps, so all that recurses over
them counts its steps here: a step too many, or one after the deadline, ends the reading wherever it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

MATCHING_STEPS = 300_000  # positions that all matching of one grammar may look at: a tenth of a second
HERE_S = 0.05  # for reading a grammar where others wait: on a frontend's loop, beside the scheduler's thread
_LOOK_EVERY = 64  # steps between looks at the clock


class TooMuchWork(ValueError):
    """Matching texts against expressions takes too long. No fault of either alone."""


class OutOfTime(Exception):
    """The deadline has passed. It says nothing of the grammar: who has more time may go on."""


class _Bounds:
    __slots__ = ("deadline", "matching", "steps")

    def __init__(self, matching: int, deadline: float | None) -> None:
        self.matching, self.deadline, self.steps = matching, deadline, 0


_of_thread = threading.local()


@contextmanager
def bounded_work(matching: int = MATCHING_STEPS, seconds: float | None = None) -> Iterator[None]:
    """Within, `matched` raises TooMuchWork beyond `matching` positions, and each step OutOfTime after `seconds`."""
    before = getattr(_of_thread, "bounds", None)
    _of_thread.bounds = _Bounds(matching, None if seconds is None else time.perf_counter() + seconds)
    try:
        yield
    finally:
        _of_thread.bounds = before


def step(n: int = 1) -> None:
    """About `n` times ten microseconds of reading are to follow."""
    bounds: _Bounds | None = getattr(_of_thread, "bounds", None)
    if bounds is None or bounds.deadline is None:
        return
    bounds.steps += n
    if bounds.steps >= _LOOK_EVERY:
        bounds.steps = 0
        if time.perf_counter() > bounds.deadline:
            raise OutOfTime


def matched(positions: int) -> None:
    """An expression looks at so many positions of a text."""
    bounds: _Bounds | None = getattr(_of_thread, "bounds", None)
    if bounds is None:
        return
    bounds.matching -= positions
    if bounds.matching < 0:
        raise TooMuchWork
    step()
