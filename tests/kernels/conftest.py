"""Poisoned outputs: what a kernel forgets to write is NaN (or the largest integer), never a lucky zero."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def poisoned_outputs(request: pytest.FixtureRequest) -> Iterator[None]:
    """torch fills the memory of every new tensor in the native kernels' tests, also those the extension makes."""
    if not request.path.name.startswith("test_cpu_"):
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
