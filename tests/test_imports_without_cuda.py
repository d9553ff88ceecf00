"""Every module of the project, and the GPU bench, imports on a machine without CUDA and without FlashInfer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("radix", "kernels", "runtime", "frontend_lang")
IMPORT_ALL = """
import importlib, importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flashinfer", "triton", "pynvml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for name in sys.argv[1:]:
    importlib.import_module(name)
import torch
assert not torch.cuda.is_initialized()
print(len(sys.argv) - 1)
"""


def modules() -> list[str]:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    files += (ROOT / "bench").glob("gpu*.py")
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files}
    return sorted(names - {"kernels.triton_kernels"})  # that one is Triton; kernels.fused asks for it on a GPU


def test_every_module_imports_without_cuda_flashinfer_or_triton() -> None:
    names = modules()
    assert len(names) > 100
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", IMPORT_ALL, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [str(len(names))]
