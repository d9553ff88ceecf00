"""The public ZMQ door: a ROUTER socket that answers requests, streams included, beside HTTP.

Each request is a task of its own, so clients never wait for each other. A client that does not read is paused
(its requests stop taking tokens), and after a while dropped: its request is aborted, and told so if it reads
again soon. Who leaves is noticed at the next reply, and aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import secrets
from collections import Counter
from typing import Any

import zmq
import zmq.asyncio

from runtime.errors import InvalidRequest, QueueFull, RametError
from runtime.serve.context import Serving
from runtime.serve.errors import as_ramet_error, openai_body
from runtime.serve.middleware import KeyRing
from runtime.serve.trace import Trace
from runtime.serve.zmq_frames import ZmqReply, check_json, codec_of, pack, unpack_request
from runtime.serve.zmq_ops import answer

log = logging.getLogger("ramet.zmq")

REPLIES_QUEUED = 256  # a client, before it counts as not reading
PAUSE_S = 0.005
MAX_LIVE_PER_CLIENT = 1024


class ClientGone(Exception):
    """The peer has disconnected."""


class SlowReader(RametError):
    """The peer has not read its replies for too long."""

    status = 408
    kind = "slow_reader_error"
    code = "slow_reader"


class ZmqDoor:
    """Serves until `close`. Use it from one event loop.

    Raises InvalidRequest when the endpoint cannot be bound, or is open to a network without an API key.
    """

    def __init__(
        self, serving: Serving, endpoint: str, *, patience_s: float = 10.0, queued: int = REPLIES_QUEUED
    ) -> None:
        check_endpoint(endpoint, has_key=bool(serving.server.api_key))
        self._serving = serving
        self._keys = KeyRing(serving.server.api_key)
        self._patience_s = patience_s
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, queued)
        self._socket.setsockopt(zmq.MAXMSGSIZE, serving.server.max_body_bytes)
        self._socket.setsockopt(zmq.LINGER, 500)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidRequest(f"Cannot listen on {endpoint}: {error.strerror}.", param="zmq_endpoint") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._live: Counter[bytes] = Counter()
        self._loop_task = asyncio.get_running_loop().create_task(self._receive())

    async def close(self) -> None:
        """Abort what runs and close the socket."""
        tasks = [self._loop_task, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=500)

    async def _receive(self) -> None:
        while True:
            client, *frames = await self._socket.recv_multipart()
            task = asyncio.get_running_loop().create_task(self._serve(client, frames))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: bytes, frames: list[bytes]) -> None:
        """One request, from its frames to its last reply."""
        outlet = _Outlet(self._socket, client, codec_of(frames), self._patience_s)
        trace = Trace(f"zmq-{secrets.token_hex(8)}", self._serving.metrics)
        self._live[client] += 1
        try:
            await self._answer(outlet, client, frames, trace)
        except (ClientGone, asyncio.CancelledError):
            trace.aborted = True
            self._serving.metrics.aborted()
        except Exception as error:
            typed = as_ramet_error(trace.told(error))
            self._serving.metrics.failed(typed.status)
            with contextlib.suppress(ClientGone, SlowReader):
                await outlet.send("error", openai_body(typed)["error"] | {"status": typed.status})
        finally:
            self._live[client] -= 1
            if not self._live[client]:
                del self._live[client]
            log.info("request", extra={"fields": trace.fields("zmq", 499 if trace.aborted else 200)})

    async def _answer(self, outlet: _Outlet, client: bytes, frames: list[bytes], trace: Trace) -> None:
        codec, request = unpack_request(frames)
        outlet.request_id = request.id
        if codec != b"json":
            check_json(request.body)
        trace.caller = self._keys.caller(request.key)
        if self._live[client] > MAX_LIVE_PER_CLIENT:
            raise QueueFull(f"A client may have {MAX_LIVE_PER_CLIENT} requests at once.")
        held: Any = None
        first = True
        async with contextlib.aclosing(answer(self._serving, request, trace)) as items:
            async for item in items:
                if not first:
                    await outlet.send("data", held)
                held, first = item, False
        await outlet.send("end", held)


class _Outlet:
    """Replies to one request, numbered, with patience for a reader that is slow."""

    def __init__(self, socket: zmq.asyncio.Socket, client: bytes, codec: bytes, patience_s: float) -> None:
        self._socket = socket
        self._client = client
        self._codec = codec
        self._patience_s = patience_s
        self._seq = 0
        self.request_id: str | int | None = None

    async def send(self, event: Any, data: Any) -> None:
        """Raises ClientGone or SlowReader."""
        reply = ZmqReply(id=self.request_id, seq=self._seq, event=event, data=data)
        frames = [self._client, *pack(self._codec, reply)]
        waited = 0.0
        while not await self._try(frames):
            if waited >= self._patience_s:
                raise SlowReader("The client has not read its replies; the request was dropped.")
            await asyncio.sleep(PAUSE_S)
            waited += PAUSE_S
        self._seq += 1

    async def _try(self, frames: list[bytes]) -> bool:
        """Send at once or not at all: waiting inside the shared socket would hold up everyone."""
        try:
            await self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EAGAIN:
                return False
            if error.errno == errno.EHOSTUNREACH:
                raise ClientGone from error
            raise
        return True


def check_endpoint(endpoint: str, *, has_key: bool) -> None:
    """An endpoint that others on the network can reach needs a key."""
    kind, _, address = endpoint.partition("://")
    if kind not in ("tcp", "ipc", "inproc"):
        raise InvalidRequest(f"zmq_endpoint must be tcp:// or ipc://; got {endpoint!r:.80}.", param="zmq_endpoint")
    if kind == "tcp" and not has_key and not _is_loopback(address.rpartition(":")[0]):
        raise InvalidRequest(
            f"zmq_endpoint {endpoint} is open to the network; that needs --api-key.", param="zmq_endpoint"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
