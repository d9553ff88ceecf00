"""The structured output table for Ramet's server and its peers: an answer under a schema against free text as long.

    python -m bench.structured_peers --root ~/.cache/ramet/peers --peers llama --batches 1,8 --shapes "flat5 keys,enums"

Each is a server of its own, reached over HTTP, as `bench.peers` starts them; what it does to be fast is its own. Rounds
of schema and free text alternate on one server, then comes the next; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.peers import start
from bench.peers_setup import default_root
from bench.structured_shapes import CITIES, SHAPES
from runtime.bench.remote import Reply, Target
from runtime.errors import RametError


def together(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], Reply]]) -> tuple[float, list[Reply]]:
    begin = time.perf_counter()
    replies = list(pool.map(lambda call: call(), calls))
    return time.perf_counter() - begin, replies


def row(target: Target, shape: str, batch: int, max_tokens: int, rounds: int) -> str:
    """`tokens` of the answers; rates are of answers of exactly these lengths."""
    schema: dict[str, Any] = SHAPES[shape]
    asked = [f"({i}) Describe {CITIES[i % len(CITIES)]} as JSON." for i in range(batch)]
    with ThreadPoolExecutor(batch) as pool:
        answer = [lambda p=p: target.object(p, schema, max_tokens) for p in asked]
        lengths = [reply.tokens for reply in together(pool, answer)[1]]
        free = [lambda p=p, n=n: target.complete(p, n) for p, n in zip(asked, lengths, strict=True)]
        together(pool, free)
        times = [(together(pool, answer)[0], together(pool, free)[0]) for _ in range(rounds)]
    ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(b / a for a, b in times)
    n = sum(lengths)
    return f"| {batch} | {shape} | {target.name} | {n} | {n / theirs:.0f} | {n / ours:.0f} | {ratio:.2f} × |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=default_root())
    parser.add_argument("--peers", nargs="*", default=["llama", "vllm"])
    parser.add_argument("--batches", type=lambda t: [int(x) for x in t.split(",")], default=[1, 8])
    parser.add_argument("--shapes", type=lambda t: t.split(","), default=list(SHAPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| batch | schema | server | tokens | free tok/s | under the schema | of the free rate |")
    print("|---|---|---|---:|---:|---:|---:|")
    with ExitStack() as stack:
        targets = start(stack, args.root, args.peers, args.threads)
        for target in targets:
            for batch in args.batches:
                for shape in args.shapes:
                    try:
                        print(row(target, shape, batch, args.tokens, args.rounds), flush=True)
                    except RametError as error:
                        print(f"| {batch} | {shape} | {target.name} | | | refused: {str(error)[:80]} | |", flush=True)


if __name__ == "__main__":
    main()
