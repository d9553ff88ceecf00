"""Faults that such frontends are known for, each as its smallest program, on a real scheduler and cache."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import ramet as rt
from frontend_lang.errors import GenerationFailed
from runtime.engine import Engine
from tests.lang.engines import target_of, toy_engine
from tests.lang.test_engine import idle


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with toy_engine(n_pages=16384) as engine:
        yield engine


@pytest.fixture(params=["local", "http"], scope="module")
def target(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Any]:
    with target_of(request.param, engine) as target:
        yield target


# ---- Q1: fork before any text -------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [None, ""])
def test_a_fork_before_any_text(target: Any, first: str | None) -> None:
    @rt.function
    def program(s: rt.State) -> list[str]:
        if first is not None:
            s += first
        branches = s.fork(2)
        for branch in branches:
            branch += "go"
            branch += rt.gen("a", max_tokens=3)
        return branches.values("a")

    assert len(program.run(target).value) == 2


# ---- Q3: options whose first token merges with the prompt's end ---------------------------------------------


def _scores(target: Any, prompt: str, options: list[str]) -> dict[str, float]:
    @rt.function
    def program(s: rt.State) -> Any:
        s += prompt
        s += rt.select("pick", options)
        return s.info("pick").scores

    scores: dict[str, float] = program.run(target).value
    return scores


def test_both_spellings_rank_alike(target: Any) -> None:
    left, right = _scores(target, "Q? A:", [" YES", " NO"]), _scores(target, "Q? A: ", ["YES", "NO"])
    assert max(left, key=left.__getitem__).strip() == max(right, key=right.__getitem__).strip()
    for prompt in ("A:", "A: "):
        assert set(_scores(target, prompt, ["nikon", "nike shoes"])) == {"nikon", "nike shoes"}


# ---- Q4: n = 3, and temperature None ------------------------------------------------------------------------


def test_several_samples_and_no_temperature(target: Any) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "x"
        s += rt.gen("a", n=3, max_tokens=4)
        s += rt.gen("b", choices=["x", "y"], temperature=None)
        return s["a"], s["b"]

    texts, choice = program.run(target).value
    assert len(texts) == 3
    assert choice in ("x", "y")


# ---- Q6: exceptions inside a program ------------------------------------------------------------------------


def test_an_exception_comes_through_every_time(target: Any, engine: Engine) -> None:
    @rt.function
    def program(s: rt.State) -> None:
        s += "x"
        s += rt.gen("a", max_tokens=3)
        s["a"]
        raise ZeroDivisionError("mine")

    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="mine"):
            program.run(target)
    idle(engine)


async def _streams(program: Any, target: Any) -> None:
    async with program.start(target) as state:
        for name in ("a", "b"):
            assert [piece async for piece in state.stream(name)]


async def test_a_stream_ends_with_the_exception(target: Any, engine: Engine) -> None:
    @rt.function
    def program(s: rt.State) -> None:
        s += "x"
        s += rt.gen("a", max_tokens=3)
        s["a"]
        s += "x" * 20000  # more than the context holds
        s += rt.gen("b")

    for _ in range(2):
        with pytest.raises(GenerationFailed, match=r"context length.*branch 'main', test_cases\.py"):
            await _streams(program, target)
    idle(engine)


# ---- Q7: threads of batches, and forks in them --------------------------------------------------------------


def test_a_batch_of_forks_has_a_bounded_number_of_threads(target: Any) -> None:
    most = 0

    @rt.function
    def program(s: rt.State, i: int) -> int:
        nonlocal most
        s += f"item {i}"
        branches = s.fork(4)
        branches += rt.gen("a", max_tokens=2)
        found = branches.values("a")
        most = max(most, threading.active_count())
        return len(found)

    before = threading.active_count()
    batch = program.run_batch(target, range(100), threads=8, progress=False)
    assert [result.value for result in batch] == [4] * 100
    assert most <= before + 8 + 2  # the programs' loop, and one thread that ends as another begins


async def test_thousands_of_states_need_no_thread(engine: Engine) -> None:
    """2,500 states of 25 async programs side by side, in one thread of ours."""

    @rt.function
    async def program(s: rt.State, i: int) -> int:
        s += f"{i}"
        async with s.fork(99) as branches:
            branches += rt.gen("a", max_tokens=1)
            return len(await branches.gather("a"))

    before = threading.active_count()
    runs = [asyncio.ensure_future(program.arun(engine, i)) for i in range(25)]
    await asyncio.sleep(0)
    assert threading.active_count() == before
    results = await asyncio.gather(*runs)
    assert [result.value for result in results] == [99] * 25
    assert sum(len(result.record.branches) for result in results) == 2500
    idle(engine)
