"""Micro-benchmarks of the radix cache: probe, acquire, publish, split and evict at scale.

    python bench/radix.py [--nodes 100000] [--leaves 1000,10000,41000] [--json FILE]

Times are CPU times of single calls, in microseconds: median, 99th percentile, worst. (Not wall time: what else
the machine does is not the cache's.) Where SGLang's RadixCache can be imported, the same prompts are matched,
inserted and evicted there too.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from bench.sglang_radix import Theirs
from radix import Namespace, PrefixCache

PAGE = 16
NS = Namespace()
VOCAB = 50_000
LONG = 32_768


def timed(fn: Callable[[], Any], repeat: int, before: Callable[[], Any] | None = None) -> dict[str, float]:
    """Microseconds a call of `fn`; `before` runs untimed ahead of each."""
    times = []
    for _ in range(repeat):
        if before is not None:
            before()
        start = time.thread_time_ns()
        fn()
        times.append((time.thread_time_ns() - start) / 1e3)
    p50, p99 = np.percentile(times, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "max": max(times)}


def put(cache: PrefixCache, tokens: np.ndarray) -> None:
    """Serve one request: the whole of `tokens` ends up in the tree."""
    lease = cache.acquire(NS, tokens, 0)
    pages = cache.alloc(-(-len(tokens) // cache.page_size))
    assert pages is not None
    cache.finish(lease, tokens, pages, len(tokens))
    cache.begin_plan(0, time.monotonic())


class Turns:
    """Conversations of one page a turn below shared system prompts, and one conversation of LONG tokens."""

    def __init__(self, n_nodes: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.cache = PrefixCache(4 * n_nodes + 8 * LONG // PAGE, PAGE)
        self.systems = [self.random(1024) for _ in range(32)]
        self.long = np.concatenate((self.systems[0], self.random(LONG - 1024)))
        for cut in range(2048, LONG + 1, 2048):  # a sibling at each turn, so that the path has a node a turn
            put(self.cache, self.long[:cut])
            put(self.cache, np.concatenate((self.long[: cut - 512], self.random(PAGE))))
        while self.cache.tree.n_nodes < n_nodes:
            first = np.concatenate((self.systems[self.rng.integers(32)], self.random(PAGE)))
            put(self.cache, np.concatenate((first, self.random(PAGE))))
            put(self.cache, np.concatenate((first, self.random(PAGE))))

    def random(self, n: int) -> np.ndarray:
        return self.rng.integers(0, VOCAB, n, dtype=np.int32)


def bench_match(n_nodes: int) -> dict[str, dict[str, float]]:
    """Look up, lease and extend a 32k-token prompt in a tree of `n_nodes`."""
    t = Turns(n_nodes)
    cache, long = t.cache, t.long
    other = long.copy()
    other[20_000:] = 1
    pages = cache.probe(NS, long).n_pages
    assert pages == LONG // PAGE - 1
    lease = None

    def acquire() -> None:
        nonlocal lease
        lease = cache.acquire(NS, long)

    def finish() -> None:
        assert lease is not None
        cache.finish(lease, long, lease.pages, lease.n_tokens)
        cache.begin_plan(0, time.monotonic())

    acquire()
    out = {
        f"probe, {LONG} tokens, all cached": timed(lambda: cache.probe(NS, long), 2000),
        f"probe, {LONG} tokens, diverges at 20000": timed(lambda: cache.probe(NS, other), 2000),
        "probe, 1024 tokens, thousands of siblings": timed(lambda: cache.probe(NS, t.systems[3]), 2000),
        f"acquire, {LONG} tokens, all cached": timed(acquire, 2000, finish),
        f"finish, {LONG} tokens": timed(finish, 2000, acquire),
    }
    acquire()
    out["split and insert a 32-token branch"] = bench_insert(t)
    return out


def bench_insert(t: Turns) -> dict[str, float]:
    """A request that leaves a cached conversation inside an edge: acquire, alloc, publish, finish."""
    cuts = iter(t.rng.permutation(np.arange(1100, LONG - 64, PAGE))[:500])

    def branch() -> None:
        tokens, lease = prompt, t.cache.acquire(NS, prompt)
        fresh = t.cache.alloc(-(-len(tokens) // PAGE) - lease.n_tokens // PAGE)
        assert fresh is not None
        pages = np.concatenate((lease.pages, fresh))
        t.cache.publish(lease, tokens, pages, len(tokens), 1)
        t.cache.finish(lease, tokens, pages, len(tokens))

    def choose() -> None:
        nonlocal prompt
        prompt = np.concatenate((t.long[: next(cuts)], t.random(32)))
        t.cache.begin_plan(0, time.monotonic())

    prompt = t.long
    return timed(branch, 500, choose)


def bench_evict(n_leaves: int) -> dict[str, dict[str, float]]:
    """Evict from `n_leaves` leaves below one node, the worst case for sorted siblings."""
    rng = np.random.default_rng(1)
    head = rng.integers(0, VOCAB, 64, dtype=np.int32)
    size = 3 * PAGE
    cache = PrefixCache(3 * n_leaves + 1024, PAGE)
    prompts = rng.integers(0, VOCAB, (n_leaves + 301, size), dtype=np.int32)
    prompts[:, : len(head) // 4] = head[: len(head) // 4]
    rows = iter(prompts)
    for _ in range(n_leaves):
        put(cache, next(rows))

    def turn() -> None:
        """What a saturated server does: 64 old tokens make room for 64 new ones."""
        cache.evict(64 // PAGE)
        put(cache, np.concatenate((next(rows), head[:PAGE])))

    return {
        f"evict 1 page, {n_leaves} leaves": timed(lambda: cache.evict(1), 1000),
        f"evict 64 pages, {n_leaves} leaves": timed(lambda: cache.evict(64), min(200, n_leaves // 50)),
        f"evict 64 tokens + serve 64 tokens, {n_leaves} leaves": timed(turn, 300),
    }


def bench_sglang(n_leaves: int) -> dict[str, dict[str, float]] | str:
    """The same prompts in SGLang's RadixCache, or one line that says why not."""
    try:
        theirs = Theirs(PAGE)
    except Exception as why:  # whatever its own imports raise
        return f"SGLang's RadixCache cannot be loaded here: {type(why).__name__}: {why}"
    rng = np.random.default_rng(0)
    system, long = (rng.integers(0, VOCAB, n, dtype=np.int32) for n in (1024, LONG))
    long[:1024] = system
    for cut in range(2048, LONG + 1, 2048):
        theirs.put(long[:cut])
        theirs.put(np.concatenate((long[: cut - 512], rng.integers(0, VOCAB, PAGE, dtype=np.int32))))
    out = {f"match_prefix, {LONG} tokens, all cached": timed(theirs.match(long), 500)}
    for _ in range(n_leaves):
        theirs.put(np.concatenate((system[:PAGE], rng.integers(0, VOCAB, 2 * PAGE, dtype=np.int32))))
    out[f"evict 1 page, {n_leaves} leaves"] = timed(theirs.evict(PAGE), 20)
    out[f"evict 64 pages, {n_leaves} leaves"] = timed(theirs.evict(64 * PAGE), 20)
    return out


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{title:<58}{'p50':>10}{'p99':>10}{'max':>10}   us")
    for name, row in rows.items():
        print(f"{name:<58}{row['p50']:>10.1f}{row['p99']:>10.1f}{row['max']:>10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--leaves", default="1000,10000,41000")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"page size {PAGE}, python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}")
    results: dict[str, Any] = {"match": bench_match(args.nodes)}
    show(f"tree of {args.nodes} nodes", results["match"])
    for n in map(int, args.leaves.split(",")):
        results[f"evict {n}"] = bench_evict(n)
        show(f"{n} leaves", results[f"evict {n}"])
    sglang = results["sglang"] = bench_sglang(max(map(int, args.leaves.split(","))))
    show("SGLang", sglang) if isinstance(sglang, dict) else print(f"\n{sglang}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
