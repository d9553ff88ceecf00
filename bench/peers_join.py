"""Several runs of `bench.peers` as one report: `python -m bench.peers_join RUN/peers.md ... [--out FOLDER]`.

Ratios are taken within a run only, so a measure has a row for each run that has it, with the run's number. A row in
which no peer answered is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench import peers_report
from runtime.bench.measure import Figures
from runtime.bench.workloads import WORKLOADS, Measure

MEASURES = {measure.name: measure for work in WORKLOADS.values() for measure in work.measures}


@dataclass(frozen=True, slots=True)
class Run:
    """One report, read back."""

    about: str
    names: tuple[str, ...]
    rows: dict[str, dict[str, float]]  # measure -> who -> figure


def read(text: str) -> Run:
    """A report as `peers_report.write` made it."""
    about, _, rest = text.partition("\n\n")
    lines = rest.partition("\n\n")[0].splitlines()
    cells = lambda line: [cell.strip() for cell in line.strip("|").split("|")]
    names = tuple(cells(lines[0])[2:])
    rows = {}
    for line in lines[2:]:
        name, _, *values = cells(line)
        rows[name] = {who: float(value) for who, value in zip(names, values, strict=True) if value != "–"}
    return Run(about, names, rows)


def join(runs: Sequence[Run]) -> tuple[str, Figures, list[str]]:
    """(about, figures, names): each run's rows under their own names, in the workloads' order."""
    names = list(dict.fromkeys(name for run in runs for name in run.names))
    ours = {peers_report.DEFAULT, peers_report.BF16}
    figures: Figures = {}
    for name, measure in MEASURES.items():
        for number, run in enumerate(runs, 1):
            row = run.rows.get(name, {})
            if set(row) - ours:
                figures[replace(measure, name=numbered(measure, number))] = row
    about = "\n".join(f"Run {number}: {run.about}" for number, run in enumerate(runs, 1))
    return about, figures, names


def numbered(measure: Measure, number: int) -> str:
    return f"{measure.name}{peers_report.RUN}{number}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=peers_report.RESULTS)
    asked = parser.parse_args()
    about, figures, names = join([read(path.read_text()) for path in asked.runs])
    peers_report.write(asked.out, figures, names, about.replace("\n", "\n\n"))


if __name__ == "__main__":
    main()
