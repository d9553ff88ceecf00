"""A refusal names the keyword it speaks of, wherever that was merged from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from runtime.errors import InvalidRequest
from runtime.grammar.limits import Limits
from runtime.grammar.pointer import lookup
from runtime.grammar.prepare import Choice, prepare
from tests.grammar.test_random_schemas import some
from tests.grammar.toolkit import schema_spec

ARRAY, OBJECT, STRING = {"type": "array"}, {"type": "object"}, {"type": "string"}
FREE_ITEMS = {**ARRAY, "items": STRING, "uniqueItems": True}
TWO_PATTERNS = {**STRING, "allOf": [{"pattern": "^a.*$"}, {"pattern": "^.*b$"}]}


def refusal(schema: Any, backend: Choice) -> str:
    with pytest.raises(InvalidRequest) as caught:
        prepare(schema_spec(schema), backend, Limits())
    return str(caught.value)


def pointer(message: str) -> str:
    return message.split("'")[1]


@pytest.mark.parametrize(
    ("schema", "backend", "place"),
    [
        (FREE_ITEMS, "auto", "/uniqueItems"),
        ({**OBJECT, "properties": {"a/b": FREE_ITEMS}}, "auto", "/properties/a~1b/uniqueItems"),
        ({**ARRAY, "items": STRING, "allOf": [{"minItems": 2}, {"uniqueItems": True}]}, "auto", "/allOf/1/uniqueItems"),
        ({**ARRAY, "$ref": "#/$defs/x", "$defs": {"x": FREE_ITEMS}}, "auto", "/$defs/x/uniqueItems"),
        ({**ARRAY, "contains": STRING, "maxContains": 2}, "auto", "/maxContains"),
        ({**ARRAY, "allOf": [{"contains": STRING}, {"contains": {"const": 1}}]}, "auto", "/allOf/0/contains"),
        ({**ARRAY, "prefixItems": [STRING] * 300}, "auto", "/prefixItems"),
        ({**ARRAY, "items": [STRING] * 300}, "auto", "/items"),
        ({**OBJECT, "additionalProperties": STRING, "minProperties": 3}, "auto", "/minProperties"),
        ({**OBJECT, "patternProperties": {f"^{c}": STRING for c in "abcd"}}, "auto", "/patternProperties"),
        ({**STRING, "pattern": "^(ab){2,}$", "minLength": 6}, "xgrammar", "/pattern"),
        ({"allOf": [STRING, {"pattern": "^(ab){2,}$"}, {"minLength": 6}]}, "xgrammar", "/allOf/1/pattern"),
        ({**STRING, "minLength": 1, "not": {"pattern": "b$"}}, "xgrammar", "/not/pattern"),
        ({**STRING, "minLength": 40, "not": {"enum": ["b" * 50]}}, "xgrammar", "/minLength"),
        (TWO_PATTERNS, "xgrammar", "/allOf/0/pattern"),
        ({**OBJECT, "properties": {"n": {"multipleOf": 7}}}, "xgrammar", "/properties/n/multipleOf"),
        ({"type": "number", "allOf": [{"multipleOf": 0.3}]}, "xgrammar", "/allOf/0/multipleOf"),
        (
            {**OBJECT, "propertyNames": {"pattern": "^.*x$"}, "patternProperties": {"^a": STRING}},
            "xgrammar",
            "/propertyNames",
        ),
        (
            {**OBJECT, "patternProperties": {"^a.*b": STRING}, "additionalProperties": STRING},
            "xgrammar",
            "/patternProperties",
        ),
    ],
)
def test_the_keyword_is_named(schema: Any, backend: Choice, place: str) -> None:
    message = refusal(schema, backend)
    assert pointer(message) == place, message
    assert lookup(schema, place) is not None


@given(some())
@settings(max_examples=200)
def test_every_pointer_exists(schema: Any) -> None:
    for backend in ("auto", "xgrammar", "llguidance"):
        try:
            prepare(schema_spec(schema), backend, Limits())
        except InvalidRequest as error:
            message = str(error)
            if "JSON schema at '" in message and not message.startswith("JSON schema at '/'"):
                assert lookup(schema, pointer(message)) is not None, message


@pytest.mark.parametrize(
    ("schema", "place", "why"),
    [
        ({"if": {"type": "string", "maxItems": {}}, "then": {}}, "/if/maxItems", "must be an integer"),
        ({"$ref": "#/a/" + "9" * 5000, "a": [STRING]}, "/$ref", "points at nothing"),
        ({"$ref": "#/a/\u0663", "a": [STRING] * 9}, "/$ref", "points at nothing"),
        ({"$ref": "#/a/00", "a": [STRING]}, "/$ref", "points at nothing"),
    ],
)
def test_what_is_malformed_is_told_so(schema: Any, place: str, why: str) -> None:
    message = refusal(schema, "auto")
    assert pointer(message) == place, message
    assert why in message


def test_a_refusal_can_be_written() -> None:
    """A schema's key may hold half of a surrogate pair."""
    message = refusal({"$ref": "#/$defs/\ud800", "$defs": {"\ud800": FREE_ITEMS}}, "auto")
    assert "\\ud800" in message
    message.encode()
