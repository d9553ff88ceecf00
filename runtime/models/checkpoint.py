"""A model on disk: found by name, opened, its stop ids gathered."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.errors import ModelLoadError, NotFound
from runtime.models.config import ModelConfig, config_from_hf
from runtime.models.gguf_source import GgufFile
from runtime.models.registry import weight_shapes
from runtime.models.safetensors_source import SafetensorsFolder, read_json
from runtime.models.weights import DummyWeights, WeightSource
from runtime.pull import EMBEDDED, embedded_path
from runtime.text.tokenizer import Tokenizer

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def resolve_model(name: str) -> Path:
    """The folder or file of a model: an embedded model's name, a path, or a hub id (downloaded once).

    Raises NotFound for a name that is none of them, ModelLoadError if the hub cannot be reached.
    """
    path = Path(name).expanduser()
    try:
        if path.exists():
            return path
    except OSError as error:  # a name too long, a folder that may not be entered
        raise NotFound(f"There is no model {name[:80]!r}: {error.strerror}.", param="model") from None
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
        why = " ".join(str(error).split())[:200].rstrip(".")
        raise ModelLoadError(f"Model {name!r} is no local path and cannot be fetched from the hub: {why}.") from None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model: sizes, weights still on disk, and the ids that end a turn."""

    path: Path
    config: ModelConfig
    source: WeightSource
    eos_ids: tuple[int, ...]
    file_bytes: int


def open_checkpoint(
    path: Path, load_format: str = "auto", device: str = "cpu", dummy_dtype: torch.dtype = torch.float32
) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder, whose tensors will be read straight to `device`.

    Raises ModelLoadError, naming what is wrong with it.
    """
    is_folder = path.is_dir()
    if load_format == "gguf" and is_folder:
        raise ModelLoadError(f"{path} is a folder; load format gguf needs a GGUF file.")
    if load_format == "safetensors" and not is_folder:
        raise ModelLoadError(f"{path} is a file; load format safetensors needs a folder.")
    source: WeightSource | None
    if is_folder:
        config = config_from_hf(read_json(path / "config.json"), path.name)
        source = None if load_format == "dummy" else SafetensorsFolder(path, device)
        files = list(path.glob("*.safetensors"))
    else:
        source = GgufFile(path)
        config, files = source.config, [path]
    if load_format == "dummy" or source is None:
        source = DummyWeights(weight_shapes(config), device=device, dtype=dummy_dtype)
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
