"""The record of a run: what every request cost, and what an all-knowing cache could have reused."""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from frontend_lang.context import Context, Span
from frontend_lang.ir import Step, describe
from runtime.messages import Ids, Usage

if TYPE_CHECKING:
    from frontend_lang.provenance import Stretch


@dataclass(frozen=True, slots=True)
class Event:
    """One request of one branch. Times are seconds since the run began; lengths are tokens."""

    branch: str
    kind: str  # gen, select, prefetch
    names: tuple[str, ...]
    line: int
    start_s: float
    end_s: float
    usage: Usage
    prompt: Ids = field(repr=False)
    output: Ids = field(repr=False)  # generated ids and the literal text between them
    reusable: int = 0  # at most this many tokens of the prompt can come from a cache (the rest needs logits)


@dataclass(frozen=True, slots=True)
class ToolEvent:
    branch: str
    name: str
    line: int
    start_s: float
    end_s: float
    arguments: str
    result: str
    ok: bool


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the requests of a run.

    `prompt`: what the requests began with. The literal text further on in a chain, and what a grammar appends, are in
    `prefilled` and `reused` alone.
    `optimum`: tokens that a cache holding everything seen would have reused. `retokenised`: committed tokens
    that a later request of their branch did not send as they were.
    """

    requests: int = 0
    messages: int = 0
    prompt: int = 0
    prefilled: int = 0
    reused: int = 0
    copied: int = 0
    generated: int = 0
    forced: int = 0
    optimum: int = 0
    retokenised: int = 0
    wall_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Reused over reusable tokens; 1.0 when nothing was reusable."""
        return self.reused / self.optimum if self.optimum else 1.0


@dataclass(slots=True)
class Record:
    """Everything kept of one run."""

    program: str
    run_id: str
    backend: str
    events: list[Event] = field(default_factory=list)
    tools: list[ToolEvent] = field(default_factory=list)
    branches: dict[str, tuple[str | None, Sequence[Span]]] = field(default_factory=dict)  # name -> (parent, story)
    contexts: dict[str, Context] = field(default_factory=dict, repr=False)
    steps: dict[str, Sequence[Step]] = field(default_factory=dict, repr=False)  # the IR of each branch, as it was run
    token_bytes: Callable[[int], bytes] = field(default=lambda token: b"", repr=False)
    messages: int = 0
    retokenised: int = 0
    wall_s: float = 0.0
    began: float = 0.0  # monotonic seconds

    def totals(self) -> Totals:
        return add([self], None, self.messages, self.wall_s)

    def story(self, branch: str) -> list[Stretch]:
        """What a branch added, cut where its tokens came from different places."""
        from frontend_lang.provenance import stretches

        family = {branch}  # what a branch wrote may first be read by a branch that left it
        for name, (parent, _) in self.branches.items():
            if parent in family:
                family.add(name)
        events = sorted((e for e in self.events if e.branch in family), key=lambda event: event.start_s)
        return stretches(branch, self.contexts[branch], events, self.token_bytes)

    def save(self, path: str | Path) -> Path:
        """Write the record as JSON; `python -m frontend_lang.trace_page FILE` makes the page of it."""
        target = Path(path)
        target.write_text(json.dumps(self.as_dict()), encoding="utf-8")
        return target

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "program": self.program,
            "run_id": self.run_id,
            "backend": self.backend,
            "totals": {**asdict(self.totals()), "hit_rate": self.totals().hit_rate},
            "events": [
                {
                    "branch": event.branch,
                    "kind": event.kind,
                    "names": list(event.names),
                    "line": event.line,
                    "start_s": event.start_s,
                    "end_s": event.end_s,
                    "prompt": event.usage.prompt_tokens,
                    "prefilled": event.usage.prefilled_tokens,
                    "reused": event.usage.cached_tokens,
                    "copied": event.usage.copied_tokens,
                    "generated": event.usage.completion_tokens,
                    "forced": event.usage.forced_tokens,
                    "queue_s": event.usage.queue_s,
                    "miss": event.usage.miss,
                    "prompt_ids": event.prompt.tolist(),
                    "output_ids": event.output.tolist(),
                }
                for event in self.events
            ],
            "tools": [asdict(tool) for tool in self.tools],
            "branches": {
                name: {
                    "parent": parent,
                    "ids": list(self.contexts[name].ids),
                    "steps": [_step(step) for step in self.steps[name]],
                    "story": [asdict(stretch) for stretch in self.story(name)],
                }
                for name, (parent, _) in self.branches.items()
            },
        }


def _step(step: Step) -> dict[str, Any]:
    kind, text = describe(step.node)
    return {"kind": kind, "text": text, "line": step.where.line}


def add(records: Sequence[Record], shared: Event | None, messages: int, wall_s: float) -> Totals:
    """The totals of runs side by side on one cache, and of what was prefetched for all of them."""
    timed = [(record.began + event.start_s, event) for record in records for event in record.events]
    events = ([shared] if shared else []) + [event for _, event in sorted(timed, key=lambda pair: pair[0])]
    usages = [event.usage for event in events]
    return Totals(
        requests=len(events),
        messages=messages,
        prompt=sum(usage.prompt_tokens for usage in usages),
        prefilled=sum(usage.prefilled_tokens for usage in usages),
        reused=sum(usage.cached_tokens for usage in usages),
        copied=sum(usage.copied_tokens for usage in usages),
        generated=sum(usage.completion_tokens for usage in usages),
        forced=sum(usage.forced_tokens for usage in usages),
        optimum=optimum(events),
        retokenised=sum(record.retokenised for record in records),
        wall_s=wall_s,
    )


def optimum(events: Sequence[Event]) -> int:
    """Tokens that could have been reused: each prompt's longest prefix seen before it, at most `reusable`.

    `events` in the order they began. Requests that ran side by side share too, as the runtime plans a prefix once
    for all of a message. A request's last sampled token has no KV: nothing read it.
    """
    seen: list[bytes] = []  # sorted: the longest common prefix is with a neighbour
    total = 0
    for event in events:
        prompt = _sortable(event.prompt)
        at = bisect.bisect(seen, prompt)
        best = max((_common_ids(prompt, other) for other in seen[max(0, at - 1) : at + 1]), default=0)
        total += max(0, min(best, event.reusable))
        bisect.insort(seen, _sortable(np.concatenate([event.prompt, event.output[:-1]])))
    return total


def _sortable(ids: Ids) -> bytes:
    """Bytes that sort as the ids do."""
    return ids.astype(">i4").tobytes()


def _common_ids(a: bytes, b: bytes) -> int:
    return common_prefix(np.frombuffer(a, ">i4"), np.frombuffer(b, ">i4"))


def common_prefix(a: Ids, b: Ids) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
