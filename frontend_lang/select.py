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


def shared_starts(rows: Sequence[Ids], start: int) -> list[tuple[int, int]]:
    """For each row: where it leaves all rows before it (at least `start`), and the row it has gone with until there.

    What rows share need be scored once only. A row that is the beginning of an earlier one starts at its end.
    """
    out: list[tuple[int, int]] = []
    for index, row in enumerate(rows):
        best, source = start, index
        for earlier in range(index):
            n = common_prefix(row, rows[earlier])
            if n > best:
                best, source = n, earlier
        out.append((best, source))
    return out


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
