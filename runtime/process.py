"""The scheduler in a process of its own: start it, watch it, talk to it, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from runtime.client import Health, Mailroom, OnOutput, turn_health
from runtime.config import EngineConfig
from runtime.errors import BackendUnavailable, InvalidRequest, ModelLoadError, NotFound
from runtime.link import Beat, Failed, FromProcess, FrontendEnd, Hello, Ready, SocketFolder, Start, Stop
from runtime.messages import Abort, Submit, SubmitMany, ToScheduler
from runtime.step import ModelSpec

log = logging.getLogger("ramet.process")

POLL_S = 0.1
BEAT_LATE_S = 3.0
OWN_PAUSE_S = 0.5
STOP_S = 5.0
HELLO_S = 10.0
LOAD_ERRORS = {kind.__name__: kind for kind in (BackendUnavailable, InvalidRequest, ModelLoadError, NotFound)}


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """The KV pool of a running scheduler."""

    n_pages: int
    page_size: int

    @property
    def n_tokens(self) -> int:
        return self.n_pages * self.page_size


class SchedulerProcess:
    """A running scheduler process. Make it with `start`, from the main thread; end it with `stop`."""

    def __init__(self, process: subprocess.Popen[bytes], folder: SocketFolder, link: FrontendEnd) -> None:
        self._process = process
        self._folder = folder
        self.link = link
        self.spec: ModelSpec
        self.pool: PoolInfo

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        log_format: str = "text",
        log_level: str = "info",
        parts: str = "runtime.build:build",
    ) -> SchedulerProcess:
        """Start the process and wait until its model is loaded.

        Raises ModelLoadError (or what else the loader found wrong) with its one sentence, also if the process
        dies meanwhile. Interrupted, it leaves no process behind.
        """
        folder = SocketFolder()
        link = FrontendEnd(folder)
        start = Start(engine=config, log_format=log_format, log_level=log_level, parts=parts)
        made: SchedulerProcess | None = None
        try:
            with _signals_held():  # a process that nobody holds yet could not be ended
                process = subprocess.Popen(
                    [sys.executable, "-m", "runtime.child", str(folder.path), str(os.getpid())],
                    stdin=subprocess.PIPE,
                    start_new_session=True,  # the terminal's Ctrl-C is for us; we tell the scheduler when to end
                )
                made = cls(process, folder, link)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(msgspec.json.encode(start))
            made._await_ready()
        except BaseException:
            if made is not None:
                made.kill()
            else:
                link.close()
                folder.remove()
            raise
        return made

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def stop(self, timeout_s: float = STOP_S) -> int:
        """End the process in order, by force if it does not listen; its exit code. Idempotent."""
        if self._process.poll() is None:
            self.link.send(Stop())
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                log.warning("The scheduler process does not stop; it is killed.")
        return self.kill()

    def kill(self) -> int:
        """End the process at once and clean up behind it. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        code = self._process.wait()
        if self._folder.path.exists():
            self.link.close()
            self._folder.remove()
        return code

    def _await_ready(self) -> None:
        while True:
            message = self.link.receive(POLL_S)
            if isinstance(message, Failed):
                raise LOAD_ERRORS.get(message.error, ModelLoadError)(message.message)
            if isinstance(message, Ready):
                self.spec = message.spec
                self.pool = PoolInfo(message.n_pages, message.page_size)
                break
            if message is None and (code := self._process.poll()) is not None:
                raise ModelLoadError(f"The scheduler process ended while loading ({describe_exit(code)}).")
        if not self.link.send(Hello(), timeout_s=HELLO_S):
            raise ModelLoadError("The scheduler process does not take requests.")


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Signals to end arrive at the end of the block. The child, which inherits this, lets them through again."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = ", perhaps for lack of memory" if name == "SIGKILL" else ""
            return f"killed by {name}{hint}"
    return f"exit status {code}"


class IpcClient:
    """SchedulerClient over a SchedulerProcess. Lives on the event loop that makes it; callable from any thread."""

    def __init__(self, process: SchedulerProcess, *, stall_s: float, on_death: Callable[[str], None] | None = None):
        self._process = process
        self._link = process.link
        self._stall_s = stall_s
        self._on_death = on_death
        self._mail = Mailroom()
        self._beat = Beat(turn=time.monotonic(), busy=False)
        self._heard = self._ran = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._fd = self._link.fd
        self._loop.add_reader(self._fd, self._read)
        self._watcher = self._loop.create_task(self._watch())
        self._loop.call_soon(self._read)  # what came before we listened raises no new event
        self._closed = False

    def submit(self, item: Submit | SubmitMany, on_output: OnOutput) -> None:
        self._mail.expect(item, on_output)
        self._send(item)

    def abort(self, abort: Abort) -> None:
        if self._mail.dead is None:
            self._send(abort)

    def forget(self, rid: str) -> None:
        self._mail.forget(rid)

    async def call(self, op: str, **args: Any) -> Any:
        call, future = self._mail.expect_reply(op, args)
        self._send(call)
        return await future

    def health(self) -> Health:
        if self._mail.dead is not None:
            return Health(False, False, self._mail.dead)
        if _is_running(self._loop):
            self._notice_own_pause()
        silent = time.monotonic() - self._heard
        if silent > BEAT_LATE_S and _is_running(self._loop):
            self._read()  # perhaps it was this loop that was busy, and the beats are waiting
            silent = time.monotonic() - self._heard
        if silent > BEAT_LATE_S:
            return Health(True, False, f"The scheduler process has not answered for {silent:.0f} s.")
        if self._beat.trouble:
            return Health(True, False, self._beat.trouble)
        return turn_health(self._beat.turn, self._beat.busy, self._stall_s)

    def close(self) -> None:
        """Stop listening; the process is its owner's to stop. Call on the client's loop. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._watcher.cancel()
        self._loop.remove_reader(self._fd)
        self._mail.fail("The server is shutting down.")

    def _send(self, message: ToScheduler) -> None:
        if _is_running(self._loop):
            self._link.send(message)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it everything was failed
                self._loop.call_soon_threadsafe(self._link.send, message)

    def _read(self) -> None:
        """Take everything that came: the socket's descriptor tells only of the first."""
        if self._closed:
            return
        while (message := self._link.receive()) is not None:
            self._take(message)

    def _take(self, message: FromProcess) -> None:
        if isinstance(message, Beat):
            self._beat, self._heard = message, time.monotonic()
        elif not isinstance(message, Ready | Failed):
            self._mail.deliver(message)

    def _notice_own_pause(self) -> None:
        """Time in which this loop did not run (stopped, or the machine suspended) is no silence of the scheduler."""
        now = time.monotonic()
        pause, self._ran = now - self._ran - POLL_S, now
        if pause > OWN_PAUSE_S:
            self._heard = min(now, self._heard + pause)
            self._beat = msgspec.structs.replace(self._beat, turn=min(now, self._beat.turn + pause))

    async def _watch(self) -> None:
        """Notice the process's end, and read now and then in case an event of the descriptor went missing."""
        while (code := self._process.exit_code()) is None:
            await asyncio.sleep(POLL_S)
            self._notice_own_pause()
            self._read()
        why = f"The scheduler process died ({describe_exit(code)})."
        log.error(why)
        self._mail.fail(why)
        if self._on_death is not None:
            self._on_death(why)


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """True on the thread that runs `loop`, inside it."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
