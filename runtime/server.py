"""`ramet serve`: the scheduler process, the HTTP app in front of it, and an orderly end of both."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from runtime.config import EngineConfig, ServerConfig
from runtime.errors import RametError
from runtime.generate import Generator
from runtime.logs import setup_logging
from runtime.process import IpcClient, SchedulerProcess
from runtime.serve.app import create_app
from runtime.serve.zmq_door import check_endpoint
from runtime.text.tokenizer import Tokenizer

log = logging.getLogger("ramet.server")

EXIT_OK = 0
EXIT_DIED = 1
EXIT_USAGE = 2
DRAIN_POLL_S = 0.05
DEATH_GRACE_S = 1.0  # seconds of 503s after the scheduler's death, so that every client gets its answer
HTTP_CLOSE_S = 3


def run_server(engine: EngineConfig, server: ServerConfig, *, parts: str = "runtime.build:build") -> int:
    """Serve until a signal or the scheduler's death; the process's exit code.

    2: the model cannot be loaded, or the port is taken (one sentence on standard error). 1: the scheduler died.
    """
    setup_logging(server.log_format, server.log_level)
    with _signals_as(_Interrupted):
        try:
            if server.zmq_endpoint:  # told at once, as a port in use is
                check_endpoint(server.zmq_endpoint, has_key=bool(server.api_key))
            with (
                _bound(server) as sock,
                _loaded(engine, server, parts) as process,
                asyncio.Runner(loop_factory=_loop_factory()) as runner,
            ):
                return runner.run(_Server(engine, server, process, sock).run())
        except RametError as err:
            print(f"ramet: {err}", file=sys.stderr)
            return EXIT_USAGE
        except _Interrupted:
            return EXIT_OK


class _Interrupted(BaseException):
    """A signal to end arrived while nothing was being served yet."""


@contextlib.contextmanager
def _signals_as(error: type[BaseException]) -> Iterator[None]:
    def handler(number: int, frame: Any) -> None:
        raise error

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def _bound(server: ServerConfig) -> Iterator[socket.socket]:
    """The listening address, taken before the model is loaded: a port in use is told at once."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((server.host, server.port))
        except OSError as err:
            raise RametError(f"Cannot listen on {server.host}:{server.port}: {err.strerror or err}.") from err
        yield sock


@contextlib.contextmanager
def _loaded(engine: EngineConfig, server: ServerConfig, parts: str) -> Iterator[SchedulerProcess]:
    log.info("Loading %s", engine.model)
    process = SchedulerProcess.start(engine, log_format=server.log_format, log_level=server.log_level, parts=parts)
    try:
        yield process
    finally:
        process.stop()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # not made for every platform
        return asyncio.new_event_loop
    return uvloop.new_event_loop


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """Everything that lives on the event loop."""

    def __init__(
        self, engine: EngineConfig, server: ServerConfig, process: SchedulerProcess, sock: socket.socket
    ) -> None:
        self._engine = engine
        self._config = server
        self._process = process
        self._sock = sock
        self._ending: asyncio.Task[None] | None = None
        self._exit_code = EXIT_OK

    async def run(self) -> int:
        started = time.monotonic()
        client = IpcClient(self._process, stall_s=self._engine.stall_s, on_death=self._on_death)
        tokenizer = Tokenizer.from_model(self._process.spec.path)
        self._generator = Generator(
            client, tokenizer, self._process.spec, self._engine, pool_tokens=self._process.pool.n_tokens
        )
        app = create_app(self._generator, self._engine, self._config, pool=self._process.pool)
        gc.freeze()  # vocabulary, templates and routes live as long as we do
        self._http = _Uvicorn(_uvicorn_config(app, self._config))
        self._watch_signals()
        try:
            serving = asyncio.create_task(self._http.serve(sockets=[self._sock]))
            while not self._http.started and not serving.done():
                await asyncio.sleep(0.01)
            if self._http.started:
                announce(self._process, self._engine, self._config, self._sock, time.monotonic() - started)
            await serving
        finally:
            client.close()
        return self._exit_code

    # -- the end -----------------------------------------------------------------------------------------

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        """First signal: drain. Second: now."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._drain())
        else:
            log.info("Second signal: ending now")
            self._ending.cancel()
            self._end_http(at_once=True)

    async def _drain(self) -> None:
        """Readiness down, nothing new, running requests get their time; then the end."""
        self._generator.begin_drain()
        deadline = time.monotonic() + self._config.drain_timeout_s
        if n_live := self._generator.n_live:
            log.info("Draining: %d running requests have up to %g s", n_live, self._config.drain_timeout_s)
        while self._generator.n_live and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        if self._generator.n_live:
            log.warning("%d requests did not finish in time and are aborted", self._generator.n_live)
            self._generator.abort_all()
        self._end_http(at_once=False)

    def _on_death(self, why: str) -> None:
        """The scheduler died: answer 503 for a moment, then end with a failure."""
        self._exit_code = EXIT_DIED
        self._generator.begin_drain()
        asyncio.get_running_loop().call_later(DEATH_GRACE_S, self._end_http, False)

    def _end_http(self, at_once: bool) -> None:
        if at_once:
            self._generator.abort_all()
            self._http.force_exit = True
        self._http.should_exit = True


def _uvicorn_config(app: Any, server: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        root_path=server.root_path,
        timeout_graceful_shutdown=HTTP_CLOSE_S,
        backlog=4096,
    )


# -- what was chosen -----------------------------------------------------------------------------------------


def describe(process: SchedulerProcess, engine: EngineConfig) -> dict[str, str]:
    """What start-up chose, a line each, for people and for logs."""
    spec, pool = process.spec, process.pool
    return {
        "model": f"{spec.name}  ({spec.path})",
        "weights": f"{spec.dtype}, {spec.weight_bytes / 2**20:,.0f} MiB",
        "backend": spec.backend,
        "context": f"{spec.context_length:,} tokens",
        "KV pool": f"{pool.n_tokens:,} tokens: {pool.n_pages:,} pages of {pool.page_size}, "
        f"{pool.n_tokens * spec.kv_bytes_per_token / 2**20:,.0f} MiB",
        "scheduling": f"{engine.schedule_policy}, up to {engine.max_running} requests at once",
        "why": spec.why or "as asked",
    }


def announce(
    process: SchedulerProcess, engine: EngineConfig, server: ServerConfig, sock: socket.socket, seconds: float
) -> None:
    """The start-up banner (a log line where logs are JSON)."""
    host, port = sock.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    chosen = describe(process, engine)
    if server.log_format == "json":
        log.info("serving", extra={"fields": {"url": url, "pid": process.pid, **chosen}})
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for key, value in chosen.items():
        table.add_row(f"[dim]{key}", value)
    table.add_row("[dim]listening", f"[bold]{url}")
    Console(stderr=True).print(Panel(table, title="ramet", title_align="left", expand=False))
