"""Generated schemas: whatever a grammar produces, the reference validator calls valid."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.grammar.emit import schema_grammar
from runtime.grammar.printers import to_lark
from tests.grammar.toolkit import Toolkit, is_valid, schema_spec

KEYS = st.sampled_from(["a", "b", "ab", "ключ"])
SMALL = st.integers(0, 3)
VALUES = st.sampled_from([None, True, False, 0, 1, -3, 1.5, "a", "ab", '"q"', [], [1], {"a": 1}])
BOUNDS = st.sampled_from([-10, -2.5, -1, 0, 0.25, 1, 7, 100])


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any subset of the fields."""
    return st.fixed_dictionaries({}, optional=fields)


def typed(name: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return some(**fields).map(lambda schema: {"type": name, **schema})


SCALARS = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, True]),
    typed("integer", minimum=BOUNDS, maximum=BOUNDS, exclusiveMinimum=BOUNDS),
    typed("number", minimum=BOUNDS, exclusiveMaximum=BOUNDS, multipleOf=st.sampled_from([0.5, 2, 3])),
    typed("string", minLength=SMALL, maxLength=SMALL, pattern=st.sampled_from(["^a+$", "b", "^[ab]*c?$", "a|^b$"])),
    st.builds(lambda v: {"enum": v}, st.lists(VALUES, min_size=1, max_size=4)),
)


def compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    branches = st.lists(inner, min_size=1, max_size=3)
    props = st.dictionaries(KEYS, inner, max_size=3)
    required = st.lists(KEYS, max_size=2, unique=True)
    return st.one_of(
        typed(
            "object",
            properties=props,
            required=required,
            additionalProperties=st.one_of(st.booleans(), inner),
            patternProperties=st.dictionaries(st.sampled_from(["^a", "b$"]), inner, max_size=2),
            minProperties=SMALL,
            maxProperties=SMALL,
            dependentRequired=st.dictionaries(KEYS, st.lists(KEYS, max_size=2), max_size=1),
            dependentSchemas=st.dictionaries(KEYS, inner, max_size=1),
            unevaluatedProperties=st.booleans(),
        ),
        typed("array", items=inner, prefixItems=branches, minItems=SMALL, maxItems=SMALL, contains=inner),
        some(anyOf=branches, allOf=branches, oneOf=branches, properties=props, required=required, minimum=BOUNDS),
        st.builds(lambda a, b: {"allOf": [a], "not": b}, inner, SCALARS),
        st.builds(lambda c, t, e: {"if": c, "then": t, "else": e, "type": "object"}, inner, inner, inner),
    )


SCHEMAS = st.recursive(SCALARS, compound, max_leaves=6)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 999))
def test_what_is_produced_is_valid(kit: Toolkit, schema: Any, seed: int) -> None:
    for backend in ("xgrammar", "llguidance"):
        try:
            compiled = kit.compile(schema_spec(schema), backend)
        except InvalidRequest:
            continue
        text = kit.random_text(compiled, seed, max_tokens=40)
        assert text is None or is_valid(schema, text), (backend, text)


@settings(max_examples=150, deadline=None)
@given(schema=SCHEMAS)
def test_every_schema_is_printed_or_refused(schema: Any) -> None:
    try:
        grammar = schema_grammar(schema, "fixed")
    except InvalidRequest as refusal:
        grammar, reason = None, str(refusal)
    if grammar is None:
        assert "JSON schema at '" in reason
    else:
        assert to_lark(grammar)
