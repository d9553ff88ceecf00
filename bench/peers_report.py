"""What `bench.peers` writes: a table with ratios and targets, and two PNG plots."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from runtime.bench.measure import Figures
from runtime.bench.workloads import Measure

RESULTS = Path(__file__).parent / "results"
DEFAULT, BF16 = "Ramet default", "Ramet bf16"
RUN = ", run "  # between a measure's name and the number of its run, where several are joined

# measure -> (peer to beat, at the default, in bf16); "" stands for the best peer
TARGETS: dict[str, tuple[str, float | None, str, float | None]] = {
    "decode, 1 stream": ("llama.cpp", 1.5, "vLLM", 2.0),
    "prefill of 500 tokens": ("transformers", 2.0, "transformers", 2.0),
    "16-way fan-out over 1.6k tokens": ("", 3.0, "", 1.7),
    "4 agents × 6 turns": ("", 3.0, "", 1.7),
    "12 prompts, nothing shared": ("", 2.0, "", 1.3),
}


def write(folder: Path, figures: Figures, names: Sequence[str], about: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join([about, "", *table(figures, names), "", *ratio_table(figures, names)])
    (folder / "peers.md").write_text(text + "\n")
    plot(folder, figures, names)
    print(text)


def table(figures: Figures, names: Sequence[str]) -> list[str]:
    lines = ["| workload | unit | " + " | ".join(names) + " |", "|---|---|" + "---:|" * len(names)]
    for measure, row in figures.items():
        cells = " | ".join(f"{row[name]:.2f}" if name in row else "–" for name in names)
        lines.append(f"| {measure.name} | {measure.unit} | {cells} |")
    return lines


def ratio_table(figures: Figures, names: Sequence[str]) -> list[str]:
    """How many times as good Ramet is: at its default against every peer, in bf16 against the bf16 peers."""
    lines = [
        "How many times as good as the peer named (above 1: Ramet is ahead).",
        "",
        "| workload | default | against | target | bf16 | against | target |",
        "|---|---:|---|---:|---:|---|---:|",
    ]
    peers = [name for name in names if name not in (DEFAULT, BF16)]
    narrow = [name for name in peers if name.endswith("bf16")]
    for measure in figures:
        wanted = TARGETS.get(measure.name.partition(RUN)[0], ("", None, "", None))
        left = cells(figures, measure, DEFAULT, [n for n in peers if n.startswith(wanted[0])], wanted[1])
        right = cells(figures, measure, BF16, [n for n in narrow if n.startswith(wanted[2])], wanted[3])
        lines.append(f"| {measure.name} | {left} | {right} |")
    return lines


def cells(figures: Figures, measure: Measure, ours: str, peers: Sequence[str], target: float | None) -> str:
    best = best_peer(figures, measure, peers)
    goal = f"{target:.1f} ×" if target else "–"
    if best is None or ours not in figures[measure]:
        return f"– | – | {goal}"
    return f"{ratio(figures, measure, ours, best):.2f} × | {best} | {goal}"


def best_peer(figures: Figures, measure: Measure, peers: Sequence[str]) -> str | None:
    row = figures[measure]
    have = [name for name in peers if name in row]
    if not have:
        return None
    return (max if measure.more_is_better else min)(have, key=lambda name: row[name])


def ratio(figures: Figures, measure: Measure, ours: str, other: str) -> float:
    mine, theirs = figures[measure][ours], figures[measure][other]
    return mine / theirs if measure.more_is_better else theirs / mine


def machine(threads: int) -> str:
    """Where this ran and how busy it was."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    model = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "CPU")
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    wide = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8") if f in flags]
    today = datetime.now(UTC).date().isoformat()
    return (
        f"SmolLM2-135M on {model} ({', '.join(wide)}), {threads} threads each, {platform.system()}, Python "
        f"{platform.python_version()}; load before the run {os.getloadavg()[0]:.1f}; {today}."
    )


def plot(folder: Path, figures: Figures, names: Sequence[str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = dict(zip(names, ("#3ca951", "#97d8a4", "#4269d0", "#ff725c", "#efb118", "#9c6b4e"), strict=False))
    columns = 3
    rows = -(-len(figures) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(13, 3.2 * rows), squeeze=False)
    for axis in axes.flat[len(figures) :]:
        axis.axis("off")
    for axis, (measure, row) in zip(axes.flat, figures.items(), strict=False):
        have = [name for name in names if name in row]
        bars = axis.barh(have[::-1], [row[n] for n in have[::-1]], color=[colours[n] for n in have[::-1]])
        axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        axis.margins(x=0.18)
        better = "more" if measure.more_is_better else "less"
        axis.set_title(f"{measure.name} ({measure.unit}, {better} is better)", fontsize=9)
        axis.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(folder / "peers.png", dpi=110)
    pyplot.close(figure)
    plot_ratios(folder, figures, names)


def plot_ratios(folder: Path, figures: Figures, names: Sequence[str]) -> None:
    from matplotlib import pyplot

    peers = [name for name in names if name not in (DEFAULT, BF16)]
    sides = ((DEFAULT, peers, 1, "#3ca951"), (BF16, [n for n in peers if n.endswith("bf16")], 3, "#97d8a4"))
    figure, axis = pyplot.subplots(figsize=(11, 0.75 * len(figures) + 1.5))
    labels = [measure.name for measure in figures]
    for side, (ours, rivals, at, colour) in enumerate(sides):
        for line, measure in enumerate(figures):
            wanted = TARGETS.get(measure.name.partition(RUN)[0], ("", None, "", None))
            best = best_peer(figures, measure, [n for n in rivals if n.startswith(wanted[at - 1])])  # type: ignore[arg-type]
            if best is None or ours not in figures[measure]:
                continue
            y, value = line + (side - 0.5) * 0.38, ratio(figures, measure, ours, best)
            axis.barh(y, value, height=0.36, color=colour, label=ours if line == 0 else None)
            axis.text(value, y, f" {value:.2f} × {best}", va="center", fontsize=8)
            if wanted[at] is not None:
                axis.plot([wanted[at]] * 2, [y - 0.18, y + 0.18], color="black", linewidth=2)
    axis.axvline(1, color="#888", linewidth=1)
    axis.set_xscale("log")
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.25)
    axis.set_title("times as good as the peer to beat; the black marks are the targets", fontsize=10)
    axis.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(folder / "peers-ratios.png", dpi=110)
    pyplot.close(figure)


__all__ = ["BF16", "DEFAULT", "RESULTS", "machine", "write"]
