"""Tool calling through the chat endpoint: promises kept by grammar, streamed fragments, every history variant."""

from __future__ import annotations

import json

import pytest

from runtime.config import ServerConfig
from runtime.messages import unpack_ids
from tests.serve.scripted import CHATML, Served, data_events, serve

USER = [{"role": "user", "content": "weather in Rome and Oslo?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"answer": {"type": "string"}}}},
}


async def post(served: Served, **body):
    async with served.http() as http:
        return await http.post("/v1/chat/completions", json={"messages": USER, **body})


async def choice(served: Served, **body) -> dict:
    response = await post(served, **body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def stream(served: Served, **body) -> list[dict]:
    response = await post(served, stream=True, **body)
    assert response.status_code == 200, response.text
    return [json.loads(c)["choices"][0] for c in data_events(response.text)[:-1]]


def grammar_of(served: Served) -> dict:
    spec = served.client.submits[-1].grammar
    return {"kind": spec.kind, **json.loads(spec.spec)}


@pytest.mark.parametrize("k", [1, 2, 7])
async def test_calls_are_parsed_alike_whole_and_streamed(k):
    pieces = ["I'll ", "look.\n", *CALL, "\n", *CALL.replace("Rome", "Oslo")]
    served = serve(pieces, k=k)
    whole = await choice(served, tools=[WEATHER])
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "I'll look."
    calls = whole["message"]["tool_calls"]
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert len({c["id"] for c in calls}) == 2
    assert all(c["id"].startswith("call_") for c in calls)

    chunks = await stream(served, tools=[WEATHER])
    deltas = [call for c in chunks for call in c["delta"].get("tool_calls", [])]
    firsts = [d for d in deltas if "id" in d]
    assert [d["index"] for d in firsts] == [0, 1]
    assert all(d["type"] == "function" and d["function"]["name"] == "get_weather" for d in firsts)
    assert all(set(d) == {"index", "function"} and set(d["function"]) == {"arguments"} for d in deltas if "id" not in d)
    joined = ["".join(d["function"]["arguments"] for d in deltas if d["index"] == i) for i in range(2)]
    assert joined == [c["function"]["arguments"] for c in calls]
    assert "".join(c["delta"].get("content") or "" for c in chunks) == "I'll look."
    assert chunks[-1]["finish_reason"] == "tool_calls"


async def test_a_call_without_arguments_says_an_empty_object():
    call = (await choice(serve(['<tool_call>{"name":"now","arguments":{}}</tool_call>']), tools=[NOW]))["message"]
    assert call["tool_calls"][0]["function"]["arguments"] == "{}"
    assert call["content"] is None


async def test_a_call_cut_off_by_the_limit_is_a_length_finish_and_not_repaired():
    served = serve(list(CALL))
    whole = await choice(served, tools=[WEATHER], max_tokens=60)
    assert whole["finish_reason"] == "length"
    chunks = await stream(served, tools=[WEATHER], max_tokens=60)
    streamed = "".join(c["function"]["arguments"] for x in chunks for c in x["delta"].get("tool_calls", []))
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == streamed == '{"city": "R'
    assert chunks[-1]["finish_reason"] == "length"


async def test_required_is_kept_by_a_grammar():
    served = serve(['[{"name":"get_weather","arguments":{"city":"Rome"}}]'])
    whole = await choice(served, tools=[WEATHER, NOW], tool_choice="required")
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city":"Rome"}'}
    grammar = grammar_of(served)
    assert (grammar["kind"], grammar["minItems"], grammar["maxItems"]) == ("json_schema", 1, 8)
    assert [option["properties"]["name"] for option in grammar["items"]["anyOf"]] == [
        {"const": "get_weather"},
        {"const": "now"},
    ]


async def test_one_call_at_most_where_parallel_calls_are_switched_off():
    served = serve(['[{"name":"now","arguments":{}}]'])
    await choice(served, tools=[NOW], tool_choice="required", parallel_tool_calls=False)
    assert grammar_of(served)["maxItems"] == 1
    served = serve([CALL, CALL])
    whole = await choice(served, tools=[WEATHER], parallel_tool_calls=False)
    assert len(whole["message"]["tool_calls"]) == 1
    assert whole["finish_reason"] == "tool_calls"
    two = "[get_weather(city='Rome'), get_weather(city='Oslo')]"
    served = serve([two], server=ServerConfig(tool_call_parser="pythonic"))
    assert len((await choice(served, tools=[WEATHER], parallel_tool_calls=False))["message"]["tool_calls"]) == 1
    assert len((await choice(served, tools=[WEATHER]))["message"]["tool_calls"]) == 2


async def test_a_named_call_is_its_arguments_under_the_declared_schema():
    served = serve(['{"city":', '"Rome"}'])
    body = {"tools": [WEATHER, NOW], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    whole = await choice(served, **body)
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city":"Rome"}'}
    assert whole["finish_reason"] == "tool_calls"
    assert grammar_of(served) == {"kind": "json_schema", **SCHEMA}


async def test_none_means_no_calls_and_no_tools_in_the_prompt():
    served = serve([CALL])
    whole = await choice(served, tools=[WEATHER], tool_choice="none")
    assert whole["message"]["content"] == CALL
    assert "tool_calls" not in whole["message"]
    assert "get_weather" not in prompt_of(served)


def prompt_of(served: Served) -> str:
    return served.client.tokenizer.decode(unpack_ids(served.client.submits[-1].tokens).tolist(), skip_special=False)


async def test_auto_is_never_refused():
    for body in ({"tools": []}, {"tools": [NOW]}, {}):
        assert (await post(serve(), tool_choice="auto", **body)).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": "zork"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": 3}}]}, "tools[0].function.parameters"),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        ({"response_format": {"type": "zork"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": None}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
    ],
)
async def test_what_makes_no_sense_is_refused_with_its_place(body, param):
    response = await post(serve(), **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_parameters_may_be_null():
    served = serve(["{}"])
    tool = {"type": "function", "function": {"name": "q", "strict": True, "parameters": None}}
    await choice(served, tools=[tool], tool_choice={"type": "function", "function": {"name": "q"}})
    assert grammar_of(served) == {"kind": "json_schema", "type": "object", "properties": {}}


async def test_tools_and_a_schema_are_calls_or_a_valid_answer():
    served = serve(['{"answer":"x"}'])
    whole = await choice(served, tools=[WEATHER], response_format=ANSWER)
    assert whole["message"]["content"] == '{"answer":"x"}'
    calls, answer = grammar_of(served)["format"]["elements"]
    assert calls["at_least_one"] is True
    assert answer["json_schema"] == ANSWER["json_schema"]["schema"]
    assert (await choice(serve([CALL]), tools=[WEATHER], response_format=ANSWER))["finish_reason"] == "tool_calls"
    await choice(served, tools=[WEATHER], response_format=ANSWER, tool_choice="none")
    assert grammar_of(served) == {"kind": "json_schema", **ANSWER["json_schema"]["schema"]}


async def test_a_schema_is_enforced_whatever_strict_says():
    for strict in (True, False, None):
        served = serve(["{}"])
        shape = {"type": "json_schema", "json_schema": {**ANSWER["json_schema"], "strict": strict}}
        await choice(served, response_format=shape)
        assert grammar_of(served)["kind"] == "json_schema"


ASSISTANT = {
    "role": "assistant",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "18C"}]}


@pytest.mark.parametrize(
    "content", [{}, {"content": None}, {"content": ""}, {"content": []}], ids=["absent", "null", "empty", "list"]
)
async def test_the_second_turn_of_an_agent_loop_takes_every_content(content):
    served = serve(["ok"])
    whole = await choice(served, messages=[*USER, {**ASSISTANT, **content}, RESULT], tools=[WEATHER])
    assert whole["message"]["content"] == "ok"
    assert '{"name": "get_weather", "arguments": {"city": "Rome"}}' in prompt_of(served)
    assert "18C" in prompt_of(served)


@pytest.mark.parametrize(("arguments", "status"), [("", 200), ("null", 200), ("{}", 200), ("{", 400), ('"Rome"', 400)])
async def test_arguments_in_the_history_are_checked(arguments, status):
    broken = json.loads(json.dumps(ASSISTANT))
    broken["tool_calls"][0]["function"]["arguments"] = arguments
    response = await post(serve(), messages=[*USER, broken, RESULT], tools=[WEATHER])
    assert response.status_code == status
    if status == 400:
        assert response.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


async def test_mistral_calls_get_ids_of_nine_letters():
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if tools %}[TOOL_CALLS]{% endif %}")
    served = serve(["[TOOL_CALLS]", "get_weather", "[ARGS]", '{"city":"Rome"}'], template=template)
    whole = await choice(served, tools=[WEATHER])
    [call] = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city":"Rome"}'}
    assert len(call["id"]) == 9
    assert call["id"].isalnum()
    assert served.client.submits[-1].params.skip_special_tokens is False


async def test_the_operator_may_choose_the_parser():
    served = serve(["[get_weather(city='Rome')]"], server=ServerConfig(tool_call_parser="pythonic"))
    [call] = (await choice(served, tools=[WEATHER]))["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Rome"}'
