"""One request's place in a grammar, whatever backend matches it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from runtime.errors import RequestFailed
from runtime.grammar.places import UNKNOWN, Place
from runtime.grammar.protocol import MaskRow


class Matcher(Protocol):
    """What a backend must do. It never sees stop ids."""

    @property
    def complete(self) -> bool: ...

    @property
    def remembered(self) -> MaskRow | None:
        """The mask here, where one was filled before that allows something but not all. Shared: not to be written."""
        ...

    @property
    def near_end(self) -> bool:
        """See `Cursor.near_end`."""
        ...

    @property
    def place(self) -> Place | None:
        """Where what is found out about this place may be noted for all requests that come here."""
        ...

    def mask(self, row: MaskRow) -> bool:
        """Fill the row; stop ids included where the text is complete. False: everything is allowed."""
        ...

    def advance(self, token: int) -> bool: ...

    def rollback(self, n: int) -> None: ...

    def fork(self) -> Matcher: ...

    def forced(self, limit: int) -> list[int]: ...

    def failure(self) -> str | None:
        """Why the backend has given up, if it has."""
        ...


@dataclass(frozen=True, slots=True)
class MaskBudget:
    """CPU time one request may spend on masks: never more than `once_s`, and more than `slow_s` only `slow_count`
    times. Grammars that pass the gate stay far below; this is for the one that does not."""

    slow_s: float = 0.05
    slow_count: int = 3
    once_s: float = 1.0


@dataclass(slots=True)
class Counters:
    """What masks cost so far, over all requests. Written by the scheduler's thread only."""

    masks: int = 0
    mask_s: float = 0.0
    slowest_mask_s: float = 0.0
    failed: int = 0


class GrammarCursor:
    """Adds to a matcher: stop ids, `done`, the mask-time budget, and a clean error for an all-masked row."""

    __slots__ = (
        "_budget",
        "_clock",
        "_counters",
        "_ended",
        "_known",
        "_matcher",
        "_row",
        "_slow",
        "_stop_row",
        "_stops",
    )

    def __init__(
        self,
        matcher: Matcher,
        stops: frozenset[int],
        stop_row: MaskRow,
        counters: Counters,
        budget: MaskBudget,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._matcher = matcher
        self._stops = stops
        self._stop_row = stop_row
        self._counters = counters
        self._budget = budget
        self._clock = clock
        self._slow = 0
        self._ended = False  # a stop id was accepted
        self._row: MaskRow | None = None  # the mask here, once somebody asked
        self._known = False  # whether _row and everything-allowed are those of this place

    @property
    def can_stop(self) -> bool:
        return self._ended or self._matcher.complete

    @property
    def done(self) -> bool:
        if self._ended:
            return True
        if not self._matcher.complete:
            return False
        row = self.allowed()
        return row is not None and not (row & ~self._stop_row).any()

    @property
    def near_end(self) -> bool:
        return not self._ended and self._matcher.near_end

    def goes_on(self, *, unforced: bool) -> bool:
        place = self._matcher.place
        return place is not None and not self._ended and place.goes_on(unforced)

    def last_token(self) -> int | None:
        if self._ended:
            return None
        place = self._matcher.place
        if place is None:
            return self._look_for_the_last()
        if place.last == UNKNOWN:
            place.last = self._look_for_the_last()
        return place.last

    def _look_for_the_last(self) -> int | None:
        if self._matcher.complete:
            return None  # a stop id may be what comes
        row = self.allowed()
        if row is None or np.count_nonzero(row) != 1:
            return None
        at = int(np.flatnonzero(row)[0])
        word = int(row[at]) & 0xFFFFFFFF
        token = at * 32 + word.bit_length() - 1
        if word & (word - 1) or not self.accept(token):
            return None
        done = self.done
        self.rollback(1)
        return token if done else None

    def allowed(self) -> MaskRow | None:
        if self._ended:
            return self._stop_row
        if self._known:
            return self._row
        row = self._matcher.remembered
        if row is None:
            fresh = np.empty_like(self._stop_row)
            row = fresh if self._masked(fresh) else None
        else:
            self._counters.masks += 1
        self._row, self._known = row, True
        return row

    def fill(self, row: MaskRow) -> bool:
        if row.shape != self._stop_row.shape or row.dtype != np.int32:
            raise ValueError(f"a mask row is int32 with {len(self._stop_row)} words")
        here = self.allowed()
        if here is None:
            return False
        row[:] = here
        return True

    def accept(self, token: int) -> bool:
        if self._ended:
            return False
        if token in self._stops:
            self._ended = self._matcher.complete
            return self._ended
        if not self._matcher.advance(token):
            why = self._matcher.failure()
            if why is not None:
                self._fail(why)
            return False
        self._known = False
        return True

    def rollback(self, n: int) -> None:
        if n and self._ended:
            self._ended, n = False, n - 1
        if n:
            self._matcher.rollback(n)
            self._known = False

    def fork(self) -> GrammarCursor:
        twin = GrammarCursor(
            self._matcher.fork(), self._stops, self._stop_row, self._counters, self._budget, self._clock
        )
        twin._ended, twin._slow = self._ended, self._slow
        return twin

    def forced_tokens(self, limit: int) -> list[int]:
        if limit <= 0 or self._ended or self._matcher.complete:
            return []
        return self._matcher.forced(limit)

    def _masked(self, row: MaskRow) -> bool:
        start = self._clock()
        limited = self._matcher.mask(row)
        self._charge(self._clock() - start)
        if limited and not row.any():
            self._fail(self._matcher.failure() or "the grammar allows no token of this vocabulary here")
        return limited

    def _charge(self, spent_s: float) -> None:
        counters, budget = self._counters, self._budget
        counters.masks += 1
        counters.mask_s += spent_s
        counters.slowest_mask_s = max(counters.slowest_mask_s, spent_s)
        self._slow += spent_s > budget.slow_s
        if spent_s > budget.once_s or self._slow >= budget.slow_count:
            self._fail(f"the grammar is too costly to apply: a mask took {spent_s * 1e3:.0f} ms")

    def _fail(self, why: str) -> None:
        self._counters.failed += 1
        raise RequestFailed(f"Structured output failed: {why}.")
