"""Builds the native CPU kernels: `python -m kernels.build`, or at first use.

Each instruction-set variant is compiled by itself with its own flags, the binding by torch's extension builder.
The results lie in a cache folder under names that hold a digest of the sources, torch and the compiler, so nothing
stale is ever loaded and builds of different environments stay apart. Set RAMET_KERNEL_CACHE to move it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

log = logging.getLogger("ramet.kernels")

SOURCES = Path(__file__).parent / "csrc"
MODULE = "ramet_cpu"
COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno")
SANITIZE = ("-fsanitize=address", "-g", "-O1")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", *AVX2)
X86_VARIANTS = {
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512bf16": ("-mavx512bf16", *AVX512),
    "amx": ("-mamx-tile", "-mamx-int8", "-mamx-bf16", "-mavx512bf16", *AVX512),
}
EMULATED = ("avx512", "avx512bf16", "amx")
EMULATION = Path(__file__).parents[1] / "tests" / "kernels" / "emulation" / "wide.h"


class BuildError(RuntimeError):
    """The kernels cannot be built here; the message says why."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A C++ compiler and what it calls itself."""

    compiler: str
    version: str


def load_extension() -> ModuleType:
    """The extension module, built if the cache lacks it. Raises BuildError.

    RAMET_KERNEL_SANITIZE=1 builds it with AddressSanitizer, RAMET_KERNEL_EMULATE=1 with the wide instruction sets
    emulated, for tests (see docs/performance.md for the whole commands).
    """
    tools = find_toolchain()
    root = cache_root()
    extra = SANITIZE if os.environ.get("RAMET_KERNEL_SANITIZE") == "1" else ()
    sources = sorted(SOURCES.glob("*.[hc]*"))
    if emulating():
        sources.append(EMULATION)
    library = root / f"{MODULE}-{_digest(tools, sources, extra)}.so"
    if not library.is_file():
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / "lock"):
            if not library.is_file():
                _build(tools, root, library, extra)
    return _import(library)


def emulating() -> bool:
    """Whether the wide variants are compiled against an emulation of their instructions."""
    return os.environ.get("RAMET_KERNEL_EMULATE") == "1"


def find_toolchain() -> Toolchain:
    """The compiler torch's builder would use ($CXX or c++). Raises BuildError where there is none."""
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler) is None:
        raise BuildError(f"no C++ compiler ({compiler}) was found to build the native kernels")
    if sys.platform != "linux":
        raise BuildError("the native kernels are built on Linux only")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return Toolchain(compiler, version.partition("\n")[0])


def cache_root() -> Path:
    """Where built kernels live."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    ramet = Path(os.environ.get("RAMET_CACHE") or Path(base) / "ramet")
    return Path(os.environ.get("RAMET_KERNEL_CACHE") or ramet / "kernels")


def _digest(tools: Toolchain, sources: list[Path], flags: tuple[str, ...]) -> str:
    state = hashlib.sha256()
    for source in sources:
        state.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    about = (torch.__version__, tools, sys.version, platform.machine(), COMMON_FLAGS, X86_VARIANTS, flags)
    state.update(repr(about).encode())
    return state.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One builder at a time, over processes; the system drops the lock of one that died."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(tools: Toolchain, root: Path, library: Path, extra: tuple[str, ...]) -> None:
    variants: dict[str, tuple[str, ...]] = {"portable": (), **(_x86_variants(tools) if _is_x86() else {})}
    missing = tuple(f"-DRAMET_NO_{name.upper()}" for name in X86_VARIANTS if name not in variants)
    log.warning("Compiling the native CPU kernels into %s (once; a few minutes).", root)
    jobs = {"barrier": extra, "plan": extra} | {f"kernels_{name}": (*flags, *extra) for name, flags in variants.items()}
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        objects = list(pool.map(lambda job: _compile(tools, root, *job), jobs.items()))
    built = _bind(tools, root, objects, (*extra, *missing))
    staged = library.with_suffix(f".{os.getpid()}.tmp")
    shutil.copy2(built, staged)
    staged.replace(library)


def _x86_variants(tools: Toolchain) -> dict[str, tuple[str, ...]]:
    """The variants this compiler knows, with their flags."""
    if emulating():
        wide = dict.fromkeys(EMULATED, (*AVX2, "-include", str(EMULATION)))
        return {"avx2": AVX2, **wide}
    return {name: flags for name, flags in X86_VARIANTS.items() if _accepts(tools, flags)}


def _accepts(tools: Toolchain, flags: tuple[str, ...]) -> bool:
    command = [tools.compiler, *flags, "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _compile(tools: Toolchain, root: Path, name: str, flags: tuple[str, ...]) -> Path:
    """One object file, reused while its source, the headers and the flags are the same."""
    source = SOURCES / f"{name}.cpp"
    headers = [*sorted(SOURCES.glob("*.h")), *([EMULATION] if "-include" in flags else [])]
    target = root / f"{name}-{_digest(tools, [source, *headers], flags)}.o"
    if target.is_file():
        return target
    staged = target.with_suffix(".tmp")
    command = [tools.compiler, *COMMON_FLAGS, *flags, "-c", str(source), "-o", str(staged)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{tools.compiler} could not compile {name}.cpp:\n{done.stderr[-2000:]}")
    return staged.replace(target)


def _bind(tools: Toolchain, root: Path, objects: list[Path], extra: tuple[str, ...]) -> Path:
    """Compile the binding and link. OpenMP's symbols come from torch's own runtime, so it is not linked."""
    from torch.utils import cpp_extension  # slow to import

    source = SOURCES / "binding.cpp"
    headers = sorted(SOURCES.glob("*.h"))
    work = root / f"binding-{_digest(tools, [source, *headers], (*extra, *map(str, objects)))}"
    work.mkdir(exist_ok=True)
    (work / "lock").unlink(missing_ok=True)  # of a build that was killed; ours is held, so nobody else is at it
    try:
        cpp_extension.load(
            name=MODULE,
            sources=[str(source)],
            extra_cflags=["-O2", "-fopenmp", *extra],
            extra_ldflags=[*map(str, objects), *(flag for flag in extra if flag.startswith("-fsanitize"))],
            build_directory=str(work),
            is_python_module=False,
        )
    except (RuntimeError, OSError, ImportError) as error:
        raise BuildError(f"the native kernels' binding could not be built: {error}") from error
    return work / f"{MODULE}.so"


def _import(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, library)
    if spec is None or spec.loader is None:
        raise BuildError(f"{library} is no extension module")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{library} cannot be loaded: {error}") from error
    return module


def main() -> int:
    """Build, and say what came out. Where it cannot be built Ramet still works, so this never fails an install."""
    try:
        module = load_extension()
    except BuildError as error:
        print(f"Native CPU kernels: not built ({error}); the slower reference kernels will be used.", file=sys.stderr)
        return 0
    print(f"Native CPU kernels: ready, best variant {module.variants()[0]}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
