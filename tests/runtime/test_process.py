"""The scheduler in its own process: start, talk, death, stall, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from runtime import process as processes
from runtime.config import EngineConfig
from runtime.errors import InvalidRequest, ModelLoadError, Unavailable
from runtime.generate import Generator
from runtime.link import Beat
from runtime.messages import Submit, pack_ids
from runtime.process import IpcClient, PoolInfo, SchedulerProcess, describe_exit
from tests.runtime.toys import ByteTokenizer

PARTS = "tests.runtime.toys:echo_parts"


@pytest.fixture
async def process() -> AsyncIterator[SchedulerProcess]:
    process = SchedulerProcess.start(EngineConfig(), parts=PARTS)
    yield process
    process.kill()
    assert is_gone(process.pid)


@pytest.fixture
async def generator(process: SchedulerProcess) -> AsyncIterator[Generator]:
    client = IpcClient(process, stall_s=60)
    yield Generator(client, ByteTokenizer(), process.spec, EngineConfig())
    client.close()


def ask(text: str) -> Submit:
    return Submit(rid="", tokens=pack_ids(list(text.encode())))


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state == "Z"


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_requests_and_calls_cross_the_border(process: SchedulerProcess, generator: Generator) -> None:
    assert process.pool == PoolInfo(64, 16)
    assert process.spec.vocab_size == 257
    answers = await asyncio.gather(*(generator.complete(ask(f"hello {i}"), n=2) for i in range(20)))
    assert [[one.text for one in group] for group in answers] == [[f"hello {i}"] * 2 for i in range(20)]
    assert await generator.call("stats") == {"running": 0}
    with pytest.raises(InvalidRequest, match="no"):
        await generator.call("nonsense")
    assert generator.health()[:2] == (True, True)


async def test_an_abort_crosses_the_border(generator: Generator) -> None:
    stream = generator.stream(ask("~" * 500))
    await anext(stream)
    (rid,) = stream.rids
    assert generator.abort(rid) == 1
    last = [delta async for delta in stream][-1]
    assert last.finish is not None
    assert last.finish.reason == "abort"


async def test_the_sockets_are_private(process: SchedulerProcess) -> None:
    folder = process._folder.path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(one.name for one in folder.iterdir()) == ["in", "out"]
    process.stop()
    assert not folder.exists()


async def test_stop_ends_in_order_with_0(process: SchedulerProcess) -> None:
    started = time.monotonic()
    assert process.stop() == 0
    assert process.stop() == 0
    assert time.monotonic() - started < 5


async def test_a_process_that_does_not_listen_is_killed(process: SchedulerProcess) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    assert process.stop(timeout_s=0.2) == -signal.SIGKILL


@pytest.mark.parametrize("by", ["kill", "exception"])
async def test_a_death_fails_everything_with_unavailable(
    process: SchedulerProcess, generator: Generator, by: str
) -> None:
    died: list[str] = []
    generator.client._on_death = died.append  # type: ignore[attr-defined]
    task = asyncio.ensure_future(generator.complete(ask("~" * 1000)))
    await until(lambda: generator.n_live == 1)
    held = []
    if by == "kill":
        os.kill(process.pid, signal.SIGKILL)
    else:
        held = generator.stream_many([ask("!die")])
    with pytest.raises(Unavailable, match="scheduler process died"):
        await asyncio.wait_for(task, 10)
    with pytest.raises(Unavailable):
        await generator.complete(ask("x"))
    assert generator.health()[:2] == (False, False)
    assert len(died) == 1
    del held
    assert process.exit_code() == (-signal.SIGKILL if by == "kill" else 70)


async def test_a_frozen_process_is_not_ready_but_live(
    process: SchedulerProcess, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "BEAT_LATE_S", 1.0)
    await generator.complete(ask("x"))
    os.kill(process.pid, signal.SIGSTOP)
    await until(lambda: not generator.health().ready)
    assert generator.health().live
    assert "has not answered" in generator.health().reason
    os.kill(process.pid, signal.SIGCONT)
    await until(lambda: generator.health().ready)
    assert (await generator.complete(ask("back")))[0].text == "back"


async def test_a_frontend_that_was_busy_itself_blames_nobody(
    process: SchedulerProcess, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "BEAT_LATE_S", 1.0)
    await generator.complete(ask("x"))
    time.sleep(1.5)  # the loop is blocked, as by a huge prompt
    assert generator.health().ready


async def test_a_frontend_that_was_stopped_for_long_blames_nobody(
    process: SchedulerProcess, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = generator.client
    assert isinstance(client, IpcClient)
    await generator.complete(ask("x"))
    os.kill(process.pid, signal.SIGSTOP)  # as if its beats of that time were not there yet
    client._read()
    client._heard -= 600
    client._ran -= 600
    client._beat = Beat(turn=time.monotonic() - 600, busy=True)
    assert generator.health().ready
    client._heard -= 600
    assert not generator.health().ready
    os.kill(process.pid, signal.SIGCONT)


async def test_a_stalled_loop_is_not_ready(process: SchedulerProcess) -> None:
    client = IpcClient(process, stall_s=0.5)
    generator = Generator(client, ByteTokenizer(), process.spec, EngineConfig())
    stream = generator.stream_many([ask("!stall")])
    await until(lambda: not generator.health().ready)
    assert "no progress" in generator.health().reason
    del stream
    client.close()


@pytest.mark.parametrize(
    ("model", "sentence"), [("broken", "shard model-00002"), ("crash", r"ended while loading \(killed by SIGKILL")]
)
def test_a_model_that_cannot_be_loaded_is_told(model: str, sentence: str) -> None:
    with pytest.raises(ModelLoadError, match=sentence):
        SchedulerProcess.start(EngineConfig(model=model), parts=PARTS)


def test_the_child_ends_with_a_parent_that_was_killed() -> None:
    code = (
        "import sys, time\n"
        "from runtime.config import EngineConfig\n"
        "from runtime.process import SchedulerProcess\n"
        f"process = SchedulerProcess.start(EngineConfig(), parts={PARTS!r})\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not is_gone(child)
        parent.kill()
    deadline = time.monotonic() + 5
    while not is_gone(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_gone(child)


def test_exit_codes_are_told_in_words() -> None:
    assert describe_exit(-9) == "killed by SIGKILL, perhaps for lack of memory"
    assert describe_exit(-15) == "killed by SIGTERM"
    assert describe_exit(70) == "exit status 70"


def test_nothing_on_the_wire_is_unpickled() -> None:
    for name in ("link", "child", "process", "client", "messages"):
        source = Path(processes.__file__).with_name(f"{name}.py").read_text()
        assert "import pickle" not in source
        assert "recv_pyobj" not in source
