"""Choosing by log-probability: every choice is scored as a suffix of one prefix, all in one message.

Choices are tokenised *jointly* with the open text before them, so "A:" with " YES" and "A: " with "YES" are the
same tokens and rank alike. Scores count from the first token in which any choice differs from the prompt.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from frontend_lang.ir import Score
from frontend_lang.record import common_prefix
from runtime.messages import Ids


@dataclass(frozen=True, slots=True)
class Scored:
    """One choice: its ids from the first differing token on, and their log-probabilities."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    alone: tuple[float, ...] = ()  # the same ids without the prompt (unconditional only)


def first_difference(prompt: Ids, joint: Sequence[Ids]) -> int:
    """The position from which the choices are scored; every choice keeps at least one token there."""
    return min(min(common_prefix(prompt, ids), len(ids) - 1) for ids in joint)


@dataclass(slots=True)
class Row:
    """One request of a select: what is read, and (n, token) for every token to be scored after n of these ids."""

    ids: Ids
    asked: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Rows:
    """The fewest requests that score all choices. `places[c][k]`: the row and the entry of its `asked` that hold
    the k-th token of choice c; None where there is nothing before it that could predict it."""

    rows: list[Row]
    places: list[list[tuple[int, int] | None]]

    @classmethod
    def of(cls, joint: Sequence[Ids], start: int) -> Rows:
        """Choices as whole sequences, scored from `start` on.

        The last token of a choice is scored and not read, and what choices share is read once: choices of one token
        each are one row, which ends where they begin.
        """
        paths = [tuple(map(int, ids[start:])) for ids in joint]
        rows: list[Row] = []
        owner: dict[tuple[int, ...], int] = {}  # what is read of a choice -> the row that scores what comes then
        for path, ids in sorted(zip(paths, joint, strict=True), key=lambda pair: -len(pair[0])):
            if path[:-1] not in owner:
                for n in range(len(path)):
                    owner.setdefault(path[:n], len(rows))
                rows.append(Row(ids[:-1], []))
        wanted: dict[tuple[int, int, int], None] = {}  # (row, n, token), each once
        keys = [[(owner[path[:k]], start + k, token) for k, token in enumerate(path)] for path in paths]
        for key in sorted(key for path in keys for key in path if key[1] > 0):
            wanted.setdefault(key)
        place: dict[tuple[int, int, int], tuple[int, int]] = {}
        for row, n, token in wanted:
            place[row, n, token] = row, len(rows[row].asked)
            rows[row].asked.append((n, token))
        return cls(rows, [[place.get(key) for key in path] for path in keys])


def scores(method: Score, choices: Sequence[Scored]) -> list[float]:
    """One number a choice, larger is better."""
    if method == "sum":
        return [math.fsum(choice.logprobs) for choice in choices]
    if method == "mean":
        return [_mean(choice.logprobs) for choice in choices]
    if method == "unconditional":
        return [_mean(choice.logprobs) - _mean(choice.alone) for choice in choices]
    return greedy(choices)


def greedy(choices: Sequence[Scored]) -> list[float]:
    """What greedy decoding restricted to the choices would take: 0 for the winner, -1 for those that fell first ...

    At each position the likeliest next token among the remaining choices wins; a choice that ends there is
    compared no further and gives way only to a longer one it is the beginning of.
    """
    alive = list(range(len(choices)))
    fell: dict[int, int] = {}
    depth = 0
    while len(alive) > 1:
        going = [i for i in alive if depth < len(choices[i].ids)]
        if not going:
            break
        best = max(going, key=lambda i: choices[i].logprobs[depth])
        keep = [i for i in going if choices[i].ids[depth] == choices[best].ids[depth]]
        for i in alive:
            if i not in keep:
                fell[i] = depth
        alive, depth = keep, depth + 1
    return [0.0 if i == alive[0] else -1.0 / (1 + fell.get(i, depth)) for i in range(len(choices))]


def pick(values: Sequence[float], temperature: float, seed: int) -> int:
    """Index of the best score (the first of equals), or a sample of softmax(scores / temperature)."""
    if temperature <= 0.0:
        return max(range(len(values)), key=lambda i: values[i])
    logits = np.asarray(values, np.float64) / temperature
    weights = np.exp(logits - logits.max())
    return random.Random(seed).choices(range(len(values)), weights=weights.tolist())[0]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
