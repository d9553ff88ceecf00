"""Tools and a response format in one request, for every notation: valid calls or a valid answer, and nothing else."""

from __future__ import annotations

import json

import pytest

from runtime.config import ServerConfig
from runtime.grammar.service import CompileService, vocabulary
from runtime.messages import GrammarSpec
from runtime.text.parsers.choose import TOOL_FAMILIES
from tests.serve.scripted import EOS, byte_tokenizer, serve
from tests.serve.test_tools import NOW, WEATHER, choice, stream

SHAPE = {
    "type": "object",
    "properties": {"answer": {"type": "string"}},
    "required": ["answer"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SHAPE}}
ONE = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Rome"}}',
}
LIST = '[{"name": "get_weather", "arguments": {"city": "Rome"}}]'
TWO = {
    "hermes": f'{ONE["hermes"]}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
    "llama3_json": f'{ONE["llama3_json"]}; {{"name": "now", "parameters": {{}}}}',
}
LIST_TWO = '[{"name": "get_weather", "arguments": {"city": "Rome"}}, {"name": "now", "arguments": {}}]'
ANSWER = '{"answer":"18C <tool_call>{\\"name\\": \\"now\\"}</tool_call>"}'
FAMILIES = sorted(TOOL_FAMILIES)


@pytest.fixture(scope="module")
def service():
    tokenizer = byte_tokenizer()
    service = CompileService(
        vocabulary(tokenizer.token_bytes, tokenizer.vocab_size, tokenizer.special_ids, {EOS}), "auto"
    )
    yield service
    service.close()


def fits(service: CompileService, spec: GrammarSpec, text: str) -> bool:
    """Whether the grammar takes exactly this text and may end there."""
    cursor = service.compile_async(spec).result(60).cursor()
    return all(cursor.accept(byte) for byte in text.encode()) and (cursor.can_stop or cursor.done)


def served_by(family: str, text: str, k: int = 3):
    return serve(list(text), k=k, server=ServerConfig(tool_call_parser=family))


async def spec_of(family: str, **body) -> GrammarSpec:
    served = served_by(family, ANSWER)
    await choice(served, tools=[WEATHER, NOW], response_format=FORMAT, **body)
    return served.client.submits[-1].grammar


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_grammar_takes_calls_and_answers_and_nothing_else(service, family):
    one, two = ONE.get(family, LIST), TWO.get(family, LIST_TWO)
    spec = await spec_of(family)
    for text in (one, two, '{"answer": "x"}'):
        assert fits(service, spec, text), text
    for text in ("It is 18C.", '{"answer": 3}', "{}", one.replace("Rome", "Rome\n"), one.replace("city", "town")):
        assert not fits(service, spec, text), text
    assert not fits(service, await spec_of(family, parallel_tool_calls=False), two)
    only_calls = await spec_of(family, tool_choice="required")
    assert not fits(service, only_calls, '{"answer": "x"}')
    only_answers = await spec_of(family, tool_choice="none")
    assert not fits(service, only_answers, one)
    assert fits(service, only_answers, '{"answer": "x"}')


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [1, 4, 400])
async def test_what_was_chosen_is_read_as_that(family, k):
    two = TWO.get(family, LIST_TWO)
    body = {"tools": [WEATHER, NOW], "response_format": FORMAT}
    whole = await choice(served_by(family, two, k), **body)
    calls = [c["function"] for c in whole["message"]["tool_calls"]]
    assert [(c["name"], json.loads(c["arguments"])) for c in calls] == [("get_weather", {"city": "Rome"}), ("now", {})]
    assert whole["finish_reason"] == "tool_calls"
    whole = await choice(served_by(family, ANSWER, k), **body)
    assert (whole["message"]["content"], whole["finish_reason"]) == (ANSWER, "stop")
    chunks = await stream(served_by(family, ANSWER, k), **body)
    assert "".join(c["delta"].get("content") or "" for c in chunks) == ANSWER
    assert not any("tool_calls" in c["delta"] for c in chunks)


async def test_other_grammars_stand_beside_the_calls_too(service):
    for field, good, bad in (
        ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
        ({"regex": "[0-9]{3}"}, "123", "12"),
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', "[1]"),
    ):
        served = served_by("hermes", good)
        await choice(served, tools=[WEATHER], **field)
        spec = served.client.submits[-1].grammar
        assert fits(service, spec, good)
        assert fits(service, spec, ONE["hermes"])
        assert not fits(service, spec, bad)
