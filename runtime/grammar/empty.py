"""Whether a text under several constraints can be written at all: together they may leave none."""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush

from runtime.grammar.derivatives import Residue, borders, derive, nullable
from runtime.grammar.distance import shortest
from runtime.grammar.regular import Regex

_MAX_STEPS = 256


@lru_cache(256)
def is_empty(must: tuple[Regex, ...], never: tuple[Regex, ...]) -> bool:
    """True if no text matches all of `must` and none of `never`. False where some hundred steps do not tell."""
    start = Residue(must, never)
    seen = {start}
    nearest = [(0, 0, start)]
    steps = 0
    while nearest:
        place = heappop(nearest)[2]
        if nullable(place):
            return False
        for code in borders(place):
            steps += 1
            if steps > _MAX_STEPS:
                return False
            left = derive(place, code)
            if left is not None and left not in seen:
                seen.add(left)
                heappush(nearest, (max(map(shortest, left.must), default=0), len(seen), left))
    return True
