"""A GGUF file: metadata, and tensors under their Hugging Face names, dequantised or as stored."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from kernels.base import QuantizedWeight
from runtime.errors import ModelLoadError
from runtime.models.config import ModelConfig, config_from_gguf
from runtime.text.gguf_meta import GgufTensorInfo, read_gguf_header

_FLOAT = {"F32", "F16", "BF16"}
_BLOCKS_AT_ONCE = 8192  # blocks whose temporaries fit the cache
_QUANTIZED = {"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"}

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_PERMUTED = {"llama", "mistral"}  # converters interleave the rows of q and k of these architectures


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of the tensor table. `shape` is outermost first, `start` a byte position in the file."""

    name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    start: int
    n_bytes: int

    @staticmethod
    def of(name: str, info: GgufTensorInfo, data_start: int, path: Path) -> StoredTensor:
        known = {code.value: code for code in gguf.GGMLQuantizationType}
        kind = known.get(info.type_code)
        if kind is None or kind.name not in _FLOAT | _QUANTIZED:
            raise ModelLoadError(
                f"The tensor {name!r} of {path} has type {kind.name if kind else info.type_code}; "
                f"supported: {', '.join(sorted(_FLOAT | _QUANTIZED))}."
            )
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not info.shape or info.shape[-1] % block:
            raise ModelLoadError(f"The tensor {name!r} of {path} has rows that are no whole number of blocks.")
        n_bytes = math.prod(info.shape) // block * block_bytes
        return StoredTensor(name, info.shape, kind, data_start + info.offset, n_bytes)


class GgufFile:
    """One opened GGUF. Raises ModelLoadError if it is not one, is truncated or of an unknown architecture."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ModelLoadError(f"There is no GGUF file {path}.")
        header = read_gguf_header(path)
        self.path = path
        self.metadata = header.metadata
        self._tensors = {
            name: StoredTensor.of(name, info, header.data_start, path) for name, info in header.tensors.items()
        }
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self._check_size()
        self.config = self._config()

    def _check_size(self) -> None:
        for tensor in self._tensors.values():
            if tensor.start + tensor.n_bytes > len(self._bytes):
                raise ModelLoadError(
                    f"{self.path} is truncated: the tensor {tensor.name!r} ends at byte "
                    f"{tensor.start + tensor.n_bytes}, the file has {len(self._bytes)}."
                )

    def _config(self) -> ModelConfig:
        factors: tuple[float, ...] = ()
        if "rope_freqs.weight" in self._tensors:
            factors = tuple(float(value) for value in self._values("rope_freqs.weight").ravel())
        name = str(self.metadata.get("general.name") or self.path.stem)
        return config_from_gguf(self.metadata, name, tied="output.weight" not in self._tensors, rope_factors=factors)

    def tensor(self, name: str) -> Tensor:
        values = torch.from_numpy(np.ascontiguousarray(self._values(_stored_name(name))))
        heads = self._interleaved_heads(name)
        return deinterleave(values, heads) if heads else values

    def quantized(self, name: str) -> QuantizedWeight | None:
        tensor = self._find(_stored_name(name))
        if tensor.type.name in _FLOAT:
            return None
        blocks = torch.from_numpy(self._raw(tensor).copy())  # the file's mapping is read-only
        heads = self._interleaved_heads(name)
        n_out, n_in = tensor.shape
        return QuantizedWeight(deinterleave(blocks, heads) if heads else blocks, tensor.type.name, (n_out, n_in))

    def _interleaved_heads(self, name: str) -> int:
        """Heads whose rows the converter interleaved, 0 if none."""
        if self.config.architecture not in _PERMUTED:
            return 0
        if ".q_proj." in name:
            return self.config.n_heads
        return self.config.n_kv_heads if ".k_proj." in name else 0

    def _find(self, stored: str) -> StoredTensor:
        try:
            return self._tensors[stored]
        except KeyError:
            raise ModelLoadError(f"The GGUF file {self.path} lacks the tensor {stored!r}.") from None

    def _raw(self, tensor: StoredTensor) -> np.ndarray:
        """The tensor's bytes, uint8 `[rows, bytes a row]`."""
        return self._bytes[tensor.start : tensor.start + tensor.n_bytes].reshape(*tensor.shape[:-1], -1)

    def _values(self, stored: str) -> np.ndarray:
        tensor = self._find(stored)
        return dequantize(np.asarray(self._raw(tensor)), tensor.type).reshape(tensor.shape)


def dequantize(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """uint8 `[..., bytes a row]` -> float32, through the gguf package, many rows at a time."""
    if kind.name in ("F32", "F16"):
        return data.view(np.float32 if kind.name == "F32" else np.float16).astype(np.float32)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, block_bytes)
    values = np.empty((len(blocks), block), np.float32)
    type_of_block = getattr(gguf.quants, kind.name)
    for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
        part = slice(start, start + _BLOCKS_AT_ONCE)
        values[part] = type_of_block.dequantize_blocks(blocks[part])
    return values


def deinterleave(rows: Tensor, n_heads: int) -> Tensor:
    """Undo the converter's row order (pairs side by side) for rotation by halves. rows [heads * d, ...]."""
    half = rows.shape[0] // n_heads // 2
    return rows.view(n_heads, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _stored_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        raise ModelLoadError(f"A GGUF model has no tensor for {name!r}.")
    return f"blk.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
