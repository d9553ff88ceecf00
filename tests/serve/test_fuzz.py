"""Both doors under nonsense: every answer is a clean one, nothing is left running, the next request is served."""

from __future__ import annotations

import asyncio
import json

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.serve.openapi import BODIES
from runtime.serve.zmq_client import AsyncZmqClient
from runtime.serve.zmq_frames import OPS
from tests.serve.scripted import Served, serve
from tests.serve.test_zmq import door_of, raw

USER = [{"role": "user", "content": "hi"}]
GOOD = {
    "messages": USER,
    "prompt": "x",
    "text": "x",
    "input": "x",
    "model": "fake",
    "max_tokens": 4,
    "tokens": [97],
    "rid": "a",
}
CLEAN = {200, 400, 404, 413, 429, 501}

leaf = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from(
        [2**31, -(2**63), 10**40, 1e308, -0.0, 0.5, "", "auto", "x" * 300, "\ud800é😀", "{}", "<tool_call>"]
    ),
    st.text(max_size=6),
)
keys = st.sampled_from(
    ["type", "role", "content", "function", "name", "schema", "json_schema", "arguments", "id", "text"]
)
value = st.recursive(
    leaf,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "function", "name", "schema", "json_schema", "arguments", "id", "text"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


def fields_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[dict]:
    """Bodies with the struct's own field names: some right, some nonsense."""
    names = list(kind.__struct_fields__)
    odd = st.dictionaries(st.sampled_from(names), value, max_size=4)
    right = st.sets(st.sampled_from(sorted(GOOD)), max_size=len(GOOD))
    return st.builds(lambda o, r: {**{k: GOOD[k] for k in r if k in names}, **o}, odd, right)


def encode(body: object) -> bytes:
    """JSON text of anything, lone surrogates and huge numbers included."""
    return json.dumps(body).encode()


async def settle(served: Served) -> None:
    """Nothing may be left running, and the next request is answered."""
    assert served.generator.n_live == 0
    async with served.http() as http:
        assert (await http.post("/v1/chat/completions", json={"messages": USER})).status_code == 200


@pytest.mark.parametrize(("method", "path"), sorted({(m, p) for m, p in BODIES}))
def test_http_bodies(method, path):
    served = serve(["a", "b"], replies={"flush": {}})

    @settings(max_examples=40, deadline=None)
    @given(body=fields_of(BODIES[(method, path)]))
    def run(body):
        async def one():
            async with served.http() as http:
                response = await http.request(method, path, content=encode(body))
                check(response)
                assert len(response.content) < 100_000
            await settle(served)

        asyncio.run(one())

    run()


def check(response: httpx.Response) -> None:
    """One of the clean statuses; an error is an object with a message, in JSON that anybody can read."""
    assert response.status_code in CLEAN, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error if isinstance(error, str) else error["message"]


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=60), path=st.sampled_from(sorted({p for _, p in BODIES})))
def test_http_bytes(data, path):
    async def one():
        served = serve()
        async with served.http() as http:
            check(await http.post(path, content=data))

    asyncio.run(one())


@settings(max_examples=40, deadline=None)
@given(
    op=st.sampled_from([*OPS, "zork"]), body=st.dictionaries(st.sampled_from([*GOOD, "n", "tools"]), value, max_size=4)
)
def test_zmq_bodies(op, body):
    async def one():
        served = serve(["a", "b"])
        async with door_of(served) as endpoint:
            text = msgspec.json.encode({"id": 1, "op": op}).rstrip(b"}") + b',"body":' + encode(body) + b"}"
            replies = await raw(endpoint, [b"json", text])
            assert replies[-1].event in ("end", "error")
            if replies[-1].event == "error":
                assert replies[-1].data["status"] in CLEAN, replies[-1].data
            async with AsyncZmqClient(endpoint) as client:
                assert await client.call("ping") == "pong"
        assert served.generator.n_live == 0

    asyncio.run(one())


@settings(max_examples=40, deadline=None)
@given(frames=st.lists(st.binary(max_size=30) | st.sampled_from([b"json", b"msgpack"]), min_size=1, max_size=4))
def test_zmq_frames(frames):
    async def one():
        async with door_of(serve()) as endpoint:
            [reply] = await raw(endpoint, frames)
            assert (reply.event, reply.data["status"]) == ("error", 400)

    asyncio.run(one())
