"""The header of a GGUF file (keys and tensor table), read without touching its tensors (tens of milliseconds)."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import ModelLoadError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32  # bytes, where the file names none


class _Cursor:
    """A little-endian reader over a byte buffer."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def scalar(self, kind: int) -> Any:
        code = struct.Struct("<" + _SCALARS[kind])
        (value,) = code.unpack_from(self._data, self._at)
        self._at += code.size
        return value

    def text(self) -> str:
        length = self.scalar(10)
        start, self._at = self._at, self._at + length
        return self._data[start : self._at].decode("utf-8", "replace")

    def array(self) -> list[Any]:
        kind, count = self.scalar(4), self.scalar(10)
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        if kind == _ARRAY:
            return [self.array() for _ in range(count)]
        code = struct.Struct(f"<{count}{_SCALARS[kind]}")
        values = code.unpack_from(self._data, self._at)
        self._at += code.size
        return list(values)

    def tensor_info(self) -> tuple[str, GgufTensorInfo]:
        name = self.text()
        shape = tuple(self.scalar(10) for _ in range(self.scalar(4)))
        return name, GgufTensorInfo(shape[::-1], self.scalar(4), self.scalar(10))

    @property
    def at(self) -> int:
        return self._at

    def value(self) -> Any:
        kind = self.scalar(4)
        readers: dict[int, Callable[[], Any]] = {_STRING: self.text, _ARRAY: self.array}
        return readers[kind]() if kind in readers else self.scalar(kind)


@dataclass(frozen=True, slots=True)
class GgufTensorInfo:
    """Where one tensor lies. `shape` is outermost first; `offset` counts from the header's `data_start`."""

    shape: tuple[int, ...]
    type_code: int  # ggml's number of the element type
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything before the tensors' bytes."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensorInfo]
    data_start: int  # byte position in the file


def read_gguf_metadata(path: str | Path) -> dict[str, Any]:
    """Every key of the header. Raises ModelLoadError for a file that is no (or a truncated) GGUF."""
    return read_gguf_header(path).metadata


def read_gguf_header(path: str | Path) -> GgufHeader:
    """The keys and the tensor table. Raises ModelLoadError for a file that is no (or a truncated) GGUF."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != _MAGIC:
                raise ModelLoadError(f"{path} is not a GGUF file: it does not start with 'GGUF'.")
            return _read_header(_Cursor(data), path)
    except (struct.error, KeyError, ValueError, ArithmeticError, RecursionError, OSError) as error:
        raise ModelLoadError(f"{path} cannot be read as a GGUF file, it may be truncated: {error}") from error


def _read_header(cursor: _Cursor, path: str | Path) -> GgufHeader:
    cursor.scalar(4)  # the magic
    version = cursor.scalar(4)
    if version not in (2, 3):
        raise ModelLoadError(f"{path} has GGUF version {version}; versions 2 and 3 are supported.")
    n_tensors, n_keys = cursor.scalar(10), cursor.scalar(10)
    metadata = {cursor.text(): cursor.value() for _ in range(n_keys)}
    tensors = dict(cursor.tensor_info() for _ in range(n_tensors))
    alignment = int(metadata.get("general.alignment", _ALIGNMENT))
    return GgufHeader(metadata, tensors, -(-cursor.at // alignment) * alignment)
