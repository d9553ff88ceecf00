"""A refused request is told in the client's own words: the field it sent, not what that is called in here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.messages import Finish
from tests.serve.scripted import data_events, serve

LONG = "x" * 2000
BAD: dict[str, Any] = {"type": "no-such-type"}
OK: dict[str, Any] = {"type": "object", "properties": {}}
HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT, RESPONSES, NATIVE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"


def function(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def formatted(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}


ROWS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"cache_salt": LONG}, "cache_salt"),
    (CHAT, {"extra_key": LONG}, "extra_key"),
    (CHAT, {"json_schema": BAD}, "json_schema"),
    (CHAT, {"guided_json": BAD}, "guided_json"),
    (CHAT, {"guided_regex": "("}, "guided_regex"),
    (CHAT, {"regex": "("}, "regex"),
    (CHAT, {"guided_choice": []}, "guided_choice"),
    (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs"),
    (CHAT, {"structured_outputs": {"json": BAD}, "response_format": {"type": "text"}}, "structured_outputs"),
    (CHAT, {"response_format": formatted(BAD)}, "response_format"),
    (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens"),
    (CHAT, {"max_tokens": -1}, "max_tokens"),
    (CHAT, {"no_stop_trim": True, "stop": ["x" * 2000]}, "stop"),
    (CHAT, {"tools": [function(OK), function(BAD)], "tool_choice": "required"}, "tools[1].function.parameters"),
    (
        CHAT,
        {"tools": [function(BAD)], "response_format": formatted(OK)},
        "tools[0].function.parameters",
    ),
    (CHAT, {"tools": [function(OK)], "response_format": formatted(BAD)}, "response_format"),
    (TEXT, {"logprobs": 1000}, "logprobs"),
    (TEXT, {"guided_json": BAD}, "guided_json"),
    (RESPONSES, {"max_output_tokens": -1}, "max_output_tokens"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "r", "schema": BAD}}}, "text.format"),
    (RESPONSES, {"input": "x" * 5000}, "input"),
    (
        RESPONSES,
        {"tools": [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": BAD}], "tool_choice": "auto"}
        | {"text": {"format": {"type": "json_schema", "name": "r", "schema": OK}}},
        "tools[1].parameters",
    ),
    (NATIVE, {"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
    (NATIVE, {"sampling_params": {"min_new_tokens": 200}}, "min_new_tokens"),
    (NATIVE, {"sampling_params": {"json_schema": '{"type":"no-such-type"}'}}, "json_schema"),
    (NATIVE, {"sampling_params": [{"structural_tag": "{}"}]}, "structural_tag"),
    (NATIVE, {"extra_key": LONG}, "extra_key"),
    (NATIVE, {"return_logprob": True, "top_logprobs_num": 1000}, "top_logprobs_num"),
    (NATIVE, {"text": "x" * 5000}, "text"),
]
NEEDED = {CHAT: {"messages": HI}, TEXT: {"prompt": "hi"}, RESPONSES: {"input": "hi"}, NATIVE: {"text": "hi"}}


@pytest.mark.parametrize(("path", "wrong", "param"), ROWS, ids=[f"{p}-{param}" for p, _, param in ROWS])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_error_names_what_the_client_sent(path, wrong, param, stream):
    served = serve()
    async with served.http() as http:
        body = {**NEEDED[path], **wrong, "stream": stream}
        answer = await http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert served.client.submits == []


@pytest.mark.parametrize(
    ("path", "wrong", "word"),
    [
        ("/v1/messages", {"stop_sequences": [LONG]}, "stop"),
        (
            "/v1/messages",
            {"tools": [{"name": "f", "input_schema": BAD}], "tool_choice": {"type": "any"}},
            "tools[0].inp",
        ),
        ("/api/chat", {"options": {"num_predict": -7}}, "options.num_predict must be"),
        ("/api/chat", {"options": {"repeat_penalty": 99.0}}, "options.repeat_penalty must be"),
        ("/api/generate", {"prompt": "hi", "options": {"seed": 1 << 70}}, "options.seed"),
    ],
)
async def test_dialects_without_a_place_for_it_name_it_in_the_message(path, wrong, word):
    async with serve().http() as http:
        answer = await http.post(path, json={"model": "default", "messages": HI, "max_tokens": 5, **wrong})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert word in (error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize(
    ("sent", "value", "ours"),
    [
        ("guided_json", OK, "json_schema"),
        ("json_schema", OK, "json_schema"),
        ("guided_grammar", "x", "ebnf"),
        ("grammar", "x", "ebnf"),
    ],
)
async def test_what_only_the_scheduler_finds_wrong_is_told_in_the_same_words(sent, value, ours):
    late = Finish(reason="error", status=400, message="This cannot be compiled.", param=ours)
    async with serve(error=late).http() as http:
        for stream in (False, True):
            body = {"messages": HI, sent: value, "stream": stream}
            answer = await http.post(CHAT, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, sent)


async def test_an_error_inside_a_stream_is_told_in_the_same_words():
    async with serve(["a", "b", "c"], fail_at=2).http() as http:
        answer = await http.post(CHAT, json={"messages": HI, "stream": True})
    assert answer.status_code == 200
    assert '"error"' in data_events(answer.text)[-2]


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
ALIASES: list[dict[str, Any]] = [
    {"regex": "[ab]+", "guided_regex": "[ab]+", "structured_outputs": {"regex": "[ab]+"}},
    {"guided_choice": ["a", "b"], "choices": ["a", "b"], "structured_outputs": {"choice": ["a", "b"]}},
    {"ebnf": 'root ::= "a"', "guided_grammar": 'root ::= "a"', "structured_outputs": {"grammar": 'root ::= "a"'}},
    {
        "json_schema": json.dumps(SCHEMA),
        "guided_json": SCHEMA,
        "structured_outputs": {"json": SCHEMA},
        "response_format": formatted(SCHEMA),
    },
]
OTHER = {"regex": "c", "guided_choice": ["c"], "ebnf": 'root ::= "c"', "json_schema": {"type": "integer"}}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("aliases", ALIASES, ids=lambda aliases: next(iter(aliases)))
async def test_the_same_grammar_under_several_names_is_one(path, aliases):
    served = serve(["a"])
    prompt = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    async with served.http() as http:
        answer = await http.post(path, json={**prompt, **aliases})
        assert answer.status_code == 200, answer.text
        name = next(iter(aliases))
        alone = await http.post(path, json={**prompt, name: aliases[name]})
        assert alone.status_code == 200
        differing = await http.post(path, json={**prompt, **aliases, name: OTHER[name]})
    assert (differing.status_code, differing.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "At most one of" in differing.json()["error"]["message"]
    assert served.client.submits[0].grammar == served.client.submits[1].grammar
