"""From an engine's options to a runner with a loaded model."""

from __future__ import annotations

import torch

from kernels.select import BackendError, select_ops
from runtime.config import EngineConfig
from runtime.errors import BackendUnavailable
from runtime.execute.cpu_loader import load_cpu_runner
from runtime.execute.cuda_loader import load_cuda_runner
from runtime.execute.placement import set_allocator
from runtime.models.checkpoint import Checkpoint, open_checkpoint, resolve_model
from runtime.step import Runner

__all__ = ["Checkpoint", "load_runner", "open_checkpoint", "resolve_model"]


def load_runner(config: EngineConfig) -> Runner:
    """Load the model `config` names and make its runner.

    Raises NotFound, ModelLoadError, BackendUnavailable or InvalidRequest, each one clear sentence.
    """
    set_allocator()
    path = resolve_model(config.model)  # first: a wrong name is told before kernels are compiled
    device = choose_device(config.device)
    try:
        choice = select_ops(config.backend, device)
    except BackendError as error:
        raise BackendUnavailable(f"Backend {config.backend!r} cannot run here: {error}.") from None
    if device.type == "cuda":
        return load_cuda_runner(config, path, choice, device)
    return load_cpu_runner(config, open_checkpoint(path, config.load_format), choice)


def choose_device(asked: str) -> torch.device:
    """Raises BackendUnavailable for cuda without a usable GPU."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable("Device 'cuda' was asked for, but this torch sees no usable GPU.")
    if asked == "cuda" or (asked == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
