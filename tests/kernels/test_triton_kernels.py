"""The GPU's Triton kernels without a GPU: run in Triton's interpreter, and compiled to machine code for Hopper.

The interpreter shows what they compute, the compiler that they are code for the card; neither, that they run there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_interpreted_kernels_compute_what_torch_does() -> None:
    out = run("-m", "pytest", "-p", "no:cacheprovider", "tests/kernels/interpreted_kernels.py", TRITON_INTERPRET="1")
    assert "passed" in out


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    out = run("-m", "tests.kernels.compile_kernels", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert out.split() == [
        "rms_norm", "add_rms_norm", "silu_mul", "rope_store", "rope_store", "quantize_rows", "merge_chunks", "race",
    ]  # fmt: skip
