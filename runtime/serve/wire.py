"""Bodies in, bytes out: msgspec reads requests, orjson writes answers, events are framed by hand."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.errors import InvalidRequest

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
SEND_KEY = "ramet.send"  # in a scope: the server's own `send`, below every middleware
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_KEY = re.compile(r" - at `key` in `\$\.?(?P<path>[^`]*)`$")
_DUMP = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def decode(body: bytes, kind: type[T]) -> T:
    """`body` as a request struct. Unknown keys are ignored; what does not fit is an InvalidRequest with its place."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None


def convert(value: Any, kind: type[T]) -> T:
    """An already decoded value as a request struct, with the same errors."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: msgspec.ValidationError) -> InvalidRequest:
    text = str(error)
    for pattern in (_PATH, _KEY):
        if match := pattern.search(text):
            path = match["path"].replace("[...]", "")
            return InvalidRequest(f"{path or 'The body'}: {text[: match.start()]}.", param=path or None)
    if missing := re.search(r"missing required field `(\w+)`", text):
        return InvalidRequest(f"{missing[1]} is required.", param=missing[1])
    return InvalidRequest(f"{text}.")


async def read(request: Request, kind: type[T]) -> T:
    """The request's JSON body; its trace keeps it, so that errors can name the client's fields."""
    body = decode(await request.body(), kind)
    request.scope["ramet.trace"].body = body
    return body


def dumps(value: Any) -> bytes:
    """JSON bytes; NaN and infinities become null."""
    try:
        return orjson.dumps(value, option=_DUMP)
    except TypeError:  # an integer beyond 64 bits, or half a surrogate pair: a client's own, told back to it
        return json.dumps(value, separators=(",", ":")).encode()


def json_response(value: Any, status: int = 200) -> Response:
    return Response(dumps(value), status, media_type="application/json")


def event(value: Any) -> bytes:
    """One server-sent event: `data: `, one line of JSON, a blank line. No comments, no other fields."""
    return b"data: " + dumps(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """An event with an `event:` line equal to its `type`, as the Responses and Messages APIs have it."""
    return b"event: " + value["type"].encode() + b"\ndata: " + dumps(value) + b"\n\n"


async def disconnected(receive: Receive) -> None:
    """Wait until the client has hung up (or has its whole answer)."""
    while (await receive())["type"] != "http.disconnect":
        pass


def around(whole: bytes, hole: str) -> tuple[bytes, bytes]:
    """An event's bytes before and after its last `hole`: between them, any other string gives the event with that."""
    before, found, after = whole.rpartition(orjson.dumps(hole))
    assert found
    return before, after


class Watcher(Protocol):
    """Who wants to know that a client left."""

    aborted: bool


class EventStream(Response):
    """Server-sent events from an async iterator of ready bytes, without a layer between it and the socket.

    The iterator is closed when the client leaves, which aborts what it reads from. `send` waits while the
    client's socket is full, so a slow reader holds back only itself. `last_words`: how an error is told once the
    answer has begun.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[bytes], watcher: Watcher, last_words: Callable[[Exception], bytes] | None = None
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._watcher = watcher
        self._last_words = last_words

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send(send, scope.get(SEND_KEY, send)))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((sender, gone), return_when=asyncio.FIRST_COMPLETED)
            left = not sender.done()
            if not left:
                sender.result()
        finally:
            for pending in (sender, gone):
                if not pending.done():
                    pending.cancel()
            await asyncio.gather(sender, gone, return_exceptions=True)
        self._watcher.aborted |= left

    async def _send(self, send: Send, write: Send) -> None:
        """The head goes the way of all answers; the pieces, many and small, go straight to the server's `write`."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await write({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            if self._last_words is None:
                raise
            await write({"type": "http.response.body", "body": self._last_words(error), "more_body": True})
        finally:
            close = getattr(self._chunks, "aclose", None)
            if close is not None:
                await close()
        await write({"type": "http.response.body", "body": b"", "more_body": False})
