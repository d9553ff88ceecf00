"""Every tool and reasoning parser: the same events at any chunking, and what real models really write."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.text.parsers.base import Answer, Parser, PlainParser, parse_all
from runtime.text.parsers.choose import TOOL_FAMILIES, choose_reasoning, choose_tools, mismatch
from runtime.text.parsers.forced import ForcedArguments, ForcedCalls
from runtime.text.parsers.reasoning import ReasoningParser, Start, ThinkTags, start_of

KNOWN = ("get_weather", "now", "f", "search", "run", "add", "get_code")
THINK = ThinkTags("<think>", "</think>")


@dataclass(frozen=True)
class Case:
    family: str
    text: str
    calls: list[tuple[str, dict]]
    content: str = ""


def hermes(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


DS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
CASES = [
    Case("hermes", hermes('{"name": "now", "arguments": {}}'), [("now", {})]),
    Case("hermes", '<tool_call>{"name":"now"}</tool_call>', [("now", {})]),
    Case(
        "hermes",
        '<tool_call>{"arguments": {"city": "Rome"}, "name": "get_weather"}',
        [("get_weather", {"city": "Rome"})],
    ),
    Case(
        "hermes",
        "Let me look.\n"
        + hermes('{"name": "get_weather", "arguments": {"city": "Rome"}}', '{"name": "now", "arguments": null}'),
        [("get_weather", {"city": "Rome"}), ("now", {})],
        "Let me look.",
    ),
    Case(
        "hermes",
        hermes('{"name":"f","arguments":{"filters":{"a":{"b":"}</tool_call>"}}}}'),
        [("f", {"filters": {"a": {"b": "}</tool_call>"}}})],
    ),
    Case("hermes", hermes('{"name":"f","arguments":"{\\"a\\": 1}"}'), [("f", {"a": 1})]),
    Case(
        "hermes",
        hermes(
            '{"name":"get_weather","arguments":{"city":"a"}}',
            '{"name":"nope","arguments":{}}',
            '{"name":"now","arguments":{}}',
        ),
        [("get_weather", {"city": "a"}), ("nope", {}), ("now", {})],
    ),
    Case(
        "hermes",
        '<tool_call>{"name":"now","arguments":{}}\n<tool_call>{"name":"f","arguments":{"a":[1,{"b":2}]}}</tool_call>',
        [("now", {}), ("f", {"a": [1, {"b": 2}]})],
    ),
    Case("hermes", "a <tool_call> tag in <tool_ text", [], "a <tool_call> tag in <tool_ text"),
    Case("hermes", "x < y and <tool", [], "x < y and <tool"),
    Case("hermes", hermes('{"name":"now","arguments":{}}') + "\n done", [("now", {})], "done"),
    Case("llama3_json", '{"name": "get_weather", "parameters": {"city": "NYC"}}', [("get_weather", {"city": "NYC"})]),
    Case(
        "llama3_json",
        '<|python_tag|>{"name":"get_weather","parameters":{"city":"NYC"}};{"name":"now","parameters":{}}',
        [("get_weather", {"city": "NYC"}), ("now", {})],
    ),
    Case(
        "llama3_json", ' {"name":"f","arguments":{"filters":{"a":{"b":"}"}}}}', [("f", {"filters": {"a": {"b": "}"}}})]
    ),
    Case("llama3_json", '{"type":"function","function":{"name":"f","parameters":{"a":1}}}', [("f", {"a": 1})]),
    Case("llama3_json", '{"name": "Bob", "age": 3}', [], '{"name": "Bob", "age": 3}'),
    Case("llama3_json", 'The set {"name": "now"} is text', [], 'The set {"name": "now"} is text'),
    Case("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city":"Rome"}', [("get_weather", {"city": "Rome"})]),
    Case(
        "mistral",
        '[TOOL_CALLS][{"name":"add","arguments":{"a":3}}, {"name":"now","arguments":{}}]',
        [("add", {"a": 3}), ("now", {})],
    ),
    Case(
        "mistral",
        'Sure.[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}[TOOL_CALLS]add[ARGS]{"a":[1]}',
        [("now", {}), ("add", {"a": [1]})],
        "Sure.",
    ),
    Case(
        "pythonic",
        '[search(queries=["a, b","c]"], opts={"k": [1, 2]}), now()]',
        [("search", {"queries": ["a, b", "c]"], "opts": {"k": [1, 2]}}), ("now", {})],
    ),
    Case("pythonic", "[run(code=\"plt.plot(x, label='')\")]", [("run", {"code": "plt.plot(x, label='')"})]),
    Case("pythonic", r'[run(code="a\"b\\")]', [("run", {"code": 'a"b\\'})]),
    Case("pythonic", "[add(a=-1, b=True, c=null)]", [("add", {"a": -1, "b": True, "c": None})]),
    Case("pythonic", "<|python_start|>[now()]<|python_end|>", [("now", {})]),
    Case("pythonic", "[1, 2] is a list", [], "[1, 2] is a list"),
    Case("pythonic", '[run(code=__import__("os").system("x"))]', [], '[run(code=__import__("os").system("x"))]'),
    Case("deepseek", f'{DS[0]}{DS[1]}get_code{DS[2]}{{"code": 123}}{DS[3]}{DS[4]}', [("get_code", {"code": 123})]),
    Case(
        "deepseek",
        f'{DS[0]}{DS[1]}now{DS[2]}{{}}{DS[3]}{DS[1]}f{DS[2]}{{"a": "<｜tool▁call▁end｜>"}}{DS[3]}{DS[4]}',
        [("now", {}), ("f", {"a": DS[3]})],
    ),
    Case(
        "deepseek",
        f'Hi{DS[0]}{DS[1]}function{DS[2]}get_weather\n```json\n{{"city": "Rome"}}\n```{DS[3]}{DS[4]}',
        [("get_weather", {"city": "Rome"})],
        "Hi",
    ),
    Case("json", '[{"name":"now","arguments":{}},{"name":"f","parameters":{"a":1}}]', [("now", {}), ("f", {"a": 1})]),
    Case("json", 'Here:\n```json\n{"name":"f","arguments":{"a":1}}\n```', [("f", {"a": 1})], "Here:"),
    Case("json", '```json\n{"rows": 3}\n```', [], '```json\n{"rows": 3}\n```'),
]


def parser_of(family: str) -> Parser:
    return TOOL_FAMILIES[family].new(KNOWN)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(c for c in cuts if c < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def read(parser: Parser, pieces: list[str]) -> Answer:
    answer = Answer()
    for piece in pieces:
        answer.add(parser.push(piece))
    answer.add(parser.finish())
    return answer


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.family}: {c.text[:40]!r}")
class TestCalls:
    def test_are_read_from_the_whole_text(self, case: Case):
        answer = parse_all(parser_of(case.family), case.text)
        assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == case.calls
        assert all(call.complete for call in answer.calls)
        assert answer.text == case.content

    def test_are_the_same_cut_at_every_character_and_every_size(self, case: Case):
        whole = parse_all(parser_of(case.family), case.text)
        for size in range(1, len(case.text)):
            pieces = [case.text[i : i + size] for i in range(0, len(case.text), size)]
            assert read(parser_of(case.family), pieces) == whole
        for cut in range(len(case.text)):
            assert read(parser_of(case.family), pieces_of(case.text, [cut])) == whole

    def test_that_the_token_limit_cut_off_are_never_completed(self, case: Case):
        whole = parse_all(parser_of(case.family), case.text)
        for end in range(len(case.text)):
            part = parse_all(parser_of(case.family), case.text[:end])
            for cut, full in zip(part.calls, whole.calls, strict=False):
                assert cut.name == full.name
                assert cut == full or not cut.complete


@settings(max_examples=200, deadline=None)
@given(
    family=st.sampled_from(sorted(TOOL_FAMILIES)),
    parts=st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                '{"name":"now","arguments":',
                "{}",
                "}",
                "[",
                "]",
                " ",
                "\n",
                "a",
                '"',
                "\\",
                "[TOOL_CALLS]",
                "[ARGS]",
                "now(",
                ")",
                "<|python_tag|>",
                ";",
                "```json",
                "```",
                *DS,
            ]
        ),
        max_size=14,
    ),
    cuts=st.lists(st.integers(0, 200), max_size=10),
)
def test_any_text_gives_the_same_answer_at_any_chunking(family, parts, cuts):
    text = "".join(parts)
    assert read(parser_of(family), pieces_of(text, cuts)) == parse_all(parser_of(family), text)


class TestReasoning:
    def parser(self, start: Start, inner: Parser | None = None) -> ReasoningParser:
        return ReasoningParser(THINK, start, inner or PlainParser())

    @pytest.mark.parametrize(
        ("start", "text", "thought", "content"),
        [
            (Start.UNKNOWN, "<think>h</think>42", "h", "42"),
            (Start.UNKNOWN, "42", "", "42"),
            (Start.UNKNOWN, "\n<think>\nh \n</think>\n\n42\n", "h", "42\n"),
            (Start.ANSWERING, "42", "", "42"),
            (Start.ANSWERING, "<think>no</think>", "", "<think>no</think>"),
            (Start.THINKING, "h</think>42", "h", "42"),
            (Start.THINKING, "<think>\nh</think>42", "h", "42"),
            (Start.THINKING, "never closed", "never closed", ""),
            (Start.UNKNOWN, "<think>a</think>use the <think> tag", "a", "use the <think> tag"),
            (Start.UNKNOWN, "<thi", "", "<thi"),
            (Start.THINKING, "a</thin", "a</thin", ""),
        ],
    )
    def test_thoughts_are_split_off_once(self, start, text, thought, content):
        whole = parse_all(self.parser(start), text)
        assert (whole.thought, whole.text) == (thought, content)
        for size in range(1, len(text) + 1):
            assert read(self.parser(start), [text[i : i + size] for i in range(0, len(text), size)]) == whole

    def test_calls_in_thoughts_are_not_calls(self):
        text = '<think>maybe <tool_call>{"name":"now","arguments":{}}</tool_call></think>ok'
        answer = parse_all(self.parser(Start.UNKNOWN, parser_of("hermes")), text)
        assert (answer.calls, answer.text) == ([], "ok")

    def test_calls_after_thoughts_are(self):
        text = "<think>a</think>\n" + hermes('{"name":"now","arguments":{}}')
        assert [c.name for c in parse_all(self.parser(Start.UNKNOWN, parser_of("hermes")), text).calls] == ["now"]

    def test_the_prompts_end_says_how_the_answer_begins(self):
        assert start_of("…assistant\n<think>\n", THINK) is Start.THINKING
        assert start_of("…assistant\n<think>\n\n</think>\n\n", THINK) is Start.ANSWERING
        assert start_of("…assistant\n", THINK) is Start.UNKNOWN


class TestForced:
    TEXT = '[{"name":"get_weather","arguments":{"city":"Rome"}},{"name":"now","arguments":{}}]'

    def test_a_list_of_calls_is_read_at_any_chunking(self):
        whole = parse_all(ForcedCalls(), self.TEXT)
        assert [(c.name, c.arguments) for c in whole.calls] == [("get_weather", '{"city":"Rome"}'), ("now", "{}")]
        for size in range(1, len(self.TEXT)):
            assert read(ForcedCalls(), [self.TEXT[i : i + size] for i in range(0, len(self.TEXT), size)]) == whole

    def test_named_arguments_are_the_whole_answer(self):
        text = '{"city":"R}\\"ome"}'
        for cut in range(len(text)):
            answer = read(ForcedArguments("get_weather"), [text[:cut], text[cut:]])
            assert [(c.name, c.arguments, c.complete) for c in answer.calls] == [("get_weather", text, True)]

    def test_what_was_cut_off_stays_unfinished(self):
        assert [c.complete for c in parse_all(ForcedCalls(), self.TEXT[:76]).calls] == [True, False]
        assert [c.complete for c in parse_all(ForcedArguments("f"), '{"a"').calls] == [False]


class TestChoice:
    @pytest.mark.parametrize(
        ("template", "family"),
        [
            ("{{ tools }} <tool_call>", "hermes"),
            ("{{ tools }} [TOOL_CALLS]", "mistral"),
            ("{{ tools }} <|python_tag|>", "llama3_json"),
            ("{{ tools }} <｜tool▁call▁begin｜>", "deepseek"),
            ("{{ tools }}", "hermes"),
        ],
    )
    def test_the_template_tells(self, template, family):
        assert choose_tools("auto", template, True).name == family

    def test_a_template_without_tools_reads_our_generic_prompt(self):
        assert choose_tools("auto", "[TOOL_CALLS]", False).name == "hermes"

    def test_the_operator_overrides_and_is_warned(self):
        assert choose_tools("qwen25", "", True).name == "hermes"
        assert "llama3_json" in mismatch("pythonic", "{{ tools }} <|python_tag|>", True)
        assert mismatch("llama3", "{{ tools }} <|python_tag|>", True) is None

    def test_unknown_names_are_refused(self):
        with pytest.raises(InvalidRequest, match="zork"):
            choose_tools("zork", "", True)
        with pytest.raises(InvalidRequest, match="zork"):
            choose_reasoning("zork", "")

    def test_thinking_is_read_off_the_template(self):
        assert choose_reasoning("auto", "… <think> …") == THINK
        assert choose_reasoning("auto", "plain") is None
        assert choose_reasoning("none", "<think>") is None
