"""Log lines about what may happen a thousand times a second: one a minute, with the number of those left out."""

from __future__ import annotations

import logging

EVERY_S = 60.0


class Seldom:
    """One kind of line. The first comes at once."""

    def __init__(self, log: logging.Logger, level: int) -> None:
        self._log, self._level = log, level
        self._next: float | None = None
        self.n_left_out = 0

    def say(self, now: float, text: str, *args: object) -> None:
        """`now`: seconds of any monotonic clock."""
        if self._next is not None and now < self._next:
            self.n_left_out += 1
            return
        more = f" ({self.n_left_out} such lines left out since the last)" if self.n_left_out else ""
        self._log.log(self._level, text + more, *args)
        self._next, self.n_left_out = now + EVERY_S, 0
