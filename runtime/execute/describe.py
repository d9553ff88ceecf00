"""What is told of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.kv8 import stored_dim
from runtime.config import EngineConfig
from runtime.errors import InvalidRequest
from runtime.execute.memory import PoolSize
from runtime.models.checkpoint import Checkpoint
from runtime.models.config import ModelConfig
from runtime.step import STEP_TOKENS, ModelSpec


def context_length(config: EngineConfig, model: ModelConfig) -> int:
    """The longest sequence. Raises InvalidRequest if more is asked for than the model was trained for."""
    asked = config.context_length
    if asked is not None and not 1 <= asked <= model.context_length:
        raise InvalidRequest(
            f"context_length must be from 1 to the model's {model.context_length}; got {asked}.",
            param="context_length",
        )
    return asked or model.context_length


def kv_bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * model.n_layers * model.n_kv_heads * stored_dim(model.head_dim, dtype) * dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Loading:
    """What was decided while loading."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    context: int
    pool: PoolSize
    weight_bytes: int
    backend: str
    why: str
    step_tokens: int = STEP_TOKENS


def describe(config: EngineConfig, checkpoint: Checkpoint, loading: Loading) -> ModelSpec:
    """The spec that the scheduler and the frontends read."""
    c = checkpoint.config
    return ModelSpec(
        name=config.served_model_name or _short_name(config.model),
        path=str(checkpoint.path),
        vocab_size=c.vocab_size,
        context_length=min(loading.context, loading.pool.n_pages * config.page_size),
        eos_ids=checkpoint.eos_ids,
        n_layers=c.n_layers,
        n_heads=c.n_heads,
        n_kv_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        kv_bytes_per_token=kv_bytes_per_token(c, loading.kv_dtype),
        weight_bytes=loading.weight_bytes,
        dtype=dtype_name(loading.dtype),
        backend=loading.backend,
        why=loading.why,
        step_tokens=loading.step_tokens,
    )


def _short_name(model: str) -> str:
    path = Path(model)
    if path.suffix == ".gguf":
        return path.stem
    return path.name if path.is_absolute() else model
