"""The GPU backend: FlashInfer's paged attention over `AttnMeta`, own Triton kernels for the small operations.

Its kernels are checked on a GPU by bench.gpu; what surrounds them (arrays, planning, streams) is tested without one.

Numerics. Keys are cut at fixed places (`kernels.flashinfer_plan`), and decode rows always run apart from prefill
rows, so a decode row's attention does not depend on its batch, captured or not. What still may: cuBLAS picks its
product by the number of rows, and FlashInfer's prefill picks its query tile by the average chunk. Without
`batch_invariant` the planner splits as it likes, CUDA-core decode comes back for small groups, and shared prefixes
run as a cascade.

The package is imported when the backend is made, never before.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.base import AttnMeta, KVStore, LayerSpec, Linear
from kernels.flashinfer_plan import Call, FlashInferOptions, Planner, Shapes, check_prefill
from kernels.fused import Fused, Pools, TorchFused, copy_slots, fused_for, store
from kernels.sampling import SamplingRows, draw

MIN_CAPABILITY = (8, 0)  # bfloat16


def make_ops(device: torch.device) -> FlashInferOps:
    """The backend on `device`. Raises RuntimeError or ImportError, saying what is missing."""
    check_device(device)
    return FlashInferOps(
        device, load_package(), fused=fused_for(device), capability=torch.cuda.get_device_capability(device)
    )


def load_package() -> Any:
    """FlashInfer, imported now."""
    try:
        return importlib.import_module("flashinfer")
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"FlashInfer cannot be imported ({missing.name} is missing); install it with: pip install 'ramet[gpu]'"
        ) from missing


def check_device(device: torch.device) -> None:
    """Raise RuntimeError unless the device is a GPU that FlashInfer's bfloat16 kernels run on."""
    if device.type != "cuda":
        raise RuntimeError(f"FlashInfer runs on CUDA devices only, not on {device.type}")
    if not torch.cuda.is_available():
        raise RuntimeError("FlashInfer needs an NVIDIA GPU, and this torch sees none")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise RuntimeError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; "
            f"bfloat16 needs {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or more"
        )


class FlashInferOps:
    """Implements `Ops` and `GraphOps`. One a runner: it holds the wrappers and the plan of the current step."""

    name = "flashinfer"
    default_dtype = torch.bfloat16

    def __init__(
        self,
        device: torch.device,
        package: Any,
        *,
        options: FlashInferOptions | None = None,
        fused: Fused | None = None,
        capability: tuple[int, int] = MIN_CAPABILITY,
    ) -> None:
        self._device = device
        self._package = package
        self._capability = capability
        self.fused = fused or TorchFused()
        self.options = options or FlashInferOptions()
        self._planner = Planner(package, device, self.options, Shapes())
        self._meta: AttnMeta | None = None
        self._calls: dict[LayerSpec, list[Call]] = {}

    def configure(self, shapes: Shapes, options: FlashInferOptions | None = None) -> None:
        """Tell the planner the types, the longest sequence and how to split, before the first plan.

        Raises RuntimeError for kernels that this card or these types have not.
        """
        self.options = options or self.options
        check_prefill(self.options.prefill, self._capability, shapes.dtype, shapes.kv_dtype)
        self._planner = Planner(self._package, self._device, self.options, shapes)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return lambda x: F.linear(x, weight, bias)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return weight[ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.fused.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """May write the norm over x and the sum over the residual."""
        return self.fused.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self.fused.silu_mul(gate_up)

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """For callers without a pool; the models use `rope_attend`."""
        return TorchFused().rotate(q, k, positions, cos_sin)

    def draw(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """`kernels.sampling.draw` with the fused race."""
        return draw(logits, rows, race_with=self.fused.race)

    def chunks_of(self, kv_indptr: Tensor, page_size: int, specs: Sequence[LayerSpec]) -> int:
        """Rows that decode attention over these pages takes; see `GraphOps`."""
        return self._planner.chunks_of(kv_indptr, page_size, specs)

    def plan(self, meta: AttnMeta, spec: LayerSpec) -> None:
        if self._meta is not meta:
            self._meta, self._calls = meta, {}
        if spec not in self._calls:
            self._calls[spec] = self._planner.step(meta, spec)

    def plan_graph(self, static: AttnMeta, step: AttnMeta, spec: LayerSpec) -> None:
        """Plan the fixed-size wrapper of `static` with the rows of `step`; see `GraphOps`."""
        if self._meta is not static:
            self._meta, self._calls = static, {}
        self._calls[spec] = [self._planner.graph(step, spec)]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, kv: KVStore, meta: AttnMeta, spec: LayerSpec
    ) -> Tensor:
        pools = Pools(kv.k[layer], kv.v[layer])
        store(pools, k, v, meta.slots)
        return self._attend(pools, q, meta, spec)

    def rope_attend(
        self,
        layer: int,
        qkv: tuple[Tensor, Tensor, Tensor],
        positions: Tensor,
        cos_sin: Tensor,
        kv: KVStore,
        meta: AttnMeta,
        spec: LayerSpec,
    ) -> Tensor:
        """`rope` and `attend` in one: the rotated keys go straight to their slots."""
        pools = Pools(kv.k[layer], kv.v[layer])
        q = self.fused.rope_store(*qkv, positions, cos_sin, pools, meta.slots)
        return self._attend(pools, q, meta, spec)

    def _attend(self, pools: Pools, q: Tensor, meta: AttnMeta, spec: LayerSpec) -> Tensor:
        copy_slots(pools, meta.copy_src, meta.copy_dst)
        self.plan(meta, spec)
        return run_calls(self._package, self.fused, self._calls[spec], q, (pools.k, pools.v))


def run_calls(package: Any, fused: Fused, calls: list[Call], q: Tensor, pools: tuple[Tensor, Tensor]) -> Tensor:
    """The planned calls over q [tokens, heads, d]; those marked `merge` fold into what the earlier ones found."""
    out = torch.empty_like(q)
    merges = any(call.merge for call in calls)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if merges else None  # base 2, for the merge
    for call in calls:
        queries, target = q[call.tokens], out[call.tokens]
        if call.chunks is not None:
            parts, part_lse = call.wrapper.run(queries[call.chunks.row_of], pools, return_lse=True)
            fused.merge_chunks(parts, part_lse, call.chunks.indptr, target)
        elif lse is None:
            call.wrapper.run(queries, pools, out=target)
        elif call.merge:
            other, other_lse = call.wrapper.run(queries, pools, return_lse=True)
            package.merge_state_in_place(target, lse[call.tokens], other, other_lse)
        else:
            call.wrapper.run(queries, pools, out=target, lse=lse[call.tokens], return_lse=True)
    return out
