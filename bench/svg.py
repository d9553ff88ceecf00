"""A line chart as SVG text, so that benchmarks plot without a plotting library."""

from __future__ import annotations

from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 60, 190, 40, 50
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#97bbf5", "#9c6b4e")


def line_chart(title: str, x_name: str, y_name: str, lines: dict[str, list[tuple[float, float]]]) -> str:
    """One line a name, with its points (x, y), both axes linear and starting at 0 for y."""
    points = [p for line in lines.values() for p in line]
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    top = max(y for _, y in points) * 1.05 or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        right = WIDTH - LEFT - RIGHT
        return LEFT + right * ((x - low) / (high - low) if high > low else 0.5), HEIGHT - BOTTOM - (
            HEIGHT - TOP - BOTTOM
        ) * y / top

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text x="12" y="{TOP - 6}">{escape(y_name)}</text>',
    ]
    for i in range(6):
        x, y = at(low, top * i / 5)
        out.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{top * i / 5:.0f}</text>')
    for x_value in sorted({x for x, _ in points}):
        x, y = at(x_value, 0)
        out.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{x_value:g}</text>')
    for i, (name, line) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*at(*p)) for p in sorted(line))
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out.extend('<circle cx="{:.1f}" cy="{:.1f}" r="3.5" fill="{}"/>'.format(*at(*p), colour) for p in sorted(line))
        y = TOP + 18 * i
        out.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{y}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{WIDTH - RIGHT + 32}" y="{y + 10}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>"])
