"""Which FlashInfer wrapper runs over which rows, and how it is planned. No kernel is called here.

With `batch_invariant`, keys are cut at fixed places. FlashInfer has a fixed split of its own, but a captured decode
step cannot use it: whether a step is split at all is frozen into the graph, and its tiles are limited by the number
of multiprocessors. So decode rows are cut here: each chunk of `split_tokens` keys is a row of the wrapper, which splits
nothing, and the chunks of a row are merged in their order. A captured step has a fixed number of chunks.

Prefill rows use FlashInfer's fixed split where that pays, which is a short chunk over long context; its partial
results take float32 rows a chunk of keys in the workspace, so rows that would need much of that are not split, and
rows that would not fit together run one after the other. Layers with a window look at few keys and are never split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.base import AttnMeta, LayerSpec
from kernels.ragged import Chunks, Rows, all_rows, cut_keys, n_chunks, part_of_rows, split_decode, split_shared
from kernels.sampling import upload

HEAD_SIZES = (64, 128, 256)
CUDA_CORE_GROUPS = (1, 2, 3)
QUERY_TILE = 128  # the largest of the prefill kernels, in query heads of one KV head
HOPPER = 9


@dataclass(frozen=True, slots=True)
class FlashInferOptions:
    """How the wrappers are planned."""

    prefill: str = "fa2"  # or fa3, on Hopper
    batch_invariant: bool = True
    split_tokens: int = 2048  # keys of one chunk where the cuts are fixed
    split_bytes: int = 64 << 20  # partial results up to which a prefill row is split
    cascade: bool = True  # only without batch_invariant: a merge by groups rounds otherwise than a flat one
    workspace_bytes: int = 384 << 20


@dataclass(frozen=True, slots=True)
class Shapes:
    """What the planner must know of the runner."""

    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    max_context: int = 8192  # the longest sequence, and
    max_rows: int = 256  # the most of them: room for page ids in captured wrappers


def check_shape(spec: LayerSpec) -> None:
    """Raise RuntimeError for heads that the kernels have no code for."""
    if spec.head_dim not in HEAD_SIZES:
        sizes = ", ".join(str(size) for size in HEAD_SIZES)
        raise RuntimeError(f"FlashInfer has no kernel for head size {spec.head_dim}; it has {sizes}")
    if spec.n_heads % spec.n_kv_heads:
        raise RuntimeError(f"{spec.n_heads} heads are no whole groups over {spec.n_kv_heads} KV heads")


def check_prefill(kernels: str, capability: tuple[int, int], dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raise RuntimeError if the chosen prefill kernels do not run on this card or over these types."""
    if kernels != "fa3":
        return
    if capability[0] != HOPPER:
        raise RuntimeError(
            f"fa3 kernels run on Hopper (compute capability 9.0) only; this GPU has {capability[0]}.{capability[1]}. "
            "Use fa2"
        )
    if kv_dtype != dtype:
        names = [str(one).removeprefix("torch.") for one in (kv_dtype, dtype)]
        raise RuntimeError(f"fa3 kernels have no code for {names[0]} KV under {names[1]} queries. Use fa2")


def wants_tensor_cores(spec: LayerSpec, kv_dtype: torch.dtype, options: FlashInferOptions) -> bool:
    """Which decode kernel: CUDA cores know only small groups, always may split, and read no one-byte KV."""
    group = spec.n_heads // spec.n_kv_heads
    return options.batch_invariant or group not in CUDA_CORE_GROUPS or kv_dtype.itemsize == 1


@dataclass(frozen=True, slots=True)
class OnDevice:
    """How the chunks of decode rows find their queries and their merge, on the device."""

    row_of: Tensor  # [chunks] int64
    indptr: Tensor  # [rows+1] int32


@dataclass(frozen=True, slots=True)
class Call:
    """One planned wrapper over some query tokens of the step."""

    wrapper: Fenced
    tokens: slice
    merge: bool = False  # fold the result into that of earlier calls
    chunks: OnDevice | None = None  # the wrapper's rows are chunks of the tokens' keys


class Fenced:
    """A wrapper whose plan is rewritten only after its last plan has been copied to the device.

    `plan` fills one pinned buffer and queues its copy; a second plan before that copy ran would change it. A plan
    that raises leaves the wrapper half written, so it must not run until the next plan succeeds.
    """

    def __init__(self, inner: Any, copied: Any) -> None:
        self._inner = inner
        self._copied = copied  # an event
        self._planned = False

    def plan(self, *args: Any, **options: Any) -> None:
        self._copied.synchronize()
        self._planned = False
        try:
            self._inner.plan(*args, **options)
            self._planned = True
        finally:
            self._copied.record()

    def run(self, q: Tensor, pools: tuple[Tensor, Tensor], **options: Any) -> Any:
        assert self._planned, "the wrapper's last plan failed"
        return self._inner.run(q, pools, **options)


class Planner:
    """Makes wrappers as they are first needed, one a use, and plans them. They share one float workspace."""

    def __init__(self, package: Any, device: torch.device, options: FlashInferOptions, shapes: Shapes) -> None:
        self._package, self._device = package, device
        self._options, self._shapes = options, shapes
        self._wrappers: dict[Any, Fenced] = {}
        self._static_chunks: dict[Any, OnDevice] = {}
        self._workspace: Tensor | None = None
        self._graph_pages: Tensor | None = None

    def step(self, meta: AttnMeta, spec: LayerSpec) -> list[Call]:
        """The calls of an eager step: decode rows, prefill rows, then the groups' shared prefixes."""
        check_shape(spec)
        apart = self._options.cascade and not self._options.batch_invariant and spec.window < 0
        cascade = split_shared(meta) if apart else None
        calls = self._flat(all_rows(meta) if cascade is None else cascade.own, meta.page_size, spec)
        for n, rows in enumerate(cascade.shared if cascade is not None else ()):
            wrapper = self._prefill_wrapper(("shared", n, spec, meta.page_size))
            self._plan_prefill(wrapper, rows, meta.page_size, spec, causal=False)
            calls.append(Call(wrapper, slice(rows.begin, rows.end), merge=True))
        return calls

    def graph(self, meta: AttnMeta, spec: LayerSpec) -> Call:
        """The one call of a captured decode step of this many rows and chunks."""
        check_shape(spec)
        rows = all_rows(meta)
        tokens = slice(rows.begin, rows.end)
        cut = cut_keys(rows, meta.page_size, self.chunk_pages(meta.page_size)) if self._cuts(spec) else None
        if cut is None or len(cut.rows) == len(rows):
            plain = _without_padding(rows)
            wrapper = self._decode_wrapper(spec, meta.page_size, graph_rows=len(plain))
            self._plan_decode(wrapper, plain, meta.page_size, spec)
            return Call(wrapper, tokens)
        wrapper = self._decode_wrapper(spec, meta.page_size, graph_rows=len(cut.rows), cut=True)
        self._plan_decode(wrapper, cut.rows, meta.page_size, spec)
        return Call(wrapper, tokens, chunks=self._static(cut, len(rows)))

    def chunk_pages(self, page_size: int) -> int:
        return max(1, self._options.split_tokens // page_size)

    def chunks_of(self, kv_indptr: Tensor, page_size: int, specs: Sequence[LayerSpec]) -> int:
        """Chunks that a decode step's rows are cut into; their number where no layer cuts."""
        if any(self._cuts(spec) for spec in specs):
            return n_chunks(kv_indptr, self.chunk_pages(page_size))
        return len(kv_indptr) - 1

    def _cuts(self, spec: LayerSpec) -> bool:
        return self._options.batch_invariant and spec.window < 0

    def _static(self, cut: Chunks, n_rows: int) -> OnDevice:
        """The chunks' arrays where the captured step of this size reads them."""
        key = (n_rows, len(cut.rows))
        fresh = self._upload(cut)
        held = self._static_chunks.setdefault(key, fresh)
        if held is not fresh:
            held.row_of.copy_(fresh.row_of)
            held.indptr.copy_(fresh.indptr)
        return held

    def _upload(self, cut: Chunks) -> OnDevice:
        return OnDevice(upload(cut.row_of, self._device), upload(cut.indptr, self._device))

    def _flat(self, rows: Rows, page_size: int, spec: LayerSpec) -> list[Call]:
        decode, prefill = split_decode(rows)
        calls = [] if decode is None else [self._decode(decode, page_size, spec)]
        groups = [] if prefill is None else self._prefill_groups(prefill, page_size, spec)
        for n, (group, split) in enumerate(groups):
            wrapper = self._prefill_wrapper(("prefill", n, spec, page_size))
            self._plan_prefill(wrapper, group, page_size, spec, causal=True, split=split)
            calls.append(Call(wrapper, slice(group.begin, group.end)))
        return calls

    def _decode(self, rows: Rows, page_size: int, spec: LayerSpec) -> Call:
        tokens = slice(rows.begin, rows.end)
        cut = cut_keys(rows, page_size, self.chunk_pages(page_size)) if self._cuts(spec) else None
        if cut is None or len(cut.rows) == len(rows):
            wrapper = self._decode_wrapper(spec, page_size)
            self._plan_decode(wrapper, rows, page_size, spec)
            return Call(wrapper, tokens)
        wrapper = self._decode_wrapper(spec, page_size, cut=True)
        self._plan_decode(wrapper, cut.rows, page_size, spec)
        return Call(wrapper, tokens, chunks=self._upload(cut))

    def _prefill_groups(self, rows: Rows, page_size: int, spec: LayerSpec) -> list[tuple[Rows, bool]]:
        """Neighbouring rows that are split alike and whose partial results fit the workspace together."""
        if not self._options.batch_invariant or self._options.prefill != "fa2":
            return [(rows, True)]
        needs = [self._partial_bytes(q_len, n_pages, page_size, spec) for q_len, n_pages in _row_sizes(rows)]
        groups: list[tuple[Rows, bool]] = []
        start, used = 0, 0
        for row, need in enumerate(needs):
            begins = row == start
            if not begins and ((need > 0) != (needs[row - 1] > 0) or used + need > self._options.workspace_bytes):
                groups.append((part_of_rows(rows, start, row), needs[start] > 0))
                start, used = row, 0
            used += need
        return [*groups, (part_of_rows(rows, start, len(needs)), needs[start] > 0)]

    def _partial_bytes(self, q_len: int, n_pages: int, page_size: int, spec: LayerSpec) -> int:
        """Workspace that a split of this row takes; 0 where it is not split. A function of the row alone."""
        chunks = -(-n_pages // self.chunk_pages(page_size))
        if chunks == 1 or spec.window >= 0:
            return 0
        group = spec.n_heads // spec.n_kv_heads
        heads = -(-q_len * group // QUERY_TILE) * QUERY_TILE * spec.n_kv_heads
        need = chunks * heads * (spec.head_dim + 1) * 4
        return need if need <= min(self._options.split_bytes, self._options.workspace_bytes) else 0

    def _plan_decode(self, wrapper: Fenced, rows: Rows, page_size: int, spec: LayerSpec) -> None:
        wrapper.plan(
            self._pinned(rows.kv_indptr),
            rows.kv_indices,
            self._pinned(rows.last_page_len),
            spec.n_heads,
            spec.n_kv_heads,
            spec.head_dim,
            page_size,
            **self._common(spec),
            **({"disable_split_kv": True} if self._options.batch_invariant else {}),
        )

    def _plan_prefill(
        self, wrapper: Fenced, rows: Rows, page_size: int, spec: LayerSpec, *, causal: bool, split: bool = True
    ) -> None:
        options = self._common(spec)
        if self._options.batch_invariant and self._options.prefill == "fa2":  # fa3 never splits
            options |= {"fixed_split_size": self.chunk_pages(page_size)} if split else {"disable_split_kv": True}
        wrapper.plan(
            self._pinned(rows.qo_indptr),
            self._pinned(rows.kv_indptr),
            rows.kv_indices,
            self._pinned(rows.last_page_len),
            spec.n_heads,
            spec.n_kv_heads,
            spec.head_dim,
            page_size,
            causal=causal,
            **options,
        )

    def _pinned(self, borders: Tensor) -> Tensor:
        """Row borders where their copy to the device need not wait for it."""
        return borders.pin_memory() if self._device.type == "cuda" else borders

    def _common(self, spec: LayerSpec) -> dict[str, Any]:
        return {
            "window_left": spec.window,
            "logits_soft_cap": spec.soft_cap or None,
            "sm_scale": spec.scale,
            "q_data_type": self._shapes.dtype,
            "kv_data_type": self._shapes.kv_dtype,
            "non_blocking": True,
        }

    def _decode_wrapper(
        self, spec: LayerSpec, page_size: int, *, graph_rows: int | None = None, cut: bool = False
    ) -> Fenced:
        key = ("decode", graph_rows, cut, spec, page_size)
        if key not in self._wrappers:
            options: dict[str, Any] = {
                "use_tensor_cores": wants_tensor_cores(spec, self._shapes.kv_dtype, self._options)
            }
            if graph_rows is not None:
                options |= self._graph_buffers(graph_rows, page_size)
            self._wrappers[key] = self._fenced(
                self._package.BatchDecodeWithPagedKVCacheWrapper(self._space(), "NHD", backend="fa2", **options)
            )
        return self._wrappers[key]

    def _graph_buffers(self, n_rows: int, page_size: int) -> dict[str, Any]:
        """Fixed arrays of a captured decode. The page ids, room for every row at the longest context, are shared by all
        sizes: every replay writes them anew, on the stream that reads them."""
        ints = lambda n: torch.zeros(n, dtype=torch.int32, device=self._device)
        if self._graph_pages is None:
            n_pages = -(-self._shapes.max_context // page_size)
            padding = -(-n_pages // self.chunk_pages(page_size)) * 4  # a graph has at most 4 times the chunks it needs
            self._graph_pages = ints(self._shapes.max_rows * (n_pages + padding))
        return {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": ints(n_rows + 1),
            "paged_kv_indices_buffer": self._graph_pages,
            "paged_kv_last_page_len_buffer": ints(n_rows),
        }

    def _prefill_wrapper(self, key: Any) -> Fenced:
        if key not in self._wrappers:
            self._wrappers[key] = self._fenced(
                self._package.BatchPrefillWithPagedKVCacheWrapper(self._space(), "NHD", backend=self._options.prefill)
            )
        return self._wrappers[key]

    def _fenced(self, inner: Any) -> Fenced:
        return Fenced(inner, torch.cuda.Event() if self._device.type == "cuda" else _NoEvent())

    def _space(self) -> Tensor:
        if self._workspace is None:
            self._workspace = torch.zeros(self._options.workspace_bytes, dtype=torch.uint8, device=self._device)
        return self._workspace


def _row_sizes(rows: Rows) -> list[tuple[int, int]]:
    """(query tokens, pages) of each row."""
    return list(zip(rows.qo_indptr.diff().tolist(), rows.kv_indptr.diff().tolist(), strict=True))


def _without_padding(rows: Rows) -> Rows:
    """The rows without page ids past the last row's."""
    n = int(rows.kv_indptr[-1])
    return rows if n == len(rows.kv_indices) else replace(rows, kv_indices=rows.kv_indices[:n])


class _NoEvent:
    """The fence of a device that copies at once."""

    def synchronize(self) -> None:
        pass

    def record(self) -> None:
        pass
