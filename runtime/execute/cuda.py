"""The runner of a GPU: the host plans step N+1 while the device runs step N, and looks at N's tokens later.

Three streams: `in` carries a plan's arrays to the device, `main` runs the model and the sampler, `out` carries
tokens home. Token values stay on the device in the token table, so the host need not know them to go on. Two
sets of step buffers alternate; a set is rewritten only when the step that used it last has left it. Host
waits happen in two places: for a step's buffers two launches later, and in `result`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from kernels.base import AttnMeta, KVStore
from kernels.sampling import Draw, Samples, report, sample, upload
from runtime.execute.batch import SampleSet, as_tensor
from runtime.execute.graphs import DecodeGraphs, GraphSize
from runtime.execute.pending import SampleArrays, ScoreArrays
from runtime.execute.runner import SCORES_AT_ONCE
from runtime.execute.staging import Download, Upload
from runtime.execute.streams import Device, Event
from runtime.execute.trial import blank_plan
from runtime.models.decoder import Model
from runtime.step import FROM_TABLE, Adjust, ModelSpec, Pending, StepPlan, StepResult

_ON_DEVICE = ("kv_indices", "positions", "slots", "copy_src", "copy_dst", "token_ids")
_ON_HOST = ("qo_indptr", "kv_indptr", "last_page_len", "kv_lens", "share_indptr", "share_n_pages")


@dataclass(slots=True)
class _Buffers:
    """What one of the two step slots owns."""

    upload: Upload
    arrived: Event  # the plan's arrays are on the device
    left: Event  # the step has read them for the last time


@dataclass(slots=True)
class DeviceStep:
    """A launched step. Device tensors in it are written by the main stream and read by the out stream."""

    plan: StepPlan
    home: Event
    device: Device
    started: float
    late_logits: Tensor | None = None
    parts: list[tuple[np.ndarray, Samples]] = field(default_factory=list)
    score_parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    downloads: list[Download] = field(default_factory=list)
    spans: list[tuple[Event, Event]] = field(default_factory=list)  # timers round the step's device work
    sent: bool = False  # its results are on their way; nothing more will be queued
    error: BaseException | None = None
    value: StepResult | None = None

    def done(self) -> bool:
        return self.error is not None or (self.sent and self.home.query())

    def result(self, timeout: float | None = None) -> StepResult:
        if self.error is None and self.value is None:
            self._wait(timeout)
            if self.error is None:
                self.value = self._collect()
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value

    def _wait(self, timeout: float | None) -> None:
        """Without a limit the driver waits; with one the host polls, since events know no limit."""
        if timeout is None and self.sent:
            self.home.synchronize()
            return
        deadline = time.monotonic() + (timeout or 0.0)
        while not self.done():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"step {self.plan.step} did not finish within {timeout} s")
            time.sleep(20e-6)

    def _collect(self) -> StepResult:
        plan = self.plan
        samples = SampleArrays.blank(len(plan.sample_index), plan.n_top)
        scores = ScoreArrays(len(plan.score_index), plan.n_top)
        for (index, _), home in zip(self.parts, self.downloads, strict=False):
            for name in Samples.__slots__:
                getattr(samples, name)[index] = home.numpy(name)
        for k, home in enumerate(self.downloads[len(self.parts) :]):
            part = slice(k * SCORES_AT_ONCE, (k + 1) * SCORES_AT_ONCE)
            for name in ("logprobs", "top_ids", "top_logprobs"):
                getattr(scores, name)[part] = home.numpy(name)
        self.parts, self.score_parts, self.downloads = [], [], []
        finished = time.monotonic()
        return StepResult(
            tokens=samples.tokens,
            logprobs=samples.logprobs,
            top_ids=samples.top_ids,
            top_logprobs=samples.top_logprobs,
            score_logprobs=scores.logprobs,
            score_top_ids=scores.top_ids,
            score_top_logprobs=scores.top_logprobs,
            failed=tuple(np.flatnonzero(samples.failed).tolist()),
            device_s=sum(self.device.seconds(start, end) for start, end in self.spans),
            started=self.started,
            finished=finished,
        )


class CudaRunner:
    """Implements `Runner` on any `Device`. `kv` has one page more than `n_pages`: the scratch page of padding rows."""

    def __init__(
        self,
        model: Model,
        kv: KVStore,
        spec: ModelSpec,
        device: Device,
        *,
        max_running: int,
        graphs: DecodeGraphs | None = None,
        draw_with: Draw | None = None,
    ) -> None:
        self.spec = spec
        self.page_size = kv.page_size
        self.n_pages = kv.k[0].shape[0] - 1
        self.max_running = max_running
        self.graphs = graphs
        self._model, self._kv, self._device, self._draw_with = model, kv, device, draw_with
        self._token_table = torch.zeros(max_running + 1, dtype=torch.long, device=device.torch_device)
        self._in, self._main, self._out = device.stream(), device.stream(), device.stream()
        self._slots = [_Buffers(Upload(device), device.event(), device.event()) for _ in range(2)]
        self._launched = 0
        device.synchronize()  # weights, pool and table were written on the default stream, which ours do not wait for

    def launch(self, plan: StepPlan) -> Pending:
        slot = self._slots[self._launched % 2]
        self._launched += 1
        slot.left.synchronize()
        step = DeviceStep(plan, self._device.event(), self._device, time.monotonic())
        size = self.graphs.size_for(plan) if self.graphs else None
        padded = plan if size is None or self.graphs is None else self.graphs.pad(plan, size, self.n_pages)
        views = slot.upload.write(_device_arrays(padded))
        self._in.run(slot.upload.copy)
        self._in.record(slot.arrived)
        self._main.wait(slot.arrived)
        early, late = np.flatnonzero(~plan.late), np.flatnonzero(plan.late)
        chosen = SampleSet.of(plan, early, plan.adjust)
        self._queue(step, lambda: self._run(step, _meta(padded, views, self.page_size), views, size, chosen, late))
        self._main.record(slot.left)
        if not len(late):
            self._send_home(step)
        return step

    def sample_late(self, pending: Pending, adjust: Sequence[Adjust]) -> None:
        step = cast(DeviceStep, pending)
        chosen = SampleSet.of(step.plan, np.flatnonzero(step.plan.late), adjust)

        def work() -> None:
            assert step.late_logits is not None, "sample_late for a step that has no late samples"
            self._sample(step, chosen, step.late_logits)
            step.late_logits = None

        self._queue(step, work)
        self._send_home(step)

    def warm_up(self) -> None:
        """Capture every size, the largest first."""
        for n_rows in reversed(self.graphs.sizes if self.graphs else []):
            self.launch(blank_plan(n_rows, self.n_pages, self.page_size)).result()

    def close(self) -> None:
        self._device.synchronize()

    def _queue(self, step: DeviceStep, work: Callable[[], None]) -> None:
        """Queue work of a step on the main stream; what it raises fails the step and nothing else."""

        def guarded() -> None:
            if step.error is not None:
                return
            try:
                work()
            except Exception as error:
                step.error = error

        span = self._device.timer(), self._device.timer()
        self._main.record(span[0])
        self._main.run(guarded)
        self._main.record(span[1])
        step.spans.append(span)

    def _run(
        self,
        step: DeviceStep,
        meta: AttnMeta,
        views: dict[str, Tensor],
        size: GraphSize | None,
        chosen: SampleSet,
        late: np.ndarray,
    ) -> None:
        known = views["token_ids"].long()
        ids = torch.where(known == FROM_TABLE, self._token_table[views["query_table"].long()], known)
        if size is not None and self.graphs is not None:
            hidden = self.graphs.run(size, ids, meta)
        else:
            hidden = self._model.forward(ids, meta.positions, meta, self._kv)
        self._score(step, hidden)
        if len(chosen):
            self._sample(step, chosen, self._model.logits(hidden[upload(chosen.query, hidden.device)]))
        if len(late):
            query = torch.from_numpy(step.plan.sample_index[late]).long()
            step.late_logits = self._model.logits(hidden[upload(query, hidden.device)])

    def _sample(self, step: DeviceStep, chosen: SampleSet, logits: Tensor) -> None:
        drawn = sample(
            logits,
            chosen.rows,
            chosen.adjusts,
            want_logprob=chosen.want_logprob,
            n_top=step.plan.n_top,
            draw_with=self._draw_with,
        )
        self._token_table[upload(chosen.table, logits.device)] = drawn.tokens
        step.parts.append((chosen.index.numpy(), drawn))

    def _score(self, step: DeviceStep, hidden: Tensor) -> None:
        plan = step.plan
        for begin in range(0, len(plan.score_index), SCORES_AT_ONCE):
            part = slice(begin, begin + SCORES_AT_ONCE)
            put = lambda array: upload(as_tensor(array).long(), hidden.device)
            index, again = np.unique(plan.score_index[part], return_inverse=True)
            logits = self._model.logits(hidden[put(index)])[put(again)]
            everyone = torch.ones(len(logits), dtype=torch.bool)
            step.score_parts.append(report(logits, put(plan.score_target[part]), everyone, plan.n_top))

    def _send_home(self, step: DeviceStep) -> None:
        sampled = self._device.event()
        self._main.record(sampled)
        self._out.wait(sampled)
        self._out.run(lambda: self._download(step))
        self._out.record(step.home)
        step.sent = True

    def _download(self, step: DeviceStep) -> None:
        if step.error is not None:
            return
        sets = [{name: getattr(drawn, name) for name in Samples.__slots__} for _, drawn in step.parts]
        names = ("logprobs", "top_ids", "top_logprobs")
        sets += [dict(zip(names, part, strict=True)) for part in step.score_parts]
        for tensors in sets:
            home = Download(self._device)
            for name, tensor in tensors.items():
                home.expect(name, tuple(tensor.shape), tensor.dtype).copy_(tensor, non_blocking=True)
                self._out.keep(tensor)
            step.downloads.append(home)


def _device_arrays(plan: StepPlan) -> dict[str, np.ndarray]:
    """The arrays that travel: those the kernels read, and the table row of every query token."""
    arrays = {name: getattr(plan, name) for name in _ON_DEVICE}
    arrays["query_table"] = plan.table_row[plan.token_row]
    return arrays


def _meta(plan: StepPlan, views: dict[str, Tensor], page_size: int) -> AttnMeta:
    """Row borders stay on the host, where the attention planner reads them; the rest lies on the device."""
    return AttnMeta(
        page_size,
        **{name: as_tensor(getattr(plan, name)) for name in _ON_HOST},
        **{name: views[name] for name in _ON_DEVICE if name not in ("token_ids", "positions")},
        positions=views["positions"].long(),
    )
