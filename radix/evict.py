"""What leaves the cache first: a policy that scores leaves, and one persistent lazy heap of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import Any, Protocol

from radix.tree import Node, RadixTree

Score = tuple[Any, ...]
SLACK = 64  # entries a heap may hold beyond twice the tree's nodes before it is swept


class HintsLike(Protocol):
    """Soft advice of an agent about what it leaves in the cache; `runtime.messages.Hints` has this shape."""

    @property
    def program_id(self) -> str | None: ...
    @property
    def expect_return_s(self) -> float | None: ...
    @property
    def final(self) -> bool: ...
    @property
    def retain_ttl_s(self) -> float | None: ...
    @property
    def retain_priority(self) -> int: ...


class EvictionPolicy(Protocol):
    """Scores leaves; the lowest goes first. A score may rise between two calls, never fall unannounced."""

    name: str

    def score(self, node: Node) -> Score: ...


class Lru:
    """Least recently used first."""

    name = "lru"

    def score(self, node: Node) -> Score:
        return (node.last_used,)


class EvictionHeap:
    """Every unpinned leaf has one live entry, scored at most as high as the leaf is now.

    Touching or pinning a leaf costs nothing here: a popped entry that has become stale is dropped (pinned, no
    longer a leaf, superseded) or pushed back with today's score. Nothing ever scans the tree.
    """

    __slots__ = ("_entries", "_tick", "_tree", "policy")

    def __init__(self, tree: RadixTree, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._tree = tree
        self._entries: list[tuple[Score, int, Node]] = []
        self._tick = count()

    def offer(self, node: Node) -> None:
        """`node` may have become evictable, or its score may have fallen."""
        if not node.evictable:
            return
        score = self.policy.score(node)
        if node.entry is None or score < node.entry[0]:
            self._push(score, node)

    def pop(self) -> Node | None:
        """The coldest evictable leaf, no longer in the heap; None when there is none."""
        while self._entries:
            entry = heapq.heappop(self._entries)
            node = entry[2]
            if node.entry is not entry:
                continue
            node.entry = None
            if not node.evictable:
                continue
            score = self.policy.score(node)
            if score > entry[0]:
                self._push(score, node)
                continue
            return node
        return None

    def live_entries(self) -> Iterator[tuple[Score, Node]]:
        """(score, node) of every entry that is not superseded; for the audit."""
        return ((score, node) for entry in self._entries for score, _, node in (entry,) if node.entry is entry)

    def __len__(self) -> int:
        return len(self._entries)

    def _push(self, score: Score, node: Node) -> None:
        if len(self._entries) > 2 * self._tree.n_nodes + SLACK:
            self._sweep()
        entry = (score, next(self._tick), node)
        node.entry = entry
        heapq.heappush(self._entries, entry)

    def _sweep(self) -> None:
        """Drop superseded entries. At least half are, so each push pays for its own removal once."""
        self._entries = [entry for entry in self._entries if entry[2].entry is entry]
        heapq.heapify(self._entries)


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": Lru}


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """A policy by name, or the given one. Raises ValueError for an unknown name."""
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"unknown eviction policy {policy!r}; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[policy]()
