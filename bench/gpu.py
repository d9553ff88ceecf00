"""Everything a GPU must show, in one run of a few minutes: `python -m bench.gpu --out results/`.

Sections: `parity` (kernels against a float64 oracle), `graphs` (capture, 200 replans under overlap), `engine` (the
scheduler end to end: overlapped and captured equals plain), `speed` (decode, prefill, prefix hits, interference).
Each is optional (`--only`), a failing one is reported and the others run. Tables come last, JSON goes to --out.
Without a network take the luggage that bench.gpu_carry packs.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


@dataclass
class Card:
    """The GPU as measured, not as sold."""

    name: str
    capability: str
    memory_gib: float
    read_gb_s: float  # of one large read
    bf16_tflops: float  # of one large product
    torch: str = field(default_factory=lambda: torch.__version__)
    host: str = field(default_factory=platform.node)


@dataclass
class Report:
    """What the sections found."""

    card: Card
    tables: dict[str, list[Row]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.errors and all(row.get("ok", True) for rows in self.tables.values() for row in rows)


def measure_card(device: torch.device) -> Card:
    properties = torch.cuda.get_device_properties(device)
    read_s = fastest(torch.zeros(4 << 30, dtype=torch.uint8, device=device).view(torch.int64).sum)
    square = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    product_s = fastest(lambda: square @ square)
    return Card(
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        memory_gib=round(properties.total_memory / 2**30, 1),
        read_gb_s=round((4 << 30) / read_s / 1e9, 1),
        bf16_tflops=round(2 * 8192**3 / product_s / 1e12, 1),
    )


def fastest(work: Callable[[], Any], repeats: int = 5) -> float:
    """Seconds of the quickest of some runs on the device, after one to warm up."""
    work()
    best = float("inf")
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


def sections() -> dict[str, Callable[[Card, torch.device], list[Row]]]:
    from bench import gpu_checks, gpu_speed

    return {
        "parity": gpu_checks.parity,
        "graphs": gpu_checks.graphs,
        "engine": gpu_checks.engine,
        "speed": gpu_speed.speed,
        "cascade": gpu_speed.cascade,
    }


def run(names: Sequence[str], device: torch.device) -> Report:
    report = Report(measure_card(device))
    for name in names:
        begin = time.monotonic()
        print(f"{name} ...", flush=True)
        try:
            report.tables[name] = sections()[name](report.card, device)
        except Exception as error:
            traceback.print_exc()
            report.errors[name] = f"{type(error).__name__}: {error}"
        report.seconds[name] = round(time.monotonic() - begin, 1)
        torch.cuda.empty_cache()
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


def show(report: Report) -> None:
    card = report.card
    print(f"\n# {card.name} ({card.memory_gib} GiB, {card.read_gb_s} GB/s read, {card.bf16_tflops} TFLOP/s bf16)")
    for name, rows in report.tables.items():
        print(f"\n## {name} ({report.seconds[name]} s)\n\n{table(rows)}")
    for name, error in report.errors.items():
        print(f"\n## {name} FAILED: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="parity,graphs,engine,speed,cascade", help="sections, comma separated")
    parser.add_argument("--out", type=Path, help="folder for gpu.json and gpu.md")
    options = parser.parse_args(arguments)
    names = [name for name in options.only.split(",") if name]
    unknown = set(names) - set(sections())
    if unknown:
        parser.error(f"unknown section {sorted(unknown)[0]!r}; there are {', '.join(sections())}")
    if not torch.cuda.is_available():
        print("bench.gpu needs an NVIDIA GPU, and this torch sees none.", file=sys.stderr)
        return 2
    report = run(names, torch.device("cuda", torch.cuda.current_device()))
    show(report)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpu.json").write_text(json.dumps(asdict(report), indent=1))
        blocks = [f"## {name}\n\n{table(rows)}\n" for name, rows in report.tables.items()]
        (options.out / "gpu.md").write_text(f"# {report.card.name}\n\n" + "\n".join(blocks))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
