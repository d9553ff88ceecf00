"""Hostile grammars over HTTP and ZMQ: a clean answer each, a 400 that names the place, the server alive after it."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import ServerConfig
from runtime.engine import Engine
from runtime.errors import RametError
from runtime.serve.app import create_app
from runtime.serve.zmq_client import AsyncZmqClient
from tests.grammar.test_hostile import HOSTILE, JSON, REGEX_PIECES
from tests.lang.engines import toy_engine, toy_server
from tests.serve.scripted import Pool, Served
from tests.serve.test_zmq import door_of

ANSWERED_S, GAP_S = 5.0, 2.0
LONGEST_S = 32.0  # the worker's, for its 5 s of computing, where answers are being written
COMPUTED = {"minItems 100000"}  # for more than a second, in the worker
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@dataclass
class Doors:
    """One engine, whose scheduler and grammar service are real, behind both doors."""

    engine: Engine
    loop: asyncio.AbstractEventLoop
    http: httpx.AsyncClient
    zmq: AsyncZmqClient

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 120))

    async def post(self, body: dict[str, Any], path: str = "/generate") -> httpx.Response:
        return await self.http.post(path, json=body)

    async def over_zmq(self, sampling: dict[str, Any]) -> int:
        try:
            await self.zmq.generate("x", **sampling)
        except RametError as error:
            return error.status
        return 200

    async def alive(self) -> None:
        answer = await self.post({"text": "x", "sampling_params": {"max_new_tokens": 2, "regex": "[ab]{2}"}})
        assert answer.status_code == 200
        assert set(answer.json()["text"]) <= {"a", "b"}
        assert self.engine.generator.n_live == 0


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    loop = asyncio.new_event_loop()
    with toy_engine(n_pages=256) as engine:
        app = create_app(engine.generator, engine.config, ServerConfig(), pool=Pool(256, 16))
        stack = AsyncExitStack()

        async def enter() -> Doors:
            http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")
            endpoint = await stack.enter_async_context(door_of(Served(app, engine.generator, None)))  # type: ignore[arg-type]
            return Doors(
                engine,
                loop,
                await stack.enter_async_context(http),
                await stack.enter_async_context(AsyncZmqClient(endpoint)),
            )

        yield loop.run_until_complete(enter())
        loop.run_until_complete(stack.aclose())
    loop.close()


async def try_both(doors: Doors, grammar: dict[str, Any]) -> None:
    sampling = {"max_new_tokens": 4, "temperature": 0, **grammar}
    answer = await doors.post({"text": "x", "sampling_params": sampling})
    status = answer.status_code
    assert status in (200, 400), answer.text
    if status == 400:
        assert len(answer.text) < 4096
        assert answer.json()["error"]["param"]
    assert await doors.over_zmq(sampling) == status
    await doors.alive()


@settings(max_examples=40, deadline=None)
@given(pattern=st.lists(REGEX_PIECES, max_size=12).map("".join))
def test_any_regex_over_both_doors(doors: Doors, pattern: str) -> None:
    doors.run(try_both(doors, {"regex": pattern}))


@settings(max_examples=60, deadline=None)
@given(schema=JSON)
def test_any_json_as_a_schema_over_both_doors(doors: Doors, schema: Any) -> None:
    doors.run(try_both(doors, {"json_schema": json.dumps(schema)}))


@pytest.mark.parametrize("name", [n for n, spec in HOSTILE.items() if spec.kind in ("json_schema", "regex", "ebnf")])
def test_hostile_grammars_over_both_doors(doors: Doors, name: str) -> None:
    """Each answered soon, while somebody else's stream goes on."""
    grammar = {HOSTILE[name].kind: HOSTILE[name].spec}
    doors.run(answered_beside_a_stream(doors, grammar, LONGEST_S if name in COMPUTED else ANSWERED_S))


async def answered_beside_a_stream(doors: Doors, grammar: dict[str, Any], answered_s: float) -> None:
    arrived: list[float] = []
    reader = asyncio.create_task(read_on(doors, arrived))
    while len(arrived) < 3:
        await asyncio.sleep(0.005)
    sampling = {"max_new_tokens": 4, "temperature": 0, **grammar}
    took: list[float] = []
    for door in (doors.post({"text": "x", "sampling_params": sampling}), doors.over_zmq(sampling)):
        began = time.monotonic()
        answer = await door
        took.append(time.monotonic() - began)
        assert (answer if isinstance(answer, int) else answer.status_code) in (200, 400)
    until = time.monotonic()
    while arrived[-1] <= until:
        await asyncio.sleep(0.005)
    reader.cancel()
    await asyncio.wait([reader])
    assert max(took) < answered_s
    assert max(b - a for a, b in itertools.pairwise(arrived)) < GAP_S
    while doors.engine.generator.n_live:
        await asyncio.sleep(0.005)
    await try_both(doors, grammar)


async def read_on(doors: Doors, arrived: list[float]) -> None:
    """Read one stream after another, noting when anything came."""
    while True:
        async for _ in doors.engine.astream("y", max_tokens=200, ignore_eos=True):
            arrived.append(time.monotonic())
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    ("grammar", "pointer"),
    [
        ({"schema": {"type": "not-a-type"}}, "/type"),
        ({"schema": {"type": "string", "pattern": "("}}, "/pattern"),
        ({"schema": {"type": "object", "properties": {"a": {"pattern": "(?=a)b"}}}}, "/properties/a/pattern"),
        ({"schema": {"type": "array", "items": {"type": "string", "format": "nope"}}}, "/items/format"),
        ({"schema": '{"type": "string"}'}, None),
        ({"schema": None}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_d15_refused_at_admission(doors: Doors, grammar: dict[str, Any], pointer: str | None, stream: bool) -> None:
    """Never unconstrained, never the end of the engine, and nothing is queued for it."""
    shape = {"type": "json_schema", "json_schema": {"name": "r", "strict": True, **grammar}}
    received = doors.engine.stats()["received"]
    answer = doors.run(
        doors.post({"messages": USER, "response_format": shape, "stream": stream}, "/v1/chat/completions")
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"].partition(".")[0]) == ("invalid_request_error", "response_format")
    if pointer is not None:
        assert f"'{pointer}'" in error["message"]
    assert doors.engine.stats()["received"] == received
    doors.run(doors.alive())


def test_d15_an_ebnf_that_misses_a_rule(doors: Doors) -> None:
    answer = doors.run(doors.post({"text": "x", "sampling_params": {"ebnf": "root ::= missing"}}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "ebnf"
    doors.run(doors.alive())


def test_d22_null_parameters_and_a_named_tool_without_strict(doors: Doors) -> None:
    null = {"type": "function", "function": {"name": "q", "strict": True, "parameters": None}}
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]},
        },
    }
    for tool, wanted in ((null, {}), (weather, {"city": "Rome"})):
        body = {
            "messages": USER,
            "tools": [tool],
            "tool_choice": {"type": "function", "function": {"name": tool["function"]["name"]}},
            "max_tokens": 200,
        }
        answer = doors.run(doors.post(body, "/v1/chat/completions"))
        assert answer.status_code == 200, answer.text
        [call] = answer.json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == wanted


@pytest.fixture(scope="module")
def guided() -> Iterator[tuple[Engine, str]]:
    with toy_engine(n_pages=256, grammar_backend="llguidance") as engine, toy_server(engine) as url:
        yield engine, url


def test_llguidance_alone_over_http(guided: tuple[Engine, str]) -> None:
    """It enforces what it can, streamed or not; what only xgrammar can is a 400 that says so, and nothing is queued."""
    engine, url = guided
    schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 7, "maximum": 98, "minimum": 0}}}
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema | {"required": ["n"]}}}
    with httpx.Client(base_url=url, timeout=60) as http:
        answer = http.post(CHAT, json={"messages": USER, "response_format": shape, "max_tokens": 60})
        assert answer.status_code == 200, answer.text
        found = json.loads(answer.json()["choices"][0]["message"]["content"])
        assert found["n"] % 7 == 0
        body = {"messages": USER, "regex": "(ab|cd){4}", "stream": True, "max_tokens": 60}
        with http.stream("POST", CHAT, json=body) as lines:
            events = [json.loads(line[6:]) for line in lines.iter_lines() if line.startswith("data: {")]
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
        assert re.fullmatch("(ab|cd){4}", text)
        received = engine.stats()["received"]
        refused = http.post(CHAT, json={"messages": USER, "ebnf": 'root ::= "a"'})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "ebnf"
        assert "llguidance cannot enforce it; xgrammar can" in refused.json()["error"]["message"]
        assert engine.stats()["received"] == received
