"""One run of one program: its states, its loop, its end."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from frontend_lang.errors import BranchCancelled, DeadlineExceeded, InvalidPiece, ProgramError, Where, raised_at
from frontend_lang.ir import Call
from frontend_lang.record import Record
from frontend_lang.session import Batcher, Prepared
from frontend_lang.state import State
from frontend_lang.threads import in_thread, run_on

T = TypeVar("T")
LINGER_S = 0.02  # a plain function that goes on writing gets this long before its requests start,
LINGERS = 5  # and so many times that at most while it still writes


class Run:
    """Owns every state of one program run and whatever they have asked of the runtime."""

    def __init__(
        self,
        name: str,
        prepared: Prepared,
        batcher: Batcher,
        loop: asyncio.AbstractEventLoop,
        *,
        temperature: float,
        seed: int,
        deadline: float | None,
    ) -> None:
        self.id = f"{name}-{secrets.token_hex(4)}"
        self.name = name
        self.prepared = prepared
        self.batcher = batcher
        self.loop = loop
        self.temperature = temperature
        self.seed = seed
        self.deadline = deadline
        self.body_done = False
        self.family: str | None = None  # the program id of the first request: what all others are booked to
        self.tool_wait_s = 1.0  # how long the last tool took: a hint
        self.told: list[BaseException] = []  # errors the user has seen
        self._late: list[BaseException] = []  # the run's deadline, as every branch met it
        self.fork_spans: dict[str, int] = {}
        self.record = Record(name, self.id, prepared.backend.name, token_bytes=prepared.backend.token_bytes)
        self.states: list[State] = []
        self._began = self.record.began = time.monotonic()
        self._dirty: deque[State] = deque()
        self._nudged = False
        self._written = 0.0  # when something was written last
        self._error: BaseException | None = None
        self._body: asyncio.Task[Any] | None = None
        self._left: asyncio.Task[Any] | None = None  # the run's task, once nobody reads its values any more
        self._timer: asyncio.TimerHandle | None = None  # a linger
        self._timers: list[asyncio.TimerHandle] = []
        self.main = self.new_state("main")

    # ---- time and threads ---------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    def on_loop(self) -> bool:
        """Whether the caller is on the run's event loop, where nothing may block."""
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def soon(self, work: Callable[..., Any], *args: Any) -> None:
        """Run `work` on the loop: now if we are there."""
        if self.on_loop():
            work(*args)
        else:
            self.loop.call_soon_threadsafe(work, *args)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it, from a thread that is not the loop's."""
        try:
            return run_on(self.loop, work)
        except RuntimeError as error:
            if not self.loop.is_closed():
                raise
            raise BranchCancelled("The run's event loop has ended.", self.main._place()) from error

    def call_later(self, seconds: float, work: Callable[..., Any], *args: Any) -> None:
        self.soon(lambda: self._timers.append(self.loop.call_later(seconds, work, *args)))

    def new_future(self) -> asyncio.Future[Any]:
        return self.loop.create_future()

    # ---- states -------------------------------------------------------------------------------------------

    def new_state(self, name: str, parent: State | None = None) -> State:
        state = State(self, name, parent)
        if self._error is not None:
            state._error = self._error
        self.states.append(state)
        return state

    def nudge(self, state: State) -> None:
        """Something was written: start it soon, after whatever else is about to be written."""
        self._dirty.append(state)
        self._written = time.monotonic()
        if self._left is not None:
            self.loop.call_soon_threadsafe(self._abandon)  # not at once: the value is not known to its state yet
        if self._nudged:
            return
        self._nudged = True
        if self.on_loop():
            self.loop.call_soon(self._start)
        else:
            self.loop.call_soon_threadsafe(self._linger)

    def kick(self) -> None:
        """Somebody waits: start everything written so far."""
        self.soon(self._start)

    def _linger(self) -> None:
        if self._nudged and self._timer is None:
            self._timer = self.loop.call_later(LINGER_S, self._ripen, time.monotonic() + LINGERS * LINGER_S)

    def _ripen(self, until: float) -> None:
        """Start, unless something was written just now: what belongs together travels together, however busy we are."""
        now = time.monotonic()
        if now < until and now - self._written < LINGER_S / 2:
            self._timer = self.loop.call_later(LINGER_S / 2, self._ripen, until)
        else:
            self._start()

    def _start(self) -> None:
        self._nudged = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._dirty:
            self._dirty.popleft()._start()

    def inline(self, state: State, call: Call) -> Any:
        """Run a sub-program's function on a state of this run."""
        function = call.program.fn
        if inspect.iscoroutinefunction(function) and not self.on_loop():
            raise InvalidPiece(f"{call.program.name!r} is async: a plain program cannot call it.", state._here())
        return function(state, *call.args, **call.kwargs)

    # ---- the whole run ------------------------------------------------------------------------------------

    def execute(self, body: Callable[[State], Any]) -> Any:
        """Run a plain body in this thread, then wait for all it started."""
        self._arm()
        try:
            value = body(self.main)
            self.do(self.finish())
        except BaseException as error:
            self._place(error)
            with contextlib.suppress(BranchCancelled):  # the loop is gone, and all that ran on it
                self.do(self.shut())
            raise
        return value

    async def aexecute(self, body: Callable[[State], Any]) -> Any:
        """The same on the loop: an async body as a task of it, a plain one in a thread."""
        if not inspect.iscoroutinefunction(body):
            try:
                return await in_thread(lambda: self.execute(body), f"ramet-{self.name}")
            except asyncio.CancelledError:  # the thread unwinds at its next read or write
                self._error = self._error or BranchCancelled("The run was cancelled.", self.main._place())
                for state in self.states:
                    state._fail(self._error)
                await self.shut()
                raise
        self._arm()
        self._body = asyncio.ensure_future(body(self.main))
        try:
            value = await self._body
        except asyncio.CancelledError:
            self._body.cancel()
            await self.shut()
            if self._error is not None:
                raise self._error from None
            raise
        except BaseException as error:
            self._place(error)
            await self.shut()
            raise
        await self.finish()
        return value

    def _place(self, error: BaseException) -> None:
        """A construct that was refused as the body wrote it does not know its program."""
        if isinstance(error, ProgramError):
            error.place(Where(self.name, "main", *raised_at(error)))

    async def finish(self) -> None:
        """The body has ended well: wait for every branch, then raise what failed and nobody saw."""
        self.body_done = True
        self._start()
        try:
            while working := [s._task for s in self.states if s._task is not None and not s._task.done()]:
                await asyncio.wait(working)
                self._start()
        except BaseException:
            await self.shut()
            raise
        self._end()
        for state in self.states:
            if state._error is not None and not self.seen(state._error):
                raise state._error

    def seen(self, error: BaseException) -> bool:
        """Whether the user has seen this error (the run's deadline: on any branch)."""
        same = self._late if any(error is late for late in self._late) else [error]
        return any(told is one for told in self.told for one in same)

    async def shut(self) -> None:
        """Cancel everything and wait until it is gone."""
        for state in self.states:
            state._cancel(BranchCancelled("The run has ended.", state._place()))
        tasks = [state._task for state in self.states if state._task is not None]
        try:
            if tasks:
                await asyncio.wait(tasks)  # a gather would cancel them once more if we are cancelled, amid their end
        finally:
            self._end()

    def leave(self, whole: asyncio.Task[Any]) -> None:
        """Nobody reads on: cancel the run (`whole` is its task) unless its body needs no further value to end."""
        self._left = whole
        self._abandon()

    def _abandon(self) -> None:
        if self._left is not None and any(state._unfinished() is not None for state in self.states):
            self._left.cancel()
            self._left = None

    def _arm(self) -> None:
        if self.deadline is not None:
            self.call_later(self.deadline, self._expire)

    def _expire(self) -> None:
        late = f"The run did not finish within {self.deadline:g} s."
        waiting = next((state for state in self.states if state._unfinished() is not None), self.main)
        self._error = DeadlineExceeded(late, waiting._place())
        for state in self.states:
            error = self._error if state is waiting else DeadlineExceeded(late, state._place())
            self._late.append(error)
            state._fail(error)
            state._stop()
        if self._body is not None:
            self._body.cancel()

    def _end(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self.record.wall_s = self.now()
        for state in self.states:
            state._closed = state._closed or "The state is used after its run has ended."
            parent = state._parent.name if state._parent is not None else None
            self.record.branches[state.name] = (parent, tuple(state._driver.context.spans))
            self.record.contexts[state.name] = state._driver.context
            self.record.steps[state.name] = state._steps
