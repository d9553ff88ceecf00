"""The Ollama API: lines of JSON, calls with objects for arguments, its own errors."""

from __future__ import annotations

import json

import pytest

from tests.serve.scripted import THINKING, Served, serve
from tests.serve.test_tools import CALL, NOW, USER, WEATHER

HELLO = {"model": "fake:latest", "messages": USER}


async def post(served: Served, path: str, **body):
    async with served.http() as http:
        return await http.post(path, json=body)


async def lines(served: Served, path: str, **body) -> list[dict]:
    response = await post(served, path, **body)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.mark.parametrize("k", [1, 3])
async def test_chat_streams_unless_told_not_to(k):
    served = serve(["It is ", "18C."], k=k)
    *pieces, last = await lines(served, "/api/chat", **HELLO)
    assert "".join(p["message"]["content"] for p in pieces) == "It is 18C."
    assert not any(p["done"] for p in pieces)
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", 11)
    assert last["prompt_eval_count"] > 0
    whole = (await post(served, "/api/chat", **HELLO, stream=False)).json()
    assert (whole["message"]["content"], whole["done_reason"]) == ("It is 18C.", "stop")


async def test_calls_have_objects_for_arguments_and_go_back_as_such():
    served = serve(list(CALL))
    whole = (await post(served, "/api/chat", **HELLO, tools=[WEATHER], stream=False)).json()["message"]
    assert whole["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Rome"}}
    streamed = [p for p in await lines(served, "/api/chat", **HELLO, tools=[WEATHER]) if "tool_calls" in p["message"]]
    assert streamed[0]["message"]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    history = [*USER, whole, {"role": "tool", "tool_name": "get_weather", "content": "18C"}]
    assert (await post(served, "/api/chat", messages=history, tools=[NOW], stream=False)).status_code == 200


async def test_generate_goes_through_the_template_unless_raw():
    served = serve(["ok"])
    body = {"prompt": "hi", "stream": False, "options": {"num_predict": 1, "temperature": 0, "stop": ["x"]}}
    answer = (await post(served, "/api/generate", **body, system="be brief")).json()
    assert (answer["response"], answer["done_reason"]) == ("o", "length")
    assert len(served.client.submits[-1].tokens) > 4 * len("hi")
    await post(served, "/api/generate", **body, raw=True)
    assert len(served.client.submits[-1].tokens) == 4 * len("hi")
    assert (await post(served, "/api/generate", model="fake")).json()["done_reason"] == "load"


async def test_formats_are_grammars_and_thoughts_are_apart():
    served = serve(["{}"])
    for value, kind in (("json", "json_object"), ({"type": "object"}, "json_schema")):
        await post(served, "/api/chat", **HELLO, format=value, stream=False)
        assert served.client.submits[-1].grammar.kind == kind
    served = serve(["<think>", "h", "</think>", "42"], template=THINKING)
    message = (await post(served, "/api/chat", **HELLO, stream=False)).json()["message"]
    assert (message["thinking"], message["content"]) == ("h", "42")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/api/chat", {"model": "zork", "messages": USER}, 404),
        ("/api/chat", {"messages": [{"role": "wizard", "content": "x"}]}, 400),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400),
        ("/api/chat", {"messages": USER, "format": 3}, 400),
        ("/api/chat", {"messages": USER, "options": {"temperature": -1}}, 400),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400),
        ("/api/show", {"model": "zork"}, 404),
    ],
)
async def test_errors_are_one_string(path, body, status):
    response = await post(serve(), path, **body)
    assert response.status_code == status
    assert isinstance(response.json()["error"], str)


async def test_what_is_served_is_told():
    async with serve().http() as http:
        [card] = (await http.get("/api/tags")).json()["models"]
        assert card["name"] == "fake"
        assert "completion" in (await http.post("/api/show", json={"model": "fake"})).json()["capabilities"]
        assert (await http.get("/api/version")).json()["version"]
