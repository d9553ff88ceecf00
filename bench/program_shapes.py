"""Nine programs as agents have them, in our DSL. `program_calls.py` holds the same by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

import ramet as rt
from bench.program_texts import DOCUMENT, FIELDS, FORM, RULES, SCHEMA, SHOTS, Sizes, chunks, duel, questions, tickets
from frontend_lang.record import Totals


@rt.tool
def look_up(order: Annotated[int, Field(ge=1000, le=9999)]) -> str:
    """The state of an order."""
    return f"Order {order} was sent on Monday."


@rt.function
def few_shot(s: rt.State, question: str, size: Sizes) -> None:
    s += RULES + SHOTS + f"Question: {question}\nAnswer:"
    s += rt.gen("answer", **size.exact)


@rt.function
def chain(s: rt.State, size: Sizes) -> None:
    s += RULES + DOCUMENT + "\nA person in this story, as a form:"
    for field in FIELDS[: size.fields]:
        s += f"\n{field}:"
        s += rt.gen(field, **size.exact)


@rt.function
def self_consistency(s: rt.State, size: Sizes) -> None:
    s.system(RULES)
    s.user(DOCUMENT + "How old is the mill?")
    for sample in s.fork(size.samples):
        sample.assistant(rt.gen("answer", temperature=0.8, **size.exact))


@rt.function
def tree_of_thought(s: rt.State, size: Sizes) -> None:
    s.system(RULES)
    s.user(DOCUMENT + "What should the town do with the mill next?")
    _grow(s, size, size.depth)


def _grow(s: rt.State, size: Sizes, depth: int) -> None:
    for thought in s.fork(size.width):
        thought.assistant(rt.gen("step", temperature=0.8, **size.exact))
        if depth > 1:
            thought.user("Go on.")
            _grow(thought, size, depth - 1)


@rt.function
def multi_turn(s: rt.State, size: Sizes) -> None:
    s.system(RULES)
    s.user(DOCUMENT)
    for i in range(size.turns):
        s.assistant(rt.gen(f"a{i}", **size.long))
        s.user(f"And what about point {i}? You said: {s[f'a{i}'][:10]}")


@rt.function
def tool_loop(s: rt.State, size: Sizes) -> None:
    s.system(RULES + "Tool: " + look_up.describe)
    for i in range(size.calls):
        s.user(f"Where is my order {4400 + i}?")
        s.assistant(look_up.call(f"r{i}", max_tokens=24), rt.gen(f"a{i}", **size.long))


@rt.function
def map_reduce(s: rt.State, size: Sizes) -> None:
    s.system(RULES)
    parts = s.fork(size.chunks)
    for part, chunk in zip(parts, chunks(size.chunks), strict=True):
        part.user(f"Sum this up: {chunk}")
        part.assistant(rt.gen("summary", **size.long))
    s.user("Sum up these summaries:\n" + "\n".join(parts.values("summary")))
    s.assistant(rt.gen("all", **size.long))


@rt.function
def judge(s: rt.State, size: Sizes) -> None:
    s.system(RULES)
    s.user(DOCUMENT)
    for i, one in enumerate(s.fork(size.duels)):
        one.user(duel(i))
        one.assistant(rt.select("winner", ["A", "B"]))


@rt.function
def extraction(s: rt.State, text: str, size: Sizes) -> None:
    s.system(RULES + FORM)
    s.user(text)
    s.assistant(rt.gen("form", json_schema=SCHEMA, max_tokens=40))


BATCHES: dict[str, tuple[rt.Program[Any, Any], Callable[[Sizes], list[str]]]] = {
    "few-shot batch": (few_shot, lambda size: questions(size.questions)),
    "JSON extraction": (extraction, lambda size: tickets(size.tickets)),
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


def run(backend: Any, shape: str, size: Sizes) -> Totals:
    """Run one of the programs to its end; what it cost."""
    if shape in BATCHES:
        program, items = BATCHES[shape]
        return program.run_batch(backend, [(item, size) for item in items(size)], progress=False).totals
    return SINGLES[shape].run(backend, size).totals
