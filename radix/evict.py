"""What leaves the cache first: policies that score leaves, and one persistent lazy heap of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count
from typing import Any, Protocol

from radix.hints import NEVER, awaited, retain_level
from radix.tree import Namespace, Node, RadixTree

Score = tuple[Any, ...]
Floors = Mapping[Namespace, int] | Callable[[Namespace], int]
MAX_SEGMENTS = 2
SLACK = 64  # entries a heap may hold beyond twice the tree's nodes before it is swept
RETURN_HINTS = frozenset({"expect_return_s", "expected_fanout", "depth", "final"})
RETAIN_HINTS = frozenset({"retain"})


class EvictionPolicy(Protocol):
    """Scores leaves; the lowest goes first. The tail of the lowest leaf is trimmed, page by page.

    A score may rise unannounced as time passes or a leaf is used. It may fall only when the cache offers the
    leaf again (a hint came) or at the time that `falls_at` told. Leaves may be kept in up to MAX_SEGMENTS
    segments, each with its own order; a leaf's segment may change when it is used.
    """

    name: str
    honours: frozenset[str]  # the hints that change its scores

    def segment(self, node: Node) -> int:
        """Which segment the leaf is in, from 0."""
        ...

    def first(self, tree: RadixTree) -> Sequence[int]:
        """The segments, in the order in which to look for a victim now."""
        ...

    def score(self, node: Node, now: float) -> Score: ...

    def falls_at(self, node: Node, now: float) -> float | None:
        """When the score falls by itself, if it will."""
        ...


class Lru:
    """Least recently used first."""

    name = "lru"
    honours: frozenset[str] = frozenset()

    def segment(self, node: Node) -> int:
        return 0

    def first(self, tree: RadixTree) -> Sequence[int]:
        return (0,)

    def score(self, node: Node, now: float) -> Score:
        return (node.last_used,)

    def falls_at(self, node: Node, now: float) -> float | None:
        return None


class Lfu(Lru):
    """Least often hit first, then least recently used. For workloads whose popular prefixes do not change."""

    name = "lfu"

    def score(self, node: Node, now: float) -> Score:
        return (node.hits, node.last_used)


class Slru(Lru):
    """Segmented LRU: pages never hit go first, as long as those that were take no more than their share.

    A flood of prompts that nobody shares cannot flush the shared ones, and these cannot squat: beyond
    `protected` of the pool the least recently used of them goes.
    """

    name = "slru"

    def __init__(self, n_pages: int, protected: float = 1 / 3) -> None:
        self.quota = int(protected * n_pages)

    def segment(self, node: Node) -> int:
        return 1 if node.hits else 0

    def first(self, tree: RadixTree) -> Sequence[int]:
        return (1, 0) if tree.n_hit > self.quota else (0, 1)


class Priority(Lru):
    """Lowest retention priority first (0 without a hint), then least recently used."""

    name = "priority"
    honours = RETAIN_HINTS

    def score(self, node: Node, now: float) -> Score:
        return (retain_level(node, now), node.last_used)

    def falls_at(self, node: Node, now: float) -> float | None:
        return node.retain_until if retain_level(node, now) > 0 else None


class Return(Priority):
    """Farthest predicted return first; without hints, exactly LRU.

    A leaf idle for t seconds is expected to stay idle for about t more (idle times of agents have heavy tails),
    so LRU order is order of predicted return. A hint replaces the guess: due at T, the leaf is treated as one
    idle for T - now, that is, last used at 2 now - T. Once overdue it ages from T on like any other. A program
    that is done (T = never) goes first; retained leaves go after all others, by priority.
    """

    name = "hints"
    honours = RETURN_HINTS | RETAIN_HINTS

    def score(self, node: Node, now: float) -> Score:
        due = node.back_at
        used = node.last_used if due is None else min(due, 2 * now - due)
        return (retain_level(node, now), awaited(node, now), used, node.last_used)

    def falls_at(self, node: Node, now: float) -> float | None:
        ends = [t for t in (super().falls_at(node, now), node.await_until) if t is not None and t > now]
        return min(ends, default=None)


def label(node: Node, now: float) -> str:
    """The class a victim is counted in."""
    if node.back_at == NEVER:
        return "final"
    if retain_level(node, now) > 0:
        return "retained"
    if awaited(node, now):
        return "awaited"
    if node.back_at is not None:
        return "overdue" if node.back_at < now else "expected"
    return "reused" if node.hits else "unused"


class EvictionHeap:
    """Every unpinned leaf has one live entry, scored at most as high as the leaf is now.

    Touching or pinning a leaf costs nothing here: a popped entry that has become stale is dropped (pinned, no
    longer a leaf, superseded) or pushed back with today's score. Nothing ever scans the tree.

    `floors`: pages a namespace keeps while others have some to give. Its leaves are parked, out of the heap,
    from when eviction meets them until the namespace grows. `now` is the time of the plan.
    """

    __slots__ = ("_floor_of", "_segments", "_tick", "_timers", "_tree", "now", "parked", "policy")

    def __init__(self, tree: RadixTree, policy: EvictionPolicy, floors: Floors | None = None) -> None:
        self.policy = policy
        self._floor_of = floors if callable(floors) else partial(_floor, dict(floors or {}))
        self.parked: dict[Namespace, set[Node]] = {}
        self.now = 0.0
        self._tree = tree
        self._segments: list[list[tuple[Score, int, Node, int, float | None]]] = [[] for _ in range(MAX_SEGMENTS)]
        self._timers: list[tuple[float, int, Node]] = []  # when a score falls by itself
        self._tick = count()

    def tick(self, now: float) -> None:
        """Time has come to `now`: leaves whose score fell by itself are offered again."""
        self.now = now
        while self._timers and self._timers[0][0] <= now:
            self.offer(heapq.heappop(self._timers)[2])

    def offer(self, node: Node) -> None:
        """`node` may have become evictable, or its score may have fallen."""
        if not node.evictable:
            return
        score = self.policy.score(node, self.now)
        entry = node.entry
        policy = self.policy
        if (
            entry is None
            or score < entry[0]
            or entry[3] != policy.segment(node)
            or entry[4] != policy.falls_at(node, self.now)
        ):
            self._push(score, node)

    def pop(self) -> Node | None:
        """The coldest evictable leaf, no longer in the heap; None when there is none."""
        for segment in self.policy.first(self._tree):
            leaf = self._pop(segment)
            if leaf is not None:
                return leaf
        return None

    def _pop(self, segment: int) -> Node | None:
        entries = self._segments[segment]
        while entries:
            entry = heapq.heappop(entries)
            node = entry[2]
            if node.entry is not entry:
                continue
            node.entry = None
            if not node.evictable:
                continue
            score = self.policy.score(node, self.now)
            if score > entry[0] or self.policy.segment(node) != segment:
                self._push(score, node)
                continue
            return node
        return None

    # -- floors ------------------------------------------------------------------------------------------------

    def spare(self, leaf: Node) -> int:
        """Pages that may be cut off `leaf` before its namespace is down to its floor."""
        return min(leaf.n_pages, leaf.root.n_pages_below - self._floor_of(leaf.root.namespace))

    def park(self, leaf: Node) -> None:
        self.parked.setdefault(leaf.root.namespace, set()).add(leaf)

    def unpark(self, namespace: Namespace) -> None:
        """The namespace has grown, or nothing else is left."""
        for leaf in self.parked.pop(namespace, ()):
            self.offer(leaf)

    # -- inside ------------------------------------------------------------------------------------------------

    def covered(self) -> Iterator[tuple[Node, Score | None]]:
        """Every node that eviction can reach, with its entry's score (None: parked); for the audit."""
        yield from ((e[2], e[0]) for e in chain.from_iterable(self._segments) if e[2].entry is e)
        yield from ((leaf, None) for leaves in self.parked.values() for leaf in leaves)

    def __len__(self) -> int:
        return sum(map(len, self._segments))

    def _push(self, score: Score, node: Node) -> None:
        if len(self) > 2 * self._tree.n_nodes + SLACK:
            self._sweep()
        segment = self.policy.segment(node)
        falls = self.policy.falls_at(node, self.now)
        entry = (score, next(self._tick), node, segment, falls)
        node.entry = entry
        heapq.heappush(self._segments[segment], entry)
        if falls is not None:
            heapq.heappush(self._timers, (falls, next(self._tick), node))

    def _sweep(self) -> None:
        """Drop superseded entries. At least half are, so each push pays for its own removal once."""
        for entries in self._segments:
            entries[:] = [entry for entry in entries if entry[2].entry is entry]
            heapq.heapify(entries)


def _floor(floors: Mapping[Namespace, int], namespace: Namespace) -> int:
    return floors.get(namespace, 0)


def make_policy(policy: str | EvictionPolicy, n_pages: int) -> EvictionPolicy:
    """A policy by name, or the given one. Raises ValueError for an unknown name."""
    if not isinstance(policy, str):
        return policy
    known: list[EvictionPolicy] = [Lru(), Lfu(), Slru(n_pages), Priority(), Return()]
    for each in known:
        if each.name == policy:
            return each
    raise ValueError(f"unknown eviction policy {policy!r}; known: {', '.join(each.name for each in known)}")
