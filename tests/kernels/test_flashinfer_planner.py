"""FlashInfer's own planner and wrappers, driven on the CPU behind a stub of the CUDA runtime.

"Planner" is not "kernel": these tests show that the real package takes our arrays and cuts them into the right
tiles. They need the package and nvcc (`make planner` sees to the first), and the first run compiles the planner's
host code (minutes, kept in the cache folder, apart from any whole build of the same modules).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu_modules import build_environment
from runtime.pull import cache_dir

HERE = Path(__file__).parent


def missing() -> str | None:
    """Why the planner cannot be built here."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install 'ramet[gpu]')"
    absent = [tool for tool in ("nvcc", "cc", "ninja") if shutil.which(tool) is None]
    return f"{', '.join(absent)} not found" if absent else None


pytestmark = [
    pytest.mark.planner,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(missing()), reason=missing() or ""),
]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("stub") / "libcuda_stub.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, HERE / "cuda_stub.c"], check=True)
    return library


@pytest.mark.parametrize("part", ["decode", "prefill"])
def test_the_planners_tiles_give_the_oracles_attention(part: str, stub: Path) -> None:
    environment = {
        **os.environ,
        **build_environment(cache_dir() / "flashinfer-planner"),
        "LD_PRELOAD": str(stub),
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
    }
    command = [sys.executable, "-m", "tests.kernels.planner_child", part]
    done = subprocess.run(command, env=environment, cwd=HERE.parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"ok {part}" in done.stdout.splitlines()
