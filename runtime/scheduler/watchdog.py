"""Notices a step that does not return, or a loop that turns without getting anywhere, and says so."""

from __future__ import annotations

import logging

from runtime.scheduler.batch import Planned
from runtime.scheduler.seldom import Seldom
from runtime.scheduler.state import State

log = logging.getLogger("ramet.scheduler")


class Watchdog:
    """`limit_s`: seconds without progress, while there is work, that count as a stall."""

    def __init__(self, limit_s: float, now: float) -> None:
        self.limit_s = limit_s
        self._last = now
        self._seldom = Seldom(log, logging.ERROR)
        self.reason: str | None = None  # why health should be 503; None while all is well

    def progress(self, now: float) -> None:
        """A step was committed, or there is nothing to do."""
        self._last = now
        self.reason = None

    def check(self, state: State) -> None:
        """Called each turn that has work but committed nothing."""
        silent = state.now - self._last
        if silent > self.limit_s and self.reason is None:
            self._report(
                state,
                f"No progress for {silent:.0f} s: {len(state.queue)} waiting, {state.rows.n_used} running, "
                f"{state.n_available} of {state.cache.pool.n_pages} pages available.",
            )

    def stuck(self, state: State, planned: Planned, seconds: float) -> None:
        """A launched step has not come back."""
        plan = planned.plan
        rids = [state.rows.requests[s].rid for s in planned.slots.tolist() if state.rows.requests[s] is not None][:16]
        self._report(
            state,
            f"Step {plan.step} has not returned for {seconds:.1f} s: {plan.n_decode} decode and "
            f"{plan.n_rows - plan.n_decode} prefill rows, {plan.n_tokens} tokens, "
            f"longest context {int(plan.kv_lens.max())}; requests {rids}.",
        )

    def _report(self, state: State, reason: str) -> None:
        if self.reason is None:
            state.stats.stalls += 1
        self.reason = reason
        self._seldom.say(state.clock(), "%s", reason)
