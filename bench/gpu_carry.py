"""Luggage for a machine with a GPU and no network: `python -m bench.gpu_carry --prebuild`, then take `.gpu.tar.gz`.

FlashInfer's wheel is over 100 MB. This keeps what the backend imports, with `--headers` what its modules compile from,
and with `--prebuild`, where nvcc is at hand, the attention modules built for sm_90a, so that nothing is compiled
there. The few other packages that the bench needs and a CUDA image lacks come along, built for the Python there.

On the other machine: `tar xzf .gpu.tar.gz`, then
`PYTHONPATH=.gpu FLASHINFER_DISABLE_JIT=1 FLASHINFER_WORKSPACE_BASE=/tmp python -m bench.gpu`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.gpu_modules import MODULES, build_environment, cuda_home

PACKAGES = ("flashinfer-python==0.7.4", "apache-tvm-ffi==0.1.15.post2", "nvidia-ml-py")
TARGET_PACKAGES = ("apache-tvm-ffi==0.1.15.post2", "msgspec", "gguf")  # what the bench imports and images lack
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
HEADERS = ("include", "cccl", "cutlass/include", "cutlass/tools/util/include", "spdlog/include")
PURE = ("pynvml.py", "pynvml")
LIST_IMPORTS = """
import sys, flashinfer, flashinfer.decode, flashinfer.prefill, flashinfer.cascade
print("\\n".join(m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "flashinfer" and m.__file__))
"""
LOAD = """
import sys
from bench.gpu_modules import MODULES, spec_of
for name in sys.argv[1:]:
    spec_of(MODULES[name]).build_and_load()
    print("loads", name, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Luggage:
    """What was packed."""

    folder: Path
    n_files: int
    n_bytes: int
    packed_bytes: int  # as a tar.gz


def fetch(wheels: Path) -> None:
    """The packages as this machine's Python imports them, unpacked in `wheels`."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(wheels), *PACKAGES], check=True)


def fetch_for(python: str, out: Path, *, headers: bool) -> None:
    """The compiled packages as the other machine's Python imports them, unpacked in `out`."""
    folder = out / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    subprocess.run([*pip, *target, *platforms, "--dest", str(folder), *TARGET_PACKAGES], check=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(out)
    shutil.rmtree(folder)
    unused = ("3rdparty", "src", "share") if headers else ("include", "3rdparty", "src", "share")
    for part in unused:  # prebuilt modules need nothing to compile against
        shutil.rmtree(out / "tvm_ffi" / part, ignore_errors=True)


def pack(wheels: Path, out: Path, *, headers: bool, prebuild: bool, modules: Iterable[str] = MODULES) -> Luggage:
    """Copy what is needed of the package from `wheels` to `out`, and build modules into it."""
    package = wheels / "flashinfer"
    if not package.is_dir():
        raise SystemExit(f"{wheels} holds no flashinfer package")
    for file in imported_files(wheels):
        _copy(file, out / file.relative_to(wheels))
    for name in PURE:
        if (wheels / name).exists():
            _copy(wheels / name, out / name)
    for dist in wheels.glob("*.dist-info"):
        if dist.name.startswith(("flashinfer_python", "nvidia_ml_py")):
            _copy(dist, out / dist.name)
    for file in (package / "data/csrc").glob("*.*"):  # templates are read for prebuilt modules too
        _copy(file, out / "flashinfer/data/csrc" / file.name)  # the folders below are other backends'
    if headers:
        for part in HEADERS:
            if (package / "data" / part).is_dir():
                _copy(package / "data" / part, out / "flashinfer/data" / part)
    if prebuild:
        build_modules(wheels, out / "flashinfer/data/aot", modules)
    return weigh(out)


def weigh(out: Path) -> Luggage:
    """The folder's size, and that of the archive that is left beside it."""
    archive = out.parent / f"{out.name}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(out, arcname=out.name)
    files = [file for file in out.rglob("*") if file.is_file()]
    return Luggage(out, len(files), sum(file.stat().st_size for file in files), archive.stat().st_size)


def imported_files(wheels: Path) -> list[Path]:
    """The package's modules that an import of the backend's parts really loads."""
    done = _python(["-c", LIST_IMPORTS], [wheels], {}, capture=True)
    return [Path(line) for line in done.splitlines() if line.endswith(".py")]


def build_modules(wheels: Path, out: Path, names: Iterable[str]) -> None:
    """Those of `bench.gpu_modules` that `out` lacks. A minute to four each on one core; MAX_JOBS raises that."""
    if shutil.which("nvcc") is None:
        raise SystemExit("prebuilding needs nvcc; leave --prebuild out and let the GPU's machine compile")
    environment = build_environment(_work())
    for name in names:
        arguments = ["-m", "bench.gpu_modules", "--build", name, "--out", str(out.resolve())]
        _python(arguments, [wheels], environment, capture=False)


def check_loads(wheels: Path, out: Path, names: Iterable[str]) -> None:
    """Load every module from the luggage alone, with just-in-time builds switched off. No GPU is asked."""
    ours = _work() / "here"  # this machine's build of what the luggage has for another Python
    ours.mkdir(parents=True, exist_ok=True)
    if not (ours / "tvm_ffi").exists():
        (ours / "tvm_ffi").symlink_to((wheels / "tvm_ffi").resolve())
    libraries = [str(cuda_home() / "lib64"), str(_work() / "driver")]
    (_work() / "driver").mkdir(exist_ok=True)
    shutil.copy(_work() / "stub/libcuda.so", _work() / "driver/libcuda.so.1")
    environment = {
        "FLASHINFER_DISABLE_JIT": "1",
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(_work() / "empty"),
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
    }
    print(_python(["-c", LOAD, *names], [ours, out.resolve()], environment, capture=True), end="")


def _work() -> Path:
    return Path(os.environ.get("RAMET_CARRY_WORK", str(Path.home() / ".cache/ramet/gpu-carry")))


def _python(arguments: list[str], path: list[Path], environment: dict[str, str], *, capture: bool) -> str:
    here = Path(__file__).resolve().parent.parent
    variables = {
        **os.environ,
        "FLASHINFER_WORKSPACE_BASE": str(_work()),
        **environment,
        "PYTHONPATH": os.pathsep.join(str(part.resolve()) for part in [*path, here]),
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        env=variables,
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
    parser.add_argument("wheels", type=Path, nargs="?", help="folder with the unpacked packages (default: fetched)")
    parser.add_argument("--out", type=Path, default=Path(".gpu"))
    parser.add_argument("--python", default="3.12", help="version of the other machine's Python")
    parser.add_argument("--headers", action="store_true", help="also what just-in-time builds need")
    parser.add_argument("--prebuild", action="store_true", help="build the attention modules for sm_90a here")
    parser.add_argument("--modules", default=",".join(MODULES), help="which, comma separated")
    options = parser.parse_args()
    names = [name for name in options.modules.split(",") if name]
    if unknown := [name for name in names if name not in MODULES]:
        parser.error(f"unknown module {unknown[0]!r}; there are {', '.join(MODULES)}")
    wheels = options.wheels or _work() / "packages"
    if options.wheels is None and not (wheels / "flashinfer").is_dir():
        fetch(wheels)
    options.out.mkdir(parents=True, exist_ok=True)
    fetch_for(options.python, options.out, headers=options.headers)
    luggage = pack(wheels, options.out, headers=options.headers, prebuild=options.prebuild, modules=names)
    if options.prebuild:
        check_loads(wheels, options.out, names)
    mib = [f"{n / 2**20:.1f} MiB" for n in (luggage.n_bytes, luggage.packed_bytes)]
    print(f"{luggage.folder}: {luggage.n_files} files, {mib[0]}; {luggage.folder}.tar.gz: {mib[1]}")


if __name__ == "__main__":
    main()
