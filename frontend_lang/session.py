"""What programs share while they run on one backend: its codec and template, and a batcher of requests."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from frontend_lang.backend import Backend, Piece
from frontend_lang.codec import Codec
from frontend_lang.errors import InvalidPiece
from frontend_lang.template import ChatPieces
from runtime.messages import Submit


class Prepared:
    """A backend with what is worth remembering between runs: encoded constants and template pieces."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.codec = Codec(backend)
        self.pieces = ChatPieces(backend)


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
    known = _prepared.get(target)
    if known is None:
        known = Prepared(target if isinstance(target, Backend) else _local(target))
        _prepared[target] = known
    return known


def _local(engine: Any) -> Backend:
    from frontend_lang.local import LocalBackend

    return LocalBackend(engine)


class Batcher:
    """Sends everything submitted in one turn of the event loop as one message, so siblings are planned together."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._waiting: list[tuple[Submit, asyncio.Future[AsyncIterator[Piece]]]] = []
        self.n_requests = 0
        self.n_messages = 0

    async def submit(self, request: Submit) -> AsyncIterator[Piece]:
        """The request's stream; closing it aborts the request."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[AsyncIterator[Piece]] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append((request, turn))
        return await turn

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


class LoopThread:
    """An event loop in a thread of its own, for the length of a `with` block."""

    def __enter__(self) -> asyncio.AbstractEventLoop:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ramet-program", daemon=True)
        self._thread.start()
        return self._loop

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_asyncgens(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
