"""A tiny scheduler and device for tests. The device keeps a fake KV, one token id a slot, and runs steps in order.

A row's page table is copied when it is planned and read only when its step executes, so a page that was given
away too early, or never written, is caught by what the row reads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from radix import Lease, Namespace, PrefixCache

NS = Namespace()


@dataclass(frozen=True)
class Hints:
    """What an agent may say; the shape of the runtime's."""

    program_id: str | None = None
    expect_return_s: float | None = None
    final: bool = False
    retain_ttl_s: float | None = None
    retain_priority: int = 0
    expected_fanout: int = 0
    depth: int = 0


GARBAGE = -2


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def seq(n: int, start: int = 1000) -> np.ndarray:
    """start, start + 1, ... : n distinct tokens."""
    return np.arange(start, start + n, dtype=np.int32)


@dataclass(eq=False)
class Run:
    """A running request: its tokens, its page table, how many tokens are planned and how many committed."""

    lease: Lease
    tokens: np.ndarray
    pages: np.ndarray
    computed: int
    committed: int
    hints: Hints | None = None


@dataclass
class Step:
    """A planned step: slots to store, slots to copy, and what each row reads."""

    number: int
    stores: list[tuple[int, int]] = field(default_factory=list)  # (slot, token)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from slot, to slot)
    rows: list[tuple[Run, np.ndarray, int]] = field(default_factory=list)  # (run, page table, kv_len)


class Client:
    """Does what a scheduler does and what a device does with it."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.kv = np.full(cache.pool.n_pages * cache.page_size, -1, np.int32)
        self.runs: list[Run] = []
        self.queue: deque[Step] = deque()
        self.step = 0
        self.plan()

    # -- steps -----------------------------------------------------------------------------------------------------

    def plan(self) -> int:
        """Begin the next plan."""
        self.step += 1
        self.cache.begin_plan(self.step, float(self.step))
        self.queue.append(Step(self.step))
        return self.step

    def execute(self) -> None:
        """The device runs the oldest step: stores, then copies, then every row reads its whole context."""
        step = self.queue.popleft()
        for slot, token in step.stores:
            self.kv[slot] = token
        for source, target in step.copies:
            self.kv[target] = self.kv[source]
        for run, pages, kv_len in step.rows:
            assert np.array_equal(self.kv[self.slots(pages, 0, kv_len)], run.tokens[:kv_len])
            run.committed = max(run.committed, kv_len)

    def drain(self) -> None:
        """Run every step that is planned; the current plan goes on, empty."""
        while self.queue:
            self.execute()
        self.queue.append(Step(self.step))

    def fail(self) -> int:
        """The oldest step fails, and so does what was planned after it: nothing they were to write is right.

        But a slot that held the very token before still does: a failed step wrote the right value or none.
        """
        failed = self.queue[0].number
        rows = {id(run) for step in self.queue for run, _, _ in step.rows}
        for step in self.queue:
            for slot, token in step.stores:
                if self.kv[slot] != token:
                    self.kv[slot] = GARBAGE
            for _, target in step.copies:
                self.kv[target] = GARBAGE
        self.queue.clear()
        holders = self.cache.holders(failed)
        for run in [run for run in self.runs if id(run) in rows or run.lease in holders]:
            self.finish(run, keep=False)
        n = self.cache.withdraw(failed)
        self.queue.append(Step(self.step))
        return n

    def slots(self, pages: np.ndarray, start: int, stop: int) -> np.ndarray:
        i = np.arange(start, stop)
        size = self.cache.page_size
        return pages[i // size].astype(np.int64) * size + i % size

    # -- requests --------------------------------------------------------------------------------------------------

    def start(
        self, tokens: np.ndarray, ns: Namespace = NS, limit: int | None = None, hints: Hints | None = None
    ) -> Run:
        """Acquire a lease where there is room for it."""
        run = self.try_start(tokens, ns, limit, hints)
        assert run is not None
        return run

    def try_start(
        self, tokens: np.ndarray, ns: Namespace = NS, limit: int | None = None, hints: Hints | None = None
    ) -> Run | None:
        """Acquire a lease; None when there is no page to copy the tail to."""
        lease = self.cache.acquire(ns, tokens, limit, hints=hints)
        run = Run(lease, np.array(tokens, np.int32), lease.pages, lease.n_tokens, lease.n_tokens, hints)
        self.runs.append(run)
        return run if self.take_tail(run) else None

    def take_tail(self, run: Run) -> bool:
        """Adopt or copy the lease's tail. On failure the run ends."""
        tail = run.lease.tail
        if tail is None:
            return True
        page = tail.page
        if not tail.adopted:
            fresh = self.cache.alloc(1)
            if fresh is None:
                self.finish(run, keep=False)
                return False
            page = int(fresh[0])
            size = self.cache.page_size
            copies = [(tail.page * size + i, page * size + i) for i in range(tail.n)]
            self.queue[-1].copies.extend(copies)
        run.pages = np.append(run.pages, np.int32(page))
        run.computed += tail.n
        self.queue[-1].rows.append((run, run.pages.copy(), run.computed))
        return True

    def prefill(self, run: Run, upto: int | None = None, *, publish: bool = True, show: bool = False) -> bool:
        """Plan the tokens up to `upto`, publishing the whole pages, with `show` the rest too; False: no pages."""
        upto = len(run.tokens) if upto is None else upto
        need = -(-upto // self.cache.page_size) - len(run.pages)
        if need > 0:
            fresh = self.cache.alloc(need)
            if fresh is None:
                return False
            run.pages = np.append(run.pages, fresh)
        if publish:
            self.cache.publish(run.lease, run.tokens, run.pages, upto, self.step)
        if show:
            self.cache.show_tail(run.lease, run.tokens, run.pages, upto, self.step)
        stores = zip(self.slots(run.pages, run.computed, upto), run.tokens[run.computed : upto], strict=True)
        self.queue[-1].stores.extend((int(slot), int(token)) for slot, token in stores)
        run.computed = max(run.computed, upto)
        self.queue[-1].rows.append((run, run.pages.copy(), run.computed))
        return True

    def advance(self, run: Run) -> int:
        """Look again for what others published; for a run that has nothing private."""
        self.cache.advance(run.lease, run.tokens)
        run.pages, run.computed = run.lease.pages, run.lease.n_tokens
        self.queue[-1].rows.append((run, run.pages.copy(), run.computed))
        self.take_tail(run)
        return run.computed

    def finish(self, run: Run, *, keep: bool = True) -> None:
        self.cache.finish(run.lease, run.tokens, run.pages, run.committed, keep, hints=run.hints)
        self.runs.remove(run)

    def end(self, run: Run) -> None:
        """Run what is planned, then finish."""
        self.drain()
        self.finish(run)

    def serve(self, tokens: np.ndarray, ns: Namespace = NS, hints: Hints | None = None) -> int:
        """Run one request from start to end, a second after the last; returns how many tokens were cached."""
        self.plan()
        run = self.start(tokens, ns, hints=hints)
        cached = run.computed
        assert self.prefill(run)
        self.end(run)
        self.audit()
        return cached

    # -- checks ----------------------------------------------------------------------------------------------------

    def check_match(self, tokens: np.ndarray, ns: Namespace = NS, limit: int | None = None) -> int:
        """How many tokens a probe finds. Runs what is planned and checks that the pages hold those tokens."""
        self.drain()
        match = self.cache.probe(ns, tokens, limit)
        if match.tail is not None:
            page, r = match.tail
            want = tokens[match.n_tokens : match.n_tokens + r]
            assert np.array_equal(self.kv[page * self.cache.page_size :][:r], want)
        return match.total

    def private(self) -> list[np.ndarray]:
        """Pages that running requests own, beyond leased and adopted ones."""
        size = self.cache.page_size
        return [r.pages[r.lease.n_tokens // size + (r.lease.leaf is not None) :] for r in self.runs]

    def audit(self) -> None:
        self.cache.audit(self.private())
