"""Launching and committing in order: the device runs step N while step N+1 is planned and launched."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from runtime.errors import RequestFailed
from runtime.scheduler.batch import Planned
from runtime.scheduler.commit import Committer
from runtime.scheduler.grammar import JumpRule
from runtime.scheduler.late import late_adjusts
from runtime.scheduler.release import fail
from runtime.scheduler.retract import requeue
from runtime.scheduler.state import State
from runtime.scheduler.trace import StepTrace
from runtime.scheduler.watchdog import Watchdog
from runtime.step import Pending, StepResult

log = logging.getLogger("ramet.scheduler")
LOGGED_FAILURES = 10
NO_STEP = 1 << 62
OBSERVE_EVERY = 4  # decode-only steps are all alike: the step-time model looks at one in so many


@dataclass(slots=True)
class InFlight:
    """A launched step. `late_due`: its late samples have not been given their adjustments yet."""

    planned: Planned
    pending: Pending
    launched_at: float
    late_due: bool


class Pipeline:
    """`depth` steps may be in flight when the next is launched: 0 waits for each, 1 overlaps."""

    def __init__(self, state: State, depth: int, watchdog: Watchdog, trace: StepTrace) -> None:
        self.state, self.depth = state, depth
        self._committer = Committer(state)
        self._flight: deque[InFlight] = deque()
        self._watchdog, self._trace = watchdog, trace
        self._last_finished = 0.0
        self._jumps = JumpRule(state)

    def __len__(self) -> int:
        return len(self._flight)

    def rest(self) -> None:
        """No request is left: the time until the next one comes is nobody's idle time."""
        self._last_finished = 0.0

    def advance(self, planned: Planned | None) -> None:
        """Launch `planned`, commit what must be committed by now, then let late samples go."""
        if planned is not None:
            self._launch(planned)
        keep = self.depth if planned is not None and not self._jumps.wait_for(planned) else 0
        while len(self._flight) > keep:
            if self._flight[0].late_due:
                self._sample_late(self._flight[0])
            else:
                self._commit_first()
        for step in list(self._flight):
            if step.late_due:
                self._sample_late(step)
        if self._flight and self._jumps.ends_soon(self._flight[0].planned):
            self._commit_first()

    def _launch(self, planned: Planned) -> None:
        state = self.state
        start = state.clock()
        try:
            pending = state.runner.launch(planned.plan)
        except Exception as err:
            self._failed(planned, err)
            return
        now = state.clock()
        state.stats.launch_s.add(now - start)
        self._trace.span("launch", planned.plan.step, start, now)
        self._flight.append(InFlight(planned, pending, now, planned.any_late))

    def _sample_late(self, step: InFlight) -> None:
        state = self.state
        start = state.clock()
        adjusts = late_adjusts(state, step.planned)
        step.late_due = False
        try:
            state.runner.sample_late(step.pending, adjusts)
        except Exception as err:
            self._flight.remove(step)
            self._failed(step.planned, err)
            return
        state.stats.late_s.add(state.clock() - start)

    def _commit_first(self) -> None:
        self.state.out.flush()
        step = self._flight.popleft()
        try:
            result = self._wait(step)
        except Exception as err:
            self._failed(step.planned, err)
            return
        state = self.state
        start = state.clock()
        n_jumps = state.stats.jumps
        self._committer.commit(step.planned, result)
        self._jumps.note(step.planned, state.stats.jumps - n_jumps)
        state.committed = step.planned.plan.step
        now = state.clock()
        state.stats.commit_s.add(now - start)
        self._trace.span("commit", step.planned.plan.step, start, now)
        self._observe(step, result)
        self._watchdog.progress(now)

    def _wait(self, step: InFlight) -> StepResult:
        """The step's result. A step that does not return is reported, then waited for on."""
        state = self.state
        start = state.clock()
        while True:
            try:
                result = step.pending.result(self._watchdog.limit_s)
                break
            except TimeoutError:
                if step.pending.done():
                    raise
                self._watchdog.stuck(state, step.planned, state.clock() - step.launched_at)
        state.stats.wait_s.add(state.clock() - start)
        self._trace.span("wait", step.planned.plan.step, start, state.clock())
        return result

    def _observe(self, step: InFlight, result: StepResult) -> None:
        """Counters, the step-time model and the trace."""
        stats, plan = self.state.stats, step.planned.plan
        stats.steps += 1
        if not step.planned.pieces:
            stats.steps_decode += 1
        elif plan.n_decode:
            stats.steps_mixed += 1
        else:
            stats.steps_prefill += 1
        stats.step_tokens.add(plan.n_tokens)
        stats.step_rows.add(plan.n_rows)
        stats.device_s.add(result.device_s)
        if self._last_finished and result.started:
            stats.device_idle_s.add(max(0.0, result.started - self._last_finished))
        self._last_finished = result.finished
        self._trace.device(plan, result)
        if plan.n_tokens > plan.n_rows or plan.step % OBSERVE_EVERY == 0:
            self.state.model.observe(plan.n_tokens, int(plan.kv_lens.sum()), result.device_s)

    # -- failure -------------------------------------------------------------------------------------------------

    def _failed(self, planned: Planned, error: Exception) -> None:
        """A step failed: its requests end with an error, everyone else starts again from what is surely computed.

        Nothing a failed step was to write may stay in the tree, and no lease may hold it when it is taken out.
        """
        state = self.state
        state.stats.steps_failed += 1
        if state.stats.steps_failed <= LOGGED_FAILURES:
            log.error("Step %d failed: %s: %s", planned.plan.step, type(error).__name__, error, exc_info=error)
        first = min(self._drain(), planned.plan.step)
        rows = state.rows
        hit = {int(s) for s, g in zip(planned.slots, planned.gens, strict=True) if rows.gen[s] == g}
        for request in rows.running():
            if request.slot in hit:
                fail(state, request, RequestFailed(f"The model step failed: {error}"), keep=False)
            else:
                requeue(state, request, keep=False)
        state.stats.withdrawn_pages += state.cache.withdraw(first)

    def _drain(self) -> int:
        """Wait for everything in flight and drop its results. Returns the first step that failed; else a large one."""
        first = NO_STEP
        while self._flight:
            step = self._flight.popleft()
            try:
                if step.late_due:
                    self.state.runner.sample_late(step.pending, late_adjusts(self.state, step.planned))
                step.pending.result(self._watchdog.limit_s)
            except Exception as err:
                first = min(first, step.planned.plan.step)
                log.warning("Step %d, next to a failed one, failed too: %s", step.planned.plan.step, err)
        return first

    def drop_all(self) -> None:
        """Wait for the device and forget what it did (used when the scheduler starts over)."""
        self._drain()
