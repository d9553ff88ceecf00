"""A strict tool under `tool_choice` "auto": free text, or calls that keep to the schema, in every notation."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest

from runtime.config import ServerConfig
from runtime.errors import InvalidRequest
from runtime.grammar.service import CompileService, vocabulary
from runtime.messages import GrammarSpec
from runtime.serve.call_grammar import auto_grammar
from runtime.serve.tools import Tool, make_tool
from runtime.text.parsers.base import parse_all
from runtime.text.parsers.choose import TOOL_FAMILIES
from tests.serve.scripted import serve
from tests.serve.test_tools import NOW, WEATHER, choice, post

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "more": {"type": "object", "properties": {"on": {"type": ["boolean", "null"]}}, "required": ["on"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": SCHEMA, "now": {"type": "object", "properties": {}}}
TOOLS = [make_tool(name, "", schema, True, f"tools[{i}]") for i, (name, schema) in enumerate(SCHEMAS.items())]
MARKERS = [
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<|python_end|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
]  # fmt: skip
EOS = 256
OTHER = 257  # a chat marker
FAMILIES = sorted(TOOL_FAMILIES)

_ROME = '{"city": "Rome \\"x\\"\\n", "days": 3, "more": {"on": true}}'
_NAMED = '"name": "get_weather", "%s": ' + _ROME
_ARGS, _PARAMS = _NAMED % "arguments", _NAMED % "parameters"
_PY = 'get_weather(city="Rome \\"x\\"\\n", days=3, more={"on": true})'
_DS = "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>" + _ROME + "<｜tool▁call▁end｜>"
_DS3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n" + _ROME + "\n```<｜tool▁call▁end｜>"
_HERMES = "<tool_call>\n{" + _ARGS + "}\n</tool_call>"

CALLS = {
    "hermes": [_HERMES, "hm " + _HERMES, _HERMES + " and " + _HERMES],
    "llama3_json": [
        "{" + _PARAMS + "}",
        "\n{" + _PARAMS + '}; {"name": "now", "parameters": {}}',
        "<|python_tag|>{" + _PARAMS + "}",
        "I look: {x} <|python_tag|>{" + _PARAMS + "}",
    ],
    "mistral": [
        "[TOOL_CALLS][{" + _ARGS + "}]",
        "Well. [TOOL_CALLS] [{" + _ARGS + '}, {"name": "now", "arguments": {}}]',
        "[TOOL_CALLS]get_weather[ARGS]" + _ROME,
        "[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]" + _ROME + "[TOOL_CALLS]now[ARGS]{}",
    ],
    "pythonic": [
        f"[{_PY}]",
        f" [{_PY}, now()]",
        f"<|python_start|>[{_PY}]<|python_end|>",
        f"so <|python_start|>[{_PY}]",
    ],
    "deepseek": [
        f"<｜tool▁calls▁begin｜>{_DS}<｜tool▁calls▁end｜>",
        f"I look. <｜tool▁calls▁begin｜>{_DS3}\n{_DS}<｜tool▁calls▁end｜>",
    ],
    "json": ["{" + _ARGS + "}", "[{" + _ARGS + "}, {" + _ARGS + "}]", "so " + _HERMES],
}
FREE = ["", " ", "It is 18C.", "a {b} [c] `d` <e> é\n- f", "<", "<b>x</b>", "`x` is code", "x [TOOL", "x <|pyth"]
NOT_FREE = {  # free texts that some notation takes for a call or for its beginning
    "llama3_json": ['{"a": 1}'],
    "pythonic": ["[1] is a source"],
    "json": ['{"a": 1}', "[1]", "see\n```json\n{}\n```"],
}


def kind_of_service(marked: bool) -> CompileService:
    pieces = [bytes([i]) for i in range(256)] + [b"<eos>", b"<|im_start|>"]
    pieces += [m.encode() for m in MARKERS] if marked else []
    return CompileService(vocabulary(pieces, len(pieces), range(256, len(pieces)), (EOS,)), "auto")


@pytest.fixture(scope="module", params=[True, False], ids=["control tokens", "characters"])
def engine(request):
    """With the notations' markers as control tokens, and as text."""
    service = kind_of_service(request.param)
    yield Engine(service, request.param)
    service.close()


class Engine:
    def __init__(self, service: CompileService, marked: bool) -> None:
        self.service, self.marked = service, marked

    def tokens(self, text: str) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, MARKERS)) + ")", text) if self.marked else [text]
        ids = []
        for part in parts:
            ids += [258 + MARKERS.index(part)] if part in MARKERS and self.marked else part.encode()
        return ids

    def text(self, ids: list[int]) -> str:
        return b"".join(MARKERS[i - 258].encode() if i >= 258 else bytes([i]) for i in ids).decode(errors="replace")

    def cursor(self, spec: GrammarSpec):
        return self.service.compile_async(spec).result(60).cursor()

    def allowed(self, cursor) -> np.ndarray:
        n = 258 + len(MARKERS) * self.marked
        row = np.full((n + 31) // 32, -1, np.int32)
        cursor.fill(row)
        return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:n])

    def fits(self, spec: GrammarSpec, ids: list[int]) -> bool:
        cursor = self.cursor(spec)
        for token in ids:
            permitted = token in self.allowed(cursor)
            assert cursor.accept(token) == permitted
            if not permitted:
                return False
        return cursor.can_stop

    def reaches(self, spec: GrammarSpec, ids: list[int]) -> bool:
        """Whether the text comes too when what is forced is taken as it comes."""
        cursor, at = self.cursor(spec), 0
        while at < len(ids):
            forced = cursor.forced_tokens(64)
            for token in forced or ids[at : at + 1]:
                if ids[at : at + 1] != [token] or not cursor.accept(token):
                    return False
                at += 1
        return cursor.can_stop


def spec_of(family: str, tools: list[Tool] = TOOLS, *, parallel: bool = True) -> GrammarSpec:
    spec = auto_grammar(tools, TOOL_FAMILIES[family], None, parallel=parallel)
    assert spec is not None
    return spec


def calls_in(family: str, text: str) -> list[tuple[str, dict]]:
    """What the notation's own reader finds."""
    answer = parse_all(TOOL_FAMILIES[family].new(list(SCHEMAS)), text)
    assert all(call.complete for call in answer.calls), (text, answer)
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize("family", FAMILIES)
def test_free_text_and_exact_calls_are_taken(engine, family):
    spec = spec_of(family)
    for text in FREE:
        assert engine.fits(spec, engine.tokens(text)), text
        assert not calls_in(family, text), text
    for text in CALLS[family]:
        assert engine.fits(spec, engine.tokens(text)), text
        found = calls_in(family, text)
        assert engine.reaches(spec, engine.tokens(text)), text
        assert found[0] == ("get_weather", {"city": 'Rome "x"\n', "days": 3, "more": {"on": True}}), text
        for name, arguments in found:
            jsonschema.validate(arguments, SCHEMAS[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_that_break_the_schema_are_not_taken(engine, family):
    spec = spec_of(family)
    for text in CALLS[family]:
        for old, new in (
            ("3", "0"),
            ("3", "15"),
            ("3", '"3"'),
            ("get_weather", "get_time"),
            ("city", "town"),
            ('"Rome \\"x\\"\\n"', "7"),
            ("true", "1"),
        ):
            broken = text.replace(old, new)
            assert broken != text
            assert not engine.fits(spec, engine.tokens(broken)), broken
    for text in NOT_FREE.get(family, []):
        assert not engine.fits(spec, engine.tokens(text)), text


@pytest.mark.parametrize("family", FAMILIES)
def test_no_spelling_of_a_marker_gets_past_the_grammar(family):
    """Where markers are control tokens, the text cannot spell them: its reader would not see the difference."""
    service = kind_of_service(True)
    marked = Engine(service, True)
    spec = spec_of(family)
    for text in CALLS[family]:
        if any(marker in text for marker in MARKERS):
            assert not marked.fits(spec, list(text.encode())), text
    assert not marked.fits(spec, [OTHER])
    assert not marked.fits(spec, [*b"text ", OTHER])
    cursor = marked.cursor(spec)
    ids = marked.tokens(CALLS[family][0])
    at = next(i for i in range(len(ids)) if bytes(x for x in ids[:i] if x < 256).endswith(b"Rome"))
    assert all(map(cursor.accept, ids[:at]))
    assert not [i for i in marked.allowed(cursor) if i > 255]  # no control token is text inside a call
    service.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_a_walk_writes_after_the_call_has_begun_is_valid(engine, family):
    spec, found = spec_of(family), 0
    chooser = np.random.default_rng(7)
    for text in CALLS[family]:
        ids = engine.tokens(text)
        at = next(i for i in range(len(ids)) if b"get_weather" in bytes(x for x in ids[:i] if x < 256)) - 11
        for _ in range(4):
            cursor, said = engine.cursor(spec), ids[:at]
            assert all(map(cursor.accept, said))
            for step in range(400):
                if cursor.done or (cursor.can_stop and step > 60):
                    break
                options = [i for i in engine.allowed(cursor) if i != EOS]
                closing = [i for i in options if i > EOS or i in b'"}]),:']
                token = int(chooser.choice(closing if closing and (step > 40 or chooser.random() < 0.3) else options))
                assert cursor.accept(token)
                said.append(token)
            if not cursor.can_stop:
                continue
            for name, arguments in calls_in(family, engine.text(said)):
                jsonschema.validate(arguments, SCHEMAS[name])
                found += 1
    assert found > 4


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_where_parallel_calls_are_switched_off(engine, family):
    one = spec_of(family, parallel=False)
    several = [text for text in CALLS[family] if len(calls_in(family, text)) > 1]
    assert several
    for text in CALLS[family]:
        assert engine.fits(one, engine.tokens(text)) == (text not in several), text


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_is_constrained_where_a_tool_is_strict(family):
    served = serve(["hello"], server=ServerConfig(tool_call_parser=family))
    await choice(served, tools=[WEATHER, NOW])
    assert served.client.submits[-1].grammar.kind == "structural_tag"
    await choice(served, tools=[NOW])
    assert served.client.submits[-1].grammar is None


MULTIPLE = {"type": "object", "properties": {"n": {"type": "number", "multipleOf": 0.37}}}


@pytest.mark.parametrize("family", FAMILIES)
async def test_what_no_tag_can_hold_is_refused_with_the_tool_the_place_and_both_engines(family):
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": MULTIPLE}}
    response = await post(serve(server=ServerConfig(tool_call_parser=family)), tools=[NOW, tool])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools[1].function.parameters")
    for word in ("/properties/n/multipleOf", "multipleOf cannot be enforced", "xgrammar", "llguidance"):
        assert word in error["message"], error["message"]
    loose = {"type": "function", "function": {"name": "f", "parameters": MULTIPLE}}
    assert (await post(serve(server=ServerConfig(tool_call_parser=family)), tools=[loose])).status_code == 200


@pytest.mark.parametrize(
    ("family", "name", "properties", "why"),
    [
        ("pythonic", "get-weather", {}, "no name in Python"),
        ("pythonic", "lambda", {}, "no name in Python"),
        ("pythonic", "f", {"x-y": {}}, "'x-y' is no name for an argument"),
        ("pythonic", "f", {"class": {}}, "'class' is no name for an argument"),
        ("deepseek", "a\nb", {}, "not plain"),
    ],
)
def test_what_a_notation_cannot_write_is_refused(family, name, properties, why):
    tool = make_tool(name, "", {"type": "object", "properties": properties}, True, "tools[0].function.parameters")
    with pytest.raises(InvalidRequest, match=why) as caught:
        spec_of(family, [tool])
    assert caught.value.param == "tools[0].function.parameters"


def test_python_reads_the_arguments_as_json_does(engine):
    """Every kind of value, through Python's notation and back."""
    schema = {
        "type": "object",
        "properties": {
            "s": {"type": "string"}, "n": {"type": "number"}, "x": {"enum": [None, True, "a'\"\\", -1.5]},
            "l": {"type": "array", "items": {"type": "integer"}}, "o": {"type": "object"},
        },
    }  # fmt: skip
    spec = spec_of("pythonic", [make_tool("f", "", schema, True, "t")])
    cases = [
        {"s": "é\u2028\x7f\x01\\n'\"\t", "n": -0.5},
        {"n": 1e5, "x": "a'\"\\", "l": [1, -2], "o": {"a": {"b": [None, False]}}},
        {"x": None},
        {},
    ]
    for value in cases:
        members = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in value.items())
        text = f"[f({members})]"
        assert engine.fits(spec, engine.tokens(text)), text
        answer = parse_all(TOOL_FAMILIES["pythonic"].new(["f"]), text)
        assert [json.loads(call.arguments) for call in answer.calls] == [value]
    assert not engine.fits(spec, engine.tokens('[f("s")]'))
    assert not engine.fits(spec, engine.tokens("[f(o={'a': 1})]"))
