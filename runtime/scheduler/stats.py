"""Counters of the scheduler, cheap to keep and read from any thread."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

RING = 512


class Recent:
    """The last RING values of one measure: mean and percentiles on demand."""

    __slots__ = ("_at", "_values", "total")

    def __init__(self) -> None:
        self._values: list[float] = []
        self._at = 0
        self.total = 0.0

    def add(self, value: float) -> None:
        self.total += value
        if len(self._values) < RING:
            self._values.append(value)
        else:
            self._values[self._at] = value
            self._at = (self._at + 1) % RING

    def summary(self) -> dict[str, float]:
        values = sorted(self._values)
        if not values:
            return {"mean": 0.0, "p50": 0.0, "p99": 0.0, "max": 0.0, "total": self.total}
        n = len(values)
        return {
            "mean": sum(values) / n,
            "p50": values[n // 2],
            "p99": values[min(n - 1, int(n * 0.99))],
            "max": values[-1],
            "total": self.total,
        }


class Rate:
    """A count's growth per second, over windows of at least WINDOW_S."""

    WINDOW_S = 1.0

    def __init__(self) -> None:
        self.per_second = 0.0
        self._since: float | None = None
        self._from = 0

    def look(self, count: int, now: float) -> None:
        """`count` is the total at `now`."""
        if self._since is None:
            self._since, self._from = now, count
        elif now - self._since >= self.WINDOW_S:
            self.per_second = (count - self._from) / (now - self._since)
            self._since, self._from = now, count


@dataclass(slots=True)
class Stats:
    """Totals since the start. Token counts are prompt-side except `generated` and `forced`."""

    received: int = 0
    refused: int = 0  # at the door: invalid
    queue_full: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    timed_out: int = 0
    queue_timed_out: int = 0
    steps: int = 0
    steps_decode: int = 0
    steps_prefill: int = 0
    steps_mixed: int = 0
    steps_failed: int = 0
    rows_stale: int = 0  # rows of requests that had ended when their step came back
    prompt_tokens: int = 0
    prefilled: int = 0
    reused: int = 0
    copied: int = 0
    adopted: int = 0
    recomputed: int = 0  # prefilled again after a retraction
    generated: int = 0
    forced: int = 0  # jump-forward: tokens appended without a model step of their own
    jumps: int = 0
    retractions: int = 0
    retracted_tokens: int = 0
    preemptions: int = 0
    withdrawn_pages: int = 0
    output_sends: int = 0
    audit_failures: int = 0
    stalls: int = 0
    queue_s: Recent = field(default_factory=Recent)
    step_tokens: Recent = field(default_factory=Recent)
    step_rows: Recent = field(default_factory=Recent)
    plan_s: Recent = field(default_factory=Recent)
    launch_s: Recent = field(default_factory=Recent)
    wait_s: Recent = field(default_factory=Recent)
    commit_s: Recent = field(default_factory=Recent)
    late_s: Recent = field(default_factory=Recent)
    device_s: Recent = field(default_factory=Recent)
    device_idle_s: Recent = field(default_factory=Recent)  # between the end of a step and the start of the next

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers; `gil_free_share`: part of the device's time in which this thread only waited for it."""
        out: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            out[item.name] = value.summary() if isinstance(value, Recent) else value
        busy = self.device_s.total
        out["gil_free_share"] = min(1.0, self.wait_s.total / busy) if busy else 0.0
        idle = self.device_idle_s.total
        out["device_idle_share"] = idle / (idle + busy) if busy else 0.0
        return out
