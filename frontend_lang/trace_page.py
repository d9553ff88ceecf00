"""A run's record as one HTML page: the tree of states, every piece coloured by where its tokens came from.

Self-contained: no scripts are fetched, no fonts, no images; it opens from a file and from a mail.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from frontend_lang.context import Span
from frontend_lang.record import Event, Record, ToolEvent, Totals

MAX_TEXT = 4000
_STYLE = """
:root{--reused:#bfe3c9;--copied:#dff0c4;--prefilled:#f7d9b8;--generated:#bcd6f5;--forced:#d9c8f0;--tool:#f3c9c9;
--line:#d5dbe1;--ink:#1d2733;--soft:#66727f}
*{box-sizing:border-box}body{margin:0;padding:24px;font:14px/1.5 system-ui,sans-serif;color:var(--ink);background:#fff}
h1{font-size:20px;margin:0 0 4px}h2{font-size:15px;margin:28px 0 8px}.soft{color:var(--soft)}
.cards{display:flex;flex-wrap:wrap;gap:12px;margin:16px 0}.card{border:1px solid var(--line);border-radius:8px;
padding:8px 14px}.card b{display:block;font-size:18px}
.bar{display:flex;height:14px;border-radius:4px;overflow:hidden;min-width:2px}
.reused{background:var(--reused)}.copied{background:var(--copied)}.prefilled{background:var(--prefilled)}
.generated{background:var(--generated)}.forced{background:var(--forced)}.tool{background:var(--tool)}
table{border-collapse:collapse;width:100%}td,th{padding:3px 8px;text-align:right;border-bottom:1px solid var(--line);
font-variant-numeric:tabular-nums}td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){text-align:left}
.lane{position:relative;height:18px;margin:2px 0;background:#f4f6f8;border-radius:4px}
.lane i{position:absolute;top:2px;height:14px;border-radius:3px;min-width:2px}
.row{display:grid;grid-template-columns:140px 1fr;gap:8px;align-items:center}.row span{overflow:hidden;
text-overflow:ellipsis;white-space:nowrap}
details{border-left:2px solid var(--line);margin:4px 0 4px 4px;padding-left:12px}summary{cursor:pointer}
pre{white-space:pre-wrap;word-break:break-word;margin:6px 0;font:12.5px/1.5 ui-monospace,monospace}
pre span{border-radius:3px}.name{color:var(--soft);font-size:11px}
.key span{display:inline-block;padding:0 8px;border-radius:4px;margin-right:6px}
"""
_KEY = ("reused", "copied", "prefilled", "generated", "forced", "tool")


def page(record: Record) -> str:
    """The whole page as text."""
    totals = record.totals()
    body = [
        f"<h1>{escape(record.program)}</h1>",
        f'<div class="soft">run {escape(record.run_id)} on {escape(record.backend)}</div>',
        _cards(totals),
        '<p class="key">' + "".join(f'<span class="{name}">{name}</span>' for name in _KEY) + "</p>",
        "<h2>Time</h2>",
        _timeline(record),
        "<h2>Requests</h2>",
        _requests(record.events),
        "<h2>States</h2>",
        _tree(record, "main"),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(record.program)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"
    )


def save(record: Record, path: str | Path) -> Path:
    """Write the page and return where it is."""
    target = Path(path)
    target.write_text(page(record), encoding="utf-8")
    return target


def _cards(totals: Totals) -> str:
    cards = {
        "requests": totals.requests,
        "messages": totals.messages,
        "tokens prefilled": totals.prefilled,
        "tokens reused": totals.reused,
        "tokens generated": totals.generated,
        "reused of reusable": f"{totals.hit_rate:.1%}",
        "seconds": f"{totals.wall_s:.2f}",
    }
    return (
        '<div class="cards">' + "".join(f'<div class="card"><b>{v}</b>{k}</div>' for k, v in cards.items()) + "</div>"
    )


def _timeline(record: Record) -> str:
    """One lane a branch; requests and tool calls as bars at their times."""
    end = max([record.wall_s, *(event.end_s for event in record.events)], default=0.0) or 1.0
    rows = []
    for branch in record.branches:
        marks = [
            _mark("generated" if event.kind == "gen" else "prefilled", event, ", ".join(event.names), end)
            for event in record.events
            if event.branch == branch
        ]
        marks += [_mark("tool", tool, f"tool {tool.name}", end) for tool in record.tools if tool.branch == branch]
        rows.append(f'<div class="row"><span>{escape(branch)}</span><div class="lane">{"".join(marks)}</div></div>')
    return "".join(rows)


def _mark(kind: str, event: Event | ToolEvent, label: str, end: float) -> str:
    left, width = 100 * event.start_s / end, 100 * (event.end_s - event.start_s) / end
    title = f"{label}: {event.start_s:.3f} s to {event.end_s:.3f} s, line {event.line}"
    return f'<i class="{kind}" style="left:{left:.2f}%;width:{width:.2f}%" title="{escape(title)}"></i>'


def _requests(events: Sequence[Event]) -> str:
    head = "".join(
        f"<th>{name}</th>"
        for name in ("branch", "for", "prompt", "reused", "copied", "prefilled", "generated", "forced", "ms", "tokens")
    )
    longest = max((event.usage.prompt_tokens + event.usage.completion_tokens for event in events), default=1)
    return f"<table><tr>{head}</tr>{''.join(_request(event, longest) for event in events)}</table>"


def _request(event: Event, longest: int) -> str:
    usage = event.usage
    whole = usage.cached_tokens - usage.copied_tokens
    sampled = usage.completion_tokens - usage.forced_tokens
    numbers = (
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.copied_tokens,
        usage.prefilled_tokens,
        usage.completion_tokens,
        usage.forced_tokens,
        round((event.end_s - event.start_s) * 1000),
    )
    parts = {
        "reused": whole,
        "copied": usage.copied_tokens,
        "prefilled": usage.prompt_tokens - usage.cached_tokens,
        "generated": sampled,
        "forced": usage.forced_tokens,
    }
    bar = "".join(
        f'<div class="{kind}" style="width:{200 * n / max(1, longest):.1f}px" title="{n} {kind}"></div>'
        for kind, n in parts.items()
        if n > 0
    )
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    why = escape(usage.miss or "")
    names = escape(f"{event.kind} {', '.join(event.names)}")
    first = f"<td>{escape(event.branch)}</td><td>{names}</td>"
    return f'<tr title="{why}">{first}{cells}<td><div class="bar">{bar}</div></td></tr>'


def _tree(record: Record, name: str) -> str:
    """A state's text and, inside it, the branches that left it."""
    _, spans = record.branches.get(name, (None, ()))
    children = [child for child, (parent, _) in record.branches.items() if parent == name]
    text = _story(spans, _shares(record, name))
    inner = "".join(_tree(record, child) for child in children)
    n_made = sum(len(span.ids) for span in spans)
    summary = f'<summary>{escape(name)} <span class="soft">{n_made} ids generated</span></summary>'
    return f"<details open>{summary}<pre>{text}</pre>{inner}</details>"


def _shares(record: Record, name: str) -> str:
    """How literal text of a branch came to be: mostly reused, or mostly prefilled."""
    mine = [event.usage for event in record.events if event.branch == name]
    return "reused" if sum(u.cached_tokens for u in mine) > sum(u.prefilled_tokens for u in mine) else "prefilled"


def _story(spans: Sequence[Span], literal: str) -> str:
    out = []
    for span in spans:
        text = escape(span.text if len(span.text) <= MAX_TEXT else span.text[:MAX_TEXT] + " …")
        kind = ("forced" if span.forced else "generated") if span.ids else ("tool" if span.name else literal)
        label = f'<span class="name"> {escape(span.name)} </span>' if span.name else ""
        out.append(f'{label}<span class="{kind}" title="{len(span.ids) or len(span.text)}">{text}</span>')
    return "".join(out)
