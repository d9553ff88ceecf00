"""How a frontend reaches the scheduler: one face, whether it runs in a thread here or in its own process.

Callbacks run on the event loop in which their request was submitted, whatever thread the scheduler's word
arrives in. A scheduler that dies fails everything it still owes, and every later submit, with Unavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from runtime.errors import InvalidRequest, Unavailable
from runtime.messages import (
    Abort,
    Call,
    Finish,
    FromScheduler,
    Output,
    Outputs,
    Reply,
    Submit,
    SubmitMany,
    ToScheduler,
)

log = logging.getLogger("ramet.client")

OnOutput = Callable[[Output], None]
JOIN_S = 30.0


class Health(NamedTuple):
    """`live`: the scheduler exists. `ready`: it also makes progress, so new requests will be answered."""

    live: bool
    ready: bool
    reason: str = ""


def is_last(output: Output) -> bool:
    """True for the output that ends its request (an earlier segment's finish brings no usage)."""
    finish = output.finish
    return finish is not None and (output.usage is not None or finish.reason in ("abort", "error"))


class SchedulerClient(Protocol):
    """What the Generator needs of a scheduler."""

    def submit(self, item: Submit | SubmitMany, on_output: OnOutput) -> None:
        """Queue requests; `on_output` runs on the calling event loop. Raises Unavailable."""
        ...

    def abort(self, abort: Abort) -> None: ...

    def forget(self, rid: str) -> None:
        """Deliver nothing more for `rid`."""
        ...

    async def call(self, op: str, **args: Any) -> Any:
        """A control call. Raises InvalidRequest if the scheduler refuses it, Unavailable if it is dead."""
        ...

    def health(self) -> Health: ...

    def close(self) -> None: ...


class Mailroom:
    """Who waits for which request's outputs and which call's reply. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[str, tuple[asyncio.AbstractEventLoop, OnOutput]] = {}
        self._calls: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self._call_ids = itertools.count(1)
        self._dead: str | None = None

    @property
    def dead(self) -> str | None:
        """Why nothing more can be delivered; None while the scheduler lives."""
        return self._dead

    def expect(self, item: Submit | SubmitMany, on_output: OnOutput) -> None:
        """Note who waits for `item`. Raises Unavailable after `fail`, InvalidRequest for a live duplicate."""
        loop = asyncio.get_running_loop()
        rids = [one.rid for one in (item.items if isinstance(item, SubmitMany) else (item,))]
        with self._lock:
            self._check_alive()
            if twice := [rid for rid in rids if rid in self._requests]:
                raise InvalidRequest(f"Request id {twice[0]!r} is in use by a running request.", param="rid")
            for rid in rids:
                self._requests[rid] = (loop, on_output)

    def forget(self, rid: str) -> None:
        with self._lock:
            self._requests.pop(rid, None)

    def expect_reply(self, op: str, args: dict[str, Any]) -> tuple[Call, asyncio.Future[Any]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._lock:
            self._check_alive()
            call = Call(id=next(self._call_ids), op=op, args=args)
            self._calls[call.id] = (loop, future)
        return call, future

    def deliver(self, message: FromScheduler) -> None:
        """Hand a message of the scheduler to whoever waits for it; from any thread."""
        if isinstance(message, Reply):
            self._deliver_reply(message)
        else:
            self._deliver_outputs(message)

    def fail(self, why: str) -> None:
        """The scheduler is gone: everything owed ends in a 503, and nothing more is accepted."""
        with self._lock:
            if self._dead is not None:
                return
            self._dead = why
            rids, calls = list(self._requests), list(self._calls)
        finish = Finish(reason="error", status=Unavailable.status, message=why)
        self._deliver_outputs(Outputs(items=tuple(Output(rid=rid, finish=finish) for rid in rids)))
        for call in calls:
            self._deliver_reply(Reply(id=call, error=why), Unavailable(why))

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise Unavailable(self._dead)

    def _deliver_outputs(self, outputs: Outputs) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OnOutput, Output]]] = defaultdict(list)
        with self._lock:
            for output in outputs.items:
                ends = output.finish is not None and is_last(output)
                entry = self._requests.pop(output.rid, None) if ends else self._requests.get(output.rid)
                if entry is not None:
                    by_loop[entry[0]].append((entry[1], output))
        for loop, batch in by_loop.items():
            _run_on(loop, _deliver_batch, batch)

    def _deliver_reply(self, reply: Reply, error: Exception | None = None) -> None:
        with self._lock:
            entry = self._calls.pop(reply.id, None)
        if entry is None:
            return
        if error is None and reply.error is not None:
            error = InvalidRequest(reply.error)
        _run_on(entry[0], _settle, entry[1], reply.value, error)


def _run_on(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Run `function` on `loop`: at once when that is where we are, else as its next callback."""
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        here = None
    if here is loop:
        function(*args)
        return
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits there any more
        loop.call_soon_threadsafe(function, *args)


def _deliver_batch(batch: list[tuple[OnOutput, Output]]) -> None:
    for on_output, output in batch:
        on_output(output)


def _settle(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


class SchedulerLoop(Protocol):
    """What LocalClient drives: the scheduler's loop."""

    last_turn: float  # time.monotonic() of the loop's latest turn

    @property
    def busy(self) -> bool:
        """Live or waiting requests, or a step in flight."""
        ...

    def health(self) -> tuple[bool, str]:
        """(ready, why not), as the loop itself sees it."""
        ...

    def receive(self, msg: ToScheduler, sink: Callable[[FromScheduler], None]) -> None: ...

    def run(self) -> None: ...

    def stop(self, drain: bool = False) -> None: ...


class LocalClient:
    """The scheduler in a thread of this process; used by the Engine and by the scheduler process itself."""

    def __init__(self, scheduler: SchedulerLoop, *, stall_s: float = 60.0) -> None:
        self._scheduler = scheduler
        self._stall_s = stall_s
        self._mail = Mailroom()
        self._thread = threading.Thread(target=self._run, name="ramet-scheduler", daemon=True)
        self._thread.start()

    def submit(self, item: Submit | SubmitMany, on_output: OnOutput) -> None:
        self._mail.expect(item, on_output)
        self._scheduler.receive(item, self._mail.deliver)

    def abort(self, abort: Abort) -> None:
        self._scheduler.receive(abort, self._mail.deliver)

    def forget(self, rid: str) -> None:
        self._mail.forget(rid)

    async def call(self, op: str, **args: Any) -> Any:
        call, future = self._mail.expect_reply(op, args)
        self._scheduler.receive(call, self._mail.deliver)
        return await future

    def health(self) -> Health:
        if self._mail.dead is not None:
            return Health(False, False, self._mail.dead)
        ready, why = self._scheduler.health()
        if not ready:
            return Health(True, False, why)
        return turn_health(self._scheduler.last_turn, self._scheduler.busy, self._stall_s)

    def close(self) -> None:
        """Stop the loop after its current step and fail what is left. Idempotent."""
        self._scheduler.stop(drain=False)
        self._thread.join(JOIN_S)
        self._mail.fail("The engine is closed.")

    def _run(self) -> None:
        why = "The engine is closed."
        try:
            self._scheduler.run()
        except BaseException as err:
            log.exception("The scheduler died.")
            why = f"The scheduler died ({type(err).__name__}: {err})."
        finally:
            self._mail.fail(why)


def turn_health(last_turn: float, busy: bool, stall_s: float) -> Health:
    """Health of a loop by its latest turn: one that is busy and has not turned for long is stalled."""
    silent = time.monotonic() - last_turn
    if busy and silent > stall_s:
        return Health(True, False, f"The scheduler has made no progress for {silent:.0f} s.")
    return Health(True, True)
