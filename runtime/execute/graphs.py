"""Decode steps as CUDA graphs: padded to a few batch sizes, captured once, planned anew before every replay.

A size is a number of rows and one of chunks: where keys are cut at fixed places, attention takes a row a chunk, and
a graph holds a fixed number of those. Rows up to one chunk long need the first level only.
"""

from __future__ import annotations

import bisect
import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch
from torch import Tensor

from kernels.base import AttnMeta, KVStore, LayerSpec
from runtime.models.decoder import Model
from runtime.step import StepPlan

DEFAULT_SIZES = (1, 2, 4, 8, *range(16, 257, 16), *range(320, 1025, 64))
LEVELS = (1, 4, 16, 64)  # chunks a row, on average
MIB = 1 << 20

log = logging.getLogger("ramet.execute")

Replay = Callable[[], None]


class GraphSize(NamedTuple):
    """What a captured step holds."""

    rows: int
    chunks: int


class Capture(Protocol):
    """Turns a function on static tensors into a replayable graph. The function was never run before."""

    bytes: int  # device memory that captures took

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """(the static output, what runs the function again into it)."""
        ...


@runtime_checkable
class GraphOps(Protocol):
    """What a backend offers besides `Ops` when its attention can be captured."""

    def plan_graph(self, static: AttnMeta, step: AttnMeta, spec: LayerSpec) -> None:
        """Plan `static`'s own wrapper with the arrays of `step` (as many rows). `attend` calls that name
        `static` use it, captured or not, and `plan(static, spec)` does nothing until the next plan.

        `step.kv_indices` may go on after the last row's pages: each such page is a chunk of padding."""
        ...

    def chunks_of(self, kv_indptr: Tensor, page_size: int, specs: Sequence[LayerSpec]) -> int:
        """Rows that attention takes for decode rows with these pages: as many, or more where long ones are cut."""
        ...


def pad_decode(plan: StepPlan, size: int, scratch_page: int, page_size: int, *, n_spare: int = 0) -> StepPlan:
    """The plan with rows added up to `size`: one token at position 0 of the scratch page, written to table row 0.

    Then `n_spare` more scratch pages that no row owns, for attention's padding.
    """
    extra = size - plan.n_rows
    spare = np.full(n_spare, scratch_page, plan.kv_indices.dtype)
    if extra == 0:
        return msgspec.structs.replace(plan, kv_indices=np.concatenate([plan.kv_indices, spare])) if n_spare else plan
    fill = lambda array, value: np.concatenate([array, np.full(extra, value, array.dtype)])
    steps = np.arange(1, extra + 1, dtype=np.int32)
    return msgspec.structs.replace(
        plan,
        rids=plan.rids + (-1,) * extra,
        attempts=plan.attempts + (-1,) * extra,
        table_row=fill(plan.table_row, 0),
        qo_indptr=np.concatenate([plan.qo_indptr, plan.qo_indptr[-1] + steps]),
        kv_indptr=np.concatenate([plan.kv_indptr, plan.kv_indptr[-1] + steps]),
        kv_indices=np.concatenate([fill(plan.kv_indices, scratch_page), spare]),
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
    """One size: static inputs, static output, replay."""

    ids: Tensor
    meta: AttnMeta
    hidden: Tensor
    replay: Replay


class DecodeGraphs:
    """Captures a size when it is first needed. `CudaRunner.warm_up` needs them all, the largest first, so that the
    smaller ones fit into its memory."""

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
        self.eager_if = eager_if
        self.sizes = [size for size in sorted(sizes) if size < max_rows] + [max_rows]
        self._captured: dict[GraphSize, _Captured] = {}

    @property
    def bytes(self) -> int:
        """Device memory that the graphs took."""
        return self._capture.bytes

    @property
    def n_captured(self) -> int:
        return len(self._captured)

    def size_for(self, plan: StepPlan) -> GraphSize | None:
        """What a decode-only plan is padded to, None if it must run eagerly."""
        if plan.n_tokens != plan.n_rows or len(plan.copy_src) or not 0 < plan.n_rows <= self.sizes[-1]:
            return None
        if self.eager_if(plan):
            return None
        rows = self.sizes[bisect.bisect_left(self.sizes, plan.n_rows)]
        needed = rows - plan.n_rows + self._chunks_of(plan)
        chunks = [level * rows for level in LEVELS if level * rows >= needed]
        return GraphSize(rows, chunks[0]) if chunks else None

    def pad(self, plan: StepPlan, size: GraphSize, scratch_page: int) -> StepPlan:
        """The plan in the shape that the graph of `size` holds."""
        n_spare = 0
        if size.chunks > size.rows:
            n_spare = size.chunks - (size.rows - plan.n_rows) - self._chunks_of(plan)
        return pad_decode(plan, size.rows, scratch_page, self._kv.page_size, n_spare=n_spare)

    def _chunks_of(self, plan: StepPlan) -> int:
        return self._ops.chunks_of(torch.from_numpy(plan.kv_indptr), self._kv.page_size, self._specs)

    def run(self, size: GraphSize, ids: Tensor, meta: AttnMeta) -> Tensor:
        """Hidden states [rows, hidden] of a padded decode step, in the graph's static output."""
        graph = self._captured.get(size) or self._make(size, ids, meta)
        for static, step in ((graph.ids, ids), (graph.meta.positions, meta.positions), (graph.meta.slots, meta.slots)):
            static.copy_(step)
        for spec in self._specs:
            self._ops.plan_graph(graph.meta, meta, spec)
        graph.replay()
        return graph.hidden

    def _make(self, size: GraphSize, ids: Tensor, meta: AttnMeta) -> _Captured:
        static = replace(meta, positions=meta.positions.clone(), slots=meta.slots.clone())
        static_ids = ids.clone()
        for spec in self._specs:
            self._ops.plan_graph(static, meta, spec)
        hidden, replay = self._capture(lambda: self._model.forward(static_ids, static.positions, static, self._kv))
        graph = _Captured(static_ids, static, hidden, replay)
        self._captured[size] = graph
        log.info("captured a decode step of %d rows; graphs take %d MiB", size.rows, self._capture.bytes // MIB)
        return graph


class EagerCapture:
    """Captures nothing: replaying runs the function again. For devices without graphs, and to compare graphs with."""

    bytes = 0

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        out = function().clone()

        def replay() -> None:
            out.copy_(function())

        return out, replay


class CudaCapture:
    """CUDA graphs that share one memory pool. Runs the function once before it captures it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self.bytes = 0

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        function()
        gc.collect()  # as capturing begins with both, what they free would hide what the graph takes
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_before = torch.cuda.mem_get_info(self._device)[0]
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        # other threads may use the GPU meanwhile: the embedding program's, for one
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            hidden = function()
        self.bytes += max(0, free_before - torch.cuda.mem_get_info(self._device)[0])
        return hidden, graph.replay
