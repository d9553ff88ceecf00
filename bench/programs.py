"""Nine agent programs: by our DSL, by hand-written OpenAI calls, with the cache off, and by SGLang's frontend.

    python -m bench.programs [--model smollm2-135m] [--only chain ...] [--rounds 3] [--small] [--out programs.json]
                             [--sglang /path/to/python] [--step-ms 8] [--skip-off]

All of them talk to servers of their own, started here. Every way runs once in small to warm up (and one in full), then
`rounds` times in turn with the others, each time from an empty cache; the median wall time is told. Wall time is the
client's.
`--sglang`: an interpreter that has SGLang's frontend. `--out` adds to a file that is there already. Further options go
to the servers: `--threads 1` keeps kernels off the core on which clients and servers run. `--step-ms`: no model, but
a device whose every step takes so long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import httpx
from rich import box
from rich.console import Console
from rich.table import Table

import ramet as rt
from bench.program_device import STEP_MS
from bench.program_runs import Foreign, Measure, by_dsl, by_hand, flush, median, metered
from bench.program_texts import FORKS, FULL, SHAPES, SMALL, Sizes

START_S = 600.0
WAYS = ("DSL", "by hand, one by one", "by hand, side by side", "SGLang frontend", "DSL, cache off")


@contextlib.contextmanager
def server(model: str, *flags: str, step_ms: float | None = None) -> Iterator[str]:
    """`ramet serve` on a free port of this machine, or with `step_ms` one without a model; its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ours = ["-c", "import ramet; ramet.main()", "serve"] if step_ms is None else ["-m", "bench.program_device"]
    command = [sys.executable, *ours, "--model", model, "--port", str(port), *flags]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, STEP_MS: str(step_ms)})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end with us
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


def measure(args: argparse.Namespace, shapes: list[str], size: Sizes, flags: list[str]) -> Iterator[list[Measure]]:
    """All ways of all shapes, in turn, so that whatever else the machine does meets all of them."""
    with server(args.model, *flags, step_ms=args.step_ms) as url:
        backend = rt.HttpBackend(url)
        foreign = Foreign(args.sglang, url, size) if args.sglang else None
        try:
            for shape in shapes:
                ways = _ways(url, backend, foreign, shape, size)
                for way in (*_ways(url, backend, foreign, shape, SMALL), ways[0]):  # warms up, large batches too
                    way()
                taken: list[list[Measure]] = [[] for _ in ways]
                for turn in range(args.rounds):
                    for place in range(len(ways)):
                        number = (turn + place) % len(ways)  # nobody is always first
                        flush(url)
                        taken[number].append(told := metered(url, ways[number]))
                        print(f"{told.shape}, {told.way}: {told.wall_s:.2f} s", file=sys.stderr, flush=True)
                yield [median(measures) for measures in taken]
        finally:
            if foreign is not None:
                foreign.close()
    if args.skip_off:
        return
    with server(args.model, *flags, "--no-radix-cache", step_ms=args.step_ms) as url:
        backend = rt.HttpBackend(url)
        for shape in shapes:
            yield [metered(url, partial(by_dsl, backend, shape, size, "DSL, cache off"))]


def _ways(
    url: str, backend: rt.HttpBackend, foreign: Foreign | None, shape: str, size: Sizes
) -> list[Callable[[], Measure]]:
    ways: list[Callable[[], Measure]] = [
        lambda: by_dsl(backend, shape, size),
        lambda: by_hand(url, backend, shape, size, side_by_side=False),
        lambda: by_hand(url, backend, shape, size, side_by_side=True),
    ]
    if foreign is not None and shape in foreign.shapes:
        ways.append(lambda: foreign.measure(backend, shape))
    return ways


def show(found: list[Measure]) -> None:
    """A row a way of each shape, and what the DSL gains over it."""
    table = Table(box=box.SIMPLE_HEAD)
    costs = ["requests", "prompt", "prefilled", "generated", "of optimum", "again", "steps", "computed", "device"]
    for name in ("program", "way", *costs, "wall", "DSL is"):
        table.add_column(name, justify="left" if name in ("program", "way") else "right")
    ours = {m.shape: m.wall_s for m in found if m.way == "DSL"}
    for m in sorted(found, key=lambda m: (SHAPES.index(m.shape), WAYS.index(m.way))):
        fork = "*" if m.shape in FORKS else ""
        gain = f"{m.wall_s / ours[m.shape]:.2f} ×" if m.way != "DSL" and m.shape in ours else ""
        numbers = (m.requests, m.prompt, m.prefilled, m.generated)
        device = (str(m.steps), str(m.computed), f"{m.device_s:.2f} s")
        rest = (f"{m.hit_rate:.1%}", str(m.retokenised), *device, f"{m.wall_s:.2f} s", gain)
        table.add_row(m.shape + fork, m.way, *map(str, numbers), *rest)
    Console(width=160).print(table)
    Console(width=160).print(
        "* fork and tree shapes. again: tokens tokenised again. computed: tokens in all steps. device: their time."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Nine agent programs, five ways.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="the sizes of the tests")
    parser.add_argument("--skip-off", action="store_true", help="leave out the runs with the cache off")
    parser.add_argument("--sglang", type=Path, help="an interpreter that has SGLang's frontend")
    parser.add_argument("--step-ms", type=float, help="no model: a device whose every step takes so long")
    parser.add_argument("--out", type=Path)
    args, flags = parser.parse_known_args()
    found: list[Measure] = []
    if args.out and args.out.exists():
        found = [m for m in (Measure(**one) for one in json.loads(args.out.read_text())) if m.shape not in args.only]
    size = SMALL if args.small else FULL
    for some in measure(args, list(args.only), size, flags):
        found += some
        if args.out:
            args.out.write_text(json.dumps([asdict(m) for m in found], indent=1))
    show(found)


if __name__ == "__main__":
    main()
