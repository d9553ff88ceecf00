"""A world to throw random operations at: the cache, a late device, and an obviously correct model.

The model is a set of the sequences that were ever made available. The best match of a prompt is its longest
common prefix with any of them: the cache must find exactly that as long as nothing was evicted or withdrawn,
and never more. Operations take small integers, so that hypothesis and a plain random generator both drive it.
"""

from __future__ import annotations

import numpy as np
import pytest

from radix import COMMITTED, LeaseError, Namespace, PrefixCache
from radix.events import AllBlocksCleared, BlockStored, KvEvent
from radix.hashes import follow, pages_of, seed, short
from tests.radix.helpers import Client, Hints, Run

SPACES = (Namespace(), Namespace(adapter=1), Namespace(salt="s"))
DEPTH = 2  # steps launched and not executed
BASES = tuple(np.random.default_rng(seed).integers(0, 3, 200).astype(np.int32) for seed in range(2))


class Known:
    """Every sequence made available, by namespace."""

    def __init__(self) -> None:
        self.sequences: dict[Namespace, set[tuple[int, ...]]] = {}

    def add(self, ns: Namespace, tokens: np.ndarray) -> None:
        self.sequences.setdefault(ns, set()).add(tuple(tokens.tolist()))

    def best(self, ns: Namespace, tokens: np.ndarray, limit: int) -> int:
        want = tuple(tokens.tolist())[:limit]
        return max((_common(want, seq) for seq in self.sequences.get(ns, ())), default=0)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Mirror:
    """What a router knows of the cache from its events alone."""

    def __init__(self) -> None:
        self.blocks: set[int] = {-1}  # something that only AllBlocksCleared at the start removes

    def __call__(self, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockStored):
                assert event.parent_block_hash is None or event.parent_block_hash in self.blocks
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                assert not self.blocks & set(event.block_hashes)
                self.blocks |= set(event.block_hashes)
            else:
                assert set(event.block_hashes) <= self.blocks
                self.blocks -= set(event.block_hashes)


class World:
    """Every operation checks what it can see; `check` audits the books."""

    def __init__(self, page_size: int, n_pages: int, **options: object) -> None:
        self.mirror = Mirror()
        self.cache = PrefixCache(n_pages, page_size, events=self.mirror, **options)  # type: ignore[arg-type]
        self.client = Client(self.cache)
        self.known = Known()
        self.exact = True  # nothing evicted or withdrawn since the cache was last empty
        self.planning = True
        self.hogs: list[np.ndarray] = []

    @property
    def runs(self) -> list[Run]:
        return self.client.runs

    def check(self) -> None:
        self.cache.audit([*self.client.private(), *self.hogs])
        self.cache.flush_events()
        assert self.mirror.blocks == self.held_blocks()

    def held_blocks(self) -> set[int]:
        """The hash of every whole page in the tree, computed from the root down."""
        out, tree = set(), self.cache.tree
        stack = [(root, seed(ns)) for ns, root in tree.roots.items()]
        while stack:
            node, digest = stack.pop()
            if not tree.is_tail(node):
                chain = list(follow(digest, pages_of(node.data, tree.page_bytes)))
                out |= set(map(short, chain))
                stack.extend((child, chain[-1] if chain else digest) for child in node.children.values())
        return out

    # -- steps -----------------------------------------------------------------------------------------------------

    def next_step(self) -> None:
        """Launch the plan that is open, or open the next; at most DEPTH steps stay in flight."""
        if not self.planning:
            self.client.plan()
        self.planning = not self.planning
        while len(self.client.queue) > DEPTH:
            self.client.execute()

    def commit(self) -> None:
        """The oldest step in flight executes."""
        if not self.planning and self.client.queue:
            self.client.execute()

    def fail(self) -> None:
        """The oldest step in flight fails."""
        if self.planning or not self.client.queue:
            return
        before = self.cache.tree.n_pages
        self.client.fail()
        self.client.queue.clear()
        self.exact &= self.cache.tree.n_pages == before

    # -- requests --------------------------------------------------------------------------------------------------

    def start(self, base: int, cut: int, fresh: int, slack: int, serve: bool) -> None:
        """A prompt: a piece of one of the base sequences, then tokens of its own. `serve`: planned whole at once."""
        if not self.planning:
            return
        own = np.array([(fresh >> i) % 3 for i in range(fresh % 5)], np.int32)
        tokens = np.concatenate((BASES[base % 2][: cut % (5 * self.cache.page_size + 3)], own))
        ns = SPACES[base % 7 // 5 + (base % 7 == 6)]
        limit = max(len(tokens) - slack, 0)
        before, found = self.cache.stats(), self.cache.probe(ns, tokens, limit)
        assert self.cache.stats() == before
        self.expect(ns, tokens, limit, found.total)
        run = self.client.try_start(tokens, ns, limit, self.advice(fresh))
        if run is not None:
            assert run.computed == found.total
        self.note(before)
        if run is not None and serve:
            self.prefill(-1, len(tokens), True, fresh % 2 == 0)

    def prefill(self, which: int, n: int, publish: bool, show: bool) -> None:
        if not self.planning or not self.runs:
            return
        run, before = self.pick(which), self.cache.stats()
        upto = min(run.computed + n, len(run.tokens))
        if self.client.prefill(run, upto, publish=publish, show=publish and show) and publish:
            self.known.add(run.lease.namespace, run.tokens[: upto if show else run.lease.n_tokens])
        self.note(before)

    def generate(self, which: int, base: int, n: int) -> None:
        """The request's sequence grows, along a base sequence or away from both."""
        if self.runs:
            run = self.pick(which)
            at = len(run.tokens)
            run.tokens = np.append(run.tokens, BASES[base % 2][at : at + n] if base < 2 else np.full(n, 2, np.int32))

    def advance(self, which: int) -> None:
        """A request with nothing of its own looks again for what others published."""
        ready = [r for r in self.runs if r.computed == r.lease.n_tokens and r.lease.leaf is None]
        if not self.planning or not ready:
            return
        run, before = ready[which % len(ready)], self.cache.stats()
        limit = max(len(run.tokens) - 1, run.computed)
        self.client.advance(run)
        if run in self.runs:
            self.expect(run.lease.namespace, run.tokens, limit, run.computed)
        self.note(before)

    def publish_late(self, which: int) -> None:
        """Publication at commit time."""
        if not self.planning and self.runs:
            run = self.pick(which)
            self.cache.publish(run.lease, run.tokens, run.pages, run.committed, COMMITTED)
            self.known.add(run.lease.namespace, run.tokens[: run.lease.n_tokens])

    def finish(self, which: int, keep: bool) -> None:
        if not self.runs:
            return
        run = self.pick(which)
        if self.planning and any(row[0] is run for row in self.client.queue[-1].rows):
            return  # a scheduler never ends a request that the open plan names
        self.client.finish(run, keep=keep)
        if keep:
            self.known.add(run.lease.namespace, run.tokens[: run.committed])
        with pytest.raises(LeaseError):
            self.cache.finish(run.lease, run.tokens, run.pages, 0)

    # -- pages -----------------------------------------------------------------------------------------------------

    def alloc(self, n: int) -> None:
        if not self.planning:
            return
        before = self.cache.stats()
        pages = self.cache.alloc(n)
        if pages is None:
            assert n > before["free"] + before["evictable"]
            assert self.cache.stats() == before
        else:
            assert len(pages) == n
            self.hogs.append(pages)
            self.scribble(pages)
        self.note(before)

    def free(self, which: int) -> None:
        if self.hogs:
            pages = self.hogs.pop(which % len(self.hogs))
            lease = self.cache.acquire(SPACES[0], pages[:0])
            self.cache.finish(lease, pages[:0], pages, 0, keep=False)

    def evict(self, n: int) -> None:
        before = self.cache.stats()
        assert self.cache.evict(n) == min(n, before["evictable"])
        self.note(before)

    def clear(self) -> None:
        if self.planning:
            return
        self.exact &= self.cache.clear() == 0
        if self.cache.tree.n_pages == 0:
            self.known, self.exact = Known(), True

    def teardown(self) -> None:
        """Everything ends, and the pool is whole again."""
        while self.client.queue:
            self.client.execute()
        self.client.plan()
        for run in list(self.runs):
            self.client.finish(run)
        self.cache.audit(self.hogs)
        self.client.plan()
        held = sum(len(pages) for pages in self.hogs)
        assert self.cache.n_free + self.cache.n_evictable + held == self.cache.pool.n_pages
        self.cache.clear()
        assert self.cache.n_free + held == self.cache.pool.n_pages
        assert not self.cache.tree.roots

    # -- inside ----------------------------------------------------------------------------------------------------

    def pick(self, which: int) -> Run:
        return self.runs[which % len(self.runs)]

    def advice(self, i: int) -> Hints | None:
        """Every kind of hint, from one of three programs or none."""
        if i % 3 == 0:
            return None
        wait = (None, 0.5, 20.0)[i // 3 % 3]
        ttl = (None, None, 3.0)[i // 9 % 3]
        return Hints((None, "a", "b", "c")[i % 4], wait, i % 7 == 0, ttl, (0, 0, 2, -1)[i // 5 % 4], i % 5, i // 2 % 4)

    def scribble(self, pages: np.ndarray) -> None:
        """Whoever is given a page writes all over it in the same step."""
        slots = self.client.slots(pages, 0, len(pages) * self.cache.page_size)
        self.client.queue[-1].stores.extend((int(slot), 99) for slot in slots)

    def expect(self, ns: Namespace, tokens: np.ndarray, limit: int, total: int) -> None:
        best = self.known.best(ns, tokens, limit)
        assert total == best if self.exact else total <= best

    def note(self, before: dict[str, int]) -> None:
        self.exact &= self.cache.stats()["evicted"] == before["evicted"]
