"""Decode steps as CUDA graphs: padded to a few batch sizes, captured once, planned anew before every replay."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import torch
from torch import Tensor

from kernels.base import AttnMeta, KVStore, LayerSpec
from runtime.models.decoder import Model
from runtime.step import StepPlan

DEFAULT_SIZES = (1, 2, 4, 8, *range(16, 257, 16))

Replay = Callable[[], None]


class Capture(Protocol):
    """Turns a function on static tensors into a replayable graph. The function was never run before."""

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """(the static output, what runs the function again into it)."""
        ...


@runtime_checkable
class GraphOps(Protocol):
    """What a backend offers besides `Ops` when its attention can be captured."""

    def plan_graph(self, static: AttnMeta, step: AttnMeta, spec: LayerSpec) -> None:
        """Plan `static`'s own wrapper with the arrays of `step` (as many rows). `attend` calls that name
        `static` use it, captured or not, and `plan(static, spec)` does nothing until the next plan."""
        ...


def pad_decode(plan: StepPlan, size: int, scratch_page: int, page_size: int) -> StepPlan:
    """The plan with rows added up to `size`: one token at position 0 of the scratch page, written to table row 0."""
    extra = size - plan.n_rows
    if extra == 0:
        return plan
    fill = lambda array, value: np.concatenate([array, np.full(extra, value, array.dtype)])
    steps = np.arange(1, extra + 1, dtype=np.int32)
    return msgspec.structs.replace(
        plan,
        rids=plan.rids + (-1,) * extra,
        attempts=plan.attempts + (-1,) * extra,
        table_row=fill(plan.table_row, 0),
        qo_indptr=np.concatenate([plan.qo_indptr, plan.qo_indptr[-1] + steps]),
        kv_indptr=np.concatenate([plan.kv_indptr, plan.kv_indptr[-1] + steps]),
        kv_indices=fill(plan.kv_indices, scratch_page),
        last_page_len=fill(plan.last_page_len, 1),
        kv_lens=fill(plan.kv_lens, 1),
        n_decode=size,
        token_ids=fill(plan.token_ids, 0),
        token_row=np.concatenate([plan.token_row, plan.n_rows - 1 + steps]),
        positions=fill(plan.positions, 0),
        slots=fill(plan.slots, scratch_page * page_size),
        share_indptr=np.zeros(1, np.int32),
        share_n_pages=np.zeros(0, np.int32),
    )


@dataclass(slots=True)
class _Captured:
    """One batch size: static inputs, static output, replay."""

    ids: Tensor
    meta: AttnMeta
    hidden: Tensor
    replay: Replay


class DecodeGraphs:
    """Captures a batch size when it is first needed (or all at once, the largest first, through `warm_up`)."""

    def __init__(
        self,
        model: Model,
        kv: KVStore,
        ops: GraphOps,
        specs: Sequence[LayerSpec],
        capture: Capture,
        *,
        sizes: Sequence[int] = DEFAULT_SIZES,
        max_rows: int,
        eager_if: Callable[[StepPlan], bool] = lambda plan: False,
    ) -> None:
        self._model, self._kv, self._ops, self._specs = model, kv, ops, specs
        self._capture = capture
        self._eager_if = eager_if
        self.sizes = [size for size in sorted(sizes) if size < max_rows] + [max_rows]
        self._captured: dict[int, _Captured] = {}

    def size_for(self, plan: StepPlan) -> int | None:
        """The padded batch size of a decode-only plan, None if it must run eagerly."""
        if plan.n_tokens != plan.n_rows or len(plan.copy_src) or not 0 < plan.n_rows <= self.sizes[-1]:
            return None
        if self._eager_if(plan):
            return None
        return self.sizes[bisect.bisect_left(self.sizes, plan.n_rows)]

    def run(self, ids: Tensor, meta: AttnMeta) -> Tensor:
        """Hidden states [size, hidden] of a padded decode step, in the graph's static output."""
        graph = self._captured.get(len(ids)) or self._make(ids, meta)
        for static, step in ((graph.ids, ids), (graph.meta.positions, meta.positions), (graph.meta.slots, meta.slots)):
            static.copy_(step)
        for spec in self._specs:
            self._ops.plan_graph(graph.meta, meta, spec)
        graph.replay()
        return graph.hidden

    def warm_up(self, padded: Callable[[int], tuple[Tensor, AttnMeta]]) -> None:
        """Capture every size, the largest first, so that the smaller ones fit into its memory."""
        for size in reversed(self.sizes):
            self.run(*padded(size))

    def _make(self, ids: Tensor, meta: AttnMeta) -> _Captured:
        static = replace(meta, positions=meta.positions.clone(), slots=meta.slots.clone())
        static_ids = ids.clone()
        for spec in self._specs:
            self._ops.plan_graph(static, meta, spec)
        hidden, replay = self._capture(lambda: self._model.forward(static_ids, static.positions, static, self._kv))
        graph = _Captured(static_ids, static, hidden, replay)
        self._captured[len(ids)] = graph
        return graph


class CudaCapture:
    """CUDA graphs that share one memory pool. Runs the function once before it captures it."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self.bytes = 0  # device memory that captures took

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        function()
        torch.cuda.synchronize()
        free_before = torch.cuda.mem_get_info()[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            hidden = function()
        self.bytes += max(0, free_before - torch.cuda.mem_get_info()[0])
        return hidden, graph.replay
