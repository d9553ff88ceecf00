"""A schema that declares its draft is read as that draft: rows and walks, judged by the validator of the draft."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, get_args

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from runtime.errors import InvalidRequest
from runtime.grammar.backends import BackendName
from tests.grammar.test_random_schemas import SCHEMAS
from tests.grammar.toolkit import Toolkit, schema_spec

BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
DRAFTS = {
    "4": "http://json-schema.org/draft-04/schema#",
    "6": "http://json-schema.org/draft-06/schema#",
    "7": "http://json-schema.org/draft-07/schema#",
    "2019": "https://json-schema.org/draft/2019-09/schema",
    "2020": "https://json-schema.org/draft/2020-12/schema",
}
INT, STR = {"type": "integer"}, {"type": "string"}


def valid(schema: Any, text: str) -> bool:
    """The verdict of the declared draft's validator."""
    return bool(jsonschema.validators.validator_for(schema)(schema).is_valid(json.loads(text)))


@dataclass(frozen=True)
class Differs:
    """`texts`: each is judged in each draft. `never`: drafts in which the schema is malformed, or not enforced."""

    name: str
    schema: dict[str, Any]
    texts: tuple[str, ...]
    never: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def array(**words: Any) -> dict[str, Any]:
    return {"type": "array", "maxItems": 3, **words}


ROWS = [
    Differs("prefixItems", array(prefixItems=[INT, STR]), ("[]", '[1, "a"]', '["a"]', '["a", 1]')),
    Differs("prefixItems beside items", array(prefixItems=[INT], items=STR), ('[1, "a"]', '["a", "a"]', "[1]")),
    Differs("an array of items", array(items=[INT], additionalItems=STR), ('[1, "a"]', "[1, 2]", '["a"]'), ("2020",)),
    Differs("additionalItems alone", array(additionalItems=STR, items=INT), ("[1, 2]", '[1, "a"]')),
    Differs("minContains", array(items=INT, contains={"const": 5}, minContains=2), ("[5]", "[5, 5]", "[1]", "[]")),
    Differs("minContains: 0", array(items=INT, contains={"minimum": 5}, minContains=0), ("[]", "[1]", "[5]")),
    Differs("contains", array(items=INT, contains={"minimum": 5}), ("[]", "[1]", "[5]")),
    Differs("maxContains", array(items=INT, contains={"const": 5}, maxContains=1), ("[5]", "[5, 5]"), ("2019", "2020")),
    Differs("const", {"type": "integer", "const": 5}, ("5", "6")),
    Differs("propertyNames", {"type": "object", "propertyNames": {"pattern": "^k"}}, ('{"k": 1}', '{"a": 1}', "{}")),
    Differs("if", {"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 7}}, ("1", "6", "8")),
    Differs("else alone", {"type": "integer", "if": {"minimum": 5}, "else": False}, ("1", "6")),
    Differs(
        "siblings of $ref",
        {"definitions": {"a": INT}, "properties": {"x": {"$ref": "#/definitions/a", "maximum": 5}}}
        | {"type": "object", "required": ["x"]},
        ('{"x": 5}', '{"x": 6}', '{"x": "a"}'),
    ),
    Differs(
        "siblings of $ref at the root", {"definitions": {"a": INT}, "$ref": "#/definitions/a", "maximum": 5}, ("5", "6")
    ),
    Differs(
        "a negated $ref with siblings",
        {"definitions": {"a": {"minimum": 3}}, "type": "integer", "not": {"$ref": "#/definitions/a", "maximum": 5}},
        ("2", "4", "6"),
    ),
    Differs("a negated word of another draft", {"type": "integer", "not": {"minimum": 3, "const": 5}}, ("2", "4", "5")),
    Differs(
        "a flag beside a bound",
        {"type": "integer", "minimum": 3, "exclusiveMinimum": True},
        ("2", "3", "4"),
        ("6", "7", "2019", "2020"),
    ),
    Differs(
        "a flag that is off",
        {"type": "number", "maximum": 3, "exclusiveMaximum": False},
        ("2", "3", "3.5", "4"),
        ("6", "7", "2019", "2020"),
    ),
    Differs(
        "a negated flag",
        {"type": "integer", "not": {"minimum": 3, "exclusiveMinimum": True}},
        ("2", "3", "4"),
        ("6", "7", "2019", "2020"),
    ),
    Differs("a number as a strict bound", {"type": "integer", "exclusiveMinimum": 3}, ("3", "4"), ("4",)),
    Differs(
        "dependentRequired",
        {"type": "object", "properties": {"a": INT, "b": INT}, "dependentRequired": {"a": ["b"]}},
        ('{"a": 1}', '{"a": 1, "b": 2}', '{"b": 2}'),
    ),
    Differs(
        "dependentSchemas",
        {"type": "object", "properties": {"a": INT, "b": INT}, "dependentSchemas": {"a": {"required": ["b"]}}},
        ('{"a": 1}', '{"a": 1, "b": 2}', '{"b": 2}'),
    ),
    Differs(
        "dependencies",
        {"type": "object", "properties": {"a": INT, "b": INT}, "dependencies": {"a": ["b"]}},
        ('{"a": 1}', '{"a": 1, "b": 2}', '{"b": 2}'),
    ),
    Differs(
        "unevaluatedProperties",
        {"type": "object", "allOf": [{"properties": {"a": INT}}], "additionalProperties": True, "minProperties": 1}
        | {"unevaluatedProperties": False},
        ('{"a": 1}', '{"b": 1}'),
    ),
    Differs("unevaluatedItems", array(prefixItems=[INT], unevaluatedItems=False), ("[]", "[1]", "[1, 2]")),
    Differs("nullable", {"type": "integer", "nullable": True}, ("1", "null")),
    Differs("contentSchema", {"type": "string", "contentSchema": {}}, ('"a"', "1"), ("2019", "2020")),
    Differs("$dynamicRef", {"type": "integer", "$dynamicRef": "#a"}, ("1", '"a"'), ("2020",)),
    Differs("$recursiveRef", {"type": "integer", "$recursiveRef": "#"}, ("1", '"a"'), ("2019",)),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("draft", DRAFTS)
def test_words_mean_what_they_mean_in_the_declared_draft(kit: Toolkit, draft: str, row: Differs) -> None:
    schema = {"$schema": DRAFTS[draft], **row.schema}
    for backend in BACKENDS:
        if draft in row.never:
            with pytest.raises(InvalidRequest, match="JSON schema at '/"):
                kit.compile(schema_spec(schema), backend)
            continue
        compiled = kit.compile(schema_spec(schema), backend)
        for text in row.texts:
            assert kit.takes(compiled, text) == valid(schema, text), (backend, text)
        for seed in range(3):
            walked = kit.random_text(compiled, seed)
            assert walked is None or valid(schema, walked), (backend, walked)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, draft=st.sampled_from(sorted(DRAFTS)), seed=st.integers(0, 999))
def test_what_is_produced_is_valid_in_the_declared_draft(kit: Toolkit, schema: Any, draft: str, seed: int) -> None:
    schema = {"$schema": DRAFTS[draft], **(schema if isinstance(schema, dict) else {})}
    kind = jsonschema.validators.validator_for(schema)
    assume(kind(kind.META_SCHEMA).is_valid(schema))
    written = json.dumps(
        schema
    )  # jsonschema's 2019-09 forgets that a schema under additionalProperties evaluates a key
    assume(draft != "2019" or "unevaluatedProperties" not in written or "additionalProperties" not in written)
    for backend in BACKENDS:
        try:
            compiled = kit.compile(schema_spec(schema), backend)
        except InvalidRequest:
            continue
        text = kit.random_text(compiled, seed, max_tokens=40)
        assert text is None or valid(schema, text), (backend, text)


@pytest.mark.parametrize(
    ("uri", "taken"),
    [
        ("http://json-schema.org/draft-07/schema", False),
        ("https://json-schema.org/draft-07/schema#", False),
        ("https://json-schema.org/draft/2020-12/schema#", True),
        ("https://example.org/mine", True),
        (None, True),
    ],
)
def test_which_draft_is_meant(kit: Toolkit, uri: str | None, taken: bool) -> None:
    """An undeclared or unknown draft is read as the union of them."""
    schema = array(prefixItems=[INT], items=STR, minItems=2) | ({} if uri is None else {"$schema": uri})
    assert kit.takes(kit.compile(schema_spec(schema)), '[1, "a"]') == taken
    assert kit.takes(kit.compile(schema_spec(schema)), '["a", "a"]') != taken


def test_a_draft_that_is_not_read_is_refused(kit: Toolkit) -> None:
    schema = {"$schema": "http://json-schema.org/draft-03/schema#", "type": "integer"}
    with pytest.raises(InvalidRequest, match=r"at '/\$schema': must be one of the drafts 4 to 2020-12, not draft-03"):
        kit.compile(schema_spec(schema))


def test_the_nearest_declaration_counts(kit: Toolkit) -> None:
    """Schemas of generators are put into others with their `$schema`."""
    inner = {"$schema": DRAFTS["7"], **array(prefixItems=[INT], items=STR, minItems=1)}
    schema = {
        "$schema": DRAFTS["2020"],
        "type": "object",
        "properties": {"old": inner, "new": array(prefixItems=[INT], items=STR, minItems=1)},
        "required": ["old", "new"],
    }
    compiled = kit.compile(schema_spec(schema))
    for text in ('{"old": ["a"], "new": [1]}', '{"old": [1], "new": [1]}', '{"old": ["a"], "new": ["a"]}'):
        assert kit.takes(compiled, text) == valid(schema, text), text


@pytest.mark.parametrize(
    ("draft", "named"), [("4", {"id": "#n"}), ("6", {"$id": "#n"}), ("7", {"$id": "#n"}), ("2019", {"$anchor": "n"})]
)
def test_places_are_named_in_the_words_of_the_draft(kit: Toolkit, draft: str, named: dict[str, str]) -> None:
    schema = {"$schema": DRAFTS[draft], "definitions": {"a": INT | named}, "properties": {"x": {"$ref": "#n"}}}
    schema |= {"type": "object", "required": ["x"]}
    compiled = kit.compile(schema_spec(schema))
    for text in ('{"x": 1}', '{"x": "a"}'):
        assert kit.takes(compiled, text) == valid(schema, text)
    other = {"4": {"$anchor": "n"}, "2019": {"id": "#n"}}.get(draft, {"$anchor": "n"})
    with pytest.raises(InvalidRequest, match="the anchor '#n' is not defined"):
        kit.compile(schema_spec(schema | {"definitions": {"a": INT | other}}))


def test_a_document_inside_another_is_told_in_the_words_of_the_draft(kit: Toolkit) -> None:
    def around(draft: str, inner: Any) -> Any:
        return {"$schema": DRAFTS[draft], "definitions": {"a": INT}, "type": "object", "properties": {"x": inner}}

    reference = {"$ref": "#/definitions/a"}
    for draft, word in (("4", "id"), ("6", "$id"), ("7", "$id"), ("2020", "$id")):
        with pytest.raises(InvalidRequest, match="a schema document inside another"):
            kit.compile(schema_spec(around(draft, {word: "http://x.org/y", "allOf": [reference]})))
    for draft, inner in (
        ("4", {"id": "/properties/x"} | INT),
        ("7", reference | {"$id": "y"}),
        ("7", INT | {"id": "y"}),
    ):
        compiled = kit.compile(schema_spec(around(draft, inner)))
        assert kit.takes(compiled, '{"x": 1}')
        assert not kit.takes(compiled, '{"x": "a"}')


class Tone(Enum):
    WARM = "warm"
    COLD = "cold"


class Counts(BaseModel):
    by_tone: dict[Tone, int]
    by_word: dict[Literal["a", "b"], int] = {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_of_an_enum(kit: Toolkit, backend: BackendName) -> None:
    compiled = kit.compile(schema_spec(Counts.model_json_schema()), backend)
    for text in ('{"by_tone": {"warm": 1, "cold": 2}}', '{"by_tone": {}, "by_word": {"a": 1}}'):
        assert kit.takes(compiled, text)
        assert Counts.model_validate_json(text)
    for text in ('{"by_tone": {"hot": 1}}', '{"by_tone": {"warm": "x"}}', '{"by_tone": {}, "by_word": {"c": 1}}'):
        assert not kit.takes(compiled, text)
    found = [kit.random_text(compiled, seed) for seed in range(12)]
    assert any(Counts.model_validate_json(text).by_tone for text in found if text is not None)


K = "#/$defs/k"


@pytest.mark.parametrize(
    ("k", "more", "good", "bad"),
    [
        ({"enum": ["aa", "bb"]}, {"propertyNames": {"$ref": K}, "minProperties": 1}, ['{"aa": 1}'], ["{}", '{"c": 1}']),
        (
            STR | {"maxLength": 3},
            {"propertyNames": {"$ref": K}, "properties": {"ab": INT}, "required": ["ab"]},
            ['{"ab": 1}', '{"ab": 1, "abc": 2}'],
            ['{"abcd": 1}', '{"ab": 1, "abcd": 2}'],
        ),
        (
            {"enum": ["aa", "bb"]},
            {"propertyNames": {"anyOf": [{"$ref": K}, {"pattern": "^z+$"}, {"const": "q"}, INT]}},
            ['{"aa": 1}', '{"zzz": 1, "q": 2}', "{}"],
            ['{"a": 1}', '{"1": 1}', '{"qz": 1}'],
        ),
        (
            {"enum": ["aa", "bb", "abc"]},
            {"propertyNames": {"allOf": [{"$ref": K}, {"maxLength": 2}], "not": {"const": "bb"}}},
            ['{"aa": 1}'],
            ['{"bb": 1}', '{"abc": 1}'],
        ),
        (
            STR | {"pattern": "^[ab]{2}$", "maxLength": 4},
            {"propertyNames": {"anyOf": [{"$ref": K}, {"minLength": 4, "maxLength": 5}]}},
            ['{"ab": 1, "cdef": 2}'],
            ['{"abc": 1}', '{"a": 1}', '{"abcdef": 1}'],
        ),
        (
            {"$ref": "#/$defs/other"},
            {"propertyNames": {"oneOf": [{"$ref": K}, {"const": "c"}]}, "minProperties": 1},
            ['{"x": 1}', '{"c": 1}'],
            ["{}", '{"y": 1}'],
        ),
        (INT, {"propertyNames": {"$ref": K}}, ["{}"], ['{"a": 1}', '{"1": 1}']),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_names_of_keys_behind_references_and_branches(
    kit: Toolkit, backend: BackendName, k: Any, more: Any, good: list[str], bad: list[str]
) -> None:
    schema = {"$defs": {"k": k, "other": {"enum": ["x"]}}, "type": "object", "additionalProperties": INT, **more}
    if backend == "xgrammar" and "properties" in more:
        with pytest.raises(InvalidRequest, match="llguidance can"):
            kit.compile(schema_spec(schema), backend)
        return
    compiled = kit.compile(schema_spec(schema), backend)
    for text in good:
        assert valid(schema, text)
        assert kit.takes(compiled, text), text
    for text in bad:
        assert not kit.takes(compiled, text), text
    for seed in range(4):
        walked = kit.random_text(compiled, seed)
        assert walked is None or valid(schema, walked), walked
