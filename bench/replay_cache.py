"""Replay a trace against the prefix cache, without a model: what would each policy have saved?

    python bench/replay_cache.py bench/data/sessions.jsonl.gz --concurrency 16 --pools 1.5M,2M,2.5M
    python bench/replay_cache.py conversation_trace.jsonl.gz --pools 1.536M,5.12M --policies lru,lfu,slru --svg out.svg

The real PrefixCache runs with one page a block. Every request is served at its time in an instant and its
prompt is left in the cache; answers are not (a trace does not tell their blocks). `recomputed` counts prompt
tokens that were not cached. `gap` is the share of the distance from LRU to the clairvoyant policy (which evicts
what returns last, knowing the future) that a policy covers. `--hints`: what the agents say when they finish:
none, close (the program's last request is marked final) or tools (and when they expect to return, the median
gap seen so far after the same kind of stop).
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
from bisect import insort
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from bench.svg import line_chart
from bench.traces import Trace, Turn, load
from radix import Namespace, PrefixCache

NS = Namespace()


@dataclass(frozen=True, slots=True)
class Hints:
    program_id: str | None = None
    expect_return_s: float | None = None
    final: bool = False
    retain_ttl_s: float | None = None
    retain_priority: int = 0
    expected_fanout: int = 0
    depth: int = 0


@dataclass(slots=True)
class Result:
    policy: str
    hints: str
    pool_tokens: int
    prompt_tokens: int = 0
    recomputed: int = 0
    evicted_by: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return 1.0 - self.recomputed / self.prompt_tokens if self.prompt_tokens else 0.0


class Advice:
    """What an agent that tells the truth would say at the end of each request."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.left: dict[str, tuple[float, str]] = {}  # program -> when and why its last request stopped
        self.gaps: dict[str, list[float]] = defaultdict(list)

    def of(self, turn: Turn) -> Hints | None:
        if self.kind == "none" or turn.program is None:
            return None
        expect = None
        if self.kind == "tools":
            if turn.program in self.left:
                t, stop = self.left[turn.program]
                insort(self.gaps[stop], turn.t - t)
            self.left[turn.program] = (turn.t, turn.stop)
            seen = self.gaps[turn.stop]
            expect = seen[len(seen) // 2] if seen else None
        return Hints(turn.program, expect, turn.last)


def replay(trace: Trace, pool_tokens: int, policy: str, hints: str = "none") -> Result:
    """Serve every request of the trace from a pool of `pool_tokens`."""
    cache = PrefixCache(pool_tokens // trace.block_size, 1, policy=policy)
    advice = Advice(hints)
    result = Result(policy, hints, pool_tokens)
    for step, turn in enumerate(trace.turns):
        cache.begin_plan(step, turn.t)
        cached = serve(cache, turn, advice.of(turn))
        result.prompt_tokens += turn.n_tokens
        result.recomputed += turn.n_tokens - cached * trace.block_size
    result.evicted_by = cache.stats()["evicted_by"]
    return result


def serve(cache: PrefixCache, turn: Turn, hints: Hints | None) -> int:
    """One request from acquire to finish; returns how many of its blocks were cached."""
    blocks = turn.blocks
    lease = cache.acquire(NS, blocks, len(blocks), hints=hints)
    cached = lease.n_tokens
    fresh = cache.alloc(len(blocks) - cached)
    if fresh is None:  # larger than the pool
        cache.finish(lease, blocks, lease.pages, cached, keep=False, hints=hints)
        return cached
    cache.finish(lease, blocks, np.concatenate((lease.pages, fresh)), len(blocks), hints=hints)
    return cached


def clairvoyant(trace: Trace, pool_tokens: int) -> Result:
    """The fewest recomputed tokens a pool allows: evict what is used again last.

    Blocks with the same last and next use are interchangeable (a prefix is never used later than what follows
    it), so groups of them are counted, not single blocks.
    """
    last_id = max((b for turn in trace.turns for _, b in turn.ranges), default=0)
    never = len(trace.turns)
    next_use = np.full(last_id + 1, never, np.int64)
    leaves: list[list[tuple[int, int]]] = []  # of each request: (next request that uses them, how many blocks)
    for i in range(never - 1, -1, -1):
        blocks = trace.turns[i].blocks
        uses, counts = np.unique(next_use[blocks], return_counts=True)
        leaves.append(list(zip(uses.tolist(), counts.tolist(), strict=True)))
        next_use[blocks] = i
    leaves.reverse()
    return _count_groups(trace, pool_tokens, leaves)


def _count_groups(trace: Trace, pool_tokens: int, leaves: list[list[tuple[int, int]]]) -> Result:
    capacity = pool_tokens // trace.block_size
    result = Result("clairvoyant", "-", pool_tokens)
    resident: dict[int, int] = defaultdict(int)  # next use -> blocks that wait for it in the cache
    heap: list[int] = []  # minus each next use
    total = 0
    for i, turn in enumerate(trace.turns):
        hits = resident.pop(i, 0)
        result.prompt_tokens += turn.n_tokens
        result.recomputed += turn.n_tokens - hits * trace.block_size
        total -= hits
        for use, count in leaves[i]:
            if use not in resident:
                heapq.heappush(heap, -use)
            resident[use] += count
            total += count
        while total > capacity:
            use = -heap[0]
            cut = min(resident[use], total - capacity)
            resident[use] -= cut
            total -= cut
            if resident[use] == 0:
                heapq.heappop(heap)
                del resident[use]
    return result


def sizes(text: str) -> list[int]:
    """'0.5M,200k,4096' as tokens."""
    scale = {"k": 1_000, "M": 1_000_000}
    return [int(float(x[:-1]) * scale[x[-1]]) if x[-1] in scale else int(x) for x in text.split(",")]


def report(trace: Trace, results: list[Result]) -> None:
    infinite = clairvoyant(trace, trace.block_size * 2**40).recomputed
    print(f"{trace.name}: {len(trace.turns)} requests, {trace.n_tokens / 1e6:.1f} M prompt tokens, "
          f"{infinite / 1e6:.1f} M of them new; block {trace.block_size}")  # fmt: skip
    print(f"{'pool':>8} {'policy':<12} {'hints':<6} {'hit rate':>8} {'recomputed':>12} {'x new':>6} {'vs lru':>7} "
          f"{'gap':>6}  evicted by class")  # fmt: skip
    for pool in sorted({r.pool_tokens for r in results}):
        rows = [r for r in results if r.pool_tokens == pool]
        lru = next((r.recomputed for r in rows if r.policy == "lru"), math.nan)
        best = next(r.recomputed for r in rows if r.policy == "clairvoyant")
        for r in rows:
            gap = (lru - r.recomputed) / (lru - best) if lru != best else math.nan
            by = ", ".join(f"{name} {n}" for name, n in sorted(r.evicted_by.items()))
            print(f"{pool / 1e6:>7.2f}M {r.policy:<12} {r.hints:<6} {r.hit_rate:>8.1%} {r.recomputed:>12,} "
                  f"{r.recomputed / infinite:>6.2f} {r.recomputed / lru - 1:>+7.1%} {gap:>6.0%}  {by}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--pools", default="1M,2M,4M", help="pool sizes in tokens")
    parser.add_argument("--policies", default="lru,slru,hints", help="lru, lfu, slru, priority, hints")
    parser.add_argument("--hints", default="none,close", help="none, close, tools; all but none for hints only")
    parser.add_argument("--concurrency", type=float, default=100.0, help="sessions alive at once, on average")
    parser.add_argument("--seed", type=int, default=0, help="of the sessions' start times")
    parser.add_argument("--limit", type=int, help="read only the first lines")
    parser.add_argument("--svg", type=Path, help="plot hit rate over pool size")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    trace = load(args.trace, concurrency=args.concurrency, seed=args.seed, limit=args.limit)
    results = []
    for pool in sizes(args.pools):
        for policy in args.policies.split(","):
            for hints in args.hints.split(",") if policy == "hints" else ["none"]:
                results.append(replay(trace, pool, policy, hints))
        results.append(clairvoyant(trace, pool))
    report(trace, results)
    if args.svg:
        lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for r in results:
            name = f"{r.policy} ({r.hints})" if r.policy == "hints" else r.policy
            lines[name].append((r.pool_tokens / 1e6, 100 * r.hit_rate))
        args.svg.write_text(line_chart(f"{trace.name}: hit rate by pool size", "pool, M tokens", "%", lines))
    if args.json:
        args.json.write_text(json.dumps([asdict(r) | {"hit_rate": r.hit_rate} for r in results], indent=1))


if __name__ == "__main__":
    main()
