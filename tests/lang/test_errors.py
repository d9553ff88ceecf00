"""Whatever goes wrong is one typed error, with its program, branch and line, where the value is read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import ramet as rt
from frontend_lang.errors import (
    BackendLost,
    GenerationFailed,
    InvalidPiece,
    InvalidSchema,
    NotReady,
    ProgramError,
    ScopeClosed,
    UnknownVariable,
)
from runtime.errors import Unavailable
from tests.lang.fake import FakeBackend


def test_a_failed_request_surfaces_where_its_value_is_read(backend: FakeBackend) -> None:
    backend.fail_branch = "1"

    @rt.function
    def program(s: rt.State) -> Any:
        s += "go"
        branches = s.fork(3)
        branches += rt.gen("a")
        assert branches[0]["a"]
        with pytest.raises(GenerationFailed, match=r"the step failed .*branch '1', test_errors.py:") as first:
            branches[1]["a"]
        with pytest.raises(GenerationFailed) as second:
            branches[1]["a"]
        assert first.value is second.value
        branches[1].add(rt.gen("later"))
        with pytest.raises(GenerationFailed):
            branches[1]["later"]
        return branches[2]["a"]

    assert program.run(backend).value
    assert backend.live == set()


def test_a_failure_nobody_reads_is_raised_at_the_end(backend: FakeBackend) -> None:
    backend.fail_branch = "1"

    @rt.function
    def program(s: rt.State) -> Any:
        s += "go"
        branches = s.fork(2)
        branches += rt.gen("a")

    for _ in range(2):
        with pytest.raises(GenerationFailed, match="branch '1'"):
            program.run(backend)


def test_a_join_fails_with_its_branch(backend: FakeBackend) -> None:
    backend.fail_branch = "1"

    @rt.function
    def program(s: rt.State) -> Any:
        s += "go"
        branches = s.fork(2)
        branches += rt.gen("a")
        branches.join()
        s += rt.gen("b")
        return s["b"]

    with pytest.raises(GenerationFailed, match="branch '1'"):
        program.run(backend)


def test_an_error_of_the_users_own_comes_through_every_time(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "go"
        s += rt.gen("a")
        s["a"]
        raise ZeroDivisionError("mine")

    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="mine"):
            program.run(backend)
    assert backend.live == set()


async def test_a_stream_ends_when_its_program_fails(backend: FakeBackend) -> None:
    backend.fail_branch = "main"

    @rt.function
    def program(s: rt.State) -> Any:
        s += rt.gen("a")
        s += rt.gen("b")

    async def read() -> list[str]:
        async with program.start(backend) as state:
            return [piece async for piece in state.stream("b")]

    with pytest.raises(GenerationFailed):
        await read()


def test_a_stream_in_the_program_raises_too(backend: FakeBackend) -> None:
    backend.fail_branch = "main"

    @rt.function
    def program(s: rt.State) -> Any:
        s += rt.gen("a")
        return list(s.stream("a"))

    with pytest.raises(GenerationFailed):
        program.run(backend)


def test_unknown_names(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += rt.gen("answer")
        s["anwser"]

    with pytest.raises(UnknownVariable, match=r"'anwser'.*Did you mean 'answer'.*program 'program', branch 'main'"):
        program.run(backend)


@pytest.mark.parametrize("bad", [1, None, {"a": 1}, object()])
def test_wrong_pieces(backend: FakeBackend, bad: Any) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += bad

    with pytest.raises(InvalidPiece, match=rf"{type(bad).__name__}.*test_errors.py:"):
        program.run(backend)


def test_nested_roles(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        with s.user():
            s.assistant("hi")

    with pytest.raises(InvalidPiece, match="An assistant message cannot stand inside the user message"):
        program.run(backend)


def test_a_dead_server(backend: FakeBackend) -> None:
    backend.fail = Unavailable("The scheduler is dead.")

    @rt.function
    def program(s: rt.State) -> Any:
        s += rt.gen("a")
        return s["a"]

    with pytest.raises(BackendLost, match=r"dead.*branch 'main'"):
        program.run(backend)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: rt.gen(""), InvalidPiece),
        (lambda: rt.gen("a", n=0), InvalidPiece),
        (lambda: rt.gen("a", n=True), InvalidPiece),
        (lambda: rt.gen("a", temperature=float("nan")), InvalidPiece),
        (lambda: rt.gen("a", max_tokens=-1), InvalidPiece),
        (lambda: rt.gen("a", top_p=0.0), InvalidPiece),
        (lambda: rt.gen("a", warmth=1), InvalidPiece),
        (lambda: rt.gen("a", deadline=0), InvalidPiece),
        (lambda: rt.gen("a", stop=[""]), InvalidPiece),
        (lambda: rt.gen("a", regex="("), InvalidSchema),
        (lambda: rt.gen("a", json_schema="{"), InvalidSchema),
        (lambda: rt.gen("a", json_schema=[1]), InvalidSchema),
        (lambda: rt.gen("a", json_schema=False), InvalidSchema),
        (lambda: rt.gen("a", asyncio.AbstractEventLoop), InvalidSchema),
        (lambda: rt.gen("a", int, regex="x"), InvalidSchema),
        (lambda: rt.raw(1), InvalidPiece),
        (lambda: rt.function(1), InvalidPiece),
    ],
)
def test_bad_constructs_are_refused_when_they_are_written(make: Any, kind: type[ProgramError]) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert "pydantic.dev" not in str(caught.value)


def test_a_state_is_dead_after_its_run(backend: FakeBackend) -> None:
    kept: list[rt.State] = []

    @rt.function
    def program(s: rt.State) -> Any:
        s += rt.gen("a")
        kept.append(s)

    program.run(backend)
    with pytest.raises(ScopeClosed, match="after its run"):
        kept[0].add("more")


async def test_run_inside_a_loop_is_refused(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "x"

    with pytest.raises(NotReady, match="arun"):
        program.run(backend)


def test_a_bad_target() -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "x"

    with pytest.raises(InvalidPiece, match="Engine"):
        program.run(42)


def test_one_bad_item_of_a_batch(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State, i: int) -> Any:
        s += f"item {i}"
        s += rt.gen("a")
        return 1 // i

    with pytest.raises(ZeroDivisionError):
        program.run_batch(backend, [1, 0, 2], progress=False)
    results = program.run_batch(backend, [1, 0, 2], progress=False, on_error="return")
    assert [type(result).__name__ for result in results] == ["Result", "ZeroDivisionError", "Result"]
    assert backend.live == set()
