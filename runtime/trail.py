"""The ids of one request as they become known: what both ends of a wire must agree on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from runtime.messages import Ids, Segment, unpack_ids


class Trail:
    """Prompt, generated ids and the literal text between segments; a stop id before a segment is dropped, as the
    scheduler does."""

    def __init__(self, prompt: Ids, segments: Sequence[Segment], stop_ids: Iterable[int]) -> None:
        self._parts: list[Ids] = [prompt]
        self._made: list[int] = []
        self._segments = segments
        self._segment = 0
        self._stop_ids = frozenset(stop_ids)

    def add(self, segment: int, ids: Iterable[int]) -> None:
        """Ids generated in `segment`."""
        while self._segment < segment:
            if self._made and self._made[-1] in self._stop_ids:
                self._made.pop()
            self._parts.append(np.asarray(self._made, np.int32))
            self._parts.append(unpack_ids(self._segments[self._segment].tokens))
            self._made = []
            self._segment += 1
        self._made.extend(ids)

    def ids(self) -> Ids:
        """Everything so far."""
        return np.concatenate([*self._parts, np.asarray(self._made, np.int32)]).astype(np.int32)
