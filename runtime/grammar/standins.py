"""Import xgrammar without torch and transformers, in a process that has no other use for them.

Its matching engine needs neither (they serve tensors and Hugging Face tokenizers), but its package imports both:
seconds and hundreds of megabytes that the gate's worker would pay at every restart.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _StandIn(types.ModuleType):
    """Any attribute is an empty class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {"__init__": lambda self, *args, **options: None})
        setattr(self, name, value)
        return value


def import_xgrammar_alone() -> None:
    """Leave xgrammar imported and `torch`, `transformers` importable as empty modules. For the worker only."""
    missing: Any = None
    sys.modules["torch"] = missing  # its foreign-function layer works without torch if it cannot be imported
    importlib.import_module("tvm_ffi")
    for name in ("torch", "transformers"):
        sys.modules[name] = _StandIn(name)
    importlib.import_module("xgrammar")
