"""What the examples print at their end: where tokens came from, and what it cost."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

import ramet as rt
from frontend_lang.context import Span
from frontend_lang.record import Event, Totals


def show_transcript(console: Console, spans: tuple[Span, ...], title: str = "transcript") -> None:
    """A branch's text: the chat template's own in grey, generated text green, selected text and tool results cyan."""
    body = ""
    for span in spans:
        text = span.text.replace("[", "\\[")
        if span.special:
            body += f"[bright_black]{text}[/]"
        elif span.ids:
            body += f"[bold green]{text}[/]"
        else:
            body += f"[cyan]{text}[/]" if span.name else text
    console.print(Panel(body.strip(), title=title, subtitle="[green]generated[/]  [cyan]selected, or from a tool[/]"))


def show_requests(console: Console, events: list[Event]) -> None:
    """One row a request, in the order they began."""
    table = Table(title="what each request cost (tokens)", box=box.SIMPLE_HEAD)
    for name in ("branch", "for", "prompt", "reused", "copied", "prefilled", "generated", "forced", "ms"):
        table.add_column(name, justify="left" if name in ("branch", "for") else "right")
    for event in events:
        usage = event.usage
        cells = (usage.prompt_tokens, usage.cached_tokens, usage.copied_tokens, usage.prefilled_tokens)
        made = (usage.completion_tokens, usage.forced_tokens, round((event.end_s - event.start_s) * 1000))
        table.add_row(event.branch, f"{event.kind} {', '.join(event.names)}", *map(str, (*cells, *made)))
    console.print(table)


def show_totals(console: Console, runs: Mapping[str, Totals]) -> None:
    """One column a run."""
    table = Table(title="in all", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    for field in ("requests", "messages"):
        table.add_row(field, *(str(getattr(totals, field)) for totals in runs.values()))
    for field in ("prompt", "prefilled", "reused", "copied", "generated", "forced"):
        table.add_row(f"tokens {field}", *(str(getattr(totals, field)) for totals in runs.values()))
    table.add_row("reused of reusable", *(f"{totals.hit_rate:.1%}" for totals in runs.values()))
    table.add_row("wall time", *(f"{totals.wall_s:.2f} s" for totals in runs.values()))
    console.print(table)


def outputs(events: list[Event]) -> dict[Any, list[int]]:
    """What every request generated, by its place in the program."""
    made: dict[Any, list[int]] = {}
    for event in events:
        made.setdefault((event.branch, event.kind, event.names), []).extend(event.output.tolist())
    return made


def run_with_and_without_cache(what: str, agent: rt.Program[Any, Any], questions: Sequence[str]) -> None:
    """An agent's command line: its transcript, what each request cost, and the same program with the cache off."""
    parser = argparse.ArgumentParser(description=what.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    model = parser.parse_args().model
    console = Console(width=max(100, Console().width))
    with console.status("running the agent ..."), rt.Engine(model=model) as engine:
        on = agent.run(engine, questions)
    show_transcript(console, tuple(on.record.branches["main"][1]))
    for question, text in zip(questions, on.value, strict=True):
        console.print(f"[bold]{question}[/]\n  {text}")
    show_requests(console, on.record.events)
    with console.status("running it with the cache off ..."), rt.Engine(model=model, prefix_cache=False) as engine:
        off = agent.run(engine, questions)
    show_totals(console, {"cache on": on.totals, "cache off": off.totals})
    same = outputs(on.record.events) == outputs(off.record.events)
    console.print("Every token is the same with and without the cache." if same else "[red]The two runs differ.[/]")
