"""The FlashInfer modules that the GPU bench runs, and their build for sm_90a on a machine without a GPU.

`python -m bench.gpu_modules --build NAME --out FOLDER` builds one and copies it where a package with
FLASHINFER_DISABLE_JIT=1 finds it. Needs flashinfer on the path, nvcc and ninja; on one core a minute for decode,
about four for prefill.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCH = "9.0a"


@dataclass(frozen=True, slots=True)
class Module:
    """One library of kernels: what it attends with, over which keys."""

    kind: str  # decode (CUDA cores), prefill (tensor cores, fa2; decode too), prefill-fa3, cascade
    head_dim: int = 128
    kv: str = "bfloat16"  # as torch spells it
    window: bool = False
    soft_cap: bool = False


# In the order of their worth where time is short: the tiny model's, the 8B shapes', then what parity looks at besides.
MODULES = {
    "cascade": Module("cascade"),
    "prefill-64": Module("prefill", 64),
    "prefill-128": Module("prefill", 128),
    "decode-128": Module("decode", 128),
    "prefill-128-fp8": Module("prefill", 128, kv="float8_e4m3fn"),
    "prefill-128-window": Module("prefill", 128, window=True),
    "prefill-128-cap": Module("prefill", 128, soft_cap=True),
}
FA3 = {"prefill-128-fa3": Module("prefill-fa3", 128)}  # a quarter of an hour on one core


def spec_of(module: Module) -> Any:
    """FlashInfer's own description of the library, under the name that its wrappers ask for."""
    import torch
    from flashinfer.jit.attention import modules
    from flashinfer.jit.cascade import gen_cascade_module

    if module.kind == "cascade":
        return gen_cascade_module()
    bf16, kv = torch.bfloat16, getattr(torch, module.kv)
    common = (bf16, kv, bf16, torch.int32, module.head_dim, module.head_dim, 0, module.window, module.soft_cap)
    if module.kind == "decode":
        return modules.gen_batch_decode_module(*common)
    if module.kind == "prefill-fa3":
        return modules.gen_batch_prefill_module("fa3", *common, False)
    return modules._gen_batch_prefill_primary_module("fa2", *common, False)


def build(module: Module, out: Path) -> Path:
    """Compile, link against a driver's library that is not there, and copy to `out`/name/name.so."""
    spec = spec_of(module)
    target = out / spec.name / f"{spec.name}.so"
    if not target.is_file():
        spec.build(verbose=False)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(spec.jit_library_path, target)
        subprocess.run(["strip", "--strip-unneeded", str(target)], check=False)
    return target


def build_environment(work: Path) -> dict[str, str]:
    """Variables under which FlashInfer builds for sm_90a here: no GPU is asked, nothing outside `work` is written."""
    stub = work / "stub"
    stub.mkdir(parents=True, exist_ok=True)
    if not (stub / "libcuda.so").exists():
        empty = ["cc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", str(stub / "libcuda.so")]
        subprocess.run(empty, check=True)
    return {
        "CUDA_HOME": str(cuda_home()),
        "FLASHINFER_CUDA_ARCH_LIST": ARCH,
        "FLASHINFER_WORKSPACE_BASE": str(work),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{stub}",
        "MAX_JOBS": os.environ.get("MAX_JOBS", "1"),
    }


def cuda_home() -> Path:
    """Where the toolkit of the nvcc on the path lies. Raises FileNotFoundError without one."""
    given = os.environ.get("CUDA_HOME")
    if given and (Path(given) / "bin/nvcc").exists():
        return Path(given)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise FileNotFoundError("nvcc is not on the path")
    said = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False)
    tops = [line.split("=", 1)[1] for line in said.stderr.splitlines() if line.startswith("#$ TOP=")]
    return Path(tops[0]).resolve() if tops else Path(nvcc).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--build", choices=[*MODULES, *FA3], required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    print(build((MODULES | FA3)[options.build], options.out).name, flush=True)


if __name__ == "__main__":
    main()
