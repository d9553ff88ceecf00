"""Programs need not know the limits of the runtime: long chains, long names, and text that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import ramet as rt
from frontend_lang.errors import GenerationFailed
from frontend_lang.http import HttpBackend
from frontend_lang.ids import short_id
from runtime.engine import Engine
from tests.lang.engines import toy_engine, toy_server
from tests.lang.fake import FakeBackend

CONTEXT = 1024


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with toy_engine(context_length=CONTEXT) as engine:
        yield engine


@pytest.fixture(scope="module", params=["engine", "http"])
def target(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Any]:
    if request.param == "engine":
        yield engine
        return
    with toy_server(engine) as url:
        yield HttpBackend(url)


def test_a_chain_longer_than_a_request_takes_as_many_requests_as_it_needs(target: Any) -> None:
    @rt.function
    def program(s: rt.State, read: bool) -> Any:
        for i in range(260):
            s += "."
            s += rt.gen(f"a{i}", max_tokens=1)
            if read:
                s[f"a{i}"]
        return [s[f"a{i}"] for i in range(260)]

    chained, single = program.run(target, False), program.run(target, True)
    assert chained.value == single.value
    assert (chained.totals.requests, single.totals.requests) == (2, 260)


@rt.function
def overflows(s: rt.State, *, forked: bool) -> Any:
    s += "x"
    s += rt.gen("a", max_tokens=2)
    if forked:
        s = s.fork(1)[0]
    s += "y" * CONTEXT
    s += rt.gen("q", max_tokens=2)
    s += " tail"
    s += rt.gen("r", max_tokens=2)


@pytest.mark.parametrize("forked", [False, True])
def test_text_that_does_not_fit_is_an_error_at_its_gen_wherever_it_stands(target: Any, forked: bool) -> None:
    line = overflows.fn.__code__.co_firstlineno + 7
    with pytest.raises(GenerationFailed, match=rf"length is {CONTEXT} .* has 1027 tokens.*test_limits\.py:{line}\)"):
        overflows.run(target, forked=forked)


def test_what_a_chain_made_before_its_error_can_be_read_and_is_counted(target: Any) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        overflows.fn(s, forked=False)
        with pytest.raises(GenerationFailed, match="maximum context length"):
            s["q"]
        with pytest.raises(GenerationFailed):
            s["r"]
        return s["a"]

    @rt.function
    def alone(s: rt.State) -> Any:
        s += "x"
        s += rt.gen("a", max_tokens=2)
        return s["a"]

    result = program.run(target)
    assert result.value == alone.run(target).value
    assert [event.names for event in result.record.events] == [("a",)]


def test_branches_may_have_any_names_and_any_depth(target: Any) -> None:
    names = ["why " * 300, "why " * 300 + "not"]

    @rt.function
    def program(s: rt.State) -> Any:
        s += "x"
        branches = s.fork(names)
        branches += rt.gen("a", max_tokens=2)
        for _ in range(200):
            s = s.fork(1)[0]
        s += rt.gen("deep", max_tokens=2)
        return branches.values("a"), s["deep"]

    values, deep = program.run(target).value
    assert (len(values), len(deep)) == (2, 2)


def test_a_function_may_have_any_name(backend: FakeBackend) -> None:
    def body(s: rt.State) -> Any:
        s += "x"
        s.fork(["b"])[0].add(rt.gen("a"))

    body.__name__ = "long_" * 300
    rt.function(body).run(backend)
    (request,) = backend.requests
    assert len(request.rid) <= 256
    assert len(request.hints.program_id or "") <= 256


def test_ids_stay_readable_while_they_are_short_and_unique_when_not() -> None:
    assert short_id("main") == "main"
    long = [short_id("x" * 500 + end) for end in "ab"]
    assert long[0] != long[1]
    assert short_id("a\ud800") != short_id("a?")


def test_a_batch_may_be_larger_than_a_hint_says(target: Any) -> None:
    @rt.function
    def program(s: rt.State, i: int) -> Any:
        s += "What all of the items begin with is computed once, then comes"
        s += f" {i}"

    batch = program.run_batch(target, range(4100), progress=False)
    assert (len(batch), batch.totals.requests) == (4100, 1)
