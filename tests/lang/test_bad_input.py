"""Every kind of bad input on every backend: one typed error with program, branch and line; nothing hangs or is held."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import ramet as rt
from frontend_lang.errors import (
    BackendLost,
    InvalidChoices,
    InvalidPiece,
    InvalidSchema,
    ProgramError,
    ScopeClosed,
    ToolFailed,
    UnknownVariable,
)
from frontend_lang.openai import OpenAIBackend
from runtime.engine import Engine
from tests.lang.engines import toy_engine, toy_server
from tests.lang.test_engine import idle

forever = threading.Event()


@rt.tool
def raises(x: int) -> int:
    """Fails."""
    raise LookupError("no such order")


@rt.tool(timeout_s=0.05)
def never_returns(x: int) -> int:
    """Waits."""
    forever.wait()
    return x


def wrong_piece(s: rt.State) -> None:
    s.add(3.5)


def wrong_option(s: rt.State) -> None:
    s += rt.gen("a", max_tokens="many")  # type: ignore[arg-type]


def unknown_option(s: rt.State) -> None:
    s += rt.gen("a", warmth=1)


def wrong_race(s: rt.State) -> None:
    s.fork(2).race(3)


def unknown_name(s: rt.State) -> None:
    s["nothing"]


def empty_choice(s: rt.State) -> None:
    s += rt.select("a", ["yes", ""])


def duplicate_choice(s: rt.State) -> None:
    s += rt.gen("a", choices=["yes", "yes"])


def after_its_scope(s: rt.State) -> None:
    with s.fork(["one", "two"]) as branches:
        branches += "word"
    branches["two"].add("more")


def wrong_regex(s: rt.State) -> None:
    s += rt.gen("a", regex="[")


def wrong_type(s: rt.State) -> None:
    s += rt.gen("a", threading.Event)


def wrong_schema(s: rt.State) -> None:
    s += rt.gen("a", json_schema={"type": "object", "properties": {"x": {"$ref": "#/nowhere"}}}, max_tokens=9)
    s["a"]


def failing_tool(s: rt.State) -> None:
    s += raises.call("r", on_error="raise", max_tokens=200)
    s["r"]


def endless_tool(s: rt.State) -> None:
    s += never_returns.call("r", on_error="raise", max_tokens=200)
    s["r"]


CASES: list[tuple[Any, type[ProgramError], str]] = [
    (wrong_piece, InvalidPiece, "main"),
    (wrong_option, InvalidPiece, "main"),
    (unknown_option, InvalidPiece, "main"),
    (wrong_race, InvalidPiece, "main"),
    (unknown_name, UnknownVariable, "main"),
    (empty_choice, InvalidChoices, "main"),
    (duplicate_choice, InvalidChoices, "main"),
    (after_its_scope, ScopeClosed, "two"),
    (wrong_regex, InvalidSchema, "main"),
    (wrong_type, InvalidSchema, "main"),
    (wrong_schema, InvalidSchema, "main"),
    (failing_tool, ToolFailed, "main"),
    (endless_tool, ToolFailed, "main"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with toy_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with toy_server(engine) as url:
        yield url


BACKENDS = {
    "local": lambda engine, url: engine,
    "http": lambda engine, url: rt.HttpBackend(url),
    "plain": lambda engine, url: rt.HttpBackend(url, plain=True),
    "openai": lambda engine, url: OpenAIBackend(url),
}


@pytest.fixture(params=list(BACKENDS))
def target(request: pytest.FixtureRequest, engine: Engine, url: str) -> Any:
    """One of the backends; all of them end in the same engine."""
    return BACKENDS[request.param](engine, url)


@pytest.mark.parametrize(("body", "kind", "branch"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_bad_input(target: Any, engine: Engine, body: Any, kind: type[ProgramError], branch: str) -> None:
    def program(s: rt.State) -> None:
        s += "Begin. "
        s += rt.gen("first", max_tokens=3)  # something is always under way
        body(s)

    with pytest.raises(kind) as caught:
        rt.Program(program, body.__name__).run(target, deadline=60)
    where, lines = caught.value.where, body.__code__
    assert (where.program, where.branch) == (body.__name__, branch)
    assert where.file == __file__
    assert lines.co_firstlineno < where.line <= max(line for _, _, line in lines.co_lines() if line)
    assert f"program {body.__name__!r}, branch {branch!r}, test_bad_input.py:{where.line}" in str(caught.value)
    idle(engine)


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_server_that_is_dead(kind: str) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "Begin."
        s += rt.gen("a", max_tokens=3)
        return s["a"]

    engine = toy_engine()
    with toy_server(engine) as url:
        target: Any = BACKENDS[kind](engine, url)
        assert program.run(target).value
        engine.close()
        with pytest.raises(BackendLost, match=r"program 'program', branch 'main', test_bad_input\.py:\d+"):
            program.run(target, deadline=60)


def test_a_server_that_was_never_there() -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "Begin."

    with pytest.raises(BackendLost, match=r"program 'program', branch 'main', test_bad_input\.py:\d+"):
        program.run("http://127.0.0.1:9")


def test_wrong_arguments_of_a_run(engine: Engine) -> None:
    @rt.function
    def program(s: rt.State, x: int) -> Any:
        s += str(x)

    for wrong in ({}, {"x": 1, "y": 2}, {"x": 1, "temperature": -1}, {"x": 1, "deadline": 0}, {"x": 1, "seed": "a"}):
        with pytest.raises(InvalidPiece, match=r"program 'program', branch 'main', test_bad_input\.py:\d+"):
            program.run(engine, **wrong)  # type: ignore[arg-type]
