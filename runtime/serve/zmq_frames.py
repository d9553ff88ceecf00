"""The frames of the ZMQ door, for both its ends. docs/zmq.md is the same in words.

A message is two frames: the codec (`msgpack` or `json`), then one object in it. Never pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import orjson

from runtime.errors import InvalidRequest

Codec = Literal["msgpack", "json"]
OPS = ("generate", "chat", "abort", "tokenize", "detokenize", "stats", "models", "ping")


class ZmqRequest(msgspec.Struct, kw_only=True):
    """What a client sends. `id`: its own, told back in every reply; `body`: as the HTTP endpoint of that name."""

    id: str | int
    op: str
    key: str | None = None
    body: dict[str, Any] = {}


class ZmqReply(msgspec.Struct, kw_only=True):
    """What the server sends. `seq` counts a request's replies from 0; `end` and `error` are its last."""

    id: str | int | None
    seq: int
    event: Literal["data", "end", "error"]
    data: Any = None


class _Coder(NamedTuple):
    encode: Callable[[Any], bytes]
    decode: Callable[..., Any]


_CODERS: dict[bytes, _Coder] = {
    b"msgpack": _Coder(msgspec.msgpack.encode, msgspec.msgpack.decode),
    b"json": _Coder(msgspec.json.encode, msgspec.json.decode),
}


def pack(codec: bytes, message: ZmqRequest | ZmqReply) -> list[bytes]:
    """Both frames of a message."""
    return [codec, _CODERS[codec].encode(message)]


def unpack_request(frames: Sequence[bytes]) -> tuple[bytes, ZmqRequest]:
    """Codec and request. Raises InvalidRequest for anything that is not one."""
    return _unpack(frames, ZmqRequest)


def unpack_reply(frames: Sequence[bytes]) -> tuple[bytes, ZmqReply]:
    """Codec and reply. Raises InvalidRequest for anything that is not one."""
    return _unpack(frames, ZmqReply)


def codec_of(frames: Sequence[bytes]) -> bytes:
    """The codec to answer in, whatever came."""
    return frames[0] if frames and frames[0] in _CODERS else b"json"


def _unpack(frames: Sequence[bytes], kind: type[Any]) -> tuple[bytes, Any]:
    if len(frames) != 2 or frames[0] not in _CODERS:
        raise InvalidRequest("A message is two frames: msgpack or json, then the body.", param="frames")
    try:
        return frames[0], _CODERS[frames[0]].decode(frames[1], type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The message cannot be read: {error}.", param="body") from None


def check_json(body: dict[str, Any]) -> None:
    """Raise InvalidRequest for a value that JSON has not (bytes, times, extensions), naming its place."""
    try:
        orjson.dumps(body, option=orjson.OPT_PASSTHROUGH_DATETIME)  # quick, and enough for nearly all
        return
    except TypeError:
        todo: list[tuple[str, Any]] = [("", body)]
    while todo:
        where, value = todo.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                if not isinstance(key, str | int | float | None):
                    raise InvalidRequest(f"{where or 'body'} has a key that JSON has not.", param=where or "body")
                todo.append((f"{where}.{key}" if where else str(key), inner))
        elif isinstance(value, list):
            todo.extend((f"{where}[{i}]", inner) for i, inner in enumerate(value))
        elif not isinstance(value, str | int | float | None):
            raise InvalidRequest(f"{where} is of a type that JSON has not: {type(value).__name__}.", param=where)
