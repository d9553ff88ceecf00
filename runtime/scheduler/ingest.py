"""What comes in: submissions, aborts, calls, deadlines. Every message gets an answer; none can stop the loop."""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import deque
from typing import Any

from runtime.errors import InvalidRequest, QueueFull, QueueTimeout, RametError, Unavailable
from runtime.messages import Abort, Call, Finish, Output, Reply, Submit, SubmitMany, ToScheduler, Usage
from runtime.request import Phase, Request, Sink
from runtime.scheduler.admission import probe_hit
from runtime.scheduler.grammar import start_grammar
from runtime.scheduler.hints import honoured
from runtime.scheduler.release import end, fail, finish_of
from runtime.scheduler.retract import retract
from runtime.scheduler.speak import prepare_segment
from runtime.scheduler.state import State
from runtime.validate import validate_submit

log = logging.getLogger("ramet.scheduler")
SLACK = 64  # deadlines of requests that have ended kept beyond twice those that live


class Ingest:
    """Turns messages into requests, endings and replies."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._numbers = itertools.count(1)
        self._deadlines: list[tuple[float, int, Request]] = []
        self._patience: deque[tuple[float, Request]] = deque()  # when each has waited long enough, in order

    def handle(self, message: ToScheduler, sink: Sink) -> None:
        if isinstance(message, Submit):
            self._submit(message, sink)
        elif isinstance(message, SubmitMany):
            for item in message.items:
                self._submit(item, sink)
        elif isinstance(message, Abort):
            self._abort(message, sink)
        elif isinstance(message, Call):
            self._call(message, sink)
        else:
            log.error("A message of unknown type %s was dropped.", type(message).__name__)

    # -- submissions -----------------------------------------------------------------------------------------

    def _submit(self, submit: Submit, sink: Sink) -> None:
        state = self.state
        state.stats.received += 1
        try:
            self._check(submit)
            self._enqueue(submit, sink)
        except RametError as err:
            self._refuse(submit, sink, err)
        except Exception as err:  # a malformed struct from an in-process caller must not stop the loop
            log.exception("Request %r could not be taken in.", submit.rid)
            self._refuse(submit, sink, err)

    def _check(self, submit: Submit) -> None:
        state = self.state
        if state.draining:
            raise Unavailable("The server is shutting down.")
        validate_submit(submit, state.limits)
        if submit.rid in state.live:
            raise InvalidRequest(f"Request id {submit.rid!r} is in use by a running request.", param="rid")
        if submit.hints.expected_fanout < 0:
            raise InvalidRequest("expected_fanout must not be negative.", param="expected_fanout")
        grammars = [g for g in (submit.grammar, *(s.grammar for s in submit.segments)) if g is not None]
        if grammars and state.grammar is None:
            raise InvalidRequest("This engine has no grammar backend.", param=grammars[0].param)
        if len(state.queue) >= state.config.max_queue + state.rows.n_free:  # what can start at once does not wait
            retry_after_s = self._retry_after()
            raise QueueFull(
                f"{len(state.queue)} requests are waiting, the limit is {state.config.max_queue}. "
                f"Try again in {retry_after_s:.0f} s.",
                retry_after_s=retry_after_s,
            )

    def _retry_after(self) -> float:
        """A guess at when a place in the queue comes free: the mean queue time, within reason."""
        return min(60.0, max(1.0, self.state.stats.queue_s.summary()["mean"]))

    def _enqueue(self, submit: Submit, sink: Sink) -> None:
        state = self.state
        request = Request.from_submit(next(self._numbers), submit, sink, state.now)
        request.work_at_arrival = state.work
        state.families.note(submit.hints.program_id, submit.hints.parent_id)
        request.tally.honoured = honoured(state, submit.hints)
        start_grammar(state, request, submit.grammar)
        for segment in submit.segments:  # compiled ahead; the service keeps and shares what it compiles
            if segment.grammar is not None and state.grammar is not None:
                state.grammar.compile_async(segment.grammar)
        prepare_segment(state, request)
        state.live[submit.rid] = request
        if state.policy.uses_hits:
            probe_hit(state, request)
        state.queue.add(request)
        if request.deadline is not None:
            self._watch(request, request.deadline)
        if state.config.max_queue_time_s is not None:
            self._be_patient(request, state.now + state.config.max_queue_time_s)

    def _watch(self, request: Request, deadline: float) -> None:
        """Note a deadline. Those of requests that ended in time are dropped when they outnumber the others."""
        heapq.heappush(self._deadlines, (deadline, request.num, request))
        live = self.state.live
        if len(self._deadlines) > 2 * len(live) + SLACK:
            self._deadlines = [entry for entry in self._deadlines if live.get(entry[2].rid) is entry[2]]
            heapq.heapify(self._deadlines)

    def _be_patient(self, request: Request, until: float) -> None:
        """Note how long it may wait. Those behind one that waits long are dropped when they have started or ended."""
        queue = self.state.queue
        self._patience.append((until, request))
        if len(self._patience) > 2 * len(queue) + SLACK:
            self._patience = deque(entry for entry in self._patience if entry[1] in queue)

    def _refuse(self, submit: Submit, sink: Sink, error: Exception) -> None:
        state = self.state
        if isinstance(error, QueueFull):
            state.stats.queue_full += 1
        else:
            state.stats.refused += 1
        n_prompt = len(submit.tokens) // 4 if isinstance(submit.tokens, bytes) else 0
        state.out.add(sink, Output(rid=submit.rid, finish=finish_of(error), usage=Usage(prompt_tokens=n_prompt)))

    # -- endings from outside ----------------------------------------------------------------------------------

    def _abort(self, abort: Abort, sink: Sink) -> None:
        state = self.state
        finish = Finish(reason="abort", message=abort.reason)
        if abort.rid is not None:
            request = state.live.get(abort.rid)
            victims = [request] if request is not None else []
        elif abort.group:
            victims = [r for r in state.live.values() if r.submit.group == abort.group]
        elif abort.everything:
            victims = [r for r in state.live.values() if r.sink == sink]
        else:
            victims = []
        for request in victims:
            end(state, request, finish)

    def expire(self) -> None:
        """End requests whose deadline has passed, wherever they are."""
        state = self.state
        while self._deadlines and self._deadlines[0][0] <= state.now:
            _, _, request = heapq.heappop(self._deadlines)
            if state.live.get(request.rid) is not request:
                continue
            state.stats.timed_out += 1
            message = f"The request did not finish within its timeout_s of {request.submit.timeout_s:g} s."
            end(state, request, Finish(reason="error", message=message, status=408, param="timeout_s"))

        self._expire_waiting()

    def _expire_waiting(self) -> None:
        """End requests that have waited longer than the server allows. Who has once started is not among them."""
        state = self.state
        while self._patience:
            until, request = self._patience[0]
            waits = request in state.queue and not request.tally.admitted_at
            if waits and until > state.now:
                return
            self._patience.popleft()
            if waits:
                state.stats.queue_timed_out += 1
                limit = state.config.max_queue_time_s
                fail(state, request, QueueTimeout(f"The request waited longer than max_queue_time_s ({limit:g} s)."))

    def next_deadline(self) -> float | None:
        first = [self._deadlines[0][0]] if self._deadlines else []
        if self._patience:
            first.append(self._patience[0][0])
        return min(first, default=None)

    # -- calls -------------------------------------------------------------------------------------------------

    def _call(self, call: Call, sink: Sink) -> None:
        try:
            value = self._answer(call)
        except RametError as err:
            self.state.out.reply(sink, Reply(id=call.id, error=str(err)))
        except Exception as err:
            log.exception("Call %r failed.", call.op)
            self.state.out.reply(sink, Reply(id=call.id, error=f"{type(err).__name__}: {err}"))
        else:
            self.state.out.reply(sink, Reply(id=call.id, value=value))

    def _answer(self, call: Call) -> Any:
        answer = getattr(self, f"_call_{call.op}", None)
        if answer is None:
            known = sorted(name[6:] for name in dir(self) if name.startswith("_call_"))
            raise InvalidRequest(f"Unknown call {call.op!r}; known: {', '.join(known)}.", param="op")
        return answer(call.args)

    def _call_stats(self, args: dict[str, Any]) -> dict[str, Any]:
        return self.state.report()

    def _call_flush(self, args: dict[str, Any]) -> dict[str, Any]:
        """Forget every cached prefix that no running request holds; with `idle_only`, none while any runs."""
        state = self.state
        freed = 0 if args.get("idle_only") and state.rows.n_used else state.cache.clear()
        return {"freed_pages": freed, "held_by_requests": state.rows.n_used, "paused": state.paused}

    def _call_tree(self, args: dict[str, Any]) -> dict[str, Any]:
        """A bounded picture of the radix tree, with the requests that hold its nodes."""
        users = {r.lease: r.submit.hints.program_id or r.rid for r in self.state.rows.running()}
        return self.state.cache.dump(min(int(args.get("max_nodes", 2000)), 20_000), users)

    def _call_requests(self, args: dict[str, Any]) -> list[dict[str, Any]]:
        """Who runs and who waits, at most 1000 of them."""
        return [
            {
                "rid": request.rid,
                "phase": request.phase.name.lower(),
                "prompt_tokens": request.n_prompt,
                "known_tokens": self._known(request),
                "cached_tokens": request.tally.cached,
                "age_s": self.state.now - request.arrival,
                "program": request.submit.hints.program_id,
            }
            for request in itertools.islice(self.state.live.values(), 1000)
        ]

    def _known(self, request: Request) -> int:
        """Tokens of prompt and answer so far; while it runs, its row has the count."""
        running = request.phase in (Phase.PREFILL, Phase.DECODE, Phase.DRAIN)
        return int(self.state.rows.known[request.slot]) if running else request.known

    def _call_audit(self, args: dict[str, Any]) -> str:
        self.state.audit()
        return "ok"

    def _call_pause(self, args: dict[str, Any]) -> str:
        """Admit nothing new; what runs goes on, or with `retract` goes back to the queue and holds no KV."""
        self.state.paused = True
        if args.get("retract"):
            for request in self.state.rows.running():
                if request.phase is not Phase.DRAIN:  # about to end by itself
                    retract(self.state, request)
        return "paused"

    def _call_resume(self, args: dict[str, Any]) -> str:
        self.state.paused = False
        return "running"

    def _call_server_info(self, args: dict[str, Any]) -> dict[str, Any]:
        state = self.state
        return {
            "model": state.spec.name,
            "dtype": state.spec.dtype,
            "backend": state.spec.backend,
            "context_length": state.limits.max_len,
            "page_size": state.page_size,
            "n_pages": state.cache.pool.n_pages,
            "max_running": state.rows.n_rows,
            "schedule_policy": state.policy.name,
            "overlap": state.config.overlap,
        }
