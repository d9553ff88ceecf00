"""Luggage for a machine with a GPU and no network: `python -m bench.gpu_carry WHEELS --out .gpu`.

FlashInfer's wheel is over 100 MB. This keeps what the backend imports and the headers its modules compile from,
and, where nvcc is at hand, prebuilds the attention modules for sm_90a, so that nothing is compiled there. WHEELS is a
folder with the unpacked packages (`pip install --no-deps --target WHEELS flashinfer-python apache-tvm-ffi
nvidia-ml-py`). On the other machine: `PYTHONPATH=.gpu FLASHINFER_DISABLE_JIT=1 python -m bench.gpu`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HEADERS = ("include", "cccl", "cutlass/include", "cutlass/tools/util/include", "spdlog/include")
COMPANIONS = ("tvm_ffi", "pynvml.py", "pynvml")
LIST_IMPORTS = """
import sys, flashinfer, flashinfer.decode, flashinfer.prefill, flashinfer.cascade, flashinfer.norm, flashinfer.rope
import flashinfer.activation
print("\\n".join(m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "flashinfer" and m.__file__))
"""
BUILD = """
import shutil, sys, pathlib, torch
from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module, gen_batch_decode_module
from flashinfer.jit import gen_cascade_module
bf16, i32, out = torch.bfloat16, torch.int32, pathlib.Path(sys.argv[1])
specs = [gen_cascade_module()]
for head_dim in (64, 128):
    common = (bf16, bf16, bf16, i32, head_dim, head_dim, 0, False, False)
    specs += [gen_batch_decode_module(*common), _gen_batch_prefill_primary_module("fa2", *common, False)]
for spec in specs:
    spec.build()
    target = out / spec.name
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(spec.jit_library_path, target / f"{spec.name}.so")
    print(spec.name, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Luggage:
    """What was packed."""

    folder: Path
    n_files: int
    n_bytes: int


def pack(wheels: Path, out: Path, *, headers: bool, prebuild: bool) -> Luggage:
    """Copy what is needed from `wheels` to `out`, and build modules into it."""
    package = wheels / "flashinfer"
    if not package.is_dir():
        raise SystemExit(f"{wheels} holds no flashinfer package")
    for file in imported_files(wheels):
        _copy(file, out / file.relative_to(wheels))
    for name in COMPANIONS:
        if (wheels / name).exists():
            _copy(wheels / name, out / name)
    for dist in wheels.glob("*.dist-info"):
        if dist.name.startswith(("flashinfer_python", "apache_tvm_ffi", "nvidia_ml_py")):
            _copy(dist, out / dist.name)
    if headers:
        for part in HEADERS:
            if (package / "data" / part).is_dir():
                _copy(package / "data" / part, out / "flashinfer/data" / part)
        for file in (package / "data/csrc").glob("*.*"):  # the folders below are other backends'
            _copy(file, out / "flashinfer/data/csrc" / file.name)
    if prebuild:
        build_modules(wheels, out / "flashinfer/data/aot")
    files = [file for file in out.rglob("*") if file.is_file()]
    return Luggage(out, len(files), sum(file.stat().st_size for file in files))


def imported_files(wheels: Path) -> list[Path]:
    """The package's modules that an import of the backend's parts really loads."""
    done = _python(["-c", LIST_IMPORTS], wheels, capture=True)
    return [Path(line) for line in done.splitlines() if line.endswith(".py")]


def build_modules(wheels: Path, out: Path) -> None:
    """Decode, prefill and cascade for bfloat16, head sizes 64 and 128. Needs nvcc; about ten minutes on one core."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise SystemExit("prebuilding needs nvcc; leave --prebuild out and let the GPU's machine compile")
    stub = out.parent / "stub"
    stub.mkdir(parents=True, exist_ok=True)
    empty = ["cc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", str(stub / "libcuda.so")]
    subprocess.run(empty, check=True)  # the driver's library is not here to link against
    os.environ.update(
        CUDA_HOME=str(Path(nvcc).resolve().parent.parent),
        FLASHINFER_CUDA_ARCH_LIST="9.0a",
        FLASHINFER_EXTRA_LDFLAGS=f"-L{stub}",
    )
    os.environ.setdefault("MAX_JOBS", "1")
    _python(["-c", BUILD, str(out)], wheels, capture=False)
    shutil.rmtree(stub)


def _python(arguments: list[str], wheels: Path, *, capture: bool) -> str:
    environment = {**os.environ, "PYTHONPATH": str(wheels)}
    environment.setdefault("FLASHINFER_WORKSPACE_BASE", str(wheels.parent / "flashinfer-work"))
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        check=True,
        text=True,
        stdout=subprocess.PIPE if capture else None,
    )
    return done.stdout or ""


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    else:
        shutil.copy2(source, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("wheels", type=Path, help="folder with the unpacked packages")
    parser.add_argument("--out", type=Path, default=Path(".gpu"))
    parser.add_argument("--headers", action="store_true", help="also what just-in-time builds need (11 MB packed)")
    parser.add_argument("--prebuild", action="store_true", help="build the attention modules for sm_90a here")
    options = parser.parse_args()
    luggage = pack(options.wheels, options.out, headers=options.headers, prebuild=options.prebuild)
    print(f"{luggage.folder}: {luggage.n_files} files, {luggage.n_bytes / 2**20:.1f} MiB unpacked")


if __name__ == "__main__":
    main()
