"""A Hugging Face folder: config.json and safetensors, one file or sharded with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.base import QuantizedWeight
from runtime.errors import ModelLoadError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelLoadError for one that is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"The model folder {path.parent} lacks {path.name}.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as broken:
        raise ModelLoadError(f"{path} cannot be read as JSON: {broken}.") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object.")
    return value


class SafetensorsFolder:
    """Opens every shard at once, so a missing or truncated one is found before anything is computed.

    Tensors are read when asked for, each straight to `device`.
    """

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self._shard_of: dict[str, Any] = {}
        for file in _shard_files(folder):
            handle = _open(file, device)
            self._shard_of.update(dict.fromkeys(handle.keys(), handle))
        self._folder = folder

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def tensor(self, name: str) -> Tensor:
        handle = self._shard_of.get(name)
        if handle is None:
            raise ModelLoadError(f"The weights in {self._folder} lack the tensor {name!r}.")
        try:
            return handle.get_tensor(name)
        except (SafetensorError, OSError) as broken:
            raise ModelLoadError(f"The tensor {name!r} in {self._folder} cannot be read: {broken}.") from None

    def quantized(self, name: str) -> QuantizedWeight | None:
        return None


def _shard_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{folder / INDEX} has no weight_map.")
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelLoadError(f"{folder / INDEX} has a weight_map that does not name files.")
        return [folder / name for name in sorted(set(weight_map.values()))]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    loose = sorted(folder.glob("*.safetensors"))
    if not loose:
        raise ModelLoadError(f"The model folder {folder} lacks {SINGLE} (and {INDEX}).")
    return loose


def _open(file: Path, device: str) -> Any:
    if not file.is_file():
        raise ModelLoadError(f"The model folder {file.parent} lacks the shard {file.name}.")
    try:
        return safe_open(file, framework="pt", device=device).__enter__()
    except (SafetensorError, OSError) as broken:
        raise ModelLoadError(f"{file} is truncated or not a safetensors file: {broken}.") from None
