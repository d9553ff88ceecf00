"""Structural tags: free text, then a tool's parameters enforced as exactly as a response format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.messages import GrammarSpec
from tests.grammar.toolkit import Toolkit, allowed

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WRITE = {"type": "object", "properties": {"c": {"type": "string", "maxLength": 10_000}}, "required": ["c"]}


def tool(name: str, parameters: Any) -> dict[str, Any]:
    begin = f'<tool_call>\n{{"name": "{name}", "arguments": '
    return {
        "type": "tag",
        "begin": begin,
        "content": {"type": "json_schema", "json_schema": parameters},
        "end": "}\n</tool_call>",
    }


def spec(format_: dict[str, Any]) -> GrammarSpec:
    return GrammarSpec(kind="structural_tag", spec=json.dumps({"type": "structural_tag", "format": format_}))


def triggered(*tools: dict[str, Any], **options: Any) -> GrammarSpec:
    return spec({"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": list(tools), **options})


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_free_text_until_the_trigger_then_the_schema(kit: Toolkit) -> None:
    compiled = kit.compile(triggered(tool("get_weather", WEATHER), tool("now", {"type": "object", "properties": {}})))
    for text in [
        "plain",
        "",
        "hm " + call("get_weather", '{"city": "Rome"}'),
        call("now", "{}") + " ok " + call("now", "{}"),
    ]:
        assert kit.takes(compiled, text), text
    for text in [call("nope", "{}"), call("get_weather", "{}"), call("get_weather", "42"), call("now", '{"x": 1}')]:
        assert not kit.takes(compiled, text), text


def test_required_calls(kit: Toolkit) -> None:
    compiled = kit.compile(triggered(tool("get_weather", WEATHER), at_least_one=True, stop_after_first=True))
    assert not kit.takes(compiled, "no call")
    assert kit.takes(compiled, call("get_weather", '{"city": ""}'))
    assert not kit.takes(compiled, call("get_weather", '{"city": ""}') * 2)


def test_calls_or_an_answer(kit: Toolkit) -> None:
    """Tools and a response format in one request: either calls, or an answer by the schema."""
    calls = {
        "type": "tags_with_separator",
        "tags": [tool("get_weather", WEATHER)],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": False,
    }
    answer = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    compiled = kit.compile(spec({"type": "or", "elements": [calls, {"type": "json_schema", "json_schema": answer}]}))
    one = call("get_weather", '{"city": "Rome"}')
    assert kit.takes(compiled, one)
    assert kit.takes(compiled, one + "\n" + one)
    assert kit.takes(compiled, '{"answer": "sunny"}')
    assert not kit.takes(compiled, "sunny")
    assert not kit.takes(compiled, '{"answer": 1}')


def test_a_large_bound_leaves_the_other_tools_alone(kit: Toolkit) -> None:
    """D16: one tool with a long maxLength must not break every call."""
    compiled = kit.compile(triggered(tool("get_weather", WEATHER), tool("w", WRITE)))
    assert kit.takes(compiled, call("get_weather", '{"city": "Rome"}'))
    assert kit.takes(compiled, call("w", '{"c": "' + "x" * 500 + '"}'))


def test_null_parameters_are_a_call_without_arguments_of_any_shape(kit: Toolkit) -> None:
    """D22: `parameters: null` is an object, never a crash."""
    compiled = kit.compile(triggered(tool("q", None)))
    assert kit.takes(compiled, call("q", "{}"))
    assert not kit.takes(compiled, call("q", "3"))


def test_control_tokens_are_not_text_inside_a_call(kit: Toolkit) -> None:
    cursor = kit.compile(triggered(tool("get_weather", WEATHER))).cursor()
    for token in kit.pieces.split(call("get_weather", '{"city": "Ro')[:-15].encode()):
        assert cursor.accept(token)
    assert not kit.vocab.control_ids & set(allowed(cursor, kit.n_words))


def test_the_older_form_is_read(kit: Toolkit) -> None:
    document = {"structures": [{"begin": "<f>", "schema": WEATHER, "end": "</f>"}], "triggers": ["<f>"]}
    compiled = kit.compile(GrammarSpec(kind="structural_tag", spec=json.dumps(document)))
    assert kit.takes(compiled, 'see <f>{"city": "x"}</f>')
    assert not kit.takes(compiled, "see <f>{}</f>")


def test_thirty_tools_compile(kit: Toolkit) -> None:
    compiled = kit.compile(triggered(*(tool(f"tool_{i}", WEATHER) for i in range(30))))
    assert kit.takes(compiled, call("tool_29", '{"city": "x"}'))
    assert not kit.takes(compiled, call("tool_30", '{"city": "x"}'))


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ("[]", "must be an object"),
        ('{"type": "structural_tag"}', "'/format'"),
        ('{"format": {"type": "magic"}}', "'/format/type'"),
        ('{"format": {"type": "json_schema", "json_schema": {"type": "x"}}}', "'/format'.*'/type'"),
        ('{"format": {"type": "regex", "pattern": "("}}', "'/format/pattern'"),
        ('{"format": {"type": "sequence", "elements": [3]}}', "'/format/elements/0'"),
        ("{", "not valid JSON"),
    ],
)
def test_bad_tags_name_the_place(kit: Toolkit, document: str, place: str) -> None:
    with pytest.raises(InvalidRequest, match=place) as caught:
        kit.compile(GrammarSpec(kind="structural_tag", spec=document))
    assert caught.value.param == "structural_tag"


def test_only_xgrammar_reads_tags(kit: Toolkit) -> None:
    with pytest.raises(InvalidRequest, match="llguidance cannot"):
        kit.compile(triggered(tool("get_weather", WEATHER)), "llguidance")
