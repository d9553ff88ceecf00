"""`ramet bench serve`: the serving layer alone, over a device that costs nothing.

HTTP, chat templates, tokenising, detokenising, the process border and the scheduler are real; only the model is
a fake that answers at once. CPU is read from the kernel's counters of the server's processes, so the load
generator and other work on the machine do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from runtime.bench.load import Connection, Timing, chat_body, drive
from runtime.config import DEFAULT_MODEL, EngineConfig
from runtime.errors import RametError

if TYPE_CHECKING:
    from runtime.build import Parts

HOST = "127.0.0.1"
START_S = 120.0
PROMPT = "Explain in a few words what a radix tree is, and why an agent's prompts share so much of theirs. "
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
TARGET_US, TARGET_RATE = 60.0, 5000.0
PACE_S = 0.06  # 256 streams at 60 ms a step ask for 4,300 events a second
MEMORY_LOOKS = 10


def null_parts(config: EngineConfig) -> Parts:
    """The embedded model's tokenizer over a device that answers at once."""
    return _parts(config, 0.0)


def paced_parts(config: EngineConfig) -> Parts:
    """The same over a device that takes PACE_S a step, as a model does: each token is an event of its own."""
    return _parts(config, PACE_S)


def _parts(config: EngineConfig, latency_s: float) -> Parts:
    from runtime.build import assemble
    from runtime.execute.fake import FakeRunner, fake_spec
    from runtime.pull import embedded_path
    from runtime.text.tokenizer import Tokenizer

    path = str(embedded_path(config.model))
    tokenizer = Tokenizer.from_model(path)
    spec = replace(fake_spec(tokenizer.vocab_size, 8192, tokenizer.eos_ids), path=path)
    runner = FakeRunner(spec, n_pages=8192, page_size=16, max_running=512, latency_s=latency_s, check=False)
    runner.plans = deque(maxlen=0)  # kept for tests; here they would be the growth that is looked for
    return assemble(config, runner, tokenizer)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=256, metavar="N", help="streams at once (default 256)")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens of each stream (default 128)")
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="short requests (default 1000)")
    parser.add_argument("--idle", type=int, default=1000, metavar="N", help="idle connections held (default 1000)")
    parser.add_argument(
        "--memory-requests", type=int, default=4000, metavar="N", help="requests while memory is watched (default 4000)"
    )


def bench_serve(args: argparse.Namespace) -> int:
    """Measure and print one table; 0 if both targets are met, 1 if not."""
    console = Console()
    with null_server("paced_parts") as server, console.status("streaming, a token an event"):
        paced = measure_streams(server, args.streams, args.tokens)
    with null_server("null_parts") as server:
        with console.status("streaming as fast as it goes"):
            rows = [*paced.rows("paced"), *measure_streams(server, args.streams, args.tokens).rows("flat out")]
        with console.status("short requests"):
            rows += measure_requests(server, args.requests)
        with console.status("idle connections"):
            rows += asyncio.run(measure_idle(server, args.idle))
        with console.status("memory"):
            rows += measure_memory(server, args.memory_requests)
    rows += measure_tokenizer()
    table = Table("what", "measured", "target", title="serving layer alone (null device)", title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return 0 if paced.meets_targets else 1


# -- the server under test ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    """A running server and its processes."""

    port: int
    http_pid: int
    scheduler_pid: int

    def cpu_s(self) -> tuple[float, float]:
        """CPU seconds used so far by the HTTP process and by the scheduler process."""
        return _cpu_s(self.http_pid), _cpu_s(self.scheduler_pid)

    def http_system_s(self) -> float:
        """The kernel's part of the HTTP process's CPU seconds: what sending to many sockets costs."""
        return int(_stat_of(self.http_pid)[12]) * TICK_S

    def rss_mib(self) -> tuple[float, float]:
        return _rss_mib(self.http_pid), _rss_mib(self.scheduler_pid)


@contextmanager
def null_server(parts: str) -> Iterator[Server]:
    """`ramet serve` over a device without a model, made by `parts` of this module, in processes of its own."""
    code = (
        "import sys\n"
        "from runtime.config import EngineConfig, ServerConfig\n"
        "from runtime.server import run_server\n"
        f"engine = EngineConfig(model={DEFAULT_MODEL!r}, max_running=512)\n"
        "server = ServerConfig(port=0, access_log=False)\n"
        f"sys.exit(run_server(engine, server, parts='runtime.bench.serve:{parts}'))\n"
    )
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([sys.executable, "-c", code], stderr=log, stdin=subprocess.DEVNULL)
        try:
            port = _await_port(process, lambda: os.pread(log.fileno(), 1 << 16, 0).decode())
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield Server(port, process.pid, int(children[0]))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _await_port(process: subprocess.Popen[bytes], text: Callable[[], str]) -> int:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if match := re.search(rf"http://{HOST}:(\d+)", text()):
            return int(match.group(1))
        time.sleep(0.05)
    raise RametError(f"The server under test did not start: {text()[-400:]}")


def _stat_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _cpu_s(pid: int) -> float:
    fields = _stat_of(pid)
    return (int(fields[11]) + int(fields[12])) * TICK_S


def _rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


# -- measures ----------------------------------------------------------------------------------------------------

Row = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Streaming:
    """Many streams at once."""

    n_streams: int
    n_tokens: int
    seconds: float
    http_cpu_s: float
    http_system_s: float
    scheduler_cpu_s: float
    first_s: Sequence[float]
    n_events: int

    @property
    def us_per_token(self) -> float:
        return self.http_cpu_s / self.n_tokens * 1e6

    @property
    def tokens_per_core(self) -> float:
        """Streamed tokens a second of the HTTP process's CPU."""
        return self.n_tokens / self.http_cpu_s

    @property
    def meets_targets(self) -> bool:
        return self.us_per_token <= TARGET_US and self.tokens_per_core >= TARGET_RATE

    def rows(self, name: str) -> list[Row]:
        rate = self.n_tokens / self.seconds
        return [
            (f"{name}: streams at once", f"{self.n_streams}", ""),
            (f"{name}: tokens/s, wall clock", f"{rate:,.0f}", ""),
            (f"{name}: events a token (below 1: deltas merged)", f"{self.n_events / self.n_tokens:.2f}", ""),
            (f"{name}: tokens/s per core", f"{self.tokens_per_core:,.0f}", f">= {TARGET_RATE:,.0f}"),
            (f"{name}: HTTP process CPU per token", f"{self.us_per_token:.1f} us", f"<= {TARGET_US:.0f} us"),
            (f"{name}: of it the kernel's, sending", f"{self.http_system_s / self.n_tokens * 1e6:.1f} us", ""),
            (f"{name}: scheduler CPU per token", f"{self.scheduler_cpu_s / self.n_tokens * 1e6:.1f} us", ""),
            (f"{name}: time to first token, p50 / p99", _spread(self.first_s), ""),
        ]


def measure_streams(server: Server, n_streams: int, n_tokens: int) -> Streaming:
    bodies = [chat_body(f"{PROMPT}{i}", n_tokens, stream=True) for i in range(n_streams)]
    asyncio.run(drive(HOST, server.port, bodies[:16], 16))  # warm-up
    before, system = server.cpu_s(), server.http_system_s()
    timings, seconds = asyncio.run(drive(HOST, server.port, bodies, n_streams))
    system = server.http_system_s() - system
    http, scheduler = (after - start for after, start in zip(server.cpu_s(), before, strict=True))
    n_events = sum(one.n_events for one in timings) - 2 * n_streams  # role and finish are no tokens
    firsts = [one.first_s for one in timings]
    return Streaming(n_streams, n_streams * n_tokens, seconds, http, system, scheduler, firsts, n_events)


def measure_requests(server: Server, n_requests: int) -> list[Row]:
    """Answers of one token: alone for the added latency, 64 at once for the rate."""
    bodies = [chat_body(f"{PROMPT}{i}", 1, stream=False) for i in range(n_requests)]
    alone, _ = asyncio.run(drive(HOST, server.port, bodies[:200], 1))
    before = server.cpu_s()
    timings, seconds = asyncio.run(drive(HOST, server.port, bodies, 64))
    http = server.cpu_s()[0] - before[0]
    return [
        ("added latency of one request alone, p50 / p99", _spread([one.total_s for one in alone]), ""),
        ("requests/s, 64 at once", f"{n_requests / seconds:,.0f}", ""),
        ("latency, 64 at once, p50 / p99", _spread([one.total_s for one in timings]), ""),
        ("HTTP process CPU per request", f"{http / n_requests * 1e6:,.0f} us", ""),
    ]


async def measure_idle(server: Server, n_idle: int) -> list[Row]:
    """Latency of /health while `n_idle` keep-alive connections are held open, each used once."""
    before = server.rss_mib()[0]
    held = [await Connection.open(HOST, server.port) for _ in range(n_idle)]
    for connection in held:
        assert await connection.get("/health") == 200
    grown = server.rss_mib()[0] - before
    times: list[float] = []
    for _ in range(100):
        started = time.perf_counter()
        await held[0].get("/health")
        times.append(time.perf_counter() - started)
    for connection in held:
        connection.close()
    return [
        (f"/health with {n_idle:,} idle connections, p50 / p99", _spread(times), ""),
        ("memory of an idle connection", f"{grown / n_idle * 1024:.1f} KiB", ""),
    ]


def measure_memory(server: Server, n_requests: int) -> list[Row]:
    """Both processes' memory at ten places on the way; flat: the second half adds next to nothing."""
    share = max(1, n_requests // MEMORY_LOOKS)
    looks: list[tuple[float, float]] = []
    for i in range(MEMORY_LOOKS):
        bodies = [chat_body(f"{PROMPT}{i * share + j}", 4, stream=bool(j % 2)) for j in range(share)]
        asyncio.run(drive(HOST, server.port, bodies, 64))
        looks.append(server.rss_mib())
    rows: list[Row] = []
    for name, sizes in zip(("HTTP process", "scheduler process"), zip(*looks, strict=True), strict=True):
        half = sizes[MEMORY_LOOKS // 2 - 1]
        rows.append((f"{name}, MiB after each {share:,} requests", " ".join(f"{size:.0f}" for size in sizes), ""))
        rows.append((f"{name}, growth over the last {share * 5:,}", f"{sizes[-1] - half:+.1f} MiB", "flat"))
    return rows


def measure_tokenizer() -> list[Row]:
    from runtime.pull import embedded_path
    from runtime.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_model(embedded_path(DEFAULT_MODEL))
    text = PROMPT * 20
    started, n_tokens = time.process_time(), 0
    for _ in range(100):
        n_tokens += len(tokenizer.encode(text))
    took = time.process_time() - started
    return [("tokeniser, one core", f"{n_tokens / took:,.0f} tokens/s ({len(text) * 100 / took / 1e6:.1f} MB/s)", "")]


def _spread(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"{ordered[len(ordered) // 2] * 1e3:.1f} / {p99 * 1e3:.1f} ms"


__all__ = ["Timing", "add_arguments", "bench_serve", "null_parts", "paced_parts"]
