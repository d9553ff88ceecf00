"""KV events: which pages the cache holds, told to routers and dashboards as it changes.

Only whole pages are told of. Where nodes begin, split or merge is nobody's business: a page is named by its
chained hash (`radix/hashes.py`), and a BlockStored comes after the one that stored its parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from radix.hashes import digests, short
from radix.tree import Namespace, Node, RadixTree


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Pages, in chain order, that the cache now holds. `parent_block_hash` is None at a root only."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]  # of all the blocks
    block_size: int
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Pages that the cache no longer holds."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache is empty: sent at start and after a flush."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventSink(Protocol):
    """Takes the events of a step, in order. Called on the scheduler's thread: it must not block."""

    def __call__(self, events: Sequence[KvEvent]) -> None: ...


class EventLog:
    """Collects events until `flush`, joining stores that continue one chain and removals in a row."""

    __slots__ = ("_events", "_open", "_sink", "_tree")

    def __init__(self, tree: RadixTree, sink: EventSink) -> None:
        self._tree = tree
        self._sink = sink
        self._events: list[KvEvent] = [AllBlocksCleared()]
        self._open: _Stores | _Removals | None = None  # what the next call may continue

    def stored(self, end: Node, n: int) -> None:
        """The last `n` pages of the path to the end of `end` are new."""
        digests(self._tree, end)
        parts: list[tuple[Node, int]] = []  # (node, pages from the end of its edge), upward
        for node in self._tree.chain(end):
            parts.append((node, min(n, node.n_pages)))
            n -= parts[-1][1]
            if n == 0:
                break
        top, k = parts[-1]
        before = top.digests[-k - 1 : -k] or top.parent.digests[-1:]  # type: ignore[union-attr]  # roots have none
        parent = short(before[0]) if before else None
        stores = self._open
        if not isinstance(stores, _Stores) or stores.hashes[-1] != parent or stores.namespace != end.root.namespace:
            stores = _Stores(self._tree.page_size, end.root.namespace, parent)
            self._begin(stores)
        for node, k in reversed(parts):
            stores.hashes.extend(map(short, node.digests[-k:]))
            stores.data += node.data[-k * self._tree.page_bytes :]

    def removed(self, hashes: Sequence[bytes]) -> None:
        """Pages are gone; given in the order of the path."""
        if not isinstance(self._open, _Removals):
            self._begin(_Removals())
        assert isinstance(self._open, _Removals)
        self._open.hashes.extend(map(short, reversed(hashes)))

    def cleared(self) -> None:
        """Everything is gone: whatever came before no longer matters."""
        self._open = None
        self._events = [AllBlocksCleared()]

    def flush(self) -> None:
        """Hand what was collected to the sink."""
        self._begin(None)
        if self._events:
            events, self._events = self._events, []
            self._sink(events)

    def _begin(self, next_open: _Stores | _Removals | None) -> None:
        if self._open is not None:
            self._events.append(self._open.event())
        self._open = next_open


@dataclass(slots=True)
class _Stores:
    """A BlockStored that may still grow."""

    block_size: int
    namespace: Namespace
    parent: int | None
    hashes: list[int] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)

    def event(self) -> BlockStored:
        tokens = tuple(np.frombuffer(bytes(self.data), np.int32).tolist())
        return BlockStored(tuple(self.hashes), self.parent, tokens, self.block_size, self.namespace)


@dataclass(slots=True)
class _Removals:
    """A BlockRemoved that may still grow."""

    hashes: list[int] = field(default_factory=list)

    def event(self) -> BlockRemoved:
        return BlockRemoved(tuple(self.hashes))
