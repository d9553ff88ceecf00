"""Forced tokens over the doors of a real scheduler: told with each answer, and counted on the metrics page."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types import CompletionUsage
from openai.types.responses import ResponseUsage

from runtime.config import ServerConfig
from runtime.engine import Engine
from runtime.grammar.service import CompileService, vocabulary
from runtime.messages import GrammarSpec, Submit, unpack_ids
from runtime.serve.app import create_app
from runtime.serve.zmq_client import AsyncZmqClient
from tests.lang.engines import toy_engine, toy_server
from tests.serve.scripted import EOS, Pool, Served, byte_tokenizer
from tests.serve.test_zmq import door_of

CHAT, TEXT, RESPONSES, NATIVE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"
USER = [{"role": "user", "content": "hi"}]
PATTERN, N_FORCED = "abc[xy]def", 6  # and one choice
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "regex": PATTERN, "stream_options": {"include_usage": True}},
    TEXT: {"prompt": "hi", "regex": PATTERN, "stream_options": {"include_usage": True}},
    RESPONSES: {"input": "hi", "regex": PATTERN},
    NATIVE: {"text": "hi", "sampling_params": {"regex": PATTERN}},
}
ZMQ = {"generate": NATIVE, "chat": CHAT}
DIGIT = {
    "type": "object",
    "properties": {"a_long_name": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a_long_name"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "r", "schema": DIGIT}}


def function(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with toy_engine() as engine:
        yield engine


@contextlib.asynccontextmanager
async def http_of(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine.generator, engine.config, ServerConfig(), pool=Pool())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://ramet", timeout=60) as http:
        yield http


@contextlib.asynccontextmanager
async def zmq_of(engine: Engine) -> AsyncIterator[AsyncZmqClient]:
    served = Served(None, engine.generator, None)  # type: ignore[arg-type]
    async with door_of(served) as endpoint, AsyncZmqClient(endpoint) as client:
        yield client


def asked(path: str, *, stream: bool) -> dict[str, Any]:
    body = {**BODIES[path], "stream": stream}
    return body if stream else {name: value for name, value in body.items() if name != "stream_options"}


def told(objects: list[dict[str, Any]]) -> int:
    """The forced tokens that the last object with a usage tells of."""
    last = [one.get("response", one) for one in objects][-1]
    if "meta_info" in last:
        return last["meta_info"]["forced_tokens"]
    usage = last["usage"]
    return (usage.get("completion_tokens_details") or usage["output_tokens_details"])["forced_tokens"]


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", BODIES)
async def test_usage_tells_forced_tokens_over_http(engine: Engine, path: str, stream: bool) -> None:
    before = engine.stats()["forced"]
    async with http_of(engine) as http:
        answer = await http.post(path, json=asked(path, stream=stream))
    assert answer.status_code == 200, answer.text
    assert told(events(answer.text) if stream else [answer.json()]) == N_FORCED
    assert engine.stats()["forced"] - before == N_FORCED


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("op", ZMQ)
async def test_usage_tells_forced_tokens_over_zmq(engine: Engine, op: str, stream: bool) -> None:
    async with zmq_of(engine) as client:
        assert told([one async for one in client.replies(op, **asked(ZMQ[op], stream=stream))]) == N_FORCED


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_forced_tokens_of_several_answers_are_added(engine: Engine, path: str) -> None:
    async with http_of(engine) as http:
        answer = (await http.post(path, json={**asked(path, stream=False), "n": 3})).json()
    assert told([answer]) == 3 * N_FORCED


@pytest.mark.parametrize("path", BODIES)
async def test_free_text_has_none(engine: Engine, path: str) -> None:
    limit = {RESPONSES: "max_output_tokens"}.get(path, "max_tokens")
    free = {
        name: value for name, value in asked(path, stream=False).items() if name not in ("regex", "sampling_params")
    }
    free |= {"sampling_params": {"max_new_tokens": 5}} if path == NATIVE else {limit: 5}
    async with http_of(engine) as http:
        assert told([(await http.post(path, json=free)).json()]) == 0


async def test_the_openai_sdk_takes_them(engine: Engine) -> None:
    with toy_server(engine) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            extra = {"regex": PATTERN}
            chat = await client.chat.completions.create(model="fake", messages=USER, extra_body=extra)
            stream = await client.chat.completions.create(
                model="fake", messages=USER, extra_body=extra, stream=True, stream_options={"include_usage": True}
            )
            *_, last = [chunk async for chunk in stream]
            text = await client.completions.create(model="fake", prompt="hi", extra_body=extra)
            response = await client.responses.create(model="fake", input="hi", extra_body=extra)
    for usage in (chat.usage, last.usage, text.usage):
        CompletionUsage.model_validate(usage.model_dump(), strict=True)
        assert usage.completion_tokens_details.forced_tokens == N_FORCED
    ResponseUsage.model_validate(response.usage.model_dump(), strict=True)
    assert response.usage.output_tokens_details.forced_tokens == N_FORCED


# -- the metrics page ------------------------------------------------------------------------------------------


class Page:
    """What /metrics shows: values and types by name."""

    def __init__(self, text: str) -> None:
        lines = text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line[0] != "#")
        self.values = {name.partition("{")[0]: float(value) for name, value in pairs}
        self.kinds = dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))


async def page(http: httpx.AsyncClient) -> Page:
    return Page((await http.get("/metrics")).text)


async def test_the_jump_counter_rises_under_a_schema_and_not_with_free_text(engine: Engine) -> None:
    name = "ramet_jump_forward_tokens_total"
    async with http_of(engine) as http:
        before = await page(http)
        free = await http.post(CHAT, json={"messages": USER, "max_tokens": 20})
        after_text = await page(http)
        kept = await http.post(CHAT, json={"messages": USER, "response_format": FORMAT})
        after_schema = await page(http)
    assert free.json()["usage"]["completion_tokens"] > 1
    assert after_text.values[name] == before.values[name]
    n = told([kept.json()])
    assert n >= len('{"a_long_name": ')
    assert after_schema.values[name] - after_text.values[name] == n
    assert after_schema.values["ramet_scheduler_forced"] - after_text.values["ramet_scheduler_forced"] == n
    assert after_schema.kinds[name] == "counter"


async def test_the_grammar_cache_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {kind: f"ramet_scheduler_grammar_cache_{kind}_total" for kind in ("hits", "misses", "evictions")}
    monkeypatch.setattr("runtime.grammar.service.CompileService", partial(CompileService, cache_bytes=700_000))
    with toy_engine() as small:
        async with http_of(small) as http:

            async def grown(pattern: str) -> dict[str, float]:
                before = await page(http)
                answer = await http.post(NATIVE, json={"text": "x", "sampling_params": {"regex": pattern}})
                assert answer.status_code == 200
                after = await page(http)
                assert all(after.kinds[name] == "counter" for name in names.values())
                return {kind: after.values[name] - before.values[name] for kind, name in names.items()}

            assert await grown("first") == {"hits": 0, "misses": 1, "evictions": 0}
            assert await grown("first") == {"hits": 1, "misses": 0, "evictions": 0}
            evicted = 0.0
            for i in range(8):
                evicted += (await grown(f"other {i}"))["evictions"]
            assert evicted > 0


# -- calls -----------------------------------------------------------------------------------------------------


def noted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Submit]:
    """Where the engine's requests will be noted."""
    submits: list[Submit] = []
    stream = engine.generator.stream

    def note(submit: Submit, **options: Any) -> Any:
        submits.append(submit)
        return stream(submit, **options)

    monkeypatch.setattr(engine.generator, "stream", note)
    return submits


def n_without_choice(spec: GrammarSpec, text: str) -> int:
    """Tokens of `text` where the grammar allows no other."""
    tokenizer = byte_tokenizer()
    vocab = vocabulary(tokenizer.token_bytes, tokenizer.vocab_size, tokenizer.special_ids, {EOS})
    with contextlib.closing(CompileService(vocab, "auto")) as service:
        cursor, n = service.compile_async(spec).result(60).cursor(), 0
        for byte in text.encode():
            mask = cursor.allowed()
            if mask is not None:
                n += int(np.unpackbits(np.asarray(mask).view(np.uint8)).sum()) == 1
            assert cursor.accept(byte)
        assert cursor.can_stop or cursor.done
    return n


@pytest.mark.parametrize("whitespace", ["fixed", "flexible"])
@pytest.mark.parametrize("temperature", [0, 1])
async def test_calls_with_whitespace_are_bounded_and_jump_only_where_nothing_else_may_stand(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, whitespace: str, temperature: float
) -> None:
    submits = noted(engine, monkeypatch)
    body = {"messages": USER, "tools": [function("get", DIGIT)], "tool_choice": "required", "whitespace": whitespace}
    body |= {"parallel_tool_calls": False, "temperature": temperature, "seed": 3, "max_tokens": 1000}
    async with http_of(engine) as http:
        before = await page(http)
        answer = (await http.post(CHAT, json=body)).json()
        after = await page(http)
    [choice], usage = answer["choices"], answer["usage"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a_long_name"] in range(10)
    bare = '[{"name":"get","arguments":{"a_long_name":0}}]'
    gaps = sum(bare.count(sign) for sign in "[]{}:,")
    assert usage["completion_tokens"] <= len(bare) + gaps * (17 if whitespace == "flexible" else 1)
    forced = told([answer])
    assert 0 < forced < usage["completion_tokens"]
    assert after.values["ramet_jump_forward_tokens_total"] - before.values["ramet_jump_forward_tokens_total"] == forced
    [submit] = submits
    assert submit.grammar.whitespace == whitespace
    again = engine.generate(unpack_ids(submit.tokens).tolist(), submit.params, grammar=submit.grammar)
    assert json.loads(again.text)[0]["arguments"] == json.loads(call["function"]["arguments"])
    assert (again.usage.completion_tokens, again.usage.forced_tokens) == (usage["completion_tokens"], forced)
    n = n_without_choice(submit.grammar, again.text)
    assert forced == n if whitespace == "fixed" else forced <= n


WRITE = function(
    "write", {"type": "object", "properties": {"c": {"type": "string", "maxLength": 10_000}}, "required": ["c"]}
)
ROME = function("get", {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]})


def liking(first: str, then: str) -> dict[str, Any]:
    """A model that says `first` where it may, else `then`."""
    return {"logit_bias": {str(ord(first)): 90, str(ord(then)): 50}}


@pytest.mark.parametrize("auto", [False, True], ids=["required", "auto"])
async def test_a_tool_with_a_long_bound_works_and_leaves_the_other_one_possible(engine: Engine, auto: bool) -> None:
    choice = {"tool_choice": "auto", "response_format": FORMAT} if auto else {"tool_choice": "required"}
    body = {"messages": USER, "tools": [WRITE, ROME], **choice, "temperature": 0, "parallel_tool_calls": False}
    async with http_of(engine) as http:

        async def call(**options: Any) -> dict[str, Any]:
            answer = await http.post(CHAT, json={**body, **options})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]

        get = await call(max_tokens=300, **liking("g", "<"))
        assert get["finish_reason"] == "tool_calls"
        [one] = get["message"]["tool_calls"]
        assert (one["function"]["name"], json.loads(one["function"]["arguments"])) == ("get", {"city": "Rome"})
        for options, length in (({"max_tokens": 300, **liking('"', "w")}, 0), (liking("w", "<"), 10_000)):
            write = await call(**options)
            assert write["finish_reason"] == "tool_calls"
            [one] = write["message"]["tool_calls"]
            assert one["function"]["name"] == "write"
            assert json.loads(one["function"]["arguments"]) == {"c": "w" * length}


async def test_where_a_grammar_ends_an_answer_no_token_is_called_its_stop(engine: Engine):
    async with http_of(engine) as http:
        ended = (await http.post(NATIVE, json=BODIES[NATIVE])).json()
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}
