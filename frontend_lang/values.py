"""Named results: settled once by the driver, read or streamed from any thread or loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from frontend_lang.errors import Where
from runtime.messages import TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Info:
    """How a value came about. `scores` (select only): one number a choice."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    scores: dict[str, float] | None = None
    usage: Usage | None = None  # of the request that made it; a request may make several values


class Var:
    """One named result of one branch."""

    def __init__(self, name: str, where: Where) -> None:
        self.name = name
        self.where = where
        self.info = Info()
        self.future: Future[Any] = Future()
        self._lock = threading.Lock()
        self._pieces: list[str] = []
        self._listeners: list[Callable[[str | None], None]] = []
        self._followed = False

    @property
    def done(self) -> bool:
        return self.future.done()

    @property
    def followed(self) -> bool:
        """Whether somebody streams it, or is about to."""
        return self._followed or bool(self._listeners)

    def follow(self) -> None:
        """Somebody will stream it: to be said before its request leaves."""
        self._followed = True

    def push(self, text: str) -> None:
        """Text for whoever streams this value."""
        if not text:
            return
        with self._lock:
            self._pieces.append(text)
            for listener in self._listeners:
                listener(text)

    def settle(self, value: Any, info: Info) -> None:
        self.info = info
        self._end(lambda: self.future.set_result(value))

    def fail(self, error: BaseException, info: Info | None = None) -> None:
        """Settle with an error; nothing happens if the value is there already."""
        if not self.future.done():
            self.info = info or self.info
            self._end(lambda: self.future.set_exception(error))

    def _end(self, settle: Callable[[], None]) -> None:
        with self._lock:
            settle()
            for listener in self._listeners:
                listener(None)

    def listen(self, listener: Callable[[str | None], None]) -> None:
        """Call `listener` with every piece so far and to come, then with None."""
        with self._lock:
            for piece in self._pieces:
                listener(piece)
            if self.future.done():
                listener(None)
            else:
                self._listeners.append(listener)

    async def wait(self) -> Any:
        """The value, awaited on the running loop. Cancelling the wait leaves the value alone."""
        here = asyncio.wrap_future(self.future)
        here.add_done_callback(_noted)
        return await asyncio.shield(here)


def _noted(future: asyncio.Future[Any]) -> None:
    """A failure is kept in the value for whoever reads it: one whose waiter was cancelled is no news for asyncio."""
    if not future.cancelled():
        future.exception()


class TextStream:
    """The text of one value as it is made: `for piece in ...` in plain code, `async for` in async code."""

    def __init__(self, var: Var, told: list[BaseException]) -> None:
        self._var = var
        self._told = told  # errors that somebody has seen

    def _seen(self) -> None:
        error = self._var.future.exception()
        if error is not None:
            self._told.append(error)

    def __iter__(self) -> Iterator[str]:
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._var.listen(pieces.put)
        while (piece := pieces.get()) is not None:
            yield piece
        self._seen()
        self._var.future.result()

    async def __aiter__(self) -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._var.listen(lambda piece: _put(loop, pieces, piece))
        while (piece := await pieces.get()) is not None:
            yield piece
        self._seen()
        await self._var.wait()


def _put(loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[str | None], piece: str | None) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(pieces.put_nowait, piece)
