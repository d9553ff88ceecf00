"""Each field of each body, wrong in every way that a client was ever wrong in: over a real scheduler, and restored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from runtime.config import ServerConfig
from runtime.engine import Engine
from runtime.serve.app import create_app
from runtime.serve.native_request import NativeSampling
from runtime.serve.ollama import OllamaOptions
from runtime.serve.openapi import BODIES
from tests.lang.engines import toy_engine
from tests.serve.scripted import Pool
from tests.serve.test_fuzz import check

USER = [{"role": "user", "content": "hi"}]
DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
HOSTILE: list[Any] = [
    True,
    -1,
    0,
    2**31,
    -(2**63),
    10**40,
    1e308,
    -0.5,
    "",
    " ",
    "x" * 5000,
    "\ud800",
    "NaN",
    "null",
    "[]",
    [],
    [[]],
    [None],
    [10**40],
    [-1],
    ["x", ""],
    ["x"] * 3000,
    {},
    {"": {}},
    {"type": "json_schema"},
    {"type": "function", "function": {"name": 5}},
    {"x": 1e308},
    {"-1": 1},
    {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
    [{}],
    [{"role": "user"}],
    [{"type": "text", "text": 5}],
    [{"role": "tool", "content": None}],
    DEEP,
]
NESTED = {"sampling_params": NativeSampling, "options": OllamaOptions}
SMALL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"model": "default", "messages": USER, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "default", "messages": USER},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [97]},
    "/abort_request": {"rid": "nobody"},
    "/api/chat": {"messages": USER, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "hi", "options": {"num_predict": 2}},
    "/api/show": {"model": "default"},
}


def bodies(path: str, every: int) -> Iterator[dict[str, Any]]:
    """The small body of a path with one field replaced, by one of so many values each; streamed or not."""
    kind = BODIES[("post", path)]
    places = [(None, name) for name in kind.__struct_fields__]
    for outer, inner in NESTED.items():
        if outer in kind.__struct_fields__:
            places += [(outer, name) for name in inner.__struct_fields__]
    for number, (outer, name) in enumerate(places):
        for i, value in enumerate(HOSTILE):
            if (i + number) % every:
                continue
            body = (
                {**SMALL[path], "stream": bool((i + number) % 2)} if "stream" in kind.__struct_fields__ else SMALL[path]
            )
            yield {**body, outer: {**body.get(outer, {}), name: value}} if outer else {**body, name: value}


async def send_all(engine: Engine, path: str, every: int) -> int:
    app = create_app(engine.generator, engine.config, ServerConfig(), pool=Pool())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    n = 0
    async with httpx.AsyncClient(transport=transport, base_url="http://ramet", timeout=30) as http:
        for body in bodies(path, every):
            async with asyncio.timeout(30):
                response = await http.post(path, content=json.dumps(body))
            check(response)
            n += 1
        assert (await http.post("/v1/completions", json=SMALL["/v1/completions"])).status_code == 200
    return n


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with toy_engine() as engine:
        yield engine


def restored(engine: Engine) -> None:
    assert engine.generator.n_live == 0
    engine.call("audit")
    engine.flush()
    numbers = engine.stats()
    assert (numbers["running"], numbers["waiting"], numbers["used_tokens"]) == (0, 0, 0)


@pytest.mark.parametrize("path", SMALL)
async def test_a_field_of_the_wrong_kind_is_refused_or_served_and_harms_nobody(engine, path):
    assert await send_all(engine, path, 7) > 0
    await asyncio.to_thread(restored, engine)


@pytest.mark.soak
@pytest.mark.parametrize("path", SMALL)
async def test_every_field_with_every_value(engine, path):
    assert await send_all(engine, path, 1) > 0
    await asyncio.to_thread(restored, engine)


def test_all_bodies_with_fields_are_here():
    asked = {path for method, path in BODIES if method == "post"}
    same = {"/v1/tokenize", "/v1/detokenize", "/pause_generation"}  # one code with the others, and one that stops all
    assert asked - same == set(SMALL)
    assert all(issubclass(kind, msgspec.Struct) for kind in BODIES.values())
