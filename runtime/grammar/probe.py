"""A short random walk through a fresh grammar: does it allow anything, and are its masks cheap?"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from runtime.grammar.backends import Template
from runtime.grammar.protocol import MaskRow

STEPS = 24
_ENOUGH_S = 2.0


@dataclass(frozen=True, slots=True)
class Walk:
    """`slow_s`: third slowest mask (first visits may be slow once), `worst_s`: the slowest. `dead`: no token fits."""

    slow_s: float
    worst_s: float
    dead: bool
    failure: str | None


def walk(template: Template, n_words: int, stop_ids: Iterable[int], seed: int = 0) -> Walk:
    """Follow random allowed tokens for a few steps, until the text is complete and nothing else may follow."""
    stops = frozenset(stop_ids)
    chooser = random.Random(seed)
    matcher = template.matcher()
    row: MaskRow = np.zeros(n_words, np.int32)
    times: list[float] = []
    for _ in range(STEPS):
        start = time.thread_time()
        limited = matcher.mask(row)
        times.append(time.thread_time() - start)
        failure = matcher.failure()
        if failure is not None or (limited and not row.any()):
            return _walk(times, dead=True, failure=failure)
        if not limited:
            break
        allowed = [t for t in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")) if t not in stops]
        if not allowed or max(times) > _ENOUGH_S:
            break
        if not matcher.advance(int(chooser.choice(allowed))):
            return _walk(times, dead=True, failure=matcher.failure() or "it refuses a token that it allows")
    return _walk(times, dead=False, failure=None)


def _walk(times: list[float], *, dead: bool, failure: str | None) -> Walk:
    ordered = sorted(times, reverse=True)
    return Walk(ordered[min(2, len(ordered) - 1)], ordered[0], dead, failure)
