"""Chats to prompts: every content variant agents send, tools with and without a template for them, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.errors import InvalidRequest, ModelLoadError
from runtime.messages import pack_ids
from runtime.prompt import to_ids
from runtime.text.chat import ChatRenderer, template_variables
from runtime.text.messages import merge_consecutive, normalise_messages
from runtime.text.template import ChatTemplate, TemplateRefusal
from runtime.text.tokenizer import Tokenizer

MODEL = Path("~/.cache/ramet/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf").expanduser()
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_model(MODEL)


@pytest.fixture(scope="module")
def renderer(tokenizer) -> ChatRenderer:
    return ChatRenderer(tokenizer)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def call(arguments) -> dict:
    return {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def test_a_chat_renders_as_transformers_renders_it(renderer):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [user("hi"), {"role": "assistant", "content": "ho"}, user("é")]
    expected, _ = render_jinja_template(
        conversations=[messages], chat_template=renderer.template.source, add_generation_prompt=True
    )
    assert renderer.render_text(messages) == expected[0]
    assert renderer.tokenizer.decode(renderer.render(messages), skip_special=False) == expected[0]


def test_parts_null_and_empty_content_render_like_strings(renderer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert renderer.render([{"role": "user", "content": parts}]) == renderer.render([user("ab")])
    empties = [{"role": "assistant"}, *({"role": "assistant", "content": c} for c in (None, "", []))]
    texts = {renderer.render_text([user("w?"), {**e, "tool_calls": [call('{"city":"Rome"}')]}]) for e in empties}
    assert len(texts) == 1


def test_developer_is_system_and_role_case_does_not_matter():
    assert [m["role"] for m in normalise_messages([{"role": "Developer", "content": "x"}, user("y")])] == [
        "system",
        "user",
    ]


@pytest.mark.parametrize("arguments", ["", "null", None, "{}", {}])
def test_no_arguments_become_an_empty_object(arguments):
    [message] = normalise_messages([{"role": "assistant", "tool_calls": [call(arguments)]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ["{", '"Rome"', "[1]", 3])
def test_broken_arguments_are_refused_with_their_place(arguments):
    with pytest.raises(InvalidRequest) as error:
        normalise_messages([user("w?"), {"role": "assistant", "tool_calls": [call(arguments)]}])
    assert error.value.param == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([3], "messages[0]"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
    ],
)
def test_what_no_template_can_take_is_named(messages, param):
    with pytest.raises(InvalidRequest) as error:
        normalise_messages(messages)
    assert error.value.param == param


def test_a_template_without_tools_gets_them_in_the_system_message(renderer):
    assert not renderer.knows_tools
    text = renderer.render_text([user("weather?")], [WEATHER])
    assert '"name": "get_weather"' in text.split("<|im_end|>")[0]
    turns = [
        user("w?"),
        {"role": "assistant", "tool_calls": [call('{"city":"Rome"}')]},
        {"role": "tool", "content": "18C"},
    ]
    text = renderer.render_text(turns, [WEATHER])
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in text
    assert "<tool_response>\n18C\n</tool_response>" in text


def test_a_template_with_tools_gets_objects_not_strings(tokenizer):
    source = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}{{ m.content }}{% endfor %}"
    )
    renderer = ChatRenderer(tokenizer, source)
    turns = [user("w?"), {"role": "assistant", "tool_calls": [call('{"city":"Rome"}')]}]
    assert renderer.render_text(turns, [WEATHER]) == "get_weather;w?Rome"


def test_the_templates_own_refusal_is_the_message(tokenizer):
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        ChatRenderer(tokenizer, STRICT, merge=False).render([user("a"), user("b")])
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        ChatRenderer(tokenizer, STRICT).render([{"role": "system", "content": "s"}, user("a")])


def test_turns_of_one_role_are_joined_where_the_template_insists(tokenizer):
    assert ChatRenderer(tokenizer, STRICT).render_text([user("a"), user("b")]) == "[user]a\n\nb"


def test_tool_results_are_never_joined():
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    assert merge_consecutive(results) == results


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__[1] }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__.os }}"]
)
def test_templates_run_in_a_sandbox(tokenizer, source):
    with pytest.raises(TemplateRefusal):
        ChatRenderer(tokenizer, source).render_text([user("x")])


def test_a_template_that_does_not_compile_is_a_load_error():
    with pytest.raises(ModelLoadError, match="does not compile"):
        ChatTemplate("{% for %}")


def test_tojson_keeps_text_as_written():
    template = ChatTemplate("{{ tools | tojson }}")
    assert json.loads(template.render(tools=[{"d": "<é&>"}])) == [{"d": "<é&>"}]
    assert "<é&>" in template.render(tools=[{"d": "<é&>"}])


def test_the_last_assistant_message_can_be_left_open(renderer):
    text = renderer.render_text([user("x"), {"role": "assistant", "content": "Once upon"}], continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon")
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        renderer.render([user("x")], continue_final_message=True)


@pytest.mark.parametrize("name", ["self", "prompt", "encoder", "renderer", "variables", "template", "loop", ""])
def test_a_template_variable_may_bear_any_name_that_is_no_field(renderer, name):
    plain = renderer.render([user("x")])
    assert renderer.render([user("x")], **template_variables({name: 1})) == plain
    assert to_ids([user("x")], renderer.tokenizer, renderer, **{name: 1}) == pack_ids(plain)
