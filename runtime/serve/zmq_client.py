"""Clients of the ZMQ door, for programs without HTTP: `ZmqClient` (sync) and `AsyncZmqClient` (asyncio)."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any

import zmq
import zmq.asyncio

from runtime.errors import InvalidRequest, NotFound, QueueFull, RametError, RequestFailed, Unavailable
from runtime.serve.zmq_frames import Codec, ZmqReply, ZmqRequest, pack, unpack_reply


def reply_error(data: dict[str, Any]) -> RametError:
    """The typed error of an error reply."""
    text, param, code = data.get("message", "The request failed."), data.get("param"), data.get("code")
    match data.get("status"):
        case 400 | 401 | 413:
            return InvalidRequest(text, param=param, code=code)
        case 404:
            return NotFound(text, param=param, code=code)
        case 429:
            return QueueFull(text)
        case 503:
            return Unavailable(text)
    return RequestFailed(text)


class ZmqClient:
    """Synchronous; one thread. Several streams may be read in turns.

    >>> with ZmqClient("tcp://127.0.0.1:30001") as ramet:
    ...     ramet.generate("Once upon a time", max_new_tokens=16)["text"]
    """

    def __init__(
        self, endpoint: str, *, key: str | None = None, codec: Codec = "msgpack", timeout_s: float = 600.0
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._key, self._codec, self._timeout_s = key, codec.encode(), timeout_s
        self._ids = itertools.count(1)
        self._inbox: dict[str | int, deque[ZmqReply]] = defaultdict(deque)

    def __enter__(self) -> ZmqClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def call(self, op: str, **body: Any) -> Any:
        """One answer. Raises the typed error of an error reply, TimeoutError when none comes."""
        *_, last = self.replies(op, **body)
        return last

    def replies(self, op: str, **body: Any) -> Iterator[Any]:
        """The answers to one request as they come."""
        number = next(self._ids)
        self._socket.send_multipart(pack(self._codec, ZmqRequest(id=number, op=op, key=self._key, body=body)))
        return self._read(number)

    def generate(self, text: str, **sampling: Any) -> dict[str, Any]:
        """`/generate`, whole: {"text", "output_ids", "meta_info"}."""
        answer: dict[str, Any] = self.call("generate", text=text, sampling_params=sampling)
        return answer

    def stream(self, text: str, **sampling: Any) -> Iterator[dict[str, Any]]:
        """`/generate`, streamed: each item holds all the text so far."""
        return self.replies("generate", text=text, sampling_params=sampling, stream=True)

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        """A chat completion, whole, with the fields of the HTTP endpoint."""
        answer: dict[str, Any] = self.call("chat", messages=messages, **options)
        return answer

    def stream_chat(self, messages: list[dict[str, Any]], **options: Any) -> Iterator[dict[str, Any]]:
        """Chat completion chunks."""
        return self.replies("chat", messages=messages, stream=True, **options)

    def _read(self, number: int) -> Iterator[Any]:
        while True:
            reply = self._next(number)
            if reply.event == "error":
                raise reply_error(reply.data)
            yield reply.data
            if reply.event == "end":
                self._inbox.pop(number, None)
                return

    def _next(self, number: int) -> ZmqReply:
        box = self._inbox[number]
        while not box:
            if not self._socket.poll(int(self._timeout_s * 1000)):
                raise TimeoutError(f"The server has not answered for {self._timeout_s:g} s.")
            _, reply = unpack_reply(self._socket.recv_multipart())
            if reply.id is None:
                raise reply_error(reply.data)
            self._inbox[reply.id].append(reply)
        return box.popleft()


class AsyncZmqClient:
    """For asyncio; any number of requests at once. Use it inside a running loop."""

    def __init__(self, endpoint: str, *, key: str | None = None, codec: Codec = "msgpack") -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._key, self._codec = key, codec.encode()
        self._ids = itertools.count(1)
        self._inbox: dict[str | int, asyncio.Queue[ZmqReply]] = {}
        self._reader = asyncio.get_running_loop().create_task(self._receive())

    async def __aenter__(self) -> AsyncZmqClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._context.destroy(linger=0)

    async def call(self, op: str, **body: Any) -> Any:
        """One answer. Raises the typed error of an error reply."""
        return [reply async for reply in self.replies(op, **body)][-1]

    async def replies(self, op: str, **body: Any) -> AsyncIterator[Any]:
        """The answers to one request as they come."""
        number = next(self._ids)
        box = self._inbox[number] = asyncio.Queue()
        try:
            request = ZmqRequest(id=number, op=op, key=self._key, body=body)
            await self._socket.send_multipart(pack(self._codec, request))
            while True:
                reply = await box.get()
                if reply.event == "error":
                    raise reply_error(reply.data)
                yield reply.data
                if reply.event == "end":
                    return
        finally:
            del self._inbox[number]

    async def generate(self, text: str, **sampling: Any) -> dict[str, Any]:
        """`/generate`, whole."""
        answer: dict[str, Any] = await self.call("generate", text=text, sampling_params=sampling)
        return answer

    async def chat(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        """A chat completion, whole."""
        answer: dict[str, Any] = await self.call("chat", messages=messages, **options)
        return answer

    def stream_chat(self, messages: list[dict[str, Any]], **options: Any) -> AsyncIterator[dict[str, Any]]:
        """Chat completion chunks."""
        return self.replies("chat", messages=messages, stream=True, **options)

    async def _receive(self) -> None:
        while True:
            _, reply = unpack_reply(await self._socket.recv_multipart())
            boxes = list(self._inbox.values()) if reply.id is None else [self._inbox.get(reply.id)]
            for box in boxes:
                if box is not None:
                    box.put_nowait(reply)
