"""Every field that asks for a grammar is read or refused on every door: none is passed over in silence."""

import json

import pytest

from runtime.errors import InvalidRequest
from runtime.serve.sampling import GrammarFields
from runtime.serve.zmq_client import AsyncZmqClient
from tests.serve.scripted import serve
from tests.serve.test_zmq import door_of

CHAT, TEXT, RESPONSES, NATIVE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"
MESSAGES, OLLAMA_CHAT, OLLAMA = "/v1/messages", "/api/chat", "/api/generate"
USER = [{"role": "user", "content": "hi"}]
PROMPTS = {
    CHAT: {"messages": USER},
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    NATIVE: {"text": "hi"},
    MESSAGES: {"model": "default", "messages": USER, "max_tokens": 9},
    OLLAMA_CHAT: {"messages": USER, "stream": False},
    OLLAMA: {"prompt": "hi", "stream": False},
    "zmq generate": {"text": "hi"},
    "zmq chat": {"messages": USER},
}
PATHS = pytest.mark.parametrize("path", PROMPTS)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}
TAGS = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
EBNF = 'root ::= "a"'
READ = {
    "response_format": (FORMAT, "json_schema", SCHEMA),
    "json_schema": (SCHEMA, "json_schema", SCHEMA),
    "json_object": (True, "json_object", {}),
    "regex": ("a+", "regex", "a+"),
    "ebnf": (EBNF, "ebnf", EBNF),
    "choices": (["a", "b"], "choices", ["a", "b"]),
    "structural_tag": (TAGS, "structural_tag", TAGS),
    "grammar": (EBNF, "ebnf", EBNF),
    "guided_json": (json.dumps(SCHEMA), "json_schema", SCHEMA),
    "guided_regex": ("a+", "regex", "a+"),
    "guided_choice": (["a", "b"], "choices", ["a", "b"]),
    "guided_grammar": (EBNF, "ebnf", EBNF),
    "structured_outputs": ({"json": SCHEMA}, "json_schema", SCHEMA),
}
REFUSED = {"guided_whitespace_pattern": " ?"}
OPTIONS = {"after": "x", "whitespace": "flexible"}  # mean nothing without a grammar


async def send(path, body):
    """The status, the error's text and parameter, and the grammar that the scheduler got."""
    served = serve(["a"])
    if path.startswith("zmq "):
        async with door_of(served) as endpoint, AsyncZmqClient(endpoint) as client:
            try:
                await client.call(path.removeprefix("zmq "), **body)
                status, told = 200, ("", None)
            except InvalidRequest as error:
                status, told = 400, (str(error), error.param)
    else:
        async with served.http() as http:
            answer = await http.post(path, json=body)
        error = answer.json().get("error") or {}
        status, told = answer.status_code, (answer.text, error.get("param") if isinstance(error, dict) else None)
    assert bool(served.client.submits) == (status == 200)
    return status, *told, served.client.submits[0].grammar if served.client.submits else None


async def post(path, fields, *, status=200):
    """The grammar that the scheduler got, or the error's parameter; fields go where the door reads them."""
    inner = {"sampling_params": fields} if path in (NATIVE, "zmq generate") else fields
    said, text, param, grammar = await send(path, {**PROMPTS[path], **inner})
    assert said == status, text
    return grammar if status == 200 else param or text


def test_every_field_is_here():
    assert {*READ, *REFUSED, *OPTIONS} == set(GrammarFields.__struct_fields__)


@PATHS
@pytest.mark.parametrize("name", READ)
async def test_every_name_constrains_on_every_door(path, name):
    value, kind, wanted = READ[name]
    grammar = await post(path, {name: value})
    spec = grammar.spec if kind in ("regex", "ebnf") else json.loads(grammar.spec)
    assert (grammar.kind, spec) == (kind, wanted)


@PATHS
@pytest.mark.parametrize("name", [*REFUSED, *OPTIONS])
async def test_what_is_not_enforced_is_refused_by_its_name_on_every_door(path, name):
    assert name in await post(path, {name: {**REFUSED, **OPTIONS}[name]}, status=400)


@pytest.mark.parametrize("path", [NATIVE, "zmq generate"])
@pytest.mark.parametrize("name", GrammarFields.__struct_fields__)
async def test_beside_sampling_params_a_grammar_is_refused_by_its_name(path, name):
    value = READ[name][0] if name in READ else {**REFUSED, **OPTIONS}[name]
    status, text, param, _ = await send(path, {**PROMPTS[path], name: value})
    assert (status, param) == (400, name)
    assert "inside sampling_params" in text


@pytest.mark.parametrize("path", [OLLAMA_CHAT, OLLAMA])
@pytest.mark.parametrize("name", GrammarFields.__struct_fields__)
async def test_among_ollamas_options_a_grammar_is_refused_by_its_name(path, name):
    value = READ[name][0] if name in READ else {**REFUSED, **OPTIONS}[name]
    assert f"options.{name} is read beside options" in await post(path, {"options": {name: value}}, status=400)


async def test_each_prompt_of_a_batch_has_its_own_grammar():
    served = serve(["a"])
    batch = [{"guided_regex": "a+"}, {"response_format": FORMAT}, {}]
    async with served.http() as http:
        answer = await http.post(NATIVE, json={"text": ["x", "y", "z"], "sampling_params": batch})
    assert answer.status_code == 200, answer.text
    kinds = [submit.grammar and submit.grammar.kind for submit in served.client.submits]
    assert kinds == ["regex", "json_schema", None]


@PATHS
async def test_what_asks_for_nothing_is_free_text(path):
    nothing = {"response_format": {"type": "text"}, "json_object": False, "structured_outputs": {}, "regex": None}
    assert await post(path, nothing) is None


@PATHS
async def test_a_grammar_that_is_wrong_is_refused_by_its_name(path):
    assert "guided_regex" in await post(path, {"guided_regex": "("}, status=400)
    assert "json_schema" in await post(path, {"json_schema": "{"}, status=400)
    assert "structured_outputs" in await post(path, {"structured_outputs": {"zork": 1}}, status=400)
    assert "regex" in await post(path, {"regex": "a", "guided_choice": ["a"]}, status=400)


@PATHS
async def test_choices_are_a_list_of_some(path):
    assert "choices" in await post(path, {"choices": []}, status=400)
    assert "choices" in await post(path, {"choices": "cat"}, status=400)


@PATHS
async def test_after_and_whitespace_stand_beside_the_grammar(path):
    grammar = await post(path, {"regex": "a", "after": "</think>", "whitespace": "flexible"})
    assert (grammar.kind, grammar.after, grammar.whitespace) == ("regex", "</think>", "flexible")
    assert "whitespace" in await post(path, {"regex": "a", "whitespace": "rubbish"}, status=400)
    error = await post(path, {"regex": "a", "after": ""}, status=400)
    assert error == "after" or "marker" in error


@pytest.mark.parametrize("shape", [{}, {"response_format": {"type": "json_object"}}], ids=["alone", "with a format"])
@pytest.mark.parametrize(
    "calls",
    [
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": NAMED},
        {"tools": [STRICT], "tool_choice": "auto"},
        {"tools": [STRICT]},
    ],
    ids=["required", "named", "auto", "unsaid"],
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, "zmq chat"])
async def test_whitespace_is_that_of_calls_too(path, calls, shape):
    if path == RESPONSES and shape:
        shape = {"text": {"format": {"type": "json_object"}}}
    for whitespace in ("fixed", "flexible"):
        assert (await post(path, {**calls, **shape, "whitespace": whitespace})).whitespace == whitespace
    assert (await post(path, {**calls, **shape})).whitespace == "fixed"


async def test_whitespace_that_no_grammar_would_keep_is_refused():
    for free in ({"tools": [TOOL]}, {"tools": [STRICT], "tool_choice": "none"}):
        assert await post(CHAT, {**free, "whitespace": "flexible"}, status=400) == "whitespace"
    assert (await post(CHAT, {"response_format": FORMAT, "whitespace": "flexible"})).whitespace == "flexible"


async def test_after_does_not_go_with_tools():
    body = {"response_format": {"type": "json_object"}, "tools": [TOOL], "after": "x"}
    assert await post(CHAT, body, status=400) == "after"
    assert await post(CHAT, {"tools": [TOOL], "tool_choice": "required", "after": "x"}, status=400) == "after"


@pytest.mark.parametrize(
    ("value", "kind"), [({"json_object": True}, "json_object"), ({"choice": ["a"], "regex": None}, "choices")]
)
@PATHS
async def test_structured_outputs_are_read_whole(path, value, kind):
    assert (await post(path, {"structured_outputs": value})).kind == kind


@pytest.mark.parametrize("value", [{"choices": ["a"]}, {"regex": 3}, {"whitespace_pattern": " "}, {"choice": "a"}])
@PATHS
async def test_words_of_structured_outputs_that_are_not_read_are_refused(path, value):
    assert "structured_outputs" in await post(path, {"structured_outputs": value}, status=400)
