"""How runs, scopes and streams end: interrupted, left early, late, or simply done. Nothing may run on or be held."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ramet as rt
from frontend_lang.errors import BranchCancelled, DeadlineExceeded, GenerationFailed
from runtime.engine import Engine
from tests.lang.engines import target_of, toy_engine
from tests.lang.fake import FakeBackend
from tests.lang.test_engine import idle

LONG = {"max_tokens": 12000, "ignore_eos": True}


@rt.function
def reads(s: rt.State, i: int = 0) -> Any:
    s += f"go {i}"
    s += rt.gen("a", **LONG)
    return s["a"]


@rt.function
def leaves_unread(s: rt.State) -> None:
    s += "go"
    s += rt.gen("a", **LONG)


@rt.function
def in_a_scope(s: rt.State) -> None:
    s += "go"
    with s.fork(3) as branches:
        branches += rt.gen("a", **LONG)


@rt.function
def in_a_race(s: rt.State) -> None:
    s += "go"
    branches = s.fork(3)
    branches += rt.gen("a", **LONG)
    branches.race(1)


@rt.function
def along(s: rt.State) -> str:
    s += "go"
    s += rt.gen("a", **LONG)
    return "".join(s.stream("a"))


@rt.function
async def awaits(s: rt.State, i: int = 0) -> Any:
    s += f"go {i}"
    s += rt.gen("a", **LONG)
    return await s.get("a")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with toy_engine(audit=True, latency_s=0.002) as engine:
        yield engine


@pytest.fixture(params=["engine", "http"])
def target(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Any]:
    with target_of(request.param, engine) as target:
        yield target


def settled(engine: Engine) -> None:
    """An abort over a connection arrives a moment after the program has ended."""
    until = time.monotonic() + 10
    while engine.stats()["running"] and time.monotonic() < until:
        time.sleep(0.01)
    idle(engine)


def interrupted(engine: Engine, work: Callable[[], Any]) -> None:
    """Press Ctrl-C once requests run."""
    main = threading.main_thread().ident
    assert main is not None

    def press() -> None:
        until = time.monotonic() + 20
        while not engine.stats()["running"] and time.monotonic() < until:
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)  # wakes a wait, as the terminal's does

    thread = threading.Thread(target=press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("program", [reads, leaves_unread, in_a_scope, in_a_race, along, awaits], ids=lambda p: p.name)
def test_an_interrupt_ends_everything(target: Any, engine: Engine, program: Any) -> None:
    interrupted(engine, lambda: program.run(target))
    settled(engine)


@pytest.mark.parametrize("program", [reads, awaits], ids=lambda p: p.name)
def test_an_interrupted_batch_ends_its_threads_too(target: Any, engine: Engine, program: Any) -> None:
    interrupted(engine, lambda: program.run_batch(target, range(20), threads=8, progress=False))
    settled(engine)
    until = time.monotonic() + 10
    while any(thread.name == "ramet-reads" for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(thread.name == "ramet-reads" for thread in threading.enumerate())


def test_an_async_program_that_exits_ends_its_run_alone(backend: FakeBackend) -> None:
    @rt.function
    async def program(s: rt.State) -> None:
        s += "go"
        s += rt.gen("a")
        await s.get("a")
        raise SystemExit(3)

    for _ in range(2):  # the loop of plain callers has survived the first
        with pytest.raises(SystemExit, match="3"):
            program.run(backend)


@pytest.mark.parametrize("program", [reads, awaits], ids=lambda p: p.name)
@pytest.mark.parametrize("kept", [False, True])
def test_a_started_program_ends_with_its_loop(target: Any, engine: Engine, program: Any, kept: bool) -> None:
    keep = []

    async def abandon() -> None:
        block = program.start(target)
        state = await block.__aenter__()
        async for _ in state.stream("a"):
            break
        if kept:
            keep.append(block)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        asyncio.run(abandon())
        gc.collect()
        settled(engine)
    assert not [warning for warning in caught if issubclass(warning.category, RuntimeWarning)]


@pytest.mark.parametrize("program", [reads, awaits], ids=lambda p: p.name)
def test_leaving_the_block_of_start_early_cancels_at_once(target: Any, engine: Engine, program: Any) -> None:
    async def leave() -> str:
        async with program.start(target) as state:
            async for _ in state.stream("a"):
                break
        return "left"

    aborted = engine.stats()["aborted"]
    assert asyncio.run(leave()) == "left"
    settled(engine)
    assert engine.stats()["aborted"] == aborted + 1


async def test_a_program_that_has_all_its_values_comes_to_its_end(backend: FakeBackend) -> None:
    ended = []

    @rt.function
    async def program(s: rt.State, more: bool) -> None:
        s += "go"
        s += rt.gen("a")
        await s.get("a")
        await asyncio.sleep(0.01)
        ended.append(more)
        if more:
            s += rt.gen("b")
            await s.get("b")
            raise AssertionError("nobody waits for this")
        raise ZeroDivisionError("mine")

    async def stream(more: bool) -> None:
        async with program.start(backend, more) as state:
            assert [piece async for piece in state.stream("a")]

    with pytest.raises(ZeroDivisionError, match="mine"):
        await stream(more=False)
    await stream(more=True)
    assert ended == [False, True]
    assert backend.live == set()


def test_leaving_a_stream_leaves_its_generation_running(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> str:
        s += "go"
        s += rt.gen("a")
        for piece in s.stream("a"):
            return piece
        return ""

    result = program.run(backend)
    assert result["a"].startswith(result.value)
    assert len(result["a"]) > len(result.value)
    assert backend.aborted == []


def test_a_stream_shows_the_first_of_several_samples(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "go"
        s += rt.gen("a", n=3)
        return "".join(s.stream("a")), s["a"]

    streamed, samples = program.run(backend).value
    assert streamed == samples[0] != ""
    assert [request.stream for request in backend.requests] == [True, False, False]


def test_an_error_seen_in_a_stream_is_not_raised_again(backend: FakeBackend) -> None:
    backend.fail_branch = "main"

    @rt.function
    def program(s: rt.State) -> str:
        s += rt.gen("a")
        with pytest.raises(GenerationFailed):
            list(s.stream("a"))
        return "went on"

    assert program.run(backend).value == "went on"


# ---- scopes ---------------------------------------------------------------------------------------------------


def test_the_end_of_a_block_does_not_raise_for_its_deadline(backend: FakeBackend) -> None:
    backend.hold["slow"] = asyncio.Event()

    @rt.function
    def program(s: rt.State) -> Any:
        s += "go"
        with s.fork(["slow", "quick"], deadline=0.1) as branches:
            branches += rt.gen("a")
        with pytest.raises(DeadlineExceeded, match=r"0\.1 s.*branch 'slow', test_life\.py:"):
            branches["slow"]["a"]
        return branches["quick"]["a"]

    @rt.function
    async def same(s: rt.State) -> Any:
        s += "go"
        async with s.fork(["slow", "quick"], deadline=0.1) as branches:
            branches += rt.gen("a")
        with pytest.raises(DeadlineExceeded, match=r"0\.1 s.*branch 'slow', test_life\.py:"):
            await branches["slow"].get("a")
        return await branches["quick"].get("a")

    assert program.run(backend).value == same.run(backend).value != ""
    assert backend.live == set()


def test_the_end_of_a_block_does_not_raise_for_what_was_cancelled(backend: FakeBackend) -> None:
    backend.hold["0"] = asyncio.Event()

    @rt.function
    def program(s: rt.State) -> Any:
        s += "go"
        with s.fork(2) as branches:
            branches += rt.gen("a")
            value = branches[1]["a"]
            branches.cancel()
        with pytest.raises(BranchCancelled, match=r"branch '0', test_life\.py:"):
            branches[0]["a"]
        return value

    assert program.run(backend).value


def test_the_end_of_a_block_waits_for_all_before_it_raises(backend: FakeBackend) -> None:
    backend.fail_branch = "0"

    @rt.function
    def program(s: rt.State) -> Any:
        s += "go"
        branches = s.fork(2)
        with pytest.raises(GenerationFailed, match="branch '0'"), branches:
            branches += rt.gen("a")
        assert branches[1]._vars["a"].done
        return branches[1]["a"]

    assert program.run(backend).value


def test_a_late_run_that_was_seen_is_not_raised_again(backend: FakeBackend) -> None:
    backend.hold = {"0": asyncio.Event(), "1": asyncio.Event()}

    @rt.function
    def program(s: rt.State) -> str:
        s += "go"
        branches = s.fork(2)
        branches += rt.gen("a")
        with pytest.raises(DeadlineExceeded, match="branch '1'"):
            branches[1]["a"]
        return "went on"

    assert program.run(backend, deadline=0.1).value == "went on"
