"""The scheduler: ingest, plan, launch, commit, over and over, on one thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from radix.events import EventSink
from runtime.config import EngineConfig
from runtime.errors import RametError, RequestFailed
from runtime.grammar.protocol import GrammarService
from runtime.messages import Finish, ToScheduler
from runtime.request import Sink
from runtime.scheduler.grammar import sampling_ready
from runtime.scheduler.ingest import Ingest
from runtime.scheduler.pipeline import Pipeline
from runtime.scheduler.planner import Planner
from runtime.scheduler.release import end, finish_of
from runtime.scheduler.retract import choose_stuck, retract
from runtime.scheduler.state import CPU_BACKENDS, State
from runtime.scheduler.trace import StepTrace
from runtime.scheduler.watchdog import Watchdog
from runtime.step import Runner

log = logging.getLogger("ramet.scheduler")
IDLE_S = 0.25
MAX_RECOVERIES = 3


class Scheduler:
    """Continuous batching over one runner. `receive` and `stop` may be called from any thread, all else from one."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        token_bytes: Sequence[bytes] = (),
        special_ids: frozenset[int] = frozenset(),
        eos_ids: Sequence[int] | None = None,
        grammar: GrammarService | None = None,
        events: EventSink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`token_bytes[id]`: exact bytes of each token, for stop strings. `eos_ids`: default, the model's."""

        def make_state() -> State:
            return State(
                config,
                runner,
                token_bytes=token_bytes,
                special_ids=special_ids,
                eos_ids=eos_ids,
                grammar=grammar,
                events=events,
                clock=clock,
            )

        self._make_state = make_state
        self.config = config
        self._inbox: deque[tuple[ToScheduler, Sink]] = deque()
        self._wake = threading.Event()
        self._stopping: str | None = None
        self._trace = StepTrace(config.trace_steps)
        self._recoveries = 0
        self._idle_turns = 0
        self.last_turn = time.monotonic()
        self._start(make_state())

    def _start(self, state: State) -> None:
        self.state = state
        state.wake = self._wake.set
        self.watchdog = Watchdog(self.config.stall_s, state.clock())
        self._ingest = Ingest(state)
        self._planner = Planner(state)
        self._pipeline = Pipeline(state, 1 if self.config.overlap else 0, self.watchdog, self._trace)

    # -- from other threads --------------------------------------------------------------------------------------

    def receive(self, msg: ToScheduler, sink: Sink) -> None:
        """Queue a message; its answers go to `sink`, called on the scheduler's thread."""
        self._inbox.append((msg, sink))
        self._wake.set()

    def stop(self, drain: bool = False) -> None:
        """End `run`: after the current step, or with `drain` after everything accepted so far has finished."""
        self._stopping = "drain" if drain and self._stopping is None else "now"
        self._wake.set()

    @property
    def busy(self) -> bool:
        """Live or waiting requests, or a step in flight."""
        return bool(self._inbox or self.state.live or len(self._pipeline))

    @property
    def computing_here(self) -> bool:
        """Whether answers are being written by this machine's own cores."""
        return len(self.state.decode) > 0 and self.state.spec.backend in CPU_BACKENDS

    def stats(self) -> dict[str, Any]:
        """Counters, gauges and times; see docs/scheduling.md."""
        return self.state.report()

    def health(self) -> tuple[bool, str]:
        """(ready, why not)."""
        return self.watchdog.reason is None, self.watchdog.reason or ""

    # -- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Turn until stopped. An error inside one turn fails the requests it touches, not the loop."""
        try:
            while self._stopping != "now":
                self.state.draining = self._stopping == "drain"
                if self.state.draining and not self.busy:
                    break
                if self.watchdog.reason is None:  # a loop that turns on the spot must look stalled to health checks
                    self.last_turn = time.monotonic()
                if not self._turn():
                    self._sleep()
        finally:
            self._pipeline.drop_all()
            self.state.out.flush()
            self._trace.close()

    def _turn(self) -> bool:
        try:
            worked = self.step()
        except Exception as err:
            self._recover(err)
            return True
        return worked

    def step(self) -> bool:
        """One turn: take messages in, plan, launch, commit, send. True if there was anything to do."""
        state = self.state
        state.now = state.clock()
        worked = self._take_messages()
        self._ingest.expire()
        planned = None
        if state.rows.n_used or len(state.queue):
            start = state.clock()
            planned = self._planner.plan()
            if planned is not None:
                done = state.clock()
                state.stats.plan_s.add(done - start)
                self._trace.span("plan", planned.plan.step, start, done, rows=planned.plan.n_rows)
        if planned is not None or len(self._pipeline):
            n_steps = state.stats.steps
            self._pipeline.advance(planned)
            worked = True
            self._idle_turns = 0
            if state.stats.steps > n_steps:
                self._recoveries = 0
        elif state.rows.n_used:
            worked = self._unstick() or worked
        if not state.live and not len(self._pipeline):
            self._pipeline.rest()
        state.rate.look(state.stats.generated, state.now)
        self._watch(worked)
        if self.config.audit:
            state.audit()
        if planned is None or len(self._pipeline) or not state.rows.n_used:
            state.out.flush()
        return worked  # else the device waits for the next plan: what there is to say is sent once that is launched

    def _take_messages(self) -> bool:
        worked = False
        while self._inbox:
            message, sink = self._inbox.popleft()
            self._ingest.handle(message, sink)
            worked = True
        return worked

    def _watch(self, worked: bool) -> None:
        state = self.state
        waiting_for_grammar = not all(map(sampling_ready, state.prefill))
        if not self.busy or state.paused or waiting_for_grammar:
            self.watchdog.progress(state.now)
        elif not worked:
            self.watchdog.check(state)

    def _unstick(self) -> bool:
        """Requests run but nothing could be planned and nothing is in flight: no page is left for anyone.

        The first time is forgiven, since pages pinned by the last plan come free with the next. Then the youngest
        gives way; one that is alone has filled the pool and ends by length.
        """
        state = self.state
        if not any(map(sampling_ready, state.rows.running())):
            return False  # everybody waits for a grammar
        self._idle_turns += 1
        if self._idle_turns < 2:
            return True
        self._idle_turns = 0
        victim = choose_stuck(state)
        if state.rows.n_used == 1:
            end(state, victim, Finish(reason="length", message="The request has filled the KV pool."))
        else:
            retract(state, victim)
        return True

    def _sleep(self) -> None:
        """Wait for a message, a finished compilation or a deadline."""
        self.state.cache.flush_events()
        deadline = self._ingest.next_deadline()
        wait = IDLE_S if deadline is None else min(IDLE_S, max(0.0, deadline - self.state.clock()))
        self._wake.wait(wait)
        self._wake.clear()

    def _recover(self, error: Exception) -> None:
        """A fault of our own: everyone gets an error and the books are opened anew. Raises when it recurs."""
        self._recoveries += 1
        log.error("The scheduler failed and starts over: %s", error, exc_info=error)
        if self._recoveries > MAX_RECOVERIES:
            raise error
        old = self.state
        self._pipeline.drop_all()
        finish = finish_of(error if isinstance(error, RametError) else RequestFailed(f"Internal error: {error}"))
        fresh = self._make_state()
        fresh.stats = old.stats
        fresh.stats.audit_failures += 1
        fresh.step = old.step
        fresh.draining, fresh.paused = old.draining, old.paused
        for request in list(old.live.values()):
            old.out.add(request.sink, request.output(finish, request.usage(old.now)))
        old.out.flush()
        self._start(fresh)
