"""SGLang's RadixCache under the same load, where its package is on the path (`pip install --no-deps sglang`).

Only the modules of the cache are loaded: the packages above them are entered without running their own
imports (which want a GPU), and names that the cache only passes along are replaced by empty classes.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

PACKAGES = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.utils")
UNUSED = tuple(
    f"sglang.srt.{name}"
    for name in (
        "mem_cache.memory_pool",
        "mem_cache.allocator",
        "configs",
        "distributed",
        "disaggregation",
        "observability",
        "managers",
    )
)


class _Empty(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def load() -> Any:
    """The module `sglang.srt.mem_cache.radix_cache`. Raises ImportError where it cannot be had."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("no package sglang")
    top = spec.submodule_search_locations[0]
    for name in PACKAGES:
        _enter(name, types.ModuleType(name), top + name.removeprefix("sglang").replace(".", "/"))
    for name in UNUSED:
        _enter(name, _Empty(name), None)
    common = _Empty("sglang.srt.utils.common")
    common.ceil_align = lambda x, align: -(-x // align) * align  # type: ignore[attr-defined]
    _enter("sglang.srt.utils.common", common, None)
    for _ in range(64):
        try:
            return importlib.import_module("sglang.srt.mem_cache.radix_cache")
        except ModuleNotFoundError as missing:
            if missing.name is None:
                raise
            _enter(missing.name, _Empty(missing.name), None)
    raise ImportError("sglang needs too much")


def _enter(name: str, module: types.ModuleType, path: str | None) -> None:
    module.__path__ = [path] if path else []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module


class _Allocator:
    """Gives nothing out and takes everything back."""

    device = "cpu"

    def free(self, *_: Any, **__: Any) -> None: ...

    free_segment = free


class Theirs:
    """Puts, matches and evicts, in tokens."""

    def __init__(self, page_size: int) -> None:
        self.module = load()
        self.base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        self.torch = importlib.import_module("torch")
        self.cache = self.module.RadixCache.create_simulated(mock_allocator=_Allocator(), page_size=page_size)
        self.next = 0

    def key(self, tokens: np.ndarray) -> Any:
        return self.module.RadixKey(array("q", tokens.astype(np.int64).tobytes()), None)

    def put(self, tokens: np.ndarray) -> None:
        value = self.torch.arange(self.next, self.next + len(tokens))
        self.next += len(tokens)
        self.cache.insert(self.base.InsertParams(key=self.key(tokens), value=value))

    def match(self, tokens: np.ndarray) -> Callable[[], Any]:
        key = self.key(tokens)
        return lambda: self.cache.match_prefix(self.base.MatchPrefixParams(key=key))

    def evict(self, n_tokens: int) -> Callable[[], Any]:
        params = self.base.EvictParams(num_tokens=n_tokens)
        return lambda: self.cache.evict(params)
