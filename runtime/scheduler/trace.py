"""A Chrome trace of every step: open the file in Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from typing import IO

from runtime.step import StepPlan, StepResult

SCHEDULER, DEVICE = 1, 2


class StepTrace:
    """Writes spans as they end; without a path it does nothing. The file is valid at any time (the format allows an
    unclosed list)."""

    def __init__(self, path: str | None) -> None:
        self._file: IO[str] | None = open(path, "w", encoding="utf-8") if path else None  # noqa: SIM115
        self._zero: float | None = None
        if self._file:
            self._file.write("[\n")
            for tid, name in ((SCHEDULER, "scheduler"), (DEVICE, "device")):
                self._write({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}})

    def span(self, name: str, step: int, start: float, end: float, **args: object) -> None:
        """A stretch of the scheduler's time, in seconds of its clock."""
        if self._file:
            self._event(name, SCHEDULER, start, end, {"step": step, **args})

    def device(self, plan: StepPlan, result: StepResult) -> None:
        """The device's time for one step."""
        if self._file:
            args: dict[str, object] = {
                "step": plan.step,
                "rows": plan.n_rows,
                "decode_rows": plan.n_decode,
                "tokens": plan.n_tokens,
                "kv_tokens": int(plan.kv_lens.sum()),
                "copies": len(plan.copy_src),
            }
            self._event(f"step {plan.step}", DEVICE, result.started, result.finished, args)

    def close(self) -> None:
        if self._file:
            self._file.write("{}]\n")
            self._file.close()
            self._file = None

    def _event(self, name: str, tid: int, start: float, end: float, args: dict[str, object]) -> None:
        if self._zero is None:
            self._zero = start
        self._write(
            {
                "ph": "X",
                "pid": 1,
                "tid": tid,
                "name": name,
                "ts": round((start - self._zero) * 1e6, 1),
                "dur": round((end - start) * 1e6, 1),
                "args": args,
            }
        )

    def _write(self, event: dict[str, object]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(event) + ",\n")
