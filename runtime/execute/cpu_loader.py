"""From an opened checkpoint to a runner on the CPU."""

from __future__ import annotations

import math

import torch

from kernels.base import KVStore, Ops, QuantizedOps
from kernels.blocks import QTYPES, GgmlBlocks
from kernels.sampling import report, sample
from kernels.select import Choice
from runtime.config import EngineConfig
from runtime.errors import BackendUnavailable
from runtime.execute.cpu import CpuQueue, default_threads
from runtime.execute.describe import Loading, context_length, describe, dtype_name, kv_bytes_per_token
from runtime.execute.memory import CPU_POOL_BYTES, PoolSize, free_host_bytes, size_pool
from runtime.execute.quality import weights_clause
from runtime.execute.runner import ModelRunner
from runtime.models.checkpoint import Checkpoint
from runtime.models.gguf_source import GgufFile
from runtime.models.layers import Builder
from runtime.models.registry import build_model, weight_shapes

STEP_TOKENS = 128  # more rows at a time leave a core's cache: a token of a 512-token step takes a fifth longer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_DTYPES = {
    **_DTYPES,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


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
    kv_dtype = _kv_dtype(config.kv_dtype, dtype, choice.ops)
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
        why=_why(config, choice, (dtype, kv_dtype), _weights(config, build), pool, queue.n_threads),
        step_tokens=STEP_TOKENS,
    )
    spec = describe(config, checkpoint, loading)
    ops = choice.ops  # a backend may bring its own sampling
    sample_with, report_with = getattr(ops, "sample", sample), getattr(ops, "report", report)
    return ModelRunner(model, kv, spec, queue, config.max_running, sample_with, report_with)


def _kv_dtype(asked: str, dtype: torch.dtype, ops: Ops) -> torch.dtype:
    """`auto` is the activations' type, but half of float32 where the kernels read both as fast as memory gives them:
    float16 keeps eleven bits of a key, which costs nothing that could be measured."""
    if asked == "auto" and ops.name == "native" and dtype == torch.float32:
        return torch.float16
    return _KV_DTYPES.get(asked, dtype)


def _keeps_blocks(build: Builder) -> bool:
    return build.keep_quantized and isinstance(build.ops, QuantizedOps) and isinstance(build.source, GgufFile)


def _weights(config: EngineConfig, build: Builder) -> str:
    made = config.quantization if build.method is not None else "none"
    return weights_clause(quantization=made, kept_blocks=_keeps_blocks(build))


def _weight_bytes(build: Builder, checkpoint: Checkpoint) -> int:
    """Bytes of the weights in memory: the file's where the backend keeps them quantised."""
    if _keeps_blocks(build):
        return checkpoint.file_bytes
    return sum(math.prod(shape) for shape in weight_shapes(checkpoint.config).values()) * build.dtype.itemsize


def _why(
    config: EngineConfig,
    choice: Choice,
    types: tuple[torch.dtype, torch.dtype],
    weights: str,
    pool: PoolSize,
    n_threads: int,
) -> str:
    """One sentence on what was chosen. `types`: of activations, of KV."""
    chosen = "as asked for" if config.dtype != "auto" else "the backend's default"
    name = dtype_name(types[0]) + (f" over {dtype_name(types[1])} KV" if types[1] != types[0] else "")
    clauses = (choice.why, f"{name}, {chosen}", weights, f"{n_threads} threads", pool.why)
    return "; ".join(clause for clause in clauses if clause)
