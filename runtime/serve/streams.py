"""Rules of every stream: errors before the first byte are a status, after it an event; then the end mark.

A piece of an answer is written where it arrives: the scheduler's message wakes the answer's `AnswerStream`, which
takes the news, puts them into bytes and hands these to the server's own `send`, in one callback of the event loop.
Only where the client's socket is full does a task wait; news merge meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import types
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Generic, Protocol, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from runtime.errors import RequestAborted
from runtime.generate import Delta, Stream
from runtime.serve.errors import as_ramet_error, openai_body
from runtime.serve.live import Claim
from runtime.serve.wire import DONE, SEND_KEY, Watcher, disconnected, event

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
ROUND_KEY = "ramet.round"  # in a scope: the app's Round
SSE = b"text/event-stream; charset=utf-8"
_UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class Feed(Generic[T]):
    """News of a Stream, each as `digest` makes them. `claim` is made at the start, and released at the end."""

    __slots__ = ("_claim", "_digest", "_make_claim", "_stream", "ended")

    def __init__(self, stream: Stream, digest: Callable[[Delta], T], claim: Callable[[], Claim] | None = None) -> None:
        self._stream = stream
        self._digest = digest
        self._make_claim = claim
        self._claim: Claim | None = None
        self.ended = False  # nothing more will come; what `poll` has to raise may be left

    def start(self) -> None:
        """Submit, once. Raises what is wrong with the request."""
        try:
            if self._claim is None and self._make_claim is not None:
                self._claim = self._make_claim()
            self._stream.start()
        except BaseException:
            self.close()
            raise

    def poll(self) -> list[T]:
        """All news that are there, perhaps none. Raises what went wrong."""
        try:
            deltas = self._stream.poll()
            news = [self._digest(deltas[0])] if len(deltas) == 1 else [self._digest(delta) for delta in deltas]
        except BaseException:
            self.close()
            raise
        if self._stream.ended:
            self.close()
        return news

    def short(self) -> tuple[int, str] | None:
        """As Stream.short: news that are text alone, taken the short way."""
        return self._stream.short()

    async def take(self) -> list[T]:
        """All news since the last call, at least one; none at the end. The first call submits."""
        self.start()
        while not (news := self.poll()) and not self.ended:
            try:
                await self._stream.inbox.arrival()
            except BaseException:
                self.close()
                raise
        return news

    def listen(self, wake: Callable[[], object]) -> None:
        """Call `wake` when there may be news, and again after each `poll`."""
        self._stream.inbox.listen(wake)

    def close(self) -> None:
        """Abort what still runs, and let go of whom the news were for. Idempotent."""
        self.ended = True
        self._digest, self._make_claim = _unheard, None
        self._stream.close()
        if self._claim is not None:
            self._claim.release()


def _unheard(delta: Delta) -> Any:
    raise AssertionError("news after the end")


async def read_all(request: Request, feed: Feed[T], note: Callable[[T], None] | None = None) -> None:
    """Read a feed to its end, telling `note` all news. If the client hangs up first, abort; raise RequestAborted."""
    left = False

    def leave(gone: asyncio.Task[None]) -> None:
        nonlocal left
        if not gone.cancelled() and not feed.ended:
            left = True
            feed.close()

    gone = asyncio.ensure_future(disconnected(request.receive))
    gone.add_done_callback(leave)
    try:
        while news := await feed.take():
            if note is not None:
                for item in news:
                    note(item)
    finally:
        gone.cancel()
        feed.close()
    if left:
        raise RequestAborted("The client closed the connection.")


class Round:
    """Callbacks of one moment, run by the event loop's next turn as one. Used by one loop at a time."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, callback: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        if not self._due or loop is not self._loop:  # a loop that was ended takes with it what it had not run
            self._loop, self._due = loop, []
            loop.call_soon(self._run)
        self._due.append(callback)

    def _run(self) -> None:
        due, self._due = self._due, []
        for callback in due:
            try:
                callback()
            except Exception as error:
                asyncio.get_running_loop().call_exception_handler({"message": "a stream failed", "exception": error})


class Writer(Protocol[T_contra]):
    """Puts an answer's news into the bytes of one dialect, each piece to be sent at once."""

    def opening(self) -> Iterable[bytes]:
        """Before all news."""
        ...

    def pieces(self, item: T_contra, /) -> Iterable[bytes]:
        """One piece of news."""
        ...

    def closing(self) -> Iterable[bytes]:
        """After all news."""
        ...

    def frame(self) -> tuple[bytes, bytes] | None:
        """What stands before and after a piece of bare text, as JSON, from here to the end; None where that varies."""
        ...

    def last_words(self, error: Exception, /) -> bytes:
        """How an error is told once the answer has begun."""
        ...


class Teller(Watcher, Protocol):
    """A watcher that knows the client's words for what went wrong."""

    def told(self, error: Exception) -> Exception: ...

    def tokens(self, n: int) -> None: ...


class AnswerStream(Response, Generic[T]):
    """A streamed answer. It has a head only once there are news, so that what is wrong before them is a status.

    `send` waits while the client's socket is full, so a slow reader holds back only itself. When the client leaves,
    the feed is closed, which aborts what it reads from.
    """

    __slots__ = (
        "_begun",
        "_busy",
        "_end",
        "_feed",
        "_frame",
        "_left",
        "_loop",
        "_rest",
        "_round",
        "_send",
        "_watcher",
        "_writer",
    )

    def __init__(
        self,
        feed: Feed[T],
        writer: Writer[T],
        watcher: Teller,
        media_type: bytes = b"text/event-stream; charset=utf-8",
    ) -> None:
        self.status_code, self.background = 200, None
        self.raw_headers = [(b"content-type", media_type), *_UNBUFFERED]
        self._feed = feed
        self._writer = writer
        self._watcher = watcher
        self._busy = False  # a task writes what the socket had no room for
        self._begun = False  # the head is sent
        self._left = False
        self._frame: tuple[bytes, bytes] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._loop = asyncio.get_running_loop()
        self._send = _coroutine_function(scope.get(SEND_KEY, send))
        self._round: Round = scope.get(ROUND_KEY) or Round()
        self._end: asyncio.Future[Exception | None] = self._loop.create_future()
        gone = self._loop.create_task(disconnected(receive))
        gone.add_done_callback(self._leave)
        try:
            news = await self._feed.take()
            if not self._left:
                self._begun = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await self._follow(news)
        finally:
            gone.remove_done_callback(self._leave)
            gone.cancel()
            self._feed.close()
            if self._busy:
                self._rest.cancel()
        self._watcher.aborted |= self._left
        if self._left and not self._begun:
            raise RequestAborted("The client closed the connection.")

    async def _follow(self, news: list[T]) -> None:
        """The answer from its opening to its end. `news` are the first."""
        error: Exception | None = None
        try:
            for piece in self._writer.opening():
                await self._write(piece)
            await self._deliver(news)
            if not self._feed.ended:
                self._frame = self._writer.frame()
                self._feed.listen(functools.partial(self._round.add, self._advance))
                error = await self._end
        except Exception as failure:
            error = failure
        if not self._left:
            for piece in self._last_pieces(error):
                await self._write(piece)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _last_pieces(self, error: Exception | None) -> list[bytes]:
        if error is None:
            try:
                return list(self._writer.closing())
            except Exception as failure:
                error = failure
        return [self._writer.last_words(self._watcher.told(error))]

    async def _write(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _deliver(self, news: list[T]) -> None:
        """Write `news`; after the last of them, raise what the answer ended with."""
        while news:
            for item in news:
                for piece in self._writer.pieces(item):
                    await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            news = self._feed.poll() if self._feed.ended else []

    def _advance(self) -> None:
        """Write what came, as far as the socket takes it; a task does the rest.

        In the loop's next turn after the news arrived, so that those of one moment are taken together.
        """
        if self._busy or self._end.done():
            return
        try:
            turn = self._short_turn() if self._frame is not None else self._turn()
            if turn is None:
                return
            awaited = turn.send(None)
        except StopIteration:
            return
        except Exception as error:
            self._settle(error)
            return
        self._busy = True
        self._rest = self._loop.create_task(self._finish_turn(turn, awaited))

    def _short_turn(self) -> Coroutine[Any, Any, None] | None:
        """The way of bare text, as nearly all is: it touches few objects, since there are many streams."""
        news = self._feed.short()
        if news is None:
            return self._turn()
        n, text = news
        self._watcher.tokens(n)
        if not text:
            return None
        assert self._frame is not None
        before, after = self._frame
        body = before + orjson.dumps(text) + after
        return self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _turn(self) -> None:
        try:
            await self._deliver(self._feed.poll())
        except Exception as error:
            self._settle(error)
        else:
            if self._feed.ended:
                self._settle(None)
            elif self._frame is None:
                self._frame = self._writer.frame()

    async def _finish_turn(self, turn: Coroutine[Any, Any, None], awaited: Any) -> None:
        try:
            await _resumed(turn, awaited)
        except Exception as error:
            self._settle(error)
        self._busy = False
        self._advance()  # to what came meanwhile

    def _settle(self, error: Exception | None) -> None:
        if not self._end.done():
            self._end.set_result(error)

    def _leave(self, gone: asyncio.Task[None]) -> None:
        if gone.cancelled():
            return
        self._left = True
        self._feed.close()
        self._settle(None)


@types.coroutine
def _resumed(coroutine: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """Go on with a coroutine that was begun by hand and waits for `awaited`."""
    yield awaited
    return (yield from coroutine)


class OpenAIWords:
    """The last words of a stream in OpenAI's dialect."""

    def frame(self) -> tuple[bytes, bytes] | None:
        return None

    def last_words(self, error: Exception) -> bytes:
        return event(openai_body(as_ramet_error(error))) + DONE


def _coroutine_function(send: Send) -> Callable[[Message], Coroutine[Any, Any, None]]:
    """`send` itself where it is one, as the server's is; other awaitables cannot be stepped by hand."""
    if inspect.iscoroutinefunction(send):
        return send

    async def awaiting(message: Message) -> None:
        await send(message)

    return awaiting
