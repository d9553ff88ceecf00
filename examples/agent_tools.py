"""A small agent with tools: plan, choose a tool, call it, write three drafts, pick one. Then: what the runtime did.

    python examples/agent_tools.py [--model smollm2-135m]

The model is tiny and its prose is poor; the tables at the end are the point. Every branch and every turn
continues token ids that are already in the KV cache, and the same program with the cache off shows what that saves.
"""

from __future__ import annotations

import datetime as dt
from typing import Literal

from report import run_with_and_without_cache

import ramet as rt

METRES = {"metre": 1.0, "kilometre": 1000.0, "mile": 1609.344, "foot": 0.3048}
Unit = Literal["metre", "kilometre", "mile", "foot"]


@rt.tool
def multiply(left: int, right: int) -> int:
    """Multiply two numbers."""
    return left * right


@rt.tool
def convert(amount: int, unit: Unit, into: Unit) -> str:
    """Convert a length from one unit into another."""
    return f"{amount * METRES[unit] / METRES[into]:.1f} {into}"


@rt.tool
def weekday(day: int, month: int, year: int) -> str:
    """Tell on which day of the week a date falls."""
    return dt.date(year, month, day).strftime("%A")


TOOLS = {tool.name: tool for tool in (multiply, convert, weekday)}
QUESTIONS = (
    "On which day of the week was 20 July 1969?",
    "A box holds 12 eggs. How many eggs are in 17 boxes?",
)
RULES = """You answer questions with the help of tools. You have these tools:
{tools}
For every question you make a plan, choose a tool, write its arguments as JSON, read its result, and then answer
in one short sentence."""
SHOWN = (  # question, plan, tool, arguments, result, answer
    ("A spider has 8 legs. How many legs have 9 spiders?", "multiply 8 by 9", "multiply",
     '{"left": 8, "right": 9}', "72", "Nine spiders have 72 legs."),
    ("A river is 40 miles long. How many kilometres is that?", "convert 40 miles into kilometres", "convert",
     '{"amount": 40, "unit": "mile", "into": "kilometre"}', "64.4 kilometre", "The river is 64.4 kilometres long."),
    ("On which day of the week was 3 May 1984?", "look up the weekday of 3 May 1984", "weekday",
     '{"day": 3, "month": 5, "year": 1984}', "Thursday", "3 May 1984 was a Thursday."),
)  # fmt: skip


@rt.function
def agent(s: rt.State, questions: tuple[str, ...]) -> list[str]:
    s.system(RULES.format(tools="\n".join(f"- {tool.describe}" for tool in TOOLS.values())))
    for question, plan, tool, arguments, result, words in SHOWN:
        s.user(question)
        s.assistant(f"Plan: I will {plan}. Tool: {tool}")
        s.user("Arguments?")
        s.assistant(arguments)
        s.tool(result)
        s.user("Answer?")
        s.assistant(words)
    return [answer(s, question) for question in questions]


def answer(s: rt.State, question: str) -> str:
    """One question. Everything it appends stays in the conversation for the next one."""
    s.user(question)
    s.assistant(
        "Plan: I will", rt.gen("plan", max_tokens=20, stop=[".", "\n"]), ". Tool: ", rt.select("tool", list(TOOLS))
    )
    s.user("Arguments?")
    s.assistant(TOOLS[s["tool"]].call("result", max_tokens=48))

    drafts = s.fork(3)
    for draft in drafts:
        draft.user("Answer?")
        draft.assistant(rt.gen("draft", max_tokens=24, stop="\n", temperature=0.5))
    texts = drafts.values("draft")

    s.user("Three answers:\n" + "\n".join(f"{i}. {text.strip()}" for i, text in enumerate(texts, 1)) + "\nThe best?")
    s.assistant("The best answer is number ", rt.select("best", ["1", "2", "3"]))
    return str(texts[int(s["best"]) - 1]).strip()


if __name__ == "__main__":
    run_with_and_without_cache(__doc__, agent, QUESTIONS)
