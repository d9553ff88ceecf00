"""A small agent with tools: plan, choose a tool, call it, write three drafts, pick one. Then: what the runtime did.

    python examples/agent_tools.py [--model smollm2-135m]

The model is tiny and its prose is poor; the tables at the end are the point. Every branch and every turn
continues token ids that are already in the KV cache, and the same program with the cache off shows what that saves.
"""

from __future__ import annotations

import argparse
import ast
import datetime as dt
import operator
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

import ramet as rt

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
METRES = {"metre": 1.0, "kilometre": 1000.0, "mile": 1609.344, "foot": 0.3048}


@rt.tool
def calculate(left: float, operation: Literal["+", "-", "*", "/"], right: float) -> float:
    """Work out one sum, difference, product or quotient."""
    node = ast.parse(f"0 {operation} 0", mode="eval").body
    assert isinstance(node, ast.BinOp)
    return float(OPERATORS[type(node.op)](left, right))


@rt.tool
def convert(amount: float, unit: Literal["metre", "kilometre", "mile", "foot"], into: Literal["metre", "kilometre", "mile", "foot"]) -> str:  # fmt: skip # noqa: E501
    """Convert a length from one unit into another."""
    return f"{amount * METRES[unit] / METRES[into]:.2f} {into}"


@rt.tool
def weekday(year: int, month: int, day: int) -> str:
    """Tell on which day of the week a date falls."""
    return dt.date(year, month, day).strftime("%A")


TOOLS = {tool.name: tool for tool in (calculate, convert, weekday)}
QUESTIONS = (
    "A box holds 12 eggs. How many eggs are in 17 boxes?",
    "A trail is 26 miles long. How long is that in kilometres?",
    "On which day of the week was 20 July 1969?",
)
RULES = """You are a careful assistant that answers with the help of tools.

You have these tools:
{tools}

For every question you first make a short plan, then choose one tool, then call it with its arguments as
JSON, read its result, and give the answer in one short sentence. Use the numbers of the question exactly
as they are written. Never guess what a tool can tell you, and never mention the tools in the answer."""


@rt.function
def agent(s: rt.State, questions: tuple[str, ...]) -> list[str]:
    s.system(RULES.format(tools="\n".join(f"- {tool.describe}" for tool in TOOLS.values())))
    return [answer(s, question) for question in questions]


def answer(s: rt.State, question: str) -> str:
    """One question: everything it appends stays in the conversation for the next one."""
    s.user(question)
    s.assistant("Plan: I will", rt.gen("plan", max_tokens=24, stop=[".", "\n"]), ".")
    s.user("Which tool do you use?")
    s.assistant("I use the tool ", rt.select("tool", list(TOOLS)))
    s.user("Call it.")
    s.assistant(TOOLS[s["tool"]].call("result", max_tokens=64))

    drafts = s.fork(3)
    for draft in drafts:
        draft.user(f"Answer the question: {question}")
        draft.assistant(rt.gen("draft", max_tokens=32, stop="\n", temperature=0.8))
    texts = drafts.values("draft")

    s.user("Three answers:\n" + "\n".join(f"{i}. {text.strip()}" for i, text in enumerate(texts, 1)) + "\nThe best?")
    s.assistant("The best answer is number ", rt.select("best", ["1", "2", "3"]))
    return str(texts[int(s["best"]) - 1]).strip()


def show_transcript(console: Console, result: rt.Result[Any]) -> None:
    """The conversation, with what the model wrote in colour."""
    _, spans = result.record.branches["main"]
    body = ""
    for span in spans:
        text = span.text.replace("[", "\\[")
        if span.special:  # the chat template's own tokens
            body += f"[bright_black]{text}[/]"
        elif span.ids:
            body += f"[bold green]{text}[/]"
        else:
            body += f"[cyan]{text}[/]" if span.name else text
    console.print(Panel(body.strip(), title="transcript", subtitle="[green]generated[/]  [cyan]selected or from a tool[/]"))


def show_requests(console: Console, result: rt.Result[Any]) -> None:
    """One row a request: where its prompt came from, and why."""
    table = Table(title="what each request cost (tokens)", box=box.SIMPLE_HEAD)
    for name in ("branch", "for", "prompt", "reused", "copied", "prefilled", "generated", "forced", "ms"):
        table.add_column(name, justify="left" if name in ("branch", "for") else "right")
    for event in result.record.events:
        usage = event.usage
        cells = (usage.prompt_tokens, usage.cached_tokens, usage.copied_tokens, usage.prefilled_tokens)
        made = (usage.completion_tokens, usage.forced_tokens, round((event.end_s - event.start_s) * 1000))
        table.add_row(event.branch, f"{event.kind} {', '.join(event.names)}", *map(str, (*cells, *made)))
    console.print(table)


def show_comparison(console: Console, runs: dict[str, rt.Result[Any]]) -> None:
    """The same program with the cache on and off."""
    table = Table(title="the same program, twice", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    totals = {name: result.totals for name, result in runs.items()}
    for field in ("requests", "prompt", "prefilled", "reused", "copied", "generated", "forced"):
        table.add_row(field if field == "requests" else f"tokens {field}", *(str(getattr(t, field)) for t in totals.values()))
    table.add_row("reused of reusable", *(f"{t.hit_rate:.1%}" for t in totals.values()))
    table.add_row("wall time", *(f"{t.wall_s:.2f} s" for t in totals.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    console = Console(width=max(100, Console().width))
    runs: dict[str, rt.Result[Any]] = {}
    for label, cache in (("cache on", True), ("cache off", False)):
        with rt.Engine(model=args.model, prefix_cache=cache) as engine, console.status(f"running with {label} ..."):
            runs[label] = agent.run(engine, questions=QUESTIONS)
    show_transcript(console, runs["cache on"])
    show_requests(console, runs["cache on"])
    show_comparison(console, runs)
    same = [event.output.tolist() for event in runs["cache on"].record.events] == [
        event.output.tolist() for event in runs["cache off"].record.events
    ]
    console.print("Every token is the same with and without the cache." if same else "[red]The two runs differ.[/]")


if __name__ == "__main__":
    main()
