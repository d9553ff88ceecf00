"""A run's record as one HTML page: the tree of states, every piece coloured by where its tokens came from.

Self-contained: no scripts, no fonts, no images are fetched; it opens from a file and from a mail.

    python -m frontend_lang.trace_page run.json [run.html]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from frontend_lang.record import Record

MAX_TEXT = 4000
Data = Mapping[str, Any]
_STYLE = """
:root{--reused:#b9e2c6;--copied:#dcefb8;--prefilled:#fbd7ac;--generated:#b6d4fa;--forced:#d8c6f5;--unread:#e7eaee;
--tool:#f5c2c2;--line:#d9dee4;--ink:#1b2430;--soft:#647080;--ground:#f5f7f9}
*{box-sizing:border-box}
body{margin:0;font:14px/1.5 system-ui,"DejaVu Sans",sans-serif;color:var(--ink);background:var(--ground)}
main{max-width:1180px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:22px;margin:0}h2{font-size:15px;margin:0 0 10px}.soft{color:var(--soft)}
section{background:#fff;border:1px solid var(--line);border-radius:10px;padding:16px 18px;margin-top:16px}
.cards{display:flex;flex-wrap:wrap;gap:10px;margin:14px 0 0}
.card{background:#fff;border:1px solid var(--line);border-radius:10px;padding:8px 16px;color:var(--soft);font-size:12px}
.card b{display:block;font-size:19px;color:var(--ink);line-height:1.3}
.key{margin:14px 0 0;font-size:12px}
.key span{display:inline-block;padding:1px 9px;border-radius:4px;margin:0 6px 4px 0;color:var(--ink)}
.reused{background:var(--reused)}.copied{background:var(--copied)}.prefilled{background:var(--prefilled)}
.generated{background:var(--generated)}.forced{background:var(--forced)}.unread{background:var(--unread)}
.tool{background:var(--tool)}
.row{display:grid;grid-template-columns:130px 1fr;gap:10px;align-items:center;font-size:12px}
.row>span{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.lane{position:relative;height:18px;margin:2px 0;background:var(--ground);border-radius:4px}
.lane i{position:absolute;top:2px;height:14px;border-radius:3px;min-width:3px;border:1px solid #0002}
.axis{position:relative;height:16px;color:var(--soft);font-size:11px}.axis b{position:absolute;font-weight:400}
table{border-collapse:collapse;width:100%;font-size:12.5px}th{color:var(--soft);font-weight:500}
td,th{padding:3px 8px;text-align:right;border-bottom:1px solid var(--line);font-variant-numeric:tabular-nums}
td:first-child,th:first-child,td:nth-child(2),th:nth-child(2),td:last-child,th:last-child{text-align:left}
.bar{display:flex;height:13px;border-radius:3px;overflow:hidden}
.state{border-left:3px solid var(--line);margin:10px 0 0 6px;padding-left:14px}
.state>summary{cursor:pointer;font-weight:600}.state>summary .soft{font-weight:400;font-size:12px;margin-left:6px}
.story{white-space:pre-wrap;word-break:break-word;margin:6px 0 10px;line-height:1.75;
font:12.5px/1.75 ui-monospace,"DejaVu Sans Mono",monospace}
.story span{border-radius:3px;padding:1.5px 0}.story .name{color:#fff;background:var(--soft);font-size:10px;
padding:1px 5px;margin:0 3px;border-radius:3px;vertical-align:1px}
.steps{font-size:12px;color:var(--soft)}.steps summary{cursor:pointer}
.steps li b{color:var(--ink);font-weight:600}
"""
_KEY = {
    "reused": "reused from the cache",
    "copied": "copied from a shared page",
    "prefilled": "prefilled",
    "generated": "generated",
    "forced": "forced by a grammar",
    "unread": "never read",
    "tool": "tool",
}


def page(record: Record | Data) -> str:
    """The whole page as text, from a record or what its `as_dict` gave."""
    data = record.as_dict() if isinstance(record, Record) else record
    key = "".join(f'<span class="{kind}">{words}</span>' for kind, words in _KEY.items())
    body = [
        f"<h1>{escape(data['program'])}</h1>",
        f'<div class="soft">run {escape(data["run_id"])} on {escape(data["backend"])}</div>',
        _cards(data["totals"]),
        f'<div class="key">{key}</div>',
        f"<section><h2>Time</h2>{_timeline(data)}</section>",
        f"<section><h2>States</h2>{_tree(data, 'main')}</section>",
        f"<section><h2>Requests</h2>{_requests(data['events'])}</section>",
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(data["program"])}</title>'
        f"<style>{_STYLE}</style></head><body><main>{''.join(body)}</main></body></html>"
    )


def save(record: Record | Data, path: str | Path) -> Path:
    """Write the page and return where it is."""
    target = Path(path)
    target.write_text(page(record), encoding="utf-8")
    return target


def _cards(totals: Data) -> str:
    cards = {
        "requests": totals["requests"],
        "messages": totals["messages"],
        "tokens reused": totals["reused"],
        "tokens prefilled": totals["prefilled"],
        "tokens generated": totals["generated"],
        "of them forced": totals["forced"],
        "reused of reusable": f"{totals['hit_rate']:.1%}",
        "wall time": f"{totals['wall_s']:.2f} s",
    }
    inner = "".join(f'<div class="card"><b>{value}</b>{name}</div>' for name, value in cards.items())
    return f'<div class="cards">{inner}</div>'


# ---- time ---------------------------------------------------------------------------------------------------


def _timeline(data: Data) -> str:
    """One lane a branch; requests (coloured by what they cost most of) and tool calls as bars at their times."""
    end = max([data["totals"]["wall_s"], *(event["end_s"] for event in data["events"])], default=0.0) or 1.0
    rows = []
    for branch in data["branches"]:
        marks = [_bar(_colour(e), e, f"{e['kind']} {', '.join(e['names'])}", end) for e in data["events"]
                 if e["branch"] == branch]  # fmt: skip
        marks += [_bar("tool", tool, f"tool {tool['name']}", end) for tool in data["tools"] if tool["branch"] == branch]
        if marks:
            rows.append(f'<div class="row"><span>{escape(branch)}</span><div class="lane">{"".join(marks)}</div></div>')
    ticks = "".join(f'<b style="left:{10 * i}%">{end * i / 10:.2f} s</b>' for i in range(0, 10, 2))
    return "".join(rows) + f'<div class="row"><span></span><div class="axis">{ticks}</div></div>'


def _colour(event: Data) -> str:
    if event["generated"]:
        return "generated"
    return "reused" if event["reused"] > event["prefilled"] else "prefilled"


def _bar(kind: str, event: Data, label: str, end: float) -> str:
    left, width = 100 * event["start_s"] / end, 100 * (event["end_s"] - event["start_s"]) / end
    title = f"{label}: {event['start_s']:.3f} s to {event['end_s']:.3f} s, line {event['line']}"
    return f'<i class="{kind}" style="left:{left:.2f}%;width:{width:.2f}%" title="{escape(title)}"></i>'


# ---- states -------------------------------------------------------------------------------------------------


def _tree(data: Data, name: str) -> str:
    """A state's story and, inside it, the branches that left it."""
    branch = data["branches"][name]
    children = [child for child, other in data["branches"].items() if other["parent"] == name]
    counts = {kind: sum(s["n_tokens"] for s in branch["story"] if s["kind"] == kind) for kind in _KEY}
    about = ", ".join(f"{n} {kind}" for kind, n in counts.items() if n)
    mine = [event for event in data["events"] if event["branch"] == name]
    if mine:
        about += f" · {min(e['start_s'] for e in mine):.2f} to {max(e['end_s'] for e in mine):.2f} s"
    inner = "".join(_tree(data, child) for child in children)
    return (
        f'<details class="state" open><summary>{escape(name)}<span class="soft">{about}</span></summary>'
        f'<div class="story">{_story(branch["story"])}</div>{_steps(branch["steps"])}{inner}</details>'
    )


def _story(story: Sequence[Data]) -> str:
    out, name = [], ""
    for piece in story:
        if piece["name"] and piece["name"] != name:
            out.append(f'<span class="name">{escape(piece["name"])}</span>')
        name = piece["name"]
        text = piece["text"] if len(piece["text"]) <= MAX_TEXT else piece["text"][:MAX_TEXT] + " …"
        title = f"{piece['n_tokens']} tokens {piece['kind']}"
        if piece["kind"] != "unread":
            title += f", by a request of line {piece['line']}, {piece['start_s']:.3f} s to {piece['end_s']:.3f} s"
        out.append(f'<span class="{piece["kind"]}" title="{escape(title)}">{escape(text)}</span>')
    return "".join(out)


def _steps(steps: Sequence[Data]) -> str:
    """The branch's IR, as it was run."""
    if not steps:
        return ""
    items = "".join(
        f"<li><b>{step['kind']}</b> {escape(' '.join(step['text'].split())[:120])} :{step['line']}</li>"
        for step in steps
        if step["kind"] != "end"
    )
    return f'<details class="steps"><summary>{len(steps)} steps</summary><ol>{items}</ol></details>'


# ---- requests -----------------------------------------------------------------------------------------------


def _requests(events: Sequence[Data]) -> str:
    names = ("branch", "for", "line", "prompt", "reused", "copied", "prefilled", "generated", "forced", "start", "ms")
    head = "".join(f"<th>{name}</th>" for name in (*names, "tokens"))
    longest = max((event["prompt"] + event["generated"] for event in events), default=1)
    return f"<table><tr>{head}</tr>{''.join(_request(event, longest) for event in events)}</table>"


def _request(event: Data, longest: int) -> str:
    parts = {
        "reused": event["reused"] - event["copied"],
        "copied": event["copied"],
        "prefilled": event["prompt"] - event["reused"],
        "generated": event["generated"] - event["forced"],
        "forced": event["forced"],
    }
    bar = "".join(
        f'<div class="{kind}" style="width:{220 * n / max(1, longest):.1f}px" title="{n} {kind}"></div>'
        for kind, n in parts.items()
        if n > 0
    )
    numbers = [event[name] for name in ("line", "prompt", "reused", "copied", "prefilled", "generated", "forced")]
    numbers += [f"{event['start_s']:.2f}", round((event["end_s"] - event["start_s"]) * 1000)]
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    names = escape(f"{event['kind']} {', '.join(event['names'])}")
    why = escape(event["miss"] or "")
    first = f"<td>{escape(event['branch'])}</td><td>{names}</td>"
    return f'<tr title="{why}">{first}{cells}<td><div class="bar">{bar}</div></td></tr>'


def main() -> None:
    source = Path(sys.argv[1])
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else source.with_suffix(".html")
    print(save(json.loads(source.read_text(encoding="utf-8")), target))


if __name__ == "__main__":
    main()
