"""Async programs, cancelling, background runs, and how many threads it all takes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import ramet as rt
from frontend_lang.errors import BranchCancelled, NotReady, UnknownVariable
from tests.lang.fake import FakeBackend


async def test_async_programs(backend: FakeBackend) -> None:
    @rt.function
    async def program(s: rt.State) -> Any:
        s += "the"
        s += rt.gen("a")
        with pytest.raises(NotReady, match="await"):
            s["a"]
        first = await s.get("a")
        pieces = [piece async for piece in s.stream("a")]
        async with s.fork(3) as branches:
            branches += rt.gen("b")
            both = await branches.gather("b")
        assert s["a"] == first
        return first, "".join(pieces), both

    first, streamed, both = (await program.arun(backend)).value
    assert first == streamed
    assert len(both) == 3


async def test_cancelling_a_run_aborts_its_requests(backend: FakeBackend) -> None:
    backend.hold["main"] = asyncio.Event()

    @rt.function
    async def program(s: rt.State) -> Any:
        s += "the"
        s += rt.gen("a")
        return await s.get("a")

    run = asyncio.ensure_future(program.arun(backend))
    while not backend.live:
        await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert backend.live == set()


async def test_cancelling_a_plain_program_unblocks_its_thread(backend: FakeBackend) -> None:
    backend.hold["main"] = asyncio.Event()
    seen: list[BaseException] = []

    @rt.function
    def program(s: rt.State) -> Any:
        s += "the"
        s += rt.gen("a")
        try:
            return s["a"]
        except BaseException as error:
            seen.append(error)
            raise

    run = asyncio.ensure_future(program.arun(backend))
    while not backend.live:
        await asyncio.sleep(0.001)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    while not seen:
        await asyncio.sleep(0.001)
    assert isinstance(seen[0], BranchCancelled)
    assert backend.live == set()


async def test_start_streams_a_name_before_it_is_defined(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> None:
        s += "the"
        s += rt.gen("plan")
        s["plan"]
        s += rt.gen("answer")

    async with program.start(backend) as state:
        pieces = [piece async for piece in state.stream("answer")]
    assert "".join(pieces) == await state.get("answer")
    with pytest.raises(UnknownVariable, match="without defining 'nothing'"):
        async with program.start(backend) as state:
            await state.get("nothing")


def test_thousands_of_states_use_few_threads(backend: FakeBackend) -> None:
    import threading

    most = 0

    @rt.function
    async def program(s: rt.State, i: int) -> Any:
        nonlocal most
        s += f"item {i}"
        async with s.fork(4) as branches:
            branches += rt.gen("a", max_tokens=2)
            values = await branches.gather("a")
        most = max(most, threading.active_count())
        return len(values)

    results = program.run_batch(backend, range(300), progress=False)
    assert [result.value for result in results] == [4] * 300
    assert most <= threading.active_count() + 2


def test_a_backends_loop_ends_with_it() -> None:
    import gc
    import weakref

    @rt.function
    def program(s: rt.State) -> None:
        s += rt.gen("a")

    backend = FakeBackend()
    program.run(backend)
    gone = weakref.ref(backend)
    del backend
    gc.collect()
    assert gone() is None


def test_batches_of_plain_programs_keep_to_their_threads(backend: FakeBackend) -> None:
    import threading

    most = 0

    @rt.function
    def program(s: rt.State, i: int) -> Any:
        nonlocal most
        s += f"item {i}"
        branches = s.fork(4)
        branches += rt.gen("a", max_tokens=2)
        values = branches.values("a")
        most = max(most, sum(t.name.startswith("ramet-program") for t in threading.enumerate()))
        return len(values)

    results = program.run_batch(backend, [{"i": i} for i in range(100)], threads=8, progress=False)
    assert [result.value for result in results] == [4] * 100
    assert most <= 9


def test_what_nobody_reads_starts_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr("frontend_lang.run.LINGER_S", 0.001)
    asked = threading.Event()

    class Telling(FakeBackend):
        def submit(self, requests: Any) -> Any:
            asked.set()
            return super().submit(requests)

    @rt.function
    def program(s: rt.State) -> bool:
        s += rt.gen("a")
        return asked.wait(20)  # the program's own slow work

    assert program.run(Telling()).value
