"""The GPU backend: FlashInfer's paged wrappers over `AttnMeta`, its fused operations, torch for the rest.

Not yet run on a GPU; what surrounds the kernels (arrays, planning, streams) is tested without one.

Numerics. Attention's KV split is fixed (`split_tokens`), and decode rows always run apart from prefill rows, so a
decode row's attention does not depend on its batch. What still may: cuBLAS picks its product by the number
of rows, and FlashInfer's prefill picks its query tile by the average chunk. With `batch_invariant` off the planner
splits as it likes, CUDA-core decode comes back for small groups, and shared prefixes run as a cascade.

The package is imported when the backend is made, never before.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.base import AttnMeta, KVStore, LayerSpec, Linear
from kernels.flashinfer_plan import Call, FlashInferOptions, Planner, Shapes
from kernels.quant import FP8, FP8_MAX

MIN_CAPABILITY = (8, 0)  # bfloat16


def make_ops(device: torch.device) -> FlashInferOps:
    """The backend on `device`. Raises RuntimeError or ImportError, saying what is missing."""
    check_device(device)
    return FlashInferOps(device, load_package())


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
    ) -> None:
        self._device = device
        self._package = package
        self.options = options or FlashInferOptions()
        self._planner = Planner(package, device, self.options, Shapes())
        self._meta: AttnMeta | None = None
        self._calls: dict[LayerSpec, list[Call]] = {}

    def configure(self, shapes: Shapes, options: FlashInferOptions | None = None) -> None:
        """Tell the planner the types, the longest sequence and how to split, before the first plan."""
        self.options = options or self.options
        self._planner = Planner(self._package, self._device, self.options, shapes)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return lambda x: F.linear(x, weight, bias)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return weight[ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._package.rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps=eps).view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """In place: FlashInfer writes the norm over x and the sum over the residual."""
        self._package.fused_add_rmsnorm(x, residual, weight, eps=eps)
        return x, residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._package.silu_and_mul(gate_up)

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        flat_q, flat_k = q.reshape(len(q), -1).contiguous(), k.reshape(len(k), -1).contiguous()
        self._package.apply_rope_with_cos_sin_cache_inplace(
            positions, flat_q, flat_k, q.shape[-1], cos_sin, is_neox=True
        )
        return flat_q.view(q.shape), flat_k.view(k.shape)

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
        store(kv, layer, k, v, meta)
        self.plan(meta, spec)
        return run_calls(self._package, self._calls[spec], q, (kv.k[layer], kv.v[layer]))


def store(kv: KVStore, layer: int, k: Tensor, v: Tensor, meta: AttnMeta) -> None:
    """Write the step's keys and values, then run its copies. FP8 pools are written as bytes, saturated."""
    for pool, new in ((kv.k[layer], k), (kv.v[layer], v)):
        flat = pool.flatten(0, 1)
        if pool.dtype == FP8:
            flat, new = flat.view(torch.uint8), new.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
        flat[meta.slots] = new
        if len(meta.copy_src):
            flat[meta.copy_dst] = flat[meta.copy_src]


def run_calls(package: Any, calls: list[Call], q: Tensor, pools: tuple[Tensor, Tensor]) -> Tensor:
    """The planned calls over q [tokens, heads, d]; those marked `merge` fold into what the earlier ones found."""
    out = torch.empty_like(q)
    if not any(call.merge for call in calls):
        for call in calls:
            call.wrapper.run(q[call.tokens], pools, out=out[call.tokens])
        return out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)  # base 2, as the merge wants it
    for call in calls:
        if call.merge:
            other, other_lse = call.wrapper.run(q[call.tokens], pools, return_lse=True)
            package.merge_state_in_place(out[call.tokens], lse[call.tokens], other, other_lse)
        else:
            call.wrapper.run(q[call.tokens], pools, out=out[call.tokens], lse=lse[call.tokens], return_lse=True)
    return out
