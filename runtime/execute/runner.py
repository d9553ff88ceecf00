"""The runner of the CPU backends: a StepPlan goes in, a StepResult comes out, in launch order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from kernels.base import KVStore
from kernels.sampling import Samples, report, sample
from kernels.steps import LateChanges, WholeStep
from runtime.execute.batch import SampleSet, as_tensor, attn_meta, input_ids
from runtime.execute.cpu import CpuQueue
from runtime.execute.pending import SampleArrays, ScoreArrays, Step
from runtime.models.decoder import Model
from runtime.step import Adjust, ModelSpec, Pending, StepPlan

Sampler = Callable[..., Samples]  # as kernels.sampling.sample
Reporter = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]  # as kernels.sampling.report
SCORES_AT_ONCE = 64  # scored tokens whose logits are alive together


class ModelRunner:
    """Implements `Runner`. The model, the KV and the token table are touched on the queue's thread only."""

    def __init__(
        self,
        model: Model,
        kv: KVStore,
        spec: ModelSpec,
        device: CpuQueue,
        max_running: int,
        sample_with: Sampler = sample,
        report_with: Reporter = report,
    ) -> None:
        self.spec = spec
        self.page_size = kv.page_size
        self.n_pages = kv.k[0].shape[0]
        self.max_running = max_running
        self._model = model
        self._kv = kv
        self._sample_with = sample_with
        self._report_with = report_with
        self._device = device
        self._token_table = torch.zeros(max_running + 1, dtype=torch.long)
        self._expected: LateChanges | None = None  # of a step that is still to be told about its late samples

    def launch(self, plan: StepPlan) -> Pending:
        self._give_up()
        step = Step(plan)
        whole = self._model.whole_step
        if whole is None or len(plan.score_index):
            self._submit(step, lambda: self._run(step))
            return step
        if plan.late.any():
            step.late_changes = self._expected = whole.expect(plan.late)
        self._submit(step, lambda: self._run_whole(step, whole))
        return step

    def sample_late(self, pending: Pending, adjust: Sequence[Adjust]) -> None:
        step = cast(Step, pending)
        if step.late_changes is None:
            self._submit(step, lambda: self._run_late(step, adjust))
            return
        step.late_changes.post([(one.sample, one) for one in adjust])
        self._expected = None

    def _give_up(self) -> None:
        """A step whose late samples nobody asked for before something else is wanted will wait no longer."""
        if self._expected is not None:
            self._expected.abandon()
            self._expected = None

    def close(self) -> None:
        self._give_up()
        self._device.close()

    def _submit(self, step: Step, work: Callable[[], None]) -> None:
        def guarded() -> None:
            if step.done():  # it failed before its late samples came
                return
            begin = time.monotonic()
            step.started = step.started or begin
            try:
                work()
            except BaseException as error:
                step.fail(error)
                return
            step.busy_s += time.monotonic() - begin
            if step.late_logits is None:
                step.finish()

        self._device.submit(guarded)

    def _run_whole(self, step: Step, whole: WholeStep) -> None:
        plan, late = step.plan, step.late_changes
        adjusts = [(one.sample, one) for one in plan.adjust]
        drawn = whole(plan, self._token_table, self._kv, adjusts, plan.n_top, late)
        step.samples, step.scores = SampleArrays(*drawn), ScoreArrays(0, plan.n_top)
        if late is not None:
            step.busy_s -= late.waited_s

    def _run(self, step: Step) -> None:
        plan = step.plan
        hidden = self._forward(plan)
        step.samples = SampleArrays.blank(len(plan.sample_index), plan.n_top)
        step.scores = self._score(plan, hidden)
        early, late = np.flatnonzero(~plan.late), np.flatnonzero(plan.late)
        if len(early):
            chosen = SampleSet.of(plan, early, plan.adjust)
            self._sample(step, chosen, self._model.logits(hidden[chosen.query]))
        if len(late):
            step.late_logits = self._model.logits(hidden[torch.from_numpy(plan.sample_index[late]).long()])

    def _run_late(self, step: Step, adjust: Sequence[Adjust]) -> None:
        assert step.late_logits is not None, "sample_late for a step that has no late samples"
        chosen = SampleSet.of(step.plan, np.flatnonzero(step.plan.late), adjust)
        self._sample(step, chosen, step.late_logits)
        step.late_logits = None

    def _forward(self, plan: StepPlan) -> Tensor:
        """Run the model over the plan's tokens. Returns hidden states [tokens, hidden]."""
        meta = attn_meta(plan, self.page_size)
        return self._model.forward(input_ids(plan, self._token_table), meta.positions.long(), meta, self._kv)

    def _sample(self, step: Step, chosen: SampleSet, logits: Tensor) -> None:
        drawn = self._sample_with(
            logits, chosen.rows, chosen.adjusts, want_logprob=chosen.want_logprob, n_top=step.plan.n_top
        )
        self._token_table[chosen.table] = drawn.tokens
        assert step.samples is not None
        step.samples.fill(chosen.index.numpy(), drawn)

    def _score(self, plan: StepPlan, hidden: Tensor) -> ScoreArrays:
        """Log-probabilities of given next tokens, a bounded number of vocabulary rows at a time."""
        scores = ScoreArrays(len(plan.score_index), plan.n_top)
        for begin in range(0, len(plan.score_index), SCORES_AT_ONCE):
            part = slice(begin, begin + SCORES_AT_ONCE)
            index, again = np.unique(plan.score_index[part], return_inverse=True)
            logits = self._model.logits(hidden[torch.from_numpy(index).long()])[torch.from_numpy(again)]
            targets = as_tensor(plan.score_target[part]).long()
            everyone = torch.ones(len(targets), dtype=torch.bool)
            logprobs, top_ids, top_logprobs = self._report_with(logits, targets, everyone, plan.n_top)
            scores.logprobs[part] = logprobs.numpy()
            scores.top_ids[part] = top_ids.numpy()
            scores.top_logprobs[part] = top_logprobs.numpy()
        return scores
