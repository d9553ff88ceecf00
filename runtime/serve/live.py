"""Ids that clients chose for their running requests, so that they can cancel them by these."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.errors import InvalidRequest


class LiveIds:
    """Client id -> the generator's request id, per caller. Used by one event loop."""

    def __init__(self) -> None:
        self._live: dict[tuple[str, str], str] = {}

    def claim(self, owner: str, names: Iterable[str], internal: Iterable[str]) -> Claim:
        """Take names for requests about to start. Raises InvalidRequest if one is taken, and takes none then."""
        pairs = [((owner, name), rid) for name, rid in zip(names, internal, strict=True)]
        keys = [key for key, _ in pairs]
        taken = next((name for key in keys if key in self._live for name in [key[1]]), None)
        if taken is not None or len(set(keys)) < len(keys):
            raise InvalidRequest(f"rid {taken or keys[0][1]!r:.80} is in use by a running request.", param="rid")
        self._live.update(pairs)
        return Claim(self._live, keys)

    def find(self, owner: str, name: str) -> list[str]:
        """Request ids under this name: the request itself, or the items of a batch called `name_0`, `name_1`…"""
        exact = self._live.get((owner, name))
        if exact is not None:
            return [exact]
        return [
            rid
            for (whose, known), rid in self._live.items()
            if whose == owner and known.startswith(f"{name}_") and known[len(name) + 1 :].isdigit()
        ]


class Claim:
    """Names in use until `release`. Idempotent."""

    def __init__(self, live: dict[tuple[str, str], str], keys: list[tuple[str, str]]) -> None:
        self._live = live
        self._keys = keys

    def release(self) -> None:
        for key in self._keys:
            self._live.pop(key, None)
        self._keys = []
