"""The compiled program as an SVG image: one lane a branch, one box a step. No scripts, no external assets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from frontend_lang.explain import Lane, Row, layout

if TYPE_CHECKING:
    from frontend_lang.function import Program

COLUMN, BOX, ROW, PAD = 230, 26, 34, 16
COLOURS = {
    "text": "#dbe7f3",
    "hole": "#f6e7c1",
    "gen": "#cfeacb",
    "select": "#e3d4f2",
    "tool": "#f8d3c5",
    "fork": "#ffffff",
    "join": "#ffffff",
    "dynamic": "#eeeeee",
}


class _Canvas:
    """Collects shapes; lanes are columns from left to right."""

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.columns = 0
        self.bottom = 0

    def lane(self, lane: Lane, top: int, entry: tuple[int, int] | None) -> None:
        """Draw one branch below `top`; a line leads there from `entry`."""
        column, self.columns = self.columns, self.columns + 1
        x, y = PAD + column * COLUMN, top
        self.text(x, y + 12, lane.name, bold=True)
        y += 20
        if entry is not None:
            self.link(entry, (x + 90, y - 20))
        for index, row in enumerate(lane.rows):
            if row.kind == "end":
                continue
            self.box(x, y, row)
            for child in lane.children.get(index, ()):
                self.lane(child, y + ROW + 24, (x + COLUMN - 24, y + BOX // 2))
            y += ROW
        self.bottom = max(self.bottom, y)

    def box(self, x: int, y: int, row: Row) -> None:
        colour = COLOURS["hole" if row.kind == "text" and row.tokens is None and row.note else
                         "text" if row.kind == "role" else row.kind]  # fmt: skip
        count = "" if row.tokens is None else f"{'≤' if row.upto else ''}{row.tokens}"
        label = " ".join(f"{row.kind} {row.text}".split() if row.kind != "text" else row.text.split())
        short = label if len(label) <= 26 else label[:25] + "…"
        self.shapes.append(
            f"<g><title>{escape(f'line {row.line}: {label} {row.note}')}</title>"
            f'<rect x="{x}" y="{y}" width="{COLUMN - 24}" height="{BOX}" rx="5" fill="{colour}" stroke="#7a8794"/></g>'
        )
        self.text(x + 8, y + 17, short)
        self.text(x + COLUMN - 32, y + 17, count, end=True)

    def text(self, x: int, y: int, text: str, *, bold: bool = False, end: bool = False) -> None:
        style = ' font-weight="bold"' if bold else ""
        anchor = ' text-anchor="end"' if end else ""
        self.shapes.append(f'<text x="{x}" y="{y}"{style}{anchor}>{escape(text)}</text>')

    def link(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        (x1, y1), (x2, y2) = start, end
        path = f"M{x1},{y1} H{x2 - 12} Q{x2},{y1} {x2},{y1 + 12} V{y2}"
        self.shapes.insert(0, f'<path d="{path}" fill="none" stroke="#7a8794"/>')


def draw(program: Program[Any, Any], target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """SVG text."""
    lane, _ = layout(program, target, args, kwargs)
    canvas = _Canvas()
    canvas.lane(lane, PAD, None)
    width, height = PAD + canvas.columns * COLUMN, canvas.bottom + PAD
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="#1d2733">'
        f'<title>{escape(program.name)}</title><rect width="100%" height="100%" fill="#ffffff"/>'
        f"{''.join(canvas.shapes)}</svg>"
    )
