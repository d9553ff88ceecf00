"""Programs on a server: the same answers as in process, only new ids on the wire, errors of their own kind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import ramet as rt
from frontend_lang.errors import BackendLost, BranchCancelled, GenerationFailed, InvalidSchema
from frontend_lang.http import HttpBackend
from runtime.engine import Engine
from runtime.errors import InvalidRequest, Unavailable
from tests.lang.engines import toy_engine, toy_server
from tests.lang.test_engine import RULES, tree, turns


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with toy_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with toy_server(engine) as url:
        yield url


@rt.function
def everything(s: rt.State) -> Any:
    s.system(RULES)
    s.user("Plan.")
    s.assistant(rt.gen("plan", max_tokens=8))
    s.user("Which?")
    s.assistant(rt.select("pick", ["one", "two"]), " of ", rt.gen("n", int))
    branches = s.fork(3)
    for branch in branches:
        branch += branch.name
        branch += rt.gen("a", max_tokens=6, temperature=0.7)
    branches.join()
    s += rt.gen("many", n=2, max_tokens=4, logprobs=2)
    return branches.values("a"), s["many"], s.info("pick").scores, s.info("many").logprobs


def test_the_same_as_in_process(engine: Engine, url: str) -> None:
    there, here = everything.run(url), everything.run(engine)
    assert there.text == here.text
    assert there.value == here.value
    assert there.totals.requests == here.totals.requests


def test_the_same_by_a_server_that_knows_nothing_of_programs(engine: Engine, url: str) -> None:
    """By `/generate`: a request a generation and all ids each time, but the same ids, and as much of them shared."""
    plain = HttpBackend(url, plain=True)
    there, here = everything.run(plain), everything.run(engine)
    assert there.text == here.text
    assert there.value == here.value
    assert there.totals.retokenised == 0
    chained = turns.run(plain, 4)
    assert chained.text == turns.run(engine, 4).text
    assert chained.totals.requests == 4
    assert chained.totals.hit_rate >= 0.99
    assert plain.ids_sent > chained.totals.prompt


def test_a_plain_server_streams_and_refuses_as_the_other_does(engine: Engine, url: str) -> None:
    @rt.function
    def reading(s: rt.State) -> Any:
        s += RULES
        s += rt.gen("a", max_tokens=40)
        return list(s.stream("a"))

    @rt.function
    def wrong(s: rt.State) -> None:
        s += "x" * 20000
        s += rt.gen("a", max_tokens=4)

    @rt.function
    def picking(s: rt.State) -> Any:
        s += "Which? "
        s += rt.gen("a", choices=["red", 'so "blue"'])
        return s["a"]

    plain = HttpBackend(url, plain=True)
    pieces = reading.run(plain).value
    assert "".join(pieces) == "".join(reading.run(engine).value)
    assert len(pieces) > 1
    assert picking.run(plain).value in ("red", 'so "blue"')
    with pytest.raises(GenerationFailed, match=r"context.*program 'wrong', branch 'main', test_http.py"):
        wrong.run(plain)


def test_only_new_ids_travel(url: str) -> None:
    backend = HttpBackend(url)
    totals = tree.run(backend, 3, 3).totals
    assert totals.hit_rate >= 0.99
    assert backend.ids_sent < totals.prompt / 5


def test_a_lost_handle_is_rebuilt_from_ids(url: str, engine: Engine) -> None:
    backend = HttpBackend(url)

    @rt.function
    def program(s: rt.State) -> Any:
        s += RULES
        s += rt.gen("a", max_tokens=5)
        s["a"]
        for known in backend._known.values():
            for handle, entry in list(known.items()):
                known[handle] = type(entry)("forgotten", entry.ids)
        s += " so "
        s += rt.gen("b", max_tokens=5)
        return s["b"]

    assert program.run(backend).value == program.run(engine).value


def test_a_chain_is_one_request(url: str) -> None:
    assert turns.run(url, 4).totals.requests == 1


def test_losers_of_a_race_are_aborted(url: str, engine: Engine) -> None:
    @rt.function
    def race(s: rt.State) -> Any:
        s += RULES
        branches = s.fork(["short", "long"])
        branches["short"].add(rt.gen("a", max_tokens=3))
        branches["long"].add(rt.gen("a", max_tokens=12000, ignore_eos=True))
        names = [winner.name for winner in branches.race(1)]
        with pytest.raises(BranchCancelled):
            branches["long"]["a"]
        return names

    assert race.run(url).value == ["short"]
    for _ in range(500):
        stats = engine.stats()
        if not stats["running"]:
            break
    assert not stats["running"]


def test_bad_requests_are_typed_errors(url: str) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "x"
        s += rt.gen("a", json_schema={"type": "object", "properties": {"x": {"$ref": "#/nowhere"}}})
        return s["a"]

    with pytest.raises(InvalidSchema, match=r"branch 'main', test_http\.py"):
        program.run(url)


def test_one_bad_request_leaves_its_siblings_alone(url: str) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "x"
        branches = s.fork(2)
        branches[0].add(rt.gen("a", max_tokens=3))
        branches[1].add(rt.gen("a", stop_token_ids=(99999,)))
        good = branches[0]["a"]
        with pytest.raises(rt.ProgramError, match="stop_token_ids"):
            branches[1]["a"]
        return good

    assert program.run(url).value


def test_nobody_there() -> None:
    with pytest.raises(Unavailable, match="No Ramet server"):
        HttpBackend("http://127.0.0.1:9")


def test_a_server_that_goes_away() -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += rt.gen("a", max_tokens=3)
        return s["a"]

    with toy_engine() as engine:
        with toy_server(engine) as url:
            backend = HttpBackend(url)
        with pytest.raises(BackendLost, match="gone"):
            program.run(backend)


def test_a_scheduler_that_dies(engine: Engine) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += rt.gen("a", max_tokens=3)
        return s["a"]

    other = toy_engine()
    with toy_server(other) as url:
        backend = HttpBackend(url)
        other.close()
        with pytest.raises(BackendLost):
            program.run(backend)


def test_keys(engine: Engine) -> None:
    with toy_server(engine, api_key="secret") as url:
        with pytest.raises(InvalidRequest):
            HttpBackend(url)
        backend = HttpBackend(url, api_key="secret")
        assert turns.run(backend, 2).totals.requests == 1


async def test_async_programs_over_http(url: str) -> None:
    @rt.function
    async def program(s: rt.State, i: int) -> Any:
        s += RULES + str(i)
        async with s.fork(2) as branches:
            branches += rt.gen("a", max_tokens=4)
            return await branches.gather("a")

    backend = HttpBackend(url)
    results = await asyncio.gather(*(program.arun(backend, i) for i in range(20)))
    assert all(len(result.value) == 2 for result in results)


def test_not_a_url() -> None:
    with pytest.raises(BackendLost, match="missing an 'http"):
        turns.run("not a url", 1)
