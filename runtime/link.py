"""The wire between a frontend and its scheduler process: msgspec over two ZMQ ipc sockets.

The sockets lie in a folder only this user may enter. Nothing on this wire is ever unpickled.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import zmq

from runtime.config import EngineConfig
from runtime.messages import Abort, Call, FromScheduler, Outputs, Reply, Submit, SubmitMany, ToScheduler
from runtime.step import ModelSpec

BEAT_S = 0.5


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler process is started with, on its standard input."""

    engine: EngineConfig
    log_format: str = "text"
    log_level: str = "info"
    parts: str = "runtime.build:build"  # where the engine's parts come from (tests name a toy)


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The model is loaded."""

    spec: ModelSpec
    n_pages: int
    page_size: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The model could not be loaded: the error's class name and its one sentence."""

    error: str
    message: str


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """The process lives; its loop's latest turn was at `turn` (monotonic seconds of this host).

    `trouble`: why the loop itself says that it makes no progress.
    """

    turn: float
    busy: bool
    trouble: str = ""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Sent once the frontend listens; proves that the way to the scheduler is open."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the process now, in order."""


ToProcess = Submit | SubmitMany | Abort | Call | Hello | Stop
FromProcess = Outputs | Reply | Ready | Failed | Beat


def _plain(value: Any) -> Any:
    """numpy's scalars and arrays in plain types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot travel between processes")


class SocketFolder:
    """A private folder with the two sockets' names; gone after `remove`."""

    def __init__(self, path: str | None = None) -> None:
        self.path = Path(path or tempfile.mkdtemp(prefix="ramet-"))  # mkdtemp: mode 0700

    @property
    def to_process(self) -> str:
        return f"ipc://{self.path}/in"

    @property
    def from_process(self) -> str:
        return f"ipc://{self.path}/out"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class ProcessEnd:
    """The scheduler process's end. `send` may be called from any thread."""

    def __init__(self, folder: SocketFolder) -> None:
        self._context = zmq.Context(io_threads=1)
        self._in = self._context.socket(zmq.PULL)
        self._out = self._context.socket(zmq.PUSH)
        for socket, name in ((self._in, folder.to_process), (self._out, folder.from_process)):
            _unbounded(socket)
            socket.connect(name)
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._decoder: msgspec.msgpack.Decoder[ToProcess] = msgspec.msgpack.Decoder(ToProcess)

    def send(self, message: FromProcess | FromScheduler) -> None:
        data = self._encoder.encode(message)
        with self._lock:  # a ZMQ socket may move between threads only through a full fence
            self._out.send(data, copy=False)

    def receive(self, timeout_s: float) -> ToProcess | None:
        """The next message, None if none came in time."""
        if not self._in.poll(int(timeout_s * 1000)):
            return None
        return self._decoder.decode(self._in.recv())

    def close(self) -> None:
        self._in.close(linger=0)
        self._out.close(linger=500)
        self._context.term()


class FrontendEnd:
    """The frontend's end. Belongs to one thread at a time."""

    def __init__(self, folder: SocketFolder) -> None:
        self._context = zmq.Context(io_threads=1)
        self._out = self._context.socket(zmq.PUSH)
        self._in = self._context.socket(zmq.PULL)
        for socket, name in ((self._out, folder.to_process), (self._in, folder.from_process)):
            _unbounded(socket)
            socket.bind(name)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._decoder: msgspec.msgpack.Decoder[FromProcess] = msgspec.msgpack.Decoder(FromProcess)

    @property
    def fd(self) -> int:
        """Readable when messages may have come; read until `receive` gives None."""
        return int(self._in.getsockopt(zmq.FD))

    def send(self, message: ToProcess | ToScheduler, timeout_s: float = 0.0) -> bool:
        """False if nobody took it in time."""
        if timeout_s and not self._out.poll(int(timeout_s * 1000), zmq.POLLOUT):
            return False
        try:
            self._out.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_s: float = 0.0) -> FromProcess | None:
        """The next message, None if none is there (yet)."""
        if timeout_s and not self._in.poll(int(timeout_s * 1000)):
            return None
        try:
            return self._decoder.decode(self._in.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        self._in.close(linger=0)
        self._out.close(linger=500)
        self._context.term()


def _unbounded(socket: Any) -> None:
    """No high-water mark: what is in flight is bounded by the requests admitted, and nothing may be dropped."""
    socket.set_hwm(0)
