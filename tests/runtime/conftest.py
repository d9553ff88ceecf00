"""Fixtures of the runtime's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.pull import embedded_path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded model's GGUF file (`make test` pulls it first)."""
    return embedded_path("smollm2-135m")
