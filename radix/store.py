"""Where cached pages live and how they leave: the tree, the pool and the eviction heap, kept in step."""

from __future__ import annotations

from collections import Counter

import numpy as np

from radix.events import EventLog, EventSink
from radix.evict import EvictionHeap, EvictionPolicy, Floors, label, make_policy
from radix.explain import Ghosts
from radix.hashes import digests
from radix.pages import REQUEST, TREE, Ids, PagePool
from radix.tree import Node, RadixTree
from radix.withdraw import doomed

REMEMBER = 65_536  # evicted pages that `explain` knows of, and at most
REMEMBER_POOLS = 8  # times as many as there are
COMMITTED = -1  # the step of pages whose KV is known to be written: no failure withdraws them


class PageStore:
    """What leaves the tree is given back to the pool here, offered to the heap, remembered and announced."""

    def __init__(
        self,
        n_pages: int,
        page_size: int,
        policy: str | EvictionPolicy,
        floors: Floors | None,
        events: EventSink | None,
    ) -> None:
        self.pool = PagePool(n_pages, page_size)
        self.tree = RadixTree(page_size)
        self.heap = EvictionHeap(self.tree, make_policy(policy, n_pages), floors)
        self.log = EventLog(self.tree, events) if events is not None else None
        self.ghosts = Ghosts(min(REMEMBER, REMEMBER_POOLS * n_pages))
        self.evicted: Counter[str] = Counter()  # pages, by class of their leaf
        self.page_step = np.full(n_pages, COMMITTED, np.int64)  # the step that writes a published page

    @property
    def n_evictable(self) -> int:
        """Pages that eviction can free: those of the tree that nobody pins."""
        return self.tree.n_pages - self.tree.n_pinned

    def alloc(self, n: int) -> Ids | None:
        """`n` pages for a request, evicting as needed; None, with nothing changed, if impossible."""
        short = n - self.pool.n_free
        if short > 0:
            if short > self.n_evictable:
                return None
            self.evict(short)
        return self.pool.take(n, REQUEST)

    def evict(self, n: int) -> int:
        """Free up to `n` cached pages, from the tails of the coldest unpinned leaves. Returns how many."""
        freed = self._evict(n)
        if freed < n and self.heap.parked:  # floors are soft: nothing else is left
            self._unpark_all()
            freed += self._evict(n - freed, floors=False)
        return freed

    def _evict(self, n: int, *, floors: bool = True) -> int:
        freed: list[Ids] = []
        left = n
        while left > 0 and (leaf := self.heap.pop()) is not None:
            k = min(left, self.heap.spare(leaf) if floors else leaf.n_pages)
            if k <= 0:
                self.heap.park(leaf)
                continue
            self.evicted[label(leaf, self.heap.now)] += k
            self._tell_removed(leaf, k)
            freed.append(self._cut(leaf, k))
            left -= k
        self._free(freed)
        return n - left

    def drop_redundant(self, leaf: Node, *, quarantine: bool) -> None:
        """Remove an unpinned tail leaf whose tokens a sibling holds: nothing is lost by it."""
        give_back = self.pool.quarantine if quarantine else self.pool.free
        give_back(self._cut(leaf, 1), TREE)

    def drop_shorter_tail(self, node: Node) -> None:
        """A sibling tail leaf that `node` begins with is worth nothing any more, unless someone holds it."""
        tail = self.tree.shorter_tail(node)
        if tail is not None and tail.evictable:
            self.drop_redundant(tail, quarantine=False)

    def withdraw(self, step: int) -> int | Node:
        """Quarantine every page that `step` or a later one writes, and all below it; or the pinned node in the way."""
        cuts = doomed(self.tree, self.page_step, step)
        for node, _ in cuts:
            if node.pins:
                return node
        for node, k in cuts:
            self._tell_removed(node, k)
            self.pool.quarantine(self._cut(node, k), TREE)
        return sum(k for _, k in cuts)

    def clear(self) -> int:
        """Free all that nobody pins. Returns the number of pages."""
        self._unpark_all()
        before, all_goes = self.tree.n_pages, not self.tree.n_pinned
        freed = []
        while (leaf := self.heap.pop()) is not None:
            if not all_goes:
                self._tell_removed(leaf, leaf.n_pages)
            freed.append(self._cut(leaf, leaf.n_pages))
        self._free(freed)
        self.ghosts.clear()
        if all_goes and self.log is not None:
            self.log.cleared()
        return before - self.tree.n_pages

    def _cut(self, leaf: Node, k: int) -> Ids:
        """Take the last `k` pages off an unpinned leaf and return them; what becomes a leaf by it is offered."""
        parent = leaf.parent
        pages = self.tree.trim(leaf, k)
        self.heap.offer(leaf)
        if parent is not None and not leaf.n_pages:
            self.heap.offer(parent)
        return pages

    def _free(self, parts: list[Ids]) -> None:
        if parts:
            self.pool.free(np.concatenate(parts), TREE)

    def _tell_removed(self, leaf: Node, k: int) -> None:
        """The last `k` pages' tokens are lost: remember it, and announce whole pages."""
        gone = digests(self.tree, leaf)[-k:]
        self.ghosts.add(gone)
        if self.log is not None and not self.tree.is_tail(leaf):
            self.log.removed(gone)

    def _unpark_all(self) -> None:
        for namespace in list(self.heap.parked):
            self.heap.unpark(namespace)
