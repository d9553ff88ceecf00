"""From a model on disk to a runner on a GPU.

The order matters: weights, then a trial of the largest step and the largest graph, then a pool of what is left, then
the graphs, which must see the pool.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from kernels.base import KVStore
from kernels.flashinfer import FlashInferOps
from kernels.flashinfer_plan import FlashInferOptions, Shapes, check_shape
from kernels.quant import LinearMethod, QuantizeRows, make_method
from kernels.select import Choice
from runtime.config import EngineConfig
from runtime.errors import BackendUnavailable, InvalidRequest, ModelLoadError
from runtime.execute.cuda import CudaRunner
from runtime.execute.describe import Loading, context_length, describe, dtype_name, kv_bytes_per_token
from runtime.execute.gpu import CudaGpu, Gpu
from runtime.execute.graphs import DecodeGraphs
from runtime.execute.memory import GIB, size_pool
from runtime.execute.placement import bind_to_socket
from runtime.execute.trial import blank_plan, trial_plan
from runtime.models.checkpoint import Checkpoint, open_checkpoint
from runtime.models.config import ModelConfig
from runtime.models.decoder import Model, distinct_specs
from runtime.models.layers import Attention, Builder
from runtime.models.registry import build_model, weight_shapes
from runtime.step import STEP_TOKENS, ModelSpec, StepPlan

log = logging.getLogger("ramet.execute")

CASCADE_TOKENS = 1 << 20  # key reads a layer that a cascade must save in a decode step to pay for launching it eagerly
MARGIN_BYTES = 512 << 20  # what the trial does not see: smaller graphs, fragments
POOL_FRACTION = 0.9
_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_cuda_runner(
    config: EngineConfig, path: Path, choice: Choice, device: torch.device, gpu: Gpu | None = None
) -> CudaRunner:
    """Load the weights, try the largest step, size the pool from what is then free, capture the graphs.

    Raises BackendUnavailable for types or shapes the kernels have not, ModelLoadError if the model or the pool
    does not fit, InvalidRequest for options out of range.
    """
    if not isinstance(choice.ops, FlashInferOps):
        raise BackendUnavailable(f"The {choice.ops.name} kernels do not run on a GPU; leave the backend on auto.")
    gpu = gpu or CudaGpu(device)
    try:
        return _Loader(config, path, choice.why, choice.ops, gpu).load()
    except torch.OutOfMemoryError:
        raise ModelLoadError(
            f"Model {path.name!r} does not fit on {gpu.name}: memory ran out with {gpu.free_bytes() / GIB:.1f} of "
            f"{gpu.total_bytes / GIB:.1f} GiB left. --quantization fp8, a shorter --context-length or fewer "
            "--max-running-requests and --max-step-tokens take less."
        ) from None


@dataclass(frozen=True, slots=True)
class _Loader:
    """One load. The steps are `load`'s."""

    config: EngineConfig
    path: Path
    why: str
    ops: FlashInferOps
    gpu: Gpu

    def load(self) -> CudaRunner:
        config, gpu = self.config, self.gpu
        dtype, kv_dtype = gpu_types(config)
        method = gpu_method(config.quantization, self.ops.fused.quantize_rows)
        if config.numa_bind:
            bind_to_socket(gpu.bus_id())
        checkpoint = open_checkpoint(self.path, config.load_format, str(gpu.torch_device), dummy_dtype=dtype)
        c = checkpoint.config
        check_heads(c)
        context = context_length(config, c)
        self._configure(dtype, kv_dtype, context)
        gpu.tidy()
        check_fits(c, dtype, method, gpu)
        before = gpu.allocated_bytes()
        with torch.inference_mode():
            build = Builder(
                c, checkpoint.source, self.ops, dtype, gpu.torch_device, keep_quantized=False, method=method
            )
            model = build_model(build, context)
        gpu.tidy()
        weight_bytes = gpu.allocated_bytes() - before
        reserve = self._try_out(checkpoint, model, kv_dtype)
        free = max(0, gpu.free_bytes() - reserve)
        pool = size_pool(config, kv_bytes_per_token(c, kv_dtype), free, cap_bytes=None, fraction=POOL_FRACTION)
        quantised = f", {method.name} layers" if method is not None else ""
        small = f"{self.ops.fused.name} for the small operations"
        why = f"{self.why}, {small}; {dtype_name(dtype)}{quantised} over {dtype_name(kv_dtype)} KV; {pool.why}"
        loading = Loading(dtype, kv_dtype, context, pool, weight_bytes, self.ops.name, why)
        runner = self._runner(model, kv_dtype, pool.n_pages, describe(config, checkpoint, loading))
        if config.cuda_graphs == "start" and runner.graphs is not None:
            runner.warm_up()
            graphs = f"{runner.graphs.n_captured} decode graphs take {runner.graphs.bytes / GIB:.2f} GiB"
            runner.spec = replace(runner.spec, why=f"{runner.spec.why}; {graphs}")
        return runner

    def _configure(self, dtype: torch.dtype, kv_dtype: torch.dtype, context: int) -> None:
        options = FlashInferOptions(prefill=self.config.prefill_kernels, batch_invariant=self.config.batch_invariant)
        try:
            self.ops.configure(Shapes(dtype, kv_dtype, context, self.config.max_running), options)
        except RuntimeError as wrong:
            raise BackendUnavailable(f"{wrong}.") from None

    def _try_out(self, checkpoint: Checkpoint, model: Model, kv_dtype: torch.dtype) -> int:
        """Bytes to set aside for steps and graphs, from running the largest of each over a pool of one page.

        What the trial leaves behind (workspaces, compiled kernels) stays in use.
        """
        config, gpu = self.config, self.gpu
        pool = size_pool(config, kv_bytes_per_token(checkpoint.config, kv_dtype), 1 << 62, cap_bytes=None)
        loading = Loading(torch.bfloat16, kv_dtype, 1, pool, 0, self.ops.name, "")
        spec = describe(config, checkpoint, loading)
        n_tokens = min(config.max_step_tokens or STEP_TOKENS, context_length(config, checkpoint.config))
        step_bytes, graph_bytes = _measure(self._runner(model, kv_dtype, 1, spec), n_tokens, gpu)
        gpu.tidy()
        log.info("a step takes %.2f GiB, its graph %.2f GiB", step_bytes / GIB, graph_bytes / GIB)
        return step_bytes + graph_bytes + MARGIN_BYTES

    def _runner(self, model: Model, kv_dtype: torch.dtype, n_pages: int, spec: ModelSpec) -> CudaRunner:
        config, ops, c = self.config, self.ops, model.config
        with torch.inference_mode():
            size = (c.n_layers, n_pages + 1, config.page_size, c.n_kv_heads, c.head_dim)
            kv = KVStore(*size, kv_dtype, self.gpu.torch_device)
        graphs = None if config.cuda_graphs == "off" else self._graphs(model, kv)
        return CudaRunner(
            model, kv, spec, self.gpu.device(), max_running=config.max_running, graphs=graphs, draw_with=ops.draw
        )

    def _graphs(self, model: Model, kv: KVStore) -> DecodeGraphs:
        specs, ops, page_size = distinct_specs(model.blocks), self.ops, self.config.page_size
        cascades = ops.options.cascade and not ops.options.batch_invariant and any(spec.window < 0 for spec in specs)
        return DecodeGraphs(
            model,
            kv,
            ops,
            specs,
            self.gpu.capture(),
            max_rows=self.config.max_running,
            eager_if=lambda plan: cascades and saved_reads(plan, page_size) >= CASCADE_TOKENS,
        )


def _measure(runner: CudaRunner, n_tokens: int, gpu: Gpu) -> tuple[int, int]:
    """Bytes that a step of `n_tokens`, and the graph of the most rows, take at their peak."""
    largest = trial_plan(n_tokens, runner.max_running, runner.page_size)
    runner.launch(largest).result()  # compiles kernels, makes workspaces
    step_bytes = gpu.peak_bytes(lambda: runner.launch(largest).result())
    if runner.graphs is None:
        return step_bytes, 0
    gpu.tidy()
    before = gpu.free_bytes()
    runner.launch(blank_plan(runner.max_running, runner.n_pages, runner.page_size)).result()
    gpu.tidy()
    return step_bytes, max(0, before - gpu.free_bytes())


def check_fits(c: ModelConfig, dtype: torch.dtype, method: LinearMethod | None, gpu: Gpu) -> None:
    """Raise ModelLoadError before any weight is read, if the weights alone take more than is free."""
    n_bytes = 0
    for name, shape in weight_shapes(c).items():
        packed = method is not None and name.endswith("_proj.weight")
        n_bytes += math.prod(shape) * (1 if packed else dtype.itemsize)
    if n_bytes > gpu.free_bytes():
        raise ModelLoadError(
            f"The weights of model {c.name!r} take {n_bytes / GIB:.1f} GiB; {gpu.free_bytes() / GIB:.1f} of "
            f"{gpu.total_bytes / GIB:.1f} GiB are free on {gpu.name}."
        )


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


def gpu_method(name: str, quantize: QuantizeRows | None = None) -> LinearMethod | None:
    """The quantisation of float weights; auto is none. Raises InvalidRequest or BackendUnavailable."""
    if name in ("auto", "none"):
        return None
    try:
        return make_method(name, quantize)
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
