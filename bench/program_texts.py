"""Texts and sizes of the nine agent programs, for every way of running them. Imports nothing of Ramet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RULES = (
    "You are a careful assistant. You read what you are given, think about it step by step, and answer in few and "
    "plain words. You never make things up, you keep to the language of the question, and you say so when you are not "
    "sure. Numbers are written as digits. Names are written as in the text. You do not repeat the question. "
)
SUMS = ((3, 4), (10, 5), (7, 9), (2, 8), (6, 6))
SHOTS = "".join(f"Question: What is {a} and {b}?\nAnswer: The sum of {a} and {b} is {a + b}.\n" for a, b in SUMS)
DOCUMENT = (
    "The old mill by the river was built in 1821 by two brothers from the north. For sixty years it ground the grain "
    "of nine villages, until a flood took the wheel and half of the weir. A painter lived in it for a while, then a "
    "family of basket makers, and in the war it was a store for potatoes. In 1974 the town bought the ruin for a "
    "symbolic price and a group of pensioners began to repair it, stone by stone, every Saturday. Today there is a "
    "museum on the ground floor, a small school for crafts above it, and under the roof a colony of bats that nobody "
    "may disturb. The new wheel turns a generator that lights the whole house. "
)
FORM = "Fill in the form as JSON: order (a number) and urgent (true or false)."
FIELDS = ("Name", "Town", "Age", "Trade", "House", "Children", "Hobby", "Favourite food", "Fear", "Wish")
SCHEMA = {
    "type": "object",
    "properties": {"order": {"type": "integer"}, "urgent": {"type": "boolean"}},
    "required": ["order", "urgent"],
    "additionalProperties": False,
}
SHAPES = (
    "few-shot batch",
    "chain",
    "self-consistency",
    "tree of thought",
    "multi-turn",
    "tool loop",
    "map-reduce",
    "judge with select",
    "JSON extraction",
)
FORKS = ("self-consistency", "tree of thought", "map-reduce", "judge with select")  # fork and tree shapes


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the programs are; `tokens` is what most generations write."""

    questions: int
    fields: int
    samples: int
    width: int
    depth: int
    turns: int
    calls: int
    chunks: int
    duels: int
    tickets: int
    tokens: int = 8
    long_tokens: int = 16

    @property
    def exact(self) -> dict[str, Any]:
        """Options of a generation that does the same work whoever asks for it."""
        return {"max_tokens": self.tokens, "ignore_eos": True}

    @property
    def long(self) -> dict[str, Any]:
        return {"max_tokens": self.long_tokens, "ignore_eos": True}


FULL = Sizes(questions=24, fields=10, samples=40, width=4, depth=3, turns=6, calls=4, chunks=8, duels=24, tickets=12)
SMALL = Sizes(questions=8, fields=5, samples=8, width=3, depth=2, turns=5, calls=3, chunks=6, duels=6, tickets=6)


def questions(n: int) -> list[str]:
    return [f"What is {a} and {a + 3}?" for a in range(21, 21 + n)]


def chunks(n: int) -> list[str]:
    return [f"Part {i}. {DOCUMENT}" for i in range(n)]


def tickets(n: int) -> list[str]:
    return [f"My order {4400 + i} is late and I am not happy. Please help. Person{i}" for i in range(n)]


def duel(i: int) -> str:
    return f"A: It is {i} years old.\nB: It was built in 1821.\nWhich is right, A or B?"
