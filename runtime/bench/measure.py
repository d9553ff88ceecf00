"""`ramet bench load`: agent workloads against any OpenAI-compatible server, with a progress bar."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from runtime.bench.remote import RemoteServer, Target
from runtime.bench.workloads import WORKLOADS, Measure, Workload
from runtime.errors import RametError

Figures = dict[Measure, dict[str, float]]  # of every measure, by target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="the server, as http://127.0.0.1:30000 (with or without /v1)")
    parser.add_argument("--model", default="", help="model name to send (default: the first that the server lists)")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="default: $OPENAI_API_KEY")
    parser.add_argument(
        "--workload",
        action="append",
        choices=tuple(WORKLOADS),
        help="one of them; give it again for more (default all)",
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="runs of each; the best counts (default 1)")


def bench_load(args: argparse.Namespace) -> int:
    """Run the workloads against one server and print one table. Raises RametError where it cannot."""
    target = RemoteServer(args.url, args.url, model=args.model, api_key=args.api_key)
    works = [WORKLOADS[name] for name in dict.fromkeys(args.workload or WORKLOADS)]
    console = Console(stderr=True)
    figures = alternate([target], works, args.rounds, console)
    table = Table("measure", "value", "unit", title=f"{args.url}, model {target.model}", title_justify="left")
    for measure, row in figures.items():
        table.add_row(measure.name, f"{row[target.name]:.2f}" if target.name in row else "failed", measure.unit)
    Console().print(table)
    return 0 if all(figures.values()) else 1


def alternate(
    targets: Sequence[Target],
    works: Sequence[Workload],
    rounds: int,
    console: Console,
    can_run: Callable[[Target, Workload, int], bool] = lambda *_: True,
) -> Figures:
    """Every round runs a workload on each target in turn; the best round of a figure counts.

    A workload that a target fails at is reported on `console` and left out of its figures.
    """
    figures: Figures = {measure: {} for work in works for measure in work.measures}
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    with bar:
        task = bar.add_task("starting", total=rounds * len(works) * len(targets))
        for turn in range(rounds):
            for work in works:
                for target in targets:
                    bar.update(task, description=f"{work.name} on {target.name}")
                    if can_run(target, work, turn):
                        _run(target, work, f"{turn} {work.name}", figures, bar.console)
                    bar.advance(task)
        bar.update(task, description="done")
    return figures


def _run(target: Target, work: Workload, salt: str, figures: Figures, console: Console) -> None:
    try:
        values = work.run(target, salt)
    except RametError as error:
        console.print(f"{work.name} on {target.name}: {error}", highlight=False, markup=False)
        return
    for measure, value in zip(work.measures, values, strict=True):
        best = max if measure.more_is_better else min
        figures[measure][target.name] = best(value, figures[measure].get(target.name, value))
