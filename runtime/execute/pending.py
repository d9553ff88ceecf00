"""A launched step on its way to a result."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.sampling import Samples
from kernels.steps import LateChanges
from runtime.step import F32, I32, StepPlan, StepResult


@dataclass(slots=True)
class Step:
    """Written by the device's thread only, until `event` is set; then read-only."""

    plan: StepPlan
    event: threading.Event = field(default_factory=threading.Event)
    late_logits: Tensor | None = None  # [late samples, vocab] kept for sample_late
    late_changes: LateChanges | None = None  # or how a step that runs as a whole is told of them
    samples: SampleArrays | None = None
    scores: ScoreArrays | None = None
    busy_s: float = 0.0
    started: float = 0.0
    value: StepResult | None = None
    error: BaseException | None = None

    def done(self) -> bool:
        return self.event.is_set()

    def result(self, timeout: float | None = None) -> StepResult:
        if not self.event.wait(timeout):
            raise TimeoutError(f"step {self.plan.step} did not finish within {timeout} s")
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value

    def finish(self) -> None:
        """Assemble the result from the arrays and wake whoever waits."""
        assert self.samples is not None
        assert self.scores is not None
        self.late_logits = None
        self.value = StepResult(
            tokens=self.samples.tokens,
            logprobs=self.samples.logprobs,
            top_ids=self.samples.top_ids,
            top_logprobs=self.samples.top_logprobs,
            score_logprobs=self.scores.logprobs,
            score_top_ids=self.scores.top_ids,
            score_top_logprobs=self.scores.top_logprobs,
            failed=tuple(np.flatnonzero(self.samples.failed).tolist()),
            device_s=self.busy_s,
            started=self.started,
            finished=time.monotonic(),
        )
        self.event.set()

    def fail(self, error: BaseException) -> None:
        self.late_logits = None
        self.error = error
        self.event.set()


@dataclass(frozen=True, slots=True)
class SampleArrays:
    """The result arrays of all samples of a plan, as one call gave them or filled in parts."""

    tokens: I32
    logprobs: F32
    top_ids: I32
    top_logprobs: F32
    failed: npt.NDArray[np.bool_]

    @staticmethod
    def blank(n_samples: int, n_top: int) -> SampleArrays:
        return SampleArrays(
            tokens=np.zeros(n_samples, np.int32),
            logprobs=np.full(n_samples, np.nan, np.float32),
            top_ids=np.full((n_samples, n_top), -1, np.int32),
            top_logprobs=np.full((n_samples, n_top), np.nan, np.float32),
            failed=np.zeros(n_samples, np.bool_),
        )

    def fill(self, index: np.ndarray, drawn: Samples) -> None:
        for name in ("tokens", "logprobs", "top_ids", "top_logprobs", "failed"):
            getattr(self, name)[index] = getattr(drawn, name).numpy()


class ScoreArrays:
    """The result arrays of a plan's scored tokens."""

    def __init__(self, n_scores: int, n_top: int) -> None:
        self.logprobs = np.full(n_scores, np.nan, np.float32)
        self.top_ids = np.full((n_scores, n_top), -1, np.int32)
        self.top_logprobs = np.full((n_scores, n_top), np.nan, np.float32)
