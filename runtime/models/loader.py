"""From a model's name to a runner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.base import KVStore, QuantizedOps
from kernels.select import BackendError, Choice, select_ops
from runtime.config import EngineConfig
from runtime.errors import BackendUnavailable, InvalidRequest, ModelLoadError, NotFound
from runtime.execute.cpu import CpuQueue, default_threads
from runtime.execute.memory import CPU_POOL_BYTES, PoolSize, free_host_bytes, size_pool
from runtime.execute.runner import ModelRunner
from runtime.models.config import ModelConfig, config_from_hf
from runtime.models.gguf_source import GgufFile
from runtime.models.layers import Builder
from runtime.models.registry import build_model, weight_shapes
from runtime.models.safetensors_source import SafetensorsFolder, read_json
from runtime.models.weights import DummyWeights, WeightSource
from runtime.pull import EMBEDDED, embedded_path
from runtime.step import ModelSpec
from runtime.text.tokenizer import Tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def resolve_model(name: str) -> Path:
    """The folder or file of a model: an embedded model's name, a path, or a hub id (downloaded once).

    Raises NotFound for a name that is none of them, ModelLoadError if the hub cannot be reached.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name in EMBEDDED:
        return embedded_path(name)
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith((".gguf", "/")):
        raise NotFound(
            f"There is no model {name!r}: it is no embedded model ({', '.join(EMBEDDED)}), no path and no hub id.",
            param="model",
        )
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and only needed here
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except RepositoryNotFoundError:
        raise NotFound(f"The hub has no model {name!r} (or it is private).", param="model") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(f"Model {name!r} cannot be fetched from the hub: {error}.") from None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model: sizes, weights still on disk, and the ids that end a turn."""

    path: Path
    config: ModelConfig
    source: WeightSource
    eos_ids: tuple[int, ...]
    file_bytes: int


def open_checkpoint(path: Path, load_format: str = "auto") -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder. Raises ModelLoadError, naming what is wrong with it."""
    is_folder = path.is_dir()
    if load_format == "gguf" and is_folder:
        raise ModelLoadError(f"{path} is a folder; load format gguf needs a GGUF file.")
    if load_format == "safetensors" and not is_folder:
        raise ModelLoadError(f"{path} is a file; load format safetensors needs a folder.")
    source: WeightSource | None
    if is_folder:
        config = config_from_hf(read_json(path / "config.json"), path.name)
        source = None if load_format == "dummy" else SafetensorsFolder(path)
        files = list(path.glob("*.safetensors"))
    else:
        source = GgufFile(path)
        config, files = source.config, [path]
    if load_format == "dummy" or source is None:
        source = DummyWeights(weight_shapes(config))
    return Checkpoint(path, config, source, _eos_ids(path), sum(file.stat().st_size for file in files))


def _eos_ids(path: Path) -> tuple[int, ...]:
    """Every id that ends a turn: the tokenizer's view, or the config's where a folder has no tokenizer."""
    if not path.is_dir() or (path / "tokenizer.json").is_file() or (path / "tokenizer_config.json").is_file():
        return Tokenizer.from_model(path).eos_ids
    ids: set[object] = set()
    for name in ("config.json", "generation_config.json"):
        if (path / name).is_file():
            value = read_json(path / name).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [value])
    return tuple(sorted(token for token in ids if isinstance(token, int)))


def load_runner(config: EngineConfig) -> ModelRunner:
    """Load the model `config` names and make its runner.

    Raises NotFound, ModelLoadError, BackendUnavailable or InvalidRequest, each one clear sentence.
    """
    device = choose_device(config.device)
    try:
        choice = select_ops(config.backend, device)
    except BackendError as error:
        raise BackendUnavailable(f"Backend {config.backend!r} cannot run here: {error}.") from None
    checkpoint = open_checkpoint(resolve_model(config.model), config.load_format)
    queue = CpuQueue(config.threads or default_threads())
    try:
        return queue.call(lambda: _build(config, checkpoint, choice, queue))
    except BaseException:
        queue.close()
        raise


def choose_device(asked: str) -> torch.device:
    """Raises BackendUnavailable for cuda without a usable GPU."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable("Device 'cuda' was asked for, but this torch sees no usable GPU.")
    return torch.device("cuda" if asked == "cuda" or (asked == "auto" and torch.cuda.is_available()) else "cpu")


def _build(config: EngineConfig, checkpoint: Checkpoint, choice: Choice, queue: CpuQueue) -> ModelRunner:
    c = checkpoint.config
    dtype = _DTYPES.get(config.dtype, choice.ops.default_dtype)
    kv_dtype = _kv_dtype(config.kv_dtype, dtype)
    context = _context_length(config.context_length, c)
    keep_quantized = config.quantization != "none"
    build = Builder(c, checkpoint.source, choice.ops, dtype, torch.device("cpu"), keep_quantized)
    model = build_model(build, context)
    kv_bytes = 2 * c.n_layers * c.n_kv_heads * c.head_dim * kv_dtype.itemsize
    pool = size_pool(config, kv_bytes, free_host_bytes(), cap_bytes=CPU_POOL_BYTES)
    kv = KVStore(c.n_layers, pool.n_pages, config.page_size, c.n_kv_heads, c.head_dim, kv_dtype)
    spec = ModelSpec(
        name=config.served_model_name or _short_name(config.model),
        path=str(checkpoint.path),
        vocab_size=c.vocab_size,
        context_length=min(context, pool.n_pages * config.page_size),
        eos_ids=checkpoint.eos_ids,
        n_layers=c.n_layers,
        n_heads=c.n_heads,
        n_kv_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        kv_bytes_per_token=kv_bytes,
        weight_bytes=_weight_bytes(build, checkpoint),
        dtype=str(dtype).removeprefix("torch."),
        backend=choice.ops.name,
        why=_why(config, choice, dtype, pool, queue.n_threads),
    )
    return ModelRunner(model, kv, spec, queue, config.max_running)


def _kv_dtype(asked: str, dtype: torch.dtype) -> torch.dtype:
    if asked in ("int8", "fp8"):
        raise BackendUnavailable(f"KV of type {asked!r} is not supported by the CPU backends.")
    return _DTYPES.get(asked, dtype)


def _context_length(asked: int | None, c: ModelConfig) -> int:
    if asked is not None and not 1 <= asked <= c.context_length:
        raise InvalidRequest(
            f"context_length must be from 1 to the model's {c.context_length}; got {asked}.", param="context_length"
        )
    return asked or c.context_length


def _short_name(model: str) -> str:
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else model if not path.is_absolute() else path.name


def _weight_bytes(build: Builder, checkpoint: Checkpoint) -> int:
    """Bytes of the weights in memory: the file's where the backend keeps them quantised."""
    if build.keep_quantized and isinstance(build.ops, QuantizedOps) and isinstance(checkpoint.source, GgufFile):
        return checkpoint.file_bytes
    return sum(math.prod(shape) for shape in weight_shapes(checkpoint.config).values()) * build.dtype.itemsize


def _why(config: EngineConfig, choice: Choice, dtype: torch.dtype, pool: PoolSize, n_threads: int) -> str:
    chosen = "as asked for" if config.dtype != "auto" else "the backend's default"
    kind = str(dtype).removeprefix("torch.")
    return f"{choice.why}; {kind}, {chosen}; {n_threads} threads; {pool.why}"
