"""Every field that asks for a grammar is read or refused: none is passed over in silence."""

import json

import pytest

from tests.serve.scripted import serve

CHAT, TEXT, RESPONSES, NATIVE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"
PROMPTS = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    NATIVE: {"text": "hi"},
}
PATHS = pytest.mark.parametrize("path", PROMPTS)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


async def post(path, fields, *, status=200):
    served = serve(["a"])
    async with served.http() as http:
        inner = {"sampling_params": fields} if path == NATIVE else fields
        answer = await http.post(path, json={**PROMPTS[path], **inner})
    assert answer.status_code == status, answer.text
    return served.client.submits[0].grammar if status == 200 else answer.json()["error"]


@PATHS
async def test_choices_constrain_on_every_door(path):
    grammar = await post(path, {"choices": ["cat", "dog"]})
    assert (grammar.kind, json.loads(grammar.spec)) == ("choices", ["cat", "dog"])
    assert (await post(path, {"choices": []}, status=400))["param"] == "choices"
    await post(path, {"choices": "cat"}, status=400)


@PATHS
async def test_after_and_whitespace_stand_beside_the_grammar(path):
    grammar = await post(path, {"regex": "a", "after": "</think>", "whitespace": "flexible"})
    assert (grammar.kind, grammar.after, grammar.whitespace) == ("regex", "</think>", "flexible")
    await post(path, {"regex": "a", "whitespace": "rubbish"}, status=400)
    assert (await post(path, {"regex": "a", "after": ""}, status=400))["param"] == "after"
    for alone in ({"after": "x"}, {"whitespace": "fixed"}):
        assert (await post(path, alone, status=400))["param"] == next(iter(alone))


async def test_whitespace_goes_with_a_response_format_and_with_tools():
    shape = {"response_format": {"type": "json_object"}, "whitespace": "flexible"}
    assert (await post(CHAT, shape)).whitespace == "flexible"
    for choice in ("auto", "required"):
        assert (await post(CHAT, {**shape, "tools": [TOOL], "tool_choice": choice})).whitespace == "flexible"
    refused = await post(CHAT, {**shape, "tools": [TOOL], "after": "x"}, status=400)
    assert refused["param"] == "after"


@pytest.mark.parametrize(
    ("value", "kind"), [({"json_object": True}, "json_object"), ({"choice": ["a"], "regex": None}, "choices")]
)
async def test_structured_outputs_are_read_whole(value, kind):
    assert (await post(CHAT, {"structured_outputs": value})).kind == kind


@pytest.mark.parametrize("value", [{"choices": ["a"]}, {"regex": 3}, {"whitespace_pattern": " "}, {"choice": "a"}])
async def test_words_of_structured_outputs_that_are_not_read_are_refused(value):
    assert (await post(CHAT, {"structured_outputs": value}, status=400))["param"] == "structured_outputs"
