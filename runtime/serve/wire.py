"""Bodies in, bytes out: msgspec reads requests, orjson writes answers, events are framed by hand."""

from __future__ import annotations

import json
import re
from typing import Any, Protocol, TypeVar

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

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
