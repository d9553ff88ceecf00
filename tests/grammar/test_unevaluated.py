"""`unevaluatedProperties: false` and `unevaluatedItems: false`: only what was evaluated by schemas that hold counts."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.grammar.nodes import Never, matches
from runtime.grammar.schema import Normaliser
from tests.grammar.test_random_schemas import some
from tests.grammar.toolkit import Toolkit, is_valid, schema_spec

NULL = {"type": "null"}
KEYS = ("a", "b", "k")
VALUES = (None, 1, False)
_ABSENT = object()


def every_object() -> list[dict[str, Any]]:
    rows = product((_ABSENT, *VALUES), repeat=len(KEYS))
    return [{k: v for k, v in zip(KEYS, row, strict=True) if v is not _ABSENT} for row in rows]


def every_array() -> list[list[Any]]:
    return [list(row) for n in range(4) for row in product(VALUES, repeat=n)]


OBJECTS = [
    ({"not": {"properties": {"q": {"type": "integer"}}, "required": ["q"]}}, ["{}"], ['{"q": null}']),
    (
        {"properties": {"a": NULL}, "dependentSchemas": {"a": {"properties": {"b": NULL}}}},
        ["{}", '{"a": null}', '{"a": null, "b": null}'],
        ['{"b": null}'],
    ),
    (
        {"dependentSchemas": {"ab": {"additionalProperties": {"const": False}}}},
        ["{}", '{"ab": false}', '{"ab": false, "anything": false}'],
        ['{"anything": false}'],
    ),
    (
        {"if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "else": {"required": ["k"]}},
        ['{"k": 1}'],
        ['{"k": false}', "{}"],
    ),
    (
        {"if": {"required": ["k"], "properties": {"k": NULL}}, "then": True, "else": {"properties": {"z": NULL}}},
        ["{}", '{"k": null}', '{"z": null}'],
        ['{"k": "", "z": null}', '{"k": ""}', '{"k": null, "z": null}'],
    ),
    ({"enum": [{"a": 1}, {"b": 1}], "properties": {"a": True}}, ['{"a": 1}'], ['{"b": 1}']),
    (
        {"anyOf": [{"properties": {"a": NULL}}, {"properties": {"b": NULL}}]},
        ['{"a": null}', '{"b": null}'],
        ['{"c": 1}'],
    ),
    ({"not": {"not": {"required": ["a"], "properties": {"a": NULL}}}, "properties": {"b": NULL}}, [], ['{"a": null}']),
    ({"patternProperties": {"^x": NULL}, "properties": {"a": NULL}}, ['{"a": null, "xy": null}'], ['{"b": null}']),
]


@pytest.mark.parametrize("backend", ["auto", "llguidance"])
@pytest.mark.parametrize(("rest", "good", "bad"), OBJECTS, ids=str)
def test_keys_that_only_a_complement_names_are_not_evaluated(
    kit: Toolkit, backend: Any, rest: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    schema = {"type": "object", **rest, "unevaluatedProperties": False}
    assert all(is_valid(schema, text) for text in good)
    assert not any(is_valid(schema, text) for text in bad)
    if not good:
        with pytest.raises(InvalidRequest, match="no value can match"):
            kit.compile(schema_spec(schema), backend)
        return
    compiled = kit.compile(schema_spec(schema), backend)
    assert backend == "llguidance" or all(kit.takes(compiled, text) for text in good)
    assert not any(kit.takes(compiled, text) for text in bad)


KEY = st.sampled_from(KEYS)
VALUE = st.sampled_from([True, NULL, {"const": 1}, {"type": "integer"}])
PROPS = st.fixed_dictionaries(
    {"properties": st.dictionaries(KEY, VALUE, min_size=1, max_size=2)},
    optional={"required": st.lists(KEY, min_size=1, max_size=1)},
)
LEAF = st.one_of(
    PROPS,
    some(
        additionalProperties=VALUE,
        patternProperties=st.dictionaries(st.sampled_from(["a", "^[ab]$"]), VALUE, min_size=1, max_size=1),
        enum=st.lists(st.sampled_from(every_object()[:24]), min_size=1, max_size=3),
        unevaluatedProperties=st.booleans(),
    ),
    some(
        prefixItems=st.lists(VALUE, min_size=1, max_size=2),
        minItems=st.integers(0, 2),
        items=VALUE,
        contains=VALUE,
        unevaluatedItems=st.booleans(),
    ),
)
TUPLE = some(minItems=st.integers(1, 2), maxItems=st.integers(1, 2), required=st.lists(KEY, min_size=1, max_size=1))


def annotated() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas whose keywords evaluate keys and items in one alternative and not in another."""
    negatable = st.one_of(PROPS, TUPLE, PROPS.map(lambda s: {"not": s}))
    conditions = st.fixed_dictionaries({"if": negatable}, optional={"then": LEAF, "else": LEAF})
    needs = st.fixed_dictionaries({"dependentSchemas": st.dictionaries(KEY, LEAF, min_size=1, max_size=2)})
    choices = st.fixed_dictionaries({"anyOf": st.lists(LEAF, min_size=1, max_size=2)})
    parts = st.one_of(LEAF, negatable.map(lambda s: {"not": s}), conditions, needs, choices)
    return st.one_of(
        parts, st.builds(lambda a, b: {"allOf": [a, b]}, parts, parts), st.builds(dict.__or__, parts, PROPS)
    )


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=annotated(), kind=st.sampled_from(["object", "array"]))
def test_the_normal_form_holds_valid_values_only(schema: dict[str, Any], kind: str) -> None:
    closed = {"type": kind, **schema, "unevaluatedProperties": False, "unevaluatedItems": False}
    normaliser = Normaliser(closed)
    try:
        node = normaliser.root()
    except InvalidRequest:
        node = Never()
    for value in every_object() if kind == "object" else every_array():
        assert not matches(node, value, normaliser.resolve) or is_valid(closed, json.dumps(value)), value
