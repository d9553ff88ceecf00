"""From an opened checkpoint to a runner on the CPU."""

from __future__ import annotations

import math

import torch

from kernels.base import KVStore, QuantizedOps
from kernels.blocks import QTYPES, GgmlBlocks
from kernels.select import Choice
from runtime.config import EngineConfig
from runtime.errors import BackendUnavailable
from runtime.execute.cpu import CpuQueue, default_threads
from runtime.execute.describe import Loading, context_length, describe, dtype_name, kv_bytes_per_token
from runtime.execute.memory import CPU_POOL_BYTES, PoolSize, free_host_bytes, size_pool
from runtime.execute.runner import ModelRunner
from runtime.models.checkpoint import Checkpoint
from runtime.models.gguf_source import GgufFile
from runtime.models.layers import Builder
from runtime.models.registry import build_model, weight_shapes

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_cpu_runner(config: EngineConfig, checkpoint: Checkpoint, choice: Choice) -> ModelRunner:
    """Build the model on the runner's own thread, so that it is packed for that thread's team.

    Raises ModelLoadError, BackendUnavailable or InvalidRequest, each one clear sentence.
    """
    queue = CpuQueue(config.threads or default_threads())
    try:
        return queue.call(lambda: _build(config, checkpoint, choice, queue))
    except BaseException:
        queue.close()
        raise


def _build(config: EngineConfig, checkpoint: Checkpoint, choice: Choice, queue: CpuQueue) -> ModelRunner:
    c = checkpoint.config
    if config.quantization == "fp8":
        raise BackendUnavailable("Quantisation 'fp8' runs on a GPU only.")
    dtype = _DTYPES.get(config.dtype, choice.ops.default_dtype)
    kv_dtype = _kv_dtype(config.kv_dtype, dtype)
    context = context_length(config, c)
    keep_quantized = config.quantization != "none"
    blocks = GgmlBlocks(choice.ops, config.quantization) if config.quantization in QTYPES else None
    head = GgmlBlocks(choice.ops, "int8") if blocks else None
    build = Builder(c, checkpoint.source, choice.ops, dtype, torch.device("cpu"), keep_quantized, blocks, head)
    model = build_model(build, context)
    pool = size_pool(config, kv_bytes_per_token(c, kv_dtype), free_host_bytes(), cap_bytes=CPU_POOL_BYTES)
    kv = KVStore(c.n_layers, pool.n_pages, config.page_size, c.n_kv_heads, c.head_dim, kv_dtype)
    loading = Loading(
        dtype=dtype,
        kv_dtype=kv_dtype,
        context=context,
        pool=pool,
        weight_bytes=_weight_bytes(build, checkpoint),
        backend=choice.ops.name,
        why=_why(config, choice, dtype, pool, queue.n_threads),
    )
    spec = describe(config, checkpoint, loading)
    return ModelRunner(model, kv, spec, queue, config.max_running, getattr(choice.ops, "draw", None))


def _kv_dtype(asked: str, dtype: torch.dtype) -> torch.dtype:
    if asked in ("int8", "fp8"):
        raise BackendUnavailable(f"KV of type {asked!r} is not supported by the CPU backends.")
    return _DTYPES.get(asked, dtype)


def _weight_bytes(build: Builder, checkpoint: Checkpoint) -> int:
    """Bytes of the weights in memory: the file's where the backend keeps them quantised."""
    if build.keep_quantized and isinstance(build.ops, QuantizedOps) and isinstance(checkpoint.source, GgufFile):
        return checkpoint.file_bytes
    return sum(math.prod(shape) for shape in weight_shapes(checkpoint.config).values()) * build.dtype.itemsize


def _why(config: EngineConfig, choice: Choice, dtype: torch.dtype, pool: PoolSize, n_threads: int) -> str:
    chosen = "as asked for" if config.dtype != "auto" else "the backend's default"
    return f"{choice.why}; {dtype_name(dtype)}, {chosen}; {n_threads} threads; {pool.why}"
