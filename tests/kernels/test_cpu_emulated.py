"""The wide variants on a CPU without their instructions: the same kernel tests, on an emulation of AVX-512 and AMX.

    RAMET_KERNEL_EMULATE=1 RAMET_KERNEL_VARIANT=amx python -m pytest tests/kernels/test_cpu_linear.py   # one by hand

This shows what they compute, not how fast. Minutes long (they are compiled first), so it is a soak test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.build import EMULATED

HERE = Path(__file__).parent
KERNELS = ("attention", "linear", "fused", "sampling", "kv8")
WHOLE_STEP = HERE.parent / "runtime" / "test_whole_step.py"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", EMULATED)
def test_kernels_on_emulated_instructions(variant: str) -> None:
    if not any(Path(root, "simde/x86/avx512.h").is_file() for root in ("/usr/include", "/usr/local/include")):
        pytest.skip("needs SIMDe's headers (Debian and Ubuntu: apt install libsimde-dev)")
    tests = [*(str(HERE / f"test_cpu_{name}.py") for name in KERNELS), str(WHOLE_STEP)]
    env = {**os.environ, "RAMET_KERNEL_EMULATE": "1", "RAMET_KERNEL_VARIANT": variant}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "3000", *tests]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
