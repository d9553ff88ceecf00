"""A least-recently-used cache bounded by the bytes of what it holds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

V = TypeVar("V")


@dataclass(slots=True)
class CacheCounters:
    hits: int = 0
    misses: int = 0
    evictions: int = 0


class ByteCache(Generic[V]):
    """Not thread-safe. An entry larger than the whole cache is not kept."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._entries: OrderedDict[bytes, tuple[V, int]] = OrderedDict()
        self.n_bytes = 0
        self.counters = CacheCounters()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        """Whether it is there; neither a hit nor a use."""
        return key in self._entries

    def get(self, key: bytes) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            self.counters.misses += 1
            return None
        self._entries.move_to_end(key)
        self.counters.hits += 1
        return entry[0]

    def put(self, key: bytes, value: V, n_bytes: int) -> None:
        """`n_bytes` of the value; the key is counted on top."""
        self.drop(key)
        cost = n_bytes + len(key)
        if cost > self._limit:
            return
        self._entries[key] = (value, cost)
        self.n_bytes += cost
        while self.n_bytes > self._limit:
            self.drop(next(iter(self._entries)))
            self.counters.evictions += 1

    def drop(self, key: bytes) -> None:
        """Forget an entry, if it is there. No eviction: that is the cache's own doing."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.n_bytes -= entry[1]
