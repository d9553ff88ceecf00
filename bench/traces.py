"""Traces of real traffic as block ids: Mooncake files (global hashes) and run-length agent sessions.

Nothing here knows a model or a token's text: a request is its prompt's length and the ids of its full blocks,
equal ids meaning equal prefixes.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `ranges`: [[first, last], ...] of block ids, inclusive; `program`: None where unknown."""

    t: float
    n_tokens: int
    ranges: tuple[tuple[int, int], ...]
    program: str | None = None
    stop: str = ""
    last: bool = False  # the program's last request

    @property
    def blocks(self) -> np.ndarray:
        """int32 ids of the prompt's full blocks, in order."""
        parts = [np.arange(a, b + 1, dtype=np.int32) for a, b in self.ranges]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    block_size: int
    turns: list[Turn]  # in order of time

    @property
    def n_tokens(self) -> int:
        return sum(turn.n_tokens for turn in self.turns)


def load(path: Path, *, concurrency: float = 100.0, seed: int = 0, limit: int | None = None) -> Trace:
    """Read a .jsonl or .jsonl.gz file of either format, at most `limit` lines of it.

    Sessions carry no common clock: their starts are drawn uniformly (`seed`) over a span that makes
    `concurrency` of them overlap on average. Raises ValueError for a file of neither format.
    """
    lines = list(_read(path, limit))
    if lines and "hash_ids" in lines[0]:
        return Trace(path.name, 512, sorted((_mooncake(line) for line in lines), key=lambda turn: turn.t))
    if lines and "requests" in lines[0]:
        return _sessions(path.name, lines, concurrency, seed)
    raise ValueError(f"{path}: neither a Mooncake trace (hash_ids) nor agent sessions (requests)")


def _read(path: Path, limit: int | None) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        yield from map(json.loads, islice(lines, limit))


def _mooncake(line: dict[str, Any]) -> Turn:
    full = line["input_length"] // 512  # the last id may name a block that is not full: not reusable
    ids = np.array(line["hash_ids"][:full], dtype=np.int64)
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    runs = np.split(ids, breaks) if len(ids) else []
    return Turn(line["timestamp"] / 1000.0, line["input_length"], tuple((int(r[0]), int(r[-1])) for r in runs))


def _sessions(name: str, lines: list[dict[str, Any]], concurrency: float, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    span = sum(line["requests"][-1]["t"] for line in lines) / concurrency
    starts = rng.uniform(0.0, span, len(lines))
    turns: list[Turn] = []
    base = 0
    for i, (line, start) in enumerate(zip(lines, starts, strict=True)):
        own = list(_program(line["requests"], f"{i}", float(start), base))
        base += 1 + max((b - base for turn in own for _, b in turn.ranges), default=0)
        turns.extend(own)
    turns.sort(key=lambda turn: turn.t)
    return Trace(name, int(lines[0]["block_size"]), turns)


def _program(requests: list[dict[str, Any]], program: str, start: float, base: int) -> Iterator[Turn]:
    """The turns of one session, and of its sub-agents as programs of their own; ids are moved to `base`."""
    own = [r for r in requests if "requests" not in r]
    for r in own:
        ranges = tuple((base + a, base + b) for a, b in r["hash_ranges"])
        yield Turn(start + r["t"], r["in"], ranges, program, r.get("stop", ""), r is own[-1])
    for i, r in enumerate(r for r in requests if "requests" in r):
        yield from _program(r["requests"], f"{program}.{i}", start + r["t"], base)
