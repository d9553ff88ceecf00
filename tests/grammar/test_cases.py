"""What hurt users of structured output elsewhere, case by case. Keyword cases are rows of `keywords.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.grammar.backends import BackendName, Llguidance, Xgrammar
from runtime.grammar.pieces import Pieces
from runtime.grammar.protocol import Vocabulary
from runtime.messages import GrammarSpec
from tests.grammar.toolkit import Toolkit, allowed, schema_spec

BACKENDS = pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
STR = {"type": "string"}


def takes(kit: Toolkit, schema: Any, text: str, backend: BackendName, **options: Any) -> bool:
    return kit.takes(kit.compile(schema_spec(schema, **options), backend), text)


@BACKENDS
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "number", "minimum": -4, "maximum": 4}, ["-0.5", "4", "0", "-4"], ["4.1", "-4.01", "5"]),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.1"], ["0", "-0.1"]),
        ({"type": "integer", "minimum": 2}, ["2", "10"], ["1"]),
        ({"type": "integer", "minimum": -5}, ["-3", "-5", "0", "12"], ["-6"]),
        ({"type": "number", "minimum": 1, "maximum": 5}, ["1", "4.99", "5.0"], ["5.7", "0.9"]),
        ({"type": "integer", "minimum": 0, "maximum": 20000000000}, ["20000000000", "7"], ["20000000001", "-1"]),
        ({"type": "integer", "minimum": 0, "maximum": 1e30}, ["1" + "0" * 30], ["2" + "0" * 30]),
        ({"type": "integer"}, ["0", "-7"], ["02", "-0", "007"]),
    ],
    ids=str,
)
def test_d6_d7_d9_numbers(kit: Toolkit, backend: BackendName, schema: Any, good: list[str], bad: list[str]) -> None:
    assert all(takes(kit, schema, text, backend) for text in good)
    assert not any(takes(kit, schema, text, backend) for text in bad)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 10, "maximum": 5},
        {"type": "string", "format": "uuid", "maxLength": 10},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "string", "enum": [1, 2]},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "string", "pattern": "^a+$", "allOf": [{"pattern": "^b+$"}]},
        {"type": "string", "pattern": "^(ab)*$", "minLength": 3, "maxLength": 3},
        {"patternProperties": {"é": {"type": "object"}}, "minProperties": 1}
        | {"allOf": [{"patternProperties": {"é": {"type": "number"}}}]},
        {"patternProperties": {"^a": True}, "propertyNames": {"pattern": "^x"}, "minProperties": 1},
        False,
    ],
    ids=str,
)
def test_d3_d7_a_schema_without_any_value_is_a_400(kit: Toolkit, schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="no value can match"):
        kit.compile(schema_spec(schema))


@BACKENDS
def test_d9_two_enums_never_share_their_values(kit: Toolkit, backend: BackendName) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["ab", "c_d"]}, "b": {"enum": ["ab_c", "d"]}},
        "required": ["a", "b"],
    }
    assert takes(kit, schema, '{"a": "ab", "b": "d"}', backend)
    assert not takes(kit, schema, '{"a": "ab", "b": "ab"}', backend)
    assert not takes(kit, schema, '{"a": "d", "b": "d"}', backend)


@BACKENDS
def test_d21_separators_do_not_break_quoting(kit: Toolkit, backend: BackendName) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
    for whitespace in ("fixed", "flexible"):
        assert not takes(kit, schema, """{"a": 1, "b': [{" """.strip(), backend, whitespace=whitespace)
        assert takes(kit, schema, '{"a": 1, "b\'": [{}]}', backend, whitespace=whitespace)


def test_d10_a_control_token_spelled_like_json_never_matches() -> None:
    """A special piece whose text would close the string."""
    pieces = (b'"', b"a", b"[", b"]", b"{", b"}", b'"]}', b"<end>", b"q", b":", b" ", b",", b'": ["')
    vocab = Vocabulary(pieces, len(pieces), (7,), frozenset({6, 7}))
    small = Toolkit(vocab, Pieces(vocab), {"xgrammar": Xgrammar(vocab), "llguidance": Llguidance(vocab, Pieces(vocab))})
    schema = {"type": "object", "properties": {"q": {"type": "array", "items": STR}}, "required": ["q"]}
    for backend in ("xgrammar", "llguidance"):
        compiled = small.compile(schema_spec(schema), backend)
        found = [small.random_text(compiled, seed) for seed in range(500)]  # any allowed token: the highest temperature
        assert all(isinstance(json.loads(text or "")["q"], list) for text in found)
        cursor = compiled.cursor()
        for token in (4, 0, 8, 12, 1):
            assert cursor.accept(token)
        assert not cursor.accept(6)


@BACKENDS
def test_d18_every_stop_id_ends_a_complete_text_and_nothing_else_follows(kit: Toolkit, backend: BackendName) -> None:
    compiled = kit.compile(GrammarSpec(kind="regex", spec="[0-9]{3}"), backend)
    cursor = compiled.cursor()
    stops = set(kit.vocab.stop_ids)
    assert len(stops) > 1
    for token in kit.pieces.split(b"123"):
        assert not stops & set(allowed(cursor, kit.n_words).tolist())
        assert cursor.accept(token)
    assert set(allowed(cursor, kit.n_words).tolist()) == stops
    assert cursor.done
    for stop in stops:
        ended = cursor.fork()
        assert ended.accept(stop)
        assert not any(ended.accept(t) for t in kit.pieces.split(b"456"))


@BACKENDS
def test_e3_flexible_whitespace_cannot_go_on_for_ever(kit: Toolkit, backend: BackendName) -> None:
    compiled = kit.compile(schema_spec({"type": "object"}, whitespace="flexible"), backend)
    cursor = compiled.cursor()
    assert cursor.accept(kit.pieces.split(b"{")[0])
    newline = kit.pieces.split(b"\n")[0]
    accepted = [cursor.accept(newline) for _ in range(40)]
    assert 1 <= sum(accepted) <= 2


@BACKENDS
def test_keys_and_strings_may_hold_anything_json_can(kit: Toolkit, backend: BackendName) -> None:
    value = {'quo"te': "back\\slash", "кл\tюч": "\u0001\n", "": "🏳️‍🌈"}
    schema = {"type": "object", "properties": {k: {"const": v} for k, v in value.items()}, "required": list(value)}
    text = json.dumps(value, ensure_ascii=False)
    assert takes(kit, schema, text, backend)
    assert takes(kit, {"type": "object"}, text, backend)


def test_a_token_that_cannot_be_written_takes_its_branch_along(kit: Toolkit) -> None:
    """It would fail while an answer is generated, wherever a lexer needs it."""
    impossible = {"type": "string", "pattern": "^a+$", "allOf": [{"pattern": "^b+$"}]}
    schema = {"anyOf": [{"type": "object", "properties": {"x": impossible}, "required": ["x"]}, STR]}
    compiled = kit.compile(schema_spec(schema), "llguidance")
    assert kit.takes(compiled, '"x"')
    assert not kit.takes(compiled, "{")
    keys = {"patternProperties": {"^a": STR}, "allOf": [{"patternProperties": {"^a": {"minLength": 1}}}]}
    assert kit.takes(kit.compile(schema_spec({"type": "object", **keys}), "llguidance"), '{"ab": "c"}')


@BACKENDS
def test_odd_characters_may_stand_in_constants_and_keys(kit: Toolkit, backend: BackendName) -> None:
    """Controls, separators, private and non-characters, each block of them in a grammar of its own."""
    blocks = [range(0x80), range(0x80, 0x100), range(0x2000, 0x2100), range(0xE000, 0xE040), range(0xFDD0, 0xFDF0)]
    for block in [*blocks, range(0xFEF0, 0x10000), range(0x1FFFE, 0x20000), range(0x10FFFE, 0x110000)]:
        text = "".join(map(chr, block))
        schema = {"type": "object", "properties": {text: {"const": text}}, "required": [text]}
        cursor = kit.compile(schema_spec(schema), backend).cursor()
        spelled = json.dumps({text: text}, ensure_ascii=False)
        assert all(cursor.accept(token) for token in kit.pieces.split(spelled.encode())), block
        assert cursor.can_stop


@BACKENDS
def test_choices_are_taken_whole(kit: Toolkit, backend: BackendName) -> None:
    compiled = kit.compile(GrammarSpec(kind="choices", spec=json.dumps(["cat", "catfish", 'a"\n', ""])), backend)
    for text in ["cat", "catfish", 'a"\n', ""]:
        assert kit.takes(compiled, text), text
    assert not kit.takes(compiled, "catf")
    assert not kit.takes(compiled, "dog")


@BACKENDS
@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("[0-9]{3}", ["123"], ["12", "1234", "12a"]),
        ("a|bc", ["a", "bc"], ["abc", ""]),
        ("^\\w+@x\\.org$", ["me_2@x.org"], ["@x.org", "me@xxorg"]),
        ("(ab?)*", ["", "a", "abaab"], ["b"]),
        ("é[^\\n]?", ["é", "é😀"], ["é\n", "e"]),
        ("\\u{1F600}+", ["😀😀"], [""]),
    ],
)
def test_a_regex_matches_the_whole_text(
    kit: Toolkit, backend: BackendName, pattern: str, good: list[str], bad: list[str]
) -> None:
    compiled = kit.compile(GrammarSpec(kind="regex", spec=pattern), backend)
    assert all(kit.takes(compiled, text) for text in good)
    assert not any(kit.takes(compiled, text) for text in bad)


def test_xgrammar_says_what_it_cannot_and_who_can(kit: Toolkit) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 7}}}
    with pytest.raises(InvalidRequest) as caught:
        kit.compile(schema_spec(schema), "xgrammar")
    message = "JSON schema at '/properties/n/multipleOf': multipleOf cannot be enforced by xgrammar; llguidance can."
    assert str(caught.value) == message


@BACKENDS
def test_bytes_that_are_no_utf8_are_never_text(kit: Toolkit, backend: BackendName) -> None:
    """A model with byte tokens could spell a surrogate (ED B5 80), which no JSON reader takes."""
    byte = {piece: token for token, piece in enumerate(kit.vocab.token_bytes) if len(piece) == 1}
    cursor = kit.compile(schema_spec(STR), backend).cursor()
    assert cursor.accept(byte[b'"'])
    assert cursor.accept(byte[b"\xed"])
    assert not cursor.accept(byte[b"\xb5"])
    assert cursor.accept(byte[b"\x9f"])
    assert cursor.accept(byte[b"\xbf"])


@BACKENDS
@pytest.mark.parametrize("n", [300, 2500])
def test_thousands_of_constants(kit: Toolkit, backend: BackendName, n: int) -> None:
    """An engine that follows every constant by itself gives up at some thousand, at the first token."""
    words = [f"{i:08x}" for i in range(n)]
    compiled = kit.compile(schema_spec({"enum": words}), backend)
    assert kit.takes(compiled, f'"{words[-1]}"')
    assert not kit.takes(compiled, f'"{n:08x}"')
    cursor = compiled.cursor()
    assert all(cursor.accept(token) for token in cursor.forced_tokens(4))


@BACKENDS
def test_a_constant_that_begins_another(kit: Toolkit, backend: BackendName) -> None:
    words = ["a", "ab", "abc d", "b"]
    compiled = kit.compile(GrammarSpec(kind="choices", spec=json.dumps(words)), backend)
    assert all(kit.takes(compiled, word) for word in words)
    assert not kit.takes(compiled, "abc")
    numbers = kit.compile(schema_spec({"type": "array", "items": {"enum": [1, 12, 123]}}), backend)
    assert kit.takes(numbers, "[12, 1, 123]")
