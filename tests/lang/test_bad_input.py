"""Every kind of bad input on every backend: one typed error with program, branch and line; nothing hangs or is held."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import ramet as rt
from frontend_lang.errors import (
    BackendLost,
    BranchCancelled,
    DeadlineExceeded,
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
from tests.lang.test_life import settled

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


@rt.tool
def sleeps(x: int) -> int:
    """Sleeps."""
    time.sleep(0.5)
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


def no_such_branch(s: rt.State) -> None:
    s.fork(2)[7]


def replaced_branch(s: rt.State) -> None:
    branches = s.fork(2)
    branches[0] += "more"  # appends, as everywhere
    branches[0] = branches[1]


def nameless_branch(s: rt.State) -> None:
    with pytest.raises(InvalidPiece, match="cannot be empty; name 1 is"):
        s.fork(["one", ""])
    s.fork([""])


def no_text(s: rt.State) -> None:
    s += "\ud800"


def no_raw_text(s: rt.State) -> None:
    s += rt.raw("a\udfffb")


def no_text_of_a_message(s: rt.State) -> None:
    s.user("\ud800")


def no_text_of_a_choice(s: rt.State) -> None:
    s += rt.select("a", ["yes", "\ud800"])


def no_text_of_a_stop(s: rt.State) -> None:
    s += rt.gen("a", stop="\ud800")


def no_text_of_a_regex(s: rt.State) -> None:
    s += rt.gen("a", regex="\ud800")


def no_text_of_a_name(s: rt.State) -> None:
    s += rt.gen("\ud800")


def no_text_of_a_branch(s: rt.State) -> None:
    s.fork(["\ud800"])


def no_text_of_a_join(s: rt.State) -> None:
    s.fork(2).join("\ud800")


def late_branch(s: rt.State) -> None:
    branches = s.fork(["quick", "late"], deadline=0.05)
    branches["late"].add(rt.gen("a", max_tokens=12000, ignore_eos=True))
    branches["late"]["a"]


def lost_race(s: rt.State) -> None:
    branches = s.fork(["quick", "slow"])
    branches["quick"].add("word")
    branches["slow"].add(rt.gen("a", max_tokens=12000, ignore_eos=True))
    branches.race(1)
    branches["slow"]["a"]


def failed_scope(s: rt.State) -> None:
    with contextlib.suppress(LookupError), s.fork(["one", "two"]) as branches:
        branches += rt.gen("a", max_tokens=12000, ignore_eos=True)
        raise LookupError("the user's own")
    branches["two"]["a"]


def cancelled_branch(s: rt.State) -> None:
    branches = s.fork(["one", "two"])
    branches += rt.gen("a", max_tokens=12000, ignore_eos=True)
    branches.cancel()
    branches["two"]["a"]


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
    (no_such_branch, InvalidPiece, "main"),
    (replaced_branch, InvalidPiece, "main"),
    (nameless_branch, InvalidPiece, "main"),
    (no_text, InvalidPiece, "main"),
    (no_raw_text, InvalidPiece, "main"),
    (no_text_of_a_message, InvalidPiece, "main"),
    (no_text_of_a_choice, InvalidPiece, "main"),
    (no_text_of_a_stop, InvalidPiece, "main"),
    (no_text_of_a_regex, InvalidPiece, "main"),
    (no_text_of_a_name, InvalidPiece, "main"),
    (no_text_of_a_branch, InvalidPiece, "main"),
    (no_text_of_a_join, InvalidPiece, "main"),
    (late_branch, DeadlineExceeded, "late"),
    (lost_race, BranchCancelled, "slow"),
    (failed_scope, BranchCancelled, "two"),
    (cancelled_branch, BranchCancelled, "two"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with toy_engine(latency_s=0.001) as engine:  # slow enough for what must be late
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
    placed(caught.value, body, branch)
    settled(engine)


def placed(error: ProgramError, body: Any, branch: str) -> None:
    """It says which program, which branch, and a line of `body`."""
    where, lines = error.where, body.__code__
    assert (where.program, where.branch) == (body.__name__, branch)
    assert where.file == __file__
    assert lines.co_firstlineno < where.line <= max(line for _, _, line in lines.co_lines() if line)
    assert f"program {body.__name__!r}, branch {branch!r}, test_bad_input.py:{where.line}" in str(error)


def late_value(s: rt.State) -> None:
    s += "Begin."
    s += rt.gen("a", max_tokens=12000, ignore_eos=True)
    s["a"]


def late_values(s: rt.State) -> None:
    branches = s.fork(["one", "two"])
    branches += "Begin."
    branches["two"].add(rt.gen("a", max_tokens=12000, ignore_eos=True))
    branches["two"]["a"]


def late_text(s: rt.State) -> None:
    s += "Begin."
    s += rt.gen("a", max_tokens=2)
    s["a"]
    time.sleep(0.3)
    s.text()


def late_end(s: rt.State) -> None:
    s += "Begin."
    s += rt.gen("a", max_tokens=2)
    s["a"]
    time.sleep(0.3)


def late_tool(s: rt.State) -> None:
    s += "Begin."
    s += sleeps.call("r", max_tokens=200)
    s["r"]


async def late_async_value(s: rt.State) -> None:
    s += "Begin."
    s += rt.gen("a", max_tokens=12000, ignore_eos=True)
    await s.get("a")


@pytest.mark.parametrize(
    ("body", "branch"),
    [
        (late_value, "main"),
        (late_values, "two"),
        (late_text, "main"),
        (late_end, "main"),
        (late_tool, "main"),
        (late_async_value, "main"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("kind", ["local", "http", "plain"])  # OpenAI's API has no `ignore_eos`
def test_a_late_run_says_what_it_waited_for(engine: Engine, url: str, body: Any, branch: str, kind: str) -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        rt.Program(body).run(BACKENDS[kind](engine, url), deadline=0.15)
    placed(caught.value, body, branch)
    settled(engine)


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"threads": True}, {"threads": "8"}, {"on_error": "zap"}])
def test_wrong_options_of_a_batch(engine: Engine, wrong: dict[str, Any]) -> None:
    @rt.function
    def program(s: rt.State, x: int) -> Any:
        s += str(x)

    with pytest.raises(InvalidPiece, match=rf"{next(iter(wrong))} must be .* 'program', .*test_bad_input\.py:\d+"):
        program.run_batch(engine, [1, 2], progress=False, **wrong)


def test_an_item_that_is_no_text_fails_alone(engine: Engine) -> None:
    @rt.function
    def program(s: rt.State, x: str) -> Any:
        s += "Begin. " * 9 + x
        s += rt.gen("a", max_tokens=2)
        return s["a"]

    results = program.run_batch(engine, ["one", "o\ud800"], progress=False, on_error="return")
    assert [type(result).__name__ for result in results] == ["Result", "InvalidPiece"]


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
