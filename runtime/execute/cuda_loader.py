"""From a model on disk to a runner on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.base import KVStore
from kernels.flashinfer import FlashInferOps
from kernels.flashinfer_plan import FlashInferOptions, Shapes, check_shape
from kernels.quant import LinearMethod, make_method
from kernels.select import Choice
from runtime.config import EngineConfig
from runtime.errors import BackendUnavailable, InvalidRequest
from runtime.execute.cuda import CudaRunner
from runtime.execute.describe import Loading, context_length, describe, dtype_name, kv_bytes_per_token
from runtime.execute.graphs import CudaCapture, DecodeGraphs
from runtime.execute.memory import size_pool
from runtime.execute.placement import bind_to_socket
from runtime.execute.streams import CudaDevice
from runtime.models.checkpoint import Checkpoint, open_checkpoint
from runtime.models.config import ModelConfig
from runtime.models.decoder import Model, distinct_specs
from runtime.models.layers import Attention, Builder
from runtime.models.registry import build_model
from runtime.step import ModelSpec, StepPlan

CASCADE_TOKENS = 65536  # key reads a cascade must save in a decode step before the graph is given up for it
RESERVE_BYTES = 2 << 30  # activations, logits and workspaces of a step
_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_cuda_runner(config: EngineConfig, path: Path, choice: Choice, device: torch.device) -> CudaRunner:
    """Load the weights, size the pool from what is then free, prepare the graphs.

    Raises BackendUnavailable for types or shapes the kernels have not, ModelLoadError if the model or the pool
    does not fit, InvalidRequest for options out of range.
    """
    ops = choice.ops
    if not isinstance(ops, FlashInferOps):
        raise BackendUnavailable(f"The {ops.name} kernels do not run on a GPU; leave the backend on auto.")
    dtype, kv_dtype = gpu_types(config)
    method = gpu_method(config.quantization)
    if config.numa_bind:
        bind_to_socket(_bus_id(device))
    checkpoint = open_checkpoint(path, config.load_format, str(device), dummy_dtype=dtype)
    c = checkpoint.config
    check_heads(c)
    context = context_length(config, c)
    with torch.inference_mode():
        build = Builder(c, checkpoint.source, ops, dtype, device, keep_quantized=False, method=method)
        model = build_model(build, context)
        ops.configure(Shapes(dtype, kv_dtype, context), FlashInferOptions(batch_invariant=config.batch_invariant))
        weight_bytes = torch.cuda.memory_allocated(device)
        free = max(0, torch.cuda.mem_get_info(device)[0] - RESERVE_BYTES)
        pool = size_pool(config, kv_bytes_per_token(c, kv_dtype), free, cap_bytes=None)
        kv = KVStore(c.n_layers, pool.n_pages + 1, config.page_size, c.n_kv_heads, c.head_dim, kv_dtype, device)
    quantised = f", {method.name} layers" if method is not None else ""
    why = f"{choice.why}; {dtype_name(dtype)}{quantised} over {dtype_name(kv_dtype)} KV; {pool.why}"
    loading = Loading(dtype, kv_dtype, context, pool, weight_bytes, ops.name, why)
    return _runner(config, checkpoint, model, kv, ops, device, describe(config, checkpoint, loading))


def _runner(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: Model,
    kv: KVStore,
    ops: FlashInferOps,
    device: torch.device,
    spec: ModelSpec,
) -> CudaRunner:
    specs = distinct_specs(model.blocks)
    cascades = ops.options.cascade and not ops.options.batch_invariant and any(spec.window < 0 for spec in specs)
    graphs = DecodeGraphs(
        model,
        kv,
        ops,
        specs,
        CudaCapture(),
        max_rows=config.max_running,
        eager_if=lambda plan: cascades and saved_reads(plan, config.page_size) >= CASCADE_TOKENS,
    )
    return CudaRunner(model, kv, spec, CudaDevice(device), max_running=config.max_running, graphs=graphs)


def saved_reads(plan: StepPlan, page_size: int) -> int:
    """Keys that one layer need not read again if every group reads its shared pages once."""
    return int(((np.diff(plan.share_indptr) - 1) * plan.share_n_pages).sum()) * page_size


def gpu_types(config: EngineConfig) -> tuple[torch.dtype, torch.dtype]:
    """(weights and activations, KV). Raises BackendUnavailable for a type the GPU kernels have not."""
    dtype = _DTYPES.get(config.dtype)
    if dtype is None:
        raise BackendUnavailable(f"The GPU kernels have no dtype {config.dtype!r}; they have bfloat16 and float16.")
    kv_dtype = {**_DTYPES, "auto": dtype, "fp8": torch.float8_e4m3fn}.get(config.kv_dtype)
    if kv_dtype is None:
        raise BackendUnavailable(
            f"The GPU kernels have no KV of type {config.kv_dtype!r}; they have bfloat16, float16 and fp8."
        )
    return dtype, kv_dtype


def gpu_method(name: str) -> LinearMethod | None:
    """The quantisation of float weights; auto is none. Raises InvalidRequest or BackendUnavailable."""
    if name in ("auto", "none"):
        return None
    try:
        return make_method(name)
    except ValueError as wrong:
        raise InvalidRequest(f"quantization {name!r} cannot be used: {wrong}.", param="quantization") from None
    except RuntimeError as missing:
        raise BackendUnavailable(f"Quantisation {name!r} cannot run: {missing}.") from None


def check_heads(c: ModelConfig) -> None:
    """Raise BackendUnavailable before any weight is read, if the kernels have no code for the model's heads."""
    try:
        for layer in range(c.n_layers):
            check_shape(Attention.spec_of(c, layer))
    except RuntimeError as wrong:
        raise BackendUnavailable(f"Model {c.name!r} cannot run: {wrong}.") from None


def _bus_id(device: torch.device) -> str:
    p: Any = torch.cuda.get_device_properties(device)
    return f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
