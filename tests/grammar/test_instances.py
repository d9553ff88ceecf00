"""Values of generated schemas: none that the reference validator calls invalid is taken, and the valid ones are.

Taken is what is written as docs/structured.md says, and belongs to the subset it describes. `derive` stays within that
subset: keys that a schema does not list only where it says something of others, values of one type where all keywords
speak of it, whole numbers without a point, no escapes. Left out of the second half by name: LESS and NO_ORDER.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.grammar.backends import BackendName
from tests.grammar.test_random_schemas import BOUNDS, KEYS, SCALARS, SCHEMAS, VALUES
from tests.grammar.toolkit import Toolkit, is_valid, schema_spec

LESS = {"not", "if", "oneOf"}  # complements are smaller than they could be
NO_ORDER = {"allOf", "anyOf", "dependentSchemas", "dependentRequired", "patternProperties"}  # whose keys come where?
STRINGS = st.sampled_from(["", "a", "b", "aa", "ab", "abc", "aab", "c", "日本"])
ANY = VALUES | st.dictionaries(KEYS, VALUES, max_size=2) | st.lists(VALUES, max_size=3) | BOUNDS | STRINGS


def words_of(schema: Any) -> set[str]:
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    own: set[str] = set(schema) if isinstance(schema, dict) else set()
    return own.union(*map(words_of, inner))


def derive(draw: Any, schema: Any) -> Any:
    """A value that is probably one of the schema's; the validator has the last word."""
    assume(schema is not False)
    if schema is True or not schema:
        return draw(VALUES)
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"]))
    parts = [schema, *schema.get("allOf", ())]
    if "anyOf" in schema:
        parts.append(draw(st.sampled_from(schema["anyOf"])))
    parts = [part for part in parts if isinstance(part, dict)]
    told = [part for part in parts if set(part) - {"allOf", "anyOf"}]
    if not told or told[0] is not schema:
        return derive(draw, draw(st.sampled_from(parts[1:]))) if parts[1:] else draw(VALUES)
    match schema.get("type"):
        case "null":
            return None
        case "boolean":
            return draw(st.booleans())
        case "integer":
            return int(draw(near_bounds(schema)))
        case "number":
            return draw(near_bounds(schema))
        case "string":
            return draw(STRINGS)
        case "array":
            return items(draw, schema)
        case None if "minimum" in schema and not {"properties", "required"} & set(schema):
            return draw(near_bounds(schema))
    return properties(draw, [part for part in parts if part.get("type", "object") == "object"])


def near_bounds(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    named = [schema[k] for k in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if k in schema]
    near = [bound + step for bound in named for step in (-1, -0.25, 0, 0.25, 1)]
    return st.sampled_from([*near, *[bound for bound in named for _ in "abc"], -12, -2.75, 0, 0.5, 3.25, 6, 120])


def items(draw: Any, schema: dict[str, Any]) -> list[Any]:
    found = [derive(draw, part) for part in schema.get("prefixItems", ())[: draw(st.integers(0, 4))]]
    length = draw(st.integers(0, 4))
    while len(found) < length:
        at = len(found)
        some = schema.get("prefixItems", ())
        wanted = some[at] if at < len(some) else schema.get("items", True)
        found.append(derive(draw, schema["contains"] if "contains" in schema and draw(st.booleans()) else wanted))
    return found


def properties(draw: Any, parts: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    required = {key for part in parts for key in part.get("required", ())}
    for part in parts:
        for key, inner in part.get("properties", {}).items():
            if key not in found and inner is not False and (key in required or draw(st.booleans())):
                found[key] = derive(draw, inner)
    for part in parts:
        more = part.get("additionalProperties", "properties" not in part and "patternProperties" not in part)
        if more is not False and all("properties" not in p or "additionalProperties" in p for p in parts):
            for key in sorted(required - set(found)) or draw(st.lists(KEYS, max_size=1)):
                if key not in found:
                    found[key] = derive(draw, more)
    return found


def mutated(draw: Any, value: Any) -> Any:
    """One part of it taken out, added, renamed or replaced."""
    match value:
        case dict() if value:
            key = draw(st.sampled_from(list(value)))
            rest = {k: v for k, v in value.items() if k != key}
            inside, added = value | {key: mutated(draw, value[key])}, value | {draw(KEYS): draw(VALUES)}
            return draw(st.sampled_from([rest, inside, added, rest | {draw(KEYS): value[key]}]))
        case list() if value:
            at = draw(st.integers(0, len(value) - 1))
            rest = [*value[:at], *value[at + 1 :]]
            inside = [*value[:at], mutated(draw, value[at]), *value[at + 1 :]]
            return draw(st.sampled_from([rest, inside, [*value, value[at]], [*value, draw(VALUES)]]))
        case str():
            return draw(st.sampled_from([value + "a", value[1:], "b" + value, value + "\n"]))
        case int() | float() if not isinstance(value, bool):
            return draw(st.sampled_from([value + 1, value - 1, -value, value + 0.25, value * 10]))
    return draw(VALUES)


def orders(value: Any) -> Iterator[Any]:
    """The value with the keys of its objects in every order."""
    match value:
        case dict():
            for keys in itertools.permutations(value):
                for inner in itertools.product(*(list(orders(value[key])) for key in keys)):
                    yield dict(zip(keys, inner, strict=True))
        case list():
            yield from (list(inner) for inner in itertools.product(*map(orders, value)))
        case _:
            yield value


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=st.booleans().flatmap(lambda alone: SCALARS if alone else SCHEMAS), data=st.data())
def test_valid_values_are_taken_and_no_others(kit: Toolkit, backend: BackendName, schema: Any, data: Any) -> None:
    try:
        compiled = kit.compile(schema_spec(schema), backend)
    except InvalidRequest:
        return
    for _ in range(4):
        value = derive(data.draw, schema)
        text = written(value)
        if not is_valid(schema, text):
            assert not kit.takes(compiled, text), text
        elif not LESS & words_of(schema):
            either = orders(value) if NO_ORDER & words_of(schema) else [value]
            assert any(kit.takes(compiled, written(one)) for one in itertools.islice(either, 200)), text
        for other in (written(data.draw(ANY)), written(mutated(data.draw, value))):
            assert is_valid(schema, other) or not kit.takes(compiled, other), other
