"""Which FlashInfer wrapper runs over which rows, and how it is planned. No kernel is called here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.base import AttnMeta, LayerSpec
from kernels.ragged import Rows, all_rows, split_decode, split_shared

HEAD_SIZES = (64, 128, 256)
CUDA_CORE_GROUPS = (1, 2, 3)
WORKSPACE_BYTES = 384 << 20


@dataclass(frozen=True, slots=True)
class FlashInferOptions:
    """How the wrappers are planned."""

    attention: str = "fa2"  # or fa3, on Hopper, for prefill
    batch_invariant: bool = True
    split_tokens: int = 2048  # keys of one KV split where it is fixed
    cascade: bool = True  # only without batch_invariant: a merge by groups rounds otherwise than a flat one
    workspace_bytes: int = WORKSPACE_BYTES


@dataclass(frozen=True, slots=True)
class Shapes:
    """What the planner must know of the runner."""

    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    max_context: int = 8192  # the longest sequence: room for page ids in captured wrappers


def check_shape(spec: LayerSpec) -> None:
    """Raise RuntimeError for heads that the kernels have no code for."""
    if spec.head_dim not in HEAD_SIZES:
        sizes = ", ".join(str(size) for size in HEAD_SIZES)
        raise RuntimeError(f"FlashInfer has no kernel for head size {spec.head_dim}; it has {sizes}")
    if spec.n_heads % spec.n_kv_heads:
        raise RuntimeError(f"{spec.n_heads} heads are no whole groups over {spec.n_kv_heads} KV heads")


def wants_tensor_cores(spec: LayerSpec, kv_dtype: torch.dtype, options: FlashInferOptions) -> bool:
    """Which decode kernel: CUDA cores know only small groups, no fixed split and no one-byte KV."""
    group = spec.n_heads // spec.n_kv_heads
    return options.batch_invariant or group not in CUDA_CORE_GROUPS or kv_dtype.itemsize == 1


@dataclass(frozen=True, slots=True)
class Call:
    """One planned wrapper over some query tokens of the step."""

    wrapper: Fenced
    tokens: slice
    merge: bool = False  # fold the result into that of earlier calls


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
        self._workspace: Tensor | None = None

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
        """The one call of a captured decode step of this many rows."""
        check_shape(spec)
        rows = all_rows(meta)
        wrapper = self._decode_wrapper(spec, meta.page_size, graph_rows=len(rows))
        self._plan_decode(wrapper, rows, meta.page_size, spec)
        return Call(wrapper, slice(rows.begin, rows.end))

    def _flat(self, rows: Rows, page_size: int, spec: LayerSpec) -> list[Call]:
        decode, prefill = split_decode(rows)
        calls = []
        if decode is not None:
            wrapper = self._decode_wrapper(spec, page_size)
            self._plan_decode(wrapper, decode, page_size, spec)
            calls.append(Call(wrapper, slice(decode.begin, decode.end)))
        if prefill is not None:
            wrapper = self._prefill_wrapper(("prefill", 0, spec, page_size))
            self._plan_prefill(wrapper, prefill, page_size, spec, causal=True)
            calls.append(Call(wrapper, slice(prefill.begin, prefill.end)))
        return calls

    def _plan_decode(self, wrapper: Fenced, rows: Rows, page_size: int, spec: LayerSpec) -> None:
        wrapper.plan(
            rows.kv_indptr,
            rows.kv_indices,
            rows.last_page_len,
            spec.n_heads,
            spec.n_kv_heads,
            spec.head_dim,
            page_size,
            **self._common(spec, page_size),
        )

    def _plan_prefill(self, wrapper: Fenced, rows: Rows, page_size: int, spec: LayerSpec, *, causal: bool) -> None:
        wrapper.plan(
            rows.qo_indptr,
            rows.kv_indptr,
            rows.kv_indices,
            rows.last_page_len,
            spec.n_heads,
            spec.n_kv_heads,
            spec.head_dim,
            page_size,
            causal=causal,
            **self._common(spec, page_size, split=self._options.attention == "fa2"),
        )

    def _common(self, spec: LayerSpec, page_size: int, *, split: bool = True) -> dict[str, Any]:
        options = {
            "window_left": spec.window,
            "logits_soft_cap": spec.soft_cap or None,
            "sm_scale": spec.scale,
            "q_data_type": self._shapes.dtype,
            "kv_data_type": self._shapes.kv_dtype,
            "non_blocking": True,
        }
        if self._options.batch_invariant and split:  # FlashInfer counts a split in pages
            options["fixed_split_size"] = max(1, self._options.split_tokens // page_size)
        return options

    def _decode_wrapper(self, spec: LayerSpec, page_size: int, *, graph_rows: int | None = None) -> Fenced:
        key = ("decode", graph_rows, spec, page_size)
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
        """Fixed arrays of a captured decode, with page ids for every row at the longest context."""
        ints = lambda n: torch.zeros(n, dtype=torch.int32, device=self._device)
        return {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": ints(n_rows + 1),
            "paged_kv_indices_buffer": ints(n_rows * -(-self._shapes.max_context // page_size)),
            "paged_kv_last_page_len_buffer": ints(n_rows),
        }

    def _prefill_wrapper(self, key: Any) -> Fenced:
        if key not in self._wrappers:
            self._wrappers[key] = self._fenced(
                self._package.BatchPrefillWithPagedKVCacheWrapper(self._space(), "NHD", backend=self._options.attention)
            )
        return self._wrappers[key]

    def _fenced(self, inner: Any) -> Fenced:
        return Fenced(inner, torch.cuda.Event() if self._device.type == "cuda" else _NoEvent())

    def _space(self) -> Tensor:
        if self._workspace is None:
            self._workspace = torch.zeros(self._options.workspace_bytes, dtype=torch.uint8, device=self._device)
        return self._workspace


class _NoEvent:
    """The fence of a device that copies at once."""

    def synchronize(self) -> None:
        pass

    def record(self) -> None:
        pass
