"""What programs share while they run on one backend: its codec and template, and a batcher of requests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar, cast

from frontend_lang.backend import Backend, Piece
from frontend_lang.codec import Codec
from frontend_lang.errors import InvalidPiece
from frontend_lang.template import ChatPieces
from frontend_lang.threads import run_on
from runtime.messages import Submit

T = TypeVar("T")
MAX_LIVE = 2048  # requests of one process at a runtime at once: more wait here, not in its queue


class Prepared:
    """A backend with what is worth keeping between runs: encoded constants, template pieces, and the loop on which
    plain programs run (so that a server's connections stay open)."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.codec = Codec(backend)
        self.pieces = ChatPieces(backend)
        self._thread: LoopThread | None = None
        self._lock = threading.Lock()
        self._gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._gates = weakref.WeakKeyDictionary()

    def batcher(self) -> Batcher:
        return Batcher(self.backend, self.gate)

    def gate(self) -> asyncio.Semaphore:
        """What every request passes while it lives; one for each event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._gates:
            self._gates[loop] = asyncio.Semaphore(MAX_LIVE)
        return self._gates[loop]

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of plain programs; it ends with this object."""
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread()
                weakref.finalize(self, self._thread.stop)
            return self._thread.loop

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it."""
        return run_on(self.loop(), work)


_prepared: weakref.WeakKeyDictionary[Any, Prepared] = weakref.WeakKeyDictionary()  # a memo, no state of its own


def prepare(target: Any) -> Prepared:
    """The prepared backend of an Engine, a Backend or a server's URL."""
    if isinstance(target, Prepared):
        return target
    if isinstance(target, str):
        from frontend_lang.http import HttpBackend

        return Prepared(HttpBackend(target))
    if not isinstance(target, Backend) and not hasattr(target, "generator"):
        raise InvalidPiece(f"A program runs on an Engine, a backend or a URL; got {type(target).__name__}.")
    if isinstance(target, Backend):  # kept on the backend itself, so that both end together
        own: Prepared | None = vars(target).get("_prepared")
        if own is None:
            own = vars(target)["_prepared"] = Prepared(target)
        return own
    known = _prepared.get(target)
    if known is None:
        known = _prepared[target] = Prepared(_local(target))
    return known


def _local(engine: Any) -> Backend:
    from frontend_lang.local import LocalBackend

    return LocalBackend(engine)


class Batcher:
    """Sends everything submitted in one turn of the event loop as one message, so siblings are planned together."""

    def __init__(self, backend: Backend, gate: Callable[[], asyncio.Semaphore]) -> None:
        self._backend = backend
        self._gate = gate
        self._waiting: list[tuple[Submit, asyncio.Future[AsyncIterator[Piece]]]] = []
        self.n_requests = 0
        self.n_messages = 0

    async def submit(self, request: Submit) -> AsyncIterator[Piece]:
        """The request's stream; closing it aborts the request. It must be closed."""
        gate = self._gate()
        await gate.acquire()
        try:
            return _Held(await self._submit(request), gate)
        except BaseException:
            gate.release()
            raise

    async def _submit(self, request: Submit) -> AsyncIterator[Piece]:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[AsyncIterator[Piece]] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append((request, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # sent, and nobody will read it
                await cast(Any, turn.result()).aclose()
            raise

    def _send(self) -> None:
        waiting = [(request, turn) for request, turn in self._waiting if not turn.done()]
        self._waiting = []
        if not waiting:
            return
        if not self._send_all(waiting):  # one of them is refused: find out which
            for one in waiting:
                self._send_all([one], last=True)

    def _send_all(
        self, waiting: list[tuple[Submit, asyncio.Future[AsyncIterator[Piece]]]], *, last: bool = False
    ) -> bool:
        try:
            streams = self._backend.submit([request for request, _ in waiting])
        except Exception as error:  # it belongs to the one who asked
            if len(waiting) > 1 and not last:
                return False
            waiting[0][1].set_exception(error)
            return True
        self.n_requests += len(waiting)
        self.n_messages += 1
        for (_, turn), stream in zip(waiting, streams, strict=True):
            turn.set_result(stream)
        return True


class _Held(AsyncIterator[Piece]):
    """A stream that holds a place at the gate until it is closed."""

    def __init__(self, stream: AsyncIterator[Piece], gate: asyncio.Semaphore) -> None:
        self._stream = stream
        self._gate: asyncio.Semaphore | None = gate

    async def __anext__(self) -> Piece:
        return await anext(self._stream)

    async def aclose(self) -> None:
        try:
            await cast(Any, self._stream).aclose()
        finally:
            gate, self._gate = self._gate, None
            if gate is not None:
                gate.release()


class LoopThread:
    """An event loop in a thread of its own, until it is stopped."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._stopped = threading.Event()
        threading.Thread(target=_run_loop, args=(self.loop, self._stopped), name="ramet-loop", daemon=True).start()

    def stop(self) -> None:
        """End the thread soon. Never waits: it may be called wherever garbage is collected."""
        self._stopped.set()
        with contextlib.suppress(RuntimeError):  # closed already
            self.loop.call_soon_threadsafe(self.loop.stop)


def _run_loop(loop: asyncio.AbstractEventLoop, stopped: threading.Event) -> None:
    while not stopped.is_set():
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # a task's own: its waiter gets it, the loop goes on
            loop.run_forever()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
