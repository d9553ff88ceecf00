"""Nine programs as agents have them, in our DSL. `program_calls.py` holds the same by hand."""

from __future__ import annotations

from typing import Any

import ramet as rt

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
QUESTIONS = tuple(f"What is {a} and {a + 3}?" for a in range(21, 29))
CHUNKS = tuple(f"Part {i}. {DOCUMENT}" for i in range(6))
TICKETS = tuple(f"My order {4400 + i} is late and I am not happy. Please help. Person{i}" for i in range(6))
SCHEMA = {
    "type": "object",
    "properties": {"order": {"type": "integer"}, "urgent": {"type": "boolean"}},
    "required": ["order", "urgent"],
    "additionalProperties": False,
}
TOKENS = 16
EXACT = {"max_tokens": TOKENS, "ignore_eos": True}  # the same work whoever asks


@rt.tool
def look_up(order: int) -> str:
    """The state of an order."""
    return f"Order {order} was sent on Monday."


@rt.function
def few_shot(s: rt.State, question: str) -> None:
    s += RULES + SHOTS + f"Question: {question}\nAnswer:"
    s += rt.gen("answer", **EXACT)


@rt.function
def chain(s: rt.State) -> None:
    s += RULES + DOCUMENT
    for i in range(5):
        s += f"\nQuestion {i}: what is the text about?\nAnswer:"
        s += rt.gen(f"a{i}", **EXACT)


@rt.function
def self_consistency(s: rt.State) -> None:
    s.system(RULES)
    s.user(DOCUMENT + "How old is the mill?")
    for sample in s.fork(8):
        sample.assistant(rt.gen("answer", temperature=0.8, **EXACT))


@rt.function
def tree_of_thought(s: rt.State) -> None:
    s.system(RULES)
    s.user(DOCUMENT + "What should the town do with the mill next?")
    _grow(s, 2)


def _grow(s: rt.State, depth: int) -> None:
    for thought in s.fork(3):
        thought.assistant(rt.gen("step", temperature=0.8, **EXACT))
        thought.user("Go on.")
        if depth > 1:
            _grow(thought, depth - 1)


@rt.function
def multi_turn(s: rt.State) -> None:
    s.system(RULES)
    s.user(DOCUMENT)
    for i in range(5):
        s.assistant(rt.gen(f"a{i}", **EXACT))
        s[f"a{i}"]
        s.user(f"And what about point {i}?")


@rt.function
def tool_loop(s: rt.State) -> None:
    s.system(RULES + "Tool: " + look_up.describe)
    for i in range(3):
        s.user(f"Where is my order {4400 + i}?")
        s.assistant(look_up.call(f"r{i}", max_tokens=24), rt.gen(f"a{i}", **EXACT))
        s[f"a{i}"]


@rt.function
def map_reduce(s: rt.State) -> None:
    s.system(RULES)
    parts = s.fork(len(CHUNKS))
    for part, chunk in zip(parts, CHUNKS, strict=True):
        part.user(f"Sum this up: {chunk}")
        part.assistant(rt.gen("summary", **EXACT))
    s.user("Sum up these summaries:\n" + "\n".join(parts.values("summary")))
    s.assistant(rt.gen("all", **EXACT))


@rt.function
def judge(s: rt.State) -> None:
    s.system(RULES)
    s.user(DOCUMENT)
    for i, duel in enumerate(s.fork(6)):
        duel.user(f"A: It is {i} years old.\nB: It was built in 1821.\nWhich is right, A or B?")
        duel.assistant("It is ", rt.select("winner", ["A", "B"]))


@rt.function
def extraction(s: rt.State, text: str) -> None:
    s.system(RULES + "Fill in the form as JSON: order (a number) and urgent (true or false).")
    s.user(text)
    s.assistant(rt.gen("form", json_schema=SCHEMA, max_tokens=40))


BATCHES: dict[str, tuple[rt.Program[Any, Any], tuple[str, ...]]] = {
    "few-shot batch": (few_shot, QUESTIONS),
    "JSON extraction": (extraction, TICKETS),
}
SINGLES: dict[str, rt.Program[Any, Any]] = {
    "chain": chain,
    "self-consistency": self_consistency,
    "tree of thought": tree_of_thought,
    "multi-turn": multi_turn,
    "tool loop": tool_loop,
    "map-reduce": map_reduce,
    "judge with select": judge,
}
SHAPES = (*BATCHES, *SINGLES)
