"""Annotations: which keys and items of a value were evaluated by keywords of schemas it is valid for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from runtime.grammar.regular import Regex, fullmatch


@dataclass(frozen=True, slots=True)
class Seen:
    """Keys by name or by pattern, and the first `items` items; or all of them."""

    keys: frozenset[str] = frozenset()
    patterns: frozenset[Regex] = frozenset()
    all_keys: bool = False
    items: int = 0
    all_items: bool = False

    def __or__(self, other: Seen) -> Seen:
        if self is other or other is UNSEEN:
            return self
        if self is UNSEEN:
            return other
        return Seen(
            self.keys | other.keys,
            self.patterns | other.patterns,
            self.all_keys or other.all_keys,
            max(self.items, other.items),
            self.all_items or other.all_items,
        )

    def key(self, key: str) -> bool:
        return self.all_keys or key in self.keys or any(fullmatch(p, key) for p in self.patterns)

    def every_key(self, keys: Iterable[str]) -> bool:
        return self.all_keys or all(map(self.key, keys))

    def length(self, n: int) -> bool:
        return self.all_items or n <= self.items


UNSEEN = Seen()
EVERY_KEY = Seen(all_keys=True)
EVERY_ITEM = Seen(all_items=True)
