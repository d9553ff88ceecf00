"""Tree searches over several documents at once, with too small a KV pool: what must be computed twice?

    python -m bench.program_pressure [--model smollm2-135m] [--documents 4] [--width 3] [--depth 3] [--pools 1500 3000]
                                     [--rounds 3] [--step-ms 8] [options of the server]

By our DSL (whose requests say to which program they belong, how many branches follow and what is over) and by hand
with the OpenAI SDK, all calls side by side, in turn, from an empty cache, on a server of its own for each pool size;
medians. Without options, the server heeds what requests say (`--eviction-policy hints`).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import ramet as rt
from bench.program_calls import Client, Messages, message
from bench.program_runs import flush, reusable
from bench.program_texts import RULES
from bench.programs import server

HONOURING = ("--eviction-policy", "hints")
NAMES = ("prefilled", "hit_rate", "wall_s")
EXACT: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.8}


@dataclass(frozen=True, slots=True)
class Cost:
    """`hit_rate`: reused over reusable tokens; the rest was computed twice."""

    wall_s: float
    prefilled: int
    hit_rate: float


def documents(n: int) -> list[str]:
    return [f"Document {i}. " + "".join(f"Line {i * j} says {j * j + i}. " for j in range(24)) for i in range(n)]


@rt.function
def search(s: rt.State, document: str, width: int, depth: int) -> None:
    s.system(RULES)
    s.user(document)
    _grow(s, width, depth)


def _grow(s: rt.State, width: int, depth: int) -> None:
    for thought in s.fork(width):
        thought.assistant(rt.gen("step", **EXACT))
        if depth > 1:
            thought.user("Go on.")
            _grow(thought, width, depth - 1)


async def search_by_hand(client: Client, document: str, width: int, depth: int) -> None:
    async def grow(messages: Messages, left: int, seed: int) -> None:
        async def one(i: int) -> None:
            said = await client.chat(messages, **EXACT, seed=width * seed + i)
            if left > 1:
                after = [*messages, message("assistant", said), message("user", "Go on.")]
                await grow(after, left - 1, width * seed + i + 1)

        await client.all(one(i) for i in range(width))

    await grow([message("system", RULES), message("user", document)], depth, 0)


def by_dsl(backend: rt.HttpBackend, n: int, width: int, depth: int) -> Cost:
    totals = search.run_batch(backend, [(one, width, depth) for one in documents(n)], progress=False).totals
    return Cost(totals.wall_s, totals.prefilled, totals.hit_rate)


def by_hand(url: str, backend: rt.HttpBackend, n: int, width: int, depth: int) -> Cost:
    async def work() -> tuple[float, Client]:
        client = Client(url, backend.model, side_by_side=True)
        began = time.perf_counter()
        await asyncio.gather(*(search_by_hand(client, one, width, depth) for one in documents(n)))
        wall_s = time.perf_counter() - began
        await client.close()
        return wall_s, client

    wall_s, client = asyncio.run(work())
    return Cost(wall_s, client.prompt - client.cached, client.cached / reusable(backend, client.seen))


def main() -> None:
    parser = argparse.ArgumentParser(description="Tree searches in too small a KV pool.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--pools", type=int, nargs="*", default=[1536, 3072])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, help="no model: a device whose every step takes so long")
    args, flags = parser.parse_known_args()
    size = (args.documents, args.width, args.depth)
    table = Table("pool", "way", "prefilled", "of optimum", "wall", box=box.SIMPLE_HEAD)
    for pool in args.pools:
        limits = ("--max-total-tokens", str(pool))
        with server(args.model, *limits, *(flags or HONOURING), step_ms=args.step_ms) as url:
            backend = rt.HttpBackend(url)
            ways = {"DSL": partial(by_dsl, backend, *size), "by hand": partial(by_hand, url, backend, *size)}
            costs: dict[str, list[Cost]] = {way: [] for way in ways}
            for turn in range(args.rounds):
                for way in sorted(ways, reverse=bool(turn % 2)):  # nobody is always first
                    flush(url)
                    costs[way].append(ways[way]())
            for way, found in costs.items():
                prefilled, hit_rate, wall_s = (median([getattr(one, name) for one in found]) for name in NAMES)
                table.add_row(str(pool), way, f"{prefilled:.0f}", f"{hit_rate:.1%}", f"{wall_s:.2f} s")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
