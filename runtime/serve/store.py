"""Responses kept for `previous_response_id` and retrieval: a bounded map, oldest use out first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Stored:
    """A response as it was answered, and the conversation up to and including it."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]
    owner: str


class ResponseStore:
    """At most `capacity` responses. Used by one event loop."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: OrderedDict[str, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Stored) -> None:
        self._items[item.body["id"]] = item
        while len(self._items) > self._capacity:
            self._items.popitem(last=False)

    def get(self, key: str, owner: str) -> Stored | None:
        """The owner's response with this id; another caller's does not exist."""
        item = self._items.get(key)
        if item is None or item.owner != owner:
            return None
        self._items.move_to_end(key)
        return item

    def delete(self, key: str, owner: str) -> bool:
        if self.get(key, owner) is None:
            return False
        del self._items[key]
        return True
