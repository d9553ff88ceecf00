"""Nine agent programs: by our DSL, by hand-written OpenAI calls, with the cache off, and by SGLang's frontend.

    python -m bench.programs [--model smollm2-135m] [--only chain ...] [--out programs.json]

All of them talk to servers of their own, started here. Every program runs once to warm up the server's code and
once measured, from an empty cache. Wall time is the client's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich import box
from rich.console import Console
from rich.table import Table

import ramet as rt
from bench import program_sglang
from bench.program_calls import CALLS, Client
from bench.program_shapes import BATCHES, SHAPES, SINGLES

START_S = 600.0


@dataclass(frozen=True, slots=True)
class Measure:
    """One program run one way. `hit_rate`: reused over reusable tokens, None where ids are unknown to the client."""

    shape: str
    way: str
    wall_s: float
    requests: int
    prompt: int
    prefilled: int
    generated: int
    hit_rate: float | None = None


@contextlib.contextmanager
def server(model: str, *flags: str) -> Iterator[str]:
    """`ramet serve` on a free port of this machine; its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-c",
        "import ramet; ramet.main()",
        "serve",
        "--model",
        model,
        "--port",
        str(port),
        *flags,
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def flush(url: str) -> None:
    httpx.post(f"{url}/flush_cache", timeout=60).raise_for_status()


def by_dsl(backend: rt.HttpBackend, shape: str, way: str) -> Measure:
    if shape in BATCHES:
        program, items = BATCHES[shape]
        totals = program.run_batch(backend, items, progress=False).totals
    else:
        totals = SINGLES[shape].run(backend).totals
    fresh = (
        totals.prefilled - totals.forced
    )  # tokens forced by a grammar are computed like a prompt's: not counted here
    return Measure(shape, way, totals.wall_s, totals.requests, totals.prompt, fresh, totals.generated, totals.hit_rate)


def by_hand(url: str, shape: str) -> Measure:
    async def work() -> Measure:
        client = Client(url)
        began = time.perf_counter()
        await CALLS[shape](client)
        wall = time.perf_counter() - began
        await client.close()
        fresh = client.prompt - client.cached
        return Measure(shape, "by hand", wall, client.requests, client.prompt, fresh, client.generated)

    return asyncio.run(work())


def by_sglang(url: str, shape: str, run: Callable[[], object]) -> Measure:
    before = _counted(url)
    began = time.perf_counter()
    run()
    wall = time.perf_counter() - began
    after = _counted(url)
    requests, prompt, cached, generated = (b - a for a, b in zip(before, after, strict=True))
    return Measure(shape, "SGLang frontend", wall, requests, prompt, prompt - cached, generated)


def _counted(url: str) -> tuple[int, int, int, int]:
    """(requests, prompt tokens, reused tokens, generated tokens) by the server's own counters."""
    stats = httpx.get(f"{url}/server_info", timeout=30).json().get("internal_states", [{}])[0]
    return tuple(int(stats.get(key, 0)) for key in ("received", "prompt_tokens", "reused", "generated"))  # type: ignore[return-value]


def measure(model: str, shapes: list[str], flags: list[str]) -> list[Measure]:
    """All ways of all shapes; the measured run follows a warm-up and a flush."""
    found: list[Measure] = []
    with server(model, *flags) as url:
        backend = rt.HttpBackend(url)
        foreign = program_sglang.programs(url) if program_sglang.available() else {}
        for shape in shapes:
            ways: list[Callable[[], Measure]] = [lambda: by_dsl(backend, shape, "DSL"), lambda: by_hand(url, shape)]  # noqa: B023
            if shape in foreign:
                ways.append(lambda: by_sglang(url, shape, foreign[shape]))  # noqa: B023
            for way in ways:
                way()
                flush(url)
                found.append(way())
                flush(url)
    with server(model, *flags, "--no-radix-cache") as url:
        backend = rt.HttpBackend(url)
        for shape in shapes:
            found.append(by_dsl(backend, shape, "DSL, cache off"))
    return found


def show(found: list[Measure]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for name in (
        "program",
        "way",
        "requests",
        "prompt",
        "prefilled",
        "generated",
        "of optimum",
        "wall",
        "against hand",
    ):
        table.add_column(name, justify="left" if name in ("program", "way") else "right")
    hand = {m.shape: m.wall_s for m in found if m.way == "by hand"}
    for m in sorted(found, key=lambda m: SHAPES.index(m.shape)):
        rate = "" if m.hit_rate is None else f"{m.hit_rate:.1%}"
        times = f"{hand[m.shape] / m.wall_s:.2f} ×" if m.shape in hand else ""
        numbers = (str(m.requests), str(m.prompt), str(m.prefilled), str(m.generated), rate, f"{m.wall_s:.2f} s", times)
        table.add_row(m.shape, m.way, *numbers)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Nine agent programs, four ways.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--out", type=Path)
    args, flags = parser.parse_known_args()
    found = measure(args.model, list(args.only), flags)
    show(found)
    if args.out:
        args.out.write_text(json.dumps([asdict(m) for m in found], indent=1))


if __name__ == "__main__":
    main()
