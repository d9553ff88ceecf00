"""A tiny client of the cache for tests: it runs requests and keeps a fake KV, one token a slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radix import Lease, Namespace, PrefixCache

NS = Namespace()


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def seq(n: int, start: int = 1000) -> np.ndarray:
    """start, start + 1, ... : n distinct tokens."""
    return np.arange(start, start + n, dtype=np.int32)


@dataclass
class Run:
    """A running request: its tokens, its page table and how many tokens have KV."""

    lease: Lease
    tokens: np.ndarray
    pages: np.ndarray
    computed: int


class Client:
    """Does what a scheduler does, one request at a time, and stores each token's id in its KV slot."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.kv = np.full((cache.pool.n_pages, cache.page_size), -1, np.int32)
        self.step = 0
        self.runs: list[Run] = []
        self.plan()

    def plan(self) -> int:
        self.step += 1
        self.cache.begin_plan(self.step, float(self.step))
        return self.step

    def start(self, tokens: np.ndarray, ns: Namespace = NS, limit: int | None = None) -> Run | None:
        """Acquire, adopt or copy the tail; None when there is no page for the copy."""
        lease = self.cache.acquire(ns, tokens, limit)
        pages, computed = lease.pages, lease.n_tokens
        if lease.tail is not None:
            page = lease.tail.page
            if not lease.tail.adopted:
                fresh = self.cache.alloc(1)
                if fresh is None:
                    self.cache.finish(lease, tokens, pages, computed, keep=False)
                    return None
                self.kv[fresh[0], : lease.tail.n] = self.kv[page, : lease.tail.n]
                page = int(fresh[0])
            pages = np.append(pages, np.int32(page))
            computed += lease.tail.n
        run = Run(lease, np.array(tokens, np.int32), pages, computed)
        self.runs.append(run)
        return run

    def prefill(self, run: Run, upto: int | None = None, *, publish: bool = True) -> bool:
        """Compute tokens up to `upto` in one step, publishing the whole pages as they are planned."""
        upto = len(run.tokens) if upto is None else upto
        need = -(-upto // self.cache.page_size) - len(run.pages)
        if need > 0:
            fresh = self.cache.alloc(need)
            if fresh is None:
                return False
            run.pages = np.append(run.pages, fresh)
        if publish:
            self.cache.publish(run.lease, run.tokens, run.pages, upto, self.step)
        for i in range(run.computed, upto):
            self.kv[run.pages[i // self.cache.page_size], i % self.cache.page_size] = run.tokens[i]
        run.computed = max(run.computed, upto)
        return True

    def finish(self, run: Run, *, keep: bool = True) -> None:
        self.cache.finish(run.lease, run.tokens, run.pages, run.computed, keep)
        self.runs.remove(run)

    def serve(self, tokens: np.ndarray, ns: Namespace = NS) -> int:
        """Run one request from start to end; returns how many tokens were cached."""
        self.plan()
        run = self.start(tokens, ns)
        assert run is not None
        cached = run.computed
        assert self.prefill(run)
        self.check(run)
        self.finish(run)
        self.audit()
        return cached

    def check(self, run: Run) -> None:
        """The KV that the page table names is exactly the request's tokens."""
        size = self.cache.page_size
        i = np.arange(run.computed)
        assert np.array_equal(self.kv[run.pages[i // size], i % size], run.tokens[: run.computed])

    def check_match(self, tokens: np.ndarray, ns: Namespace = NS, limit: int | None = None) -> int:
        """Probe, check that the pages named hold exactly those tokens, and return how many there are."""
        match = self.cache.probe(ns, tokens, limit)
        if match.tail is not None:
            page, r = match.tail
            want = tokens[match.n_tokens : match.n_tokens + r]
            assert np.array_equal(self.kv[page, :r], want)
        return match.total

    def private(self) -> list[np.ndarray]:
        """Pages that running requests own, beyond leased and adopted ones."""
        size = self.cache.page_size
        return [r.pages[r.lease.n_tokens // size + (r.lease.leaf is not None) :] for r in self.runs]

    def audit(self) -> None:
        self.cache.audit(self.private())
