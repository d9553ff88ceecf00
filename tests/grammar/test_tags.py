"""Structural tags: free text, then a tool's parameters enforced as exactly as a response format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.messages import GrammarSpec
from tests.grammar.toolkit import Toolkit, allowed, is_valid

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


def bounded(kit: Toolkit, **bounds: int) -> tuple[dict[str, Any], Any]:
    schema = {"type": "object", "properties": {"c": {"type": "string", **bounds}}, "required": ["c"]}
    return schema, kit.compile(triggered(tool("w", schema)))


def written(text: str) -> str:
    return call("w", json.dumps({"c": text}, ensure_ascii=False))


def test_bounded_strings_keep_their_escapes(kit: Toolkit) -> None:
    """A file of code under maxLength 10,000: some line breaks among long lines, or hundreds among short ones."""
    _, compiled = bounded(kit, maxLength=10_000)
    code = 'def f(x):\n    """What it is."""\n    return "a\\\\b" + x\n\n\n' * 15
    for text in ["a\nb", code, "a\n" * 1000, "x" * 600 + '\n"' + "x" * 600, "\n\n\u0001\t" * 100, "x" * 1000]:
        assert kit.takes(compiled, written(text)), text
    _, small = bounded(kit, maxLength=40)
    for text in ['He said "no".\n', "x" * 40, "", "\n"]:
        assert kit.takes(small, written(text)), text


@pytest.mark.parametrize("bounds", [{"maxLength": 9}, {"maxLength": 24}, {"minLength": 3, "maxLength": 20}])
def test_no_way_to_write_a_bounded_string_gets_beyond_its_bounds(kit: Toolkit, bounds: dict[str, int]) -> None:
    schema, compiled = bounded(kit, **bounds)
    longest = bounds["maxLength"]
    for period in range(1, longest + 2):  # an escape after every so many characters
        for n in range(longest - 2, longest + 3):
            text = "".join("\n" if i % period == period - 1 else "x" for i in range(n))
            if kit.takes(compiled, written(text)):
                assert is_valid(schema, json.dumps({"c": text})), text
    walked = 0
    for seed in range(12):
        text = kit.random_text(compiled_after(kit, schema), seed)
        if text is not None:
            walked += 1
            assert is_valid(schema, text), text
    assert walked


def compiled_after(kit: Toolkit, schema: dict[str, Any]) -> Any:
    """The tag's content alone, so that a walk stands inside it from the start."""
    return kit.compile(spec({"type": "json_schema", "json_schema": schema}))


def test_at_least_so_many_characters(kit: Toolkit) -> None:
    _, compiled = bounded(kit, minLength=10)
    assert kit.takes(compiled, written("0123456789\n\n" + "x" * 99))
    assert not kit.takes(compiled, written("012345678"))
    assert not kit.takes(compiled, written("\n12345678"))


def test_what_only_llguidance_enforces_names_the_place_the_keyword_and_both_engines(kit: Toolkit) -> None:
    for prop, place, word in (
        ({"type": "number", "multipleOf": 0.37}, "/properties/c/multipleOf", "multipleOf"),
        ({"type": "string", "pattern": "^a+b+$", "maxLength": 9}, "/properties/c", "a pattern or format together with"),
    ):
        schema = {"type": "object", "properties": {"c": prop}}
        with pytest.raises(InvalidRequest) as caught:
            kit.compile(triggered(tool("w", schema)))
        message = str(caught.value)
        for part in (f"JSON schema at '{place}", word, "xgrammar cannot", "llguidance, which can, reads no tags"):
            assert part in message, message
