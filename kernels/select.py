"""Which backend runs: the one asked for, or the best this machine has, and why."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from kernels.base import Ops
from kernels.reference import ReferenceOps


class BackendError(RuntimeError):
    """This backend cannot run here; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen backend, and one clause on why."""

    ops: Ops
    why: str


def select_ops(backend: str, device: torch.device) -> Choice:
    """`backend` is auto, reference, native or flashinfer. Raises BackendError if it cannot run on `device`."""
    if backend == "reference":
        return Choice(ReferenceOps(), "reference kernels were asked for")
    if backend == "native":
        return Choice(_make("kernels.cpu", device), "native CPU kernels were asked for")
    if backend == "flashinfer":
        return Choice(_make("kernels.flashinfer", device), "FlashInfer kernels were asked for")
    if device.type == "cuda":
        return Choice(_make("kernels.flashinfer", device), "FlashInfer kernels, the device is a GPU")
    try:
        return Choice(_make("kernels.cpu", device), "native CPU kernels")
    except BackendError as missing:
        return Choice(ReferenceOps(), f"reference kernels ({missing})")


def _make(module: str, device: torch.device) -> Ops:
    """Every backend module has `make_ops(device) -> Ops`, which raises ImportError or RuntimeError if it cannot."""
    try:
        make = cast("Callable[[torch.device], Ops]", importlib.import_module(module).make_ops)
        return make(device)
    except ModuleNotFoundError as missing:
        raise BackendError(f"{missing.name} is not installed") from missing
    except (ImportError, RuntimeError) as broken:
        raise BackendError(str(broken)) from broken
