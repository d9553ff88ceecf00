"""Everything a GPU must show, in one run of a few minutes: `python -m bench.gpu --out results/`.

Sections, in order: `parity` (attention against a float64 oracle), `fused` (the Triton kernels against torch), `graphs`
(capture, 200 replans under overlap), `engine` (the scheduler end to end: overlapped and captured equals plain), `split`
(what fixed cuts of the keys cost), `prefill` (fa2 against fa3), `speed` (decode, prefill, prefix hits, interference,
idle time of two models in bf16 and fp8), `cascade` (shared prefixes on and off), `concurrent` (512 requests at once).

Each is optional (`--only`); a failing one is reported and the others run; what does not fit the time budget is said to
be left out. Tables come last, JSON goes to --out. `--dry-run` runs every line on the CPU, over stand-ins. Without a
network take the luggage that bench.gpu_carry packs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import gpu_attention, gpu_checks, gpu_speed
from bench.gpu_machine import Card, Machine, cuda_machine, dry_machine

Row = dict[str, Any]
Section = Callable[[Machine, Card], list[Row]]

SECTIONS: dict[str, Section] = {
    "parity": lambda machine, card: gpu_checks.parity(machine),
    "fused": lambda machine, card: gpu_checks.fused(machine),
    "graphs": lambda machine, card: gpu_checks.graphs(machine),
    "engine": lambda machine, card: gpu_checks.engine(machine),
    "split": gpu_attention.split,
    "prefill": gpu_attention.prefill_kernels,
    "speed": gpu_speed.speed,
    "cascade": gpu_speed.cascade,
    "concurrent": gpu_speed.concurrent,
}
PUBLISHED = (  # of other runtimes, on one H100
    ("tok/s, 512 concurrent", "concurrent", "tok/s", 11_300.0),
    ("ITL p99 inflation under a prefill burst", "speed", "ITL p99 inflation", 1.9),
    ("speed-up of a known prefix", "speed", "2k prefix speed-up", 4.1),
)


@dataclass
class Report:
    """What the sections found."""

    card: Card
    tables: dict[str, list[Row]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.errors and all(row.get("ok", True) for rows in self.tables.values() for row in rows)

    def published(self) -> list[Row]:
        """Our first row beside what others published."""
        rows = []
        for what, section, column, theirs in PUBLISHED:
            ours = [row[column] for row in self.tables.get(section, []) if column in row]
            rows.append({"what": what, "here": ours[0] if ours else None, "published, one H100": theirs})
        return rows


def run(names: Sequence[str], machine: Machine) -> Report:
    report = Report(machine.card())
    for name in names:
        if machine.late:
            report.left_out.append(name)
            continue
        begin = time.monotonic()
        print(f"{name} ...", flush=True)
        try:
            report.tables[name] = SECTIONS[name](machine, report.card)
        except Exception as error:  # one section's failure must not cost the others their time on the GPU
            traceback.print_exc()
            report.errors[name] = f"{type(error).__name__}: {error}"
        report.seconds[name] = round(time.monotonic() - begin, 1)
        machine.gpu.tidy()
    return report


def table(rows: list[Row]) -> str:
    """Rows as a Markdown table, columns in order of first appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(name)) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def text(report: Report) -> str:
    """The report as Markdown."""
    card = report.card
    lines = [
        f"# {card.name} ({card.memory_gib} GiB, {card.read_gb_s:.0f} GB/s read, {card.bf16_tflops:.0f} TFLOP/s bf16)"
    ]
    for name, rows in report.tables.items():
        lines.append(f"## {name} ({report.seconds[name]} s)\n\n{table(rows)}")
    lines.append(f"## beside published figures\n\n{table(report.published())}")
    lines += [f"## {name} FAILED: {error}" for name, error in report.errors.items()]
    if report.left_out:
        lines.append(f"Left out, no time: {', '.join(report.left_out)}")
    return "\n\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma separated")
    parser.add_argument("--out", type=Path, help="folder for gpu.json and gpu.md")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds after which nothing more is begun")
    parser.add_argument("--dry-run", action="store_true", help="every line on the CPU; no number counts")
    options = parser.parse_args(arguments)
    names = [name for name in options.only.split(",") if name]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if not options.dry_run and not torch.cuda.is_available():
        print("bench.gpu needs an NVIDIA GPU, and this torch sees none (--dry-run needs none).", file=sys.stderr)
        return 2
    machine = dry_machine() if options.dry_run else cuda_machine(time.monotonic() + options.budget)
    report = run(names, machine)
    print("\n" + text(report))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpu.json").write_text(json.dumps(asdict(report), indent=1))
        (options.out / "gpu.md").write_text(text(report))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
