"""Reading a grammar ends in time wherever others wait for it, and equal values are those that JSON calls equal."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.grammar.backends import BackendName
from runtime.grammar.door import GrammarDoor
from runtime.grammar.limits import Limits
from runtime.grammar.prepare import prepare
from runtime.grammar.service import CompileService
from runtime.grammar.work import HERE_S, OutOfTime, bounded_work, step
from tests.grammar.test_cases import BACKENDS, takes
from tests.grammar.toolkit import Toolkit, schema_spec

SLACK_S = 0.4  # of a machine that does other things too


def two_trees(depth: int, keys: str = "xyz") -> dict[str, Any]:
    """Two definitions of each depth; merging them takes len(keys) ** depth steps."""
    definitions: dict[str, Any] = {}
    for tree in "AB":
        for i in range(depth):
            definitions[f"{tree}{i}"] = {"properties": {k: {"$ref": f"#/$defs/{tree}{i + 1}"} for k in keys}}
        definitions[f"{tree}{depth}"] = {"type": "object"}
    return {"$defs": definitions, "allOf": [{"$ref": "#/$defs/A0"}, {"$ref": "#/$defs/B0"}]}


def overlapping(n: int) -> dict[str, Any]:
    bounds = [{"minimum": k} for k in range(2 * n)]
    return {"type": "integer", "allOf": [{"anyOf": bounds[:n]}, {"anyOf": bounds[n // 2 : n // 2 + n]}]}


def many_records(n: int) -> dict[str, Any]:
    kinds = [{f"k{i}": {"type": "integer"} for i in range(j, j + 30)} for j in range(n)]
    return {"oneOf": [{"properties": kind, "required": [next(iter(kind))]} for kind in kinds]}


def products(n: int) -> dict[str, Any]:
    return {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(5)]} for i in range(n)]}


EXPLODING = [two_trees(9), two_trees(10, "abcdef"), overlapping(150), overlapping(350), many_records(25), products(8)]


@pytest.mark.parametrize("schema", EXPLODING, ids=lambda schema: f"{len(json.dumps(schema))} bytes")
def test_a_door_is_never_held_up(schema: Any) -> None:
    door, spec = GrammarDoor("auto"), schema_spec(schema)
    for _ in range(2):  # and what it has left to the service once it leaves at once
        start = time.perf_counter()
        door.check(spec)
        assert time.perf_counter() - start < HERE_S + SLACK_S
    with pytest.raises(OutOfTime):
        prepare(spec, "auto", Limits(), HERE_S)


def test_the_service_has_such_a_schema_read_elsewhere(service: CompileService) -> None:
    known = service.compile_async(schema_spec({"type": "boolean"}))
    known.result(60)
    refused = service.compile_async(schema_spec(two_trees(10, "abcdef")))
    start = time.perf_counter()
    assert service.compile_async(schema_spec({"type": "null"})).result(60)
    assert time.perf_counter() - start < HERE_S + SLACK_S, "what is small waited for what is not"
    with pytest.raises(InvalidRequest):
        refused.result(120)


def test_a_deadline_binds_only_within() -> None:
    with bounded_work(seconds=0.0), pytest.raises(OutOfTime):
        step(1000)
    step(1000)


ONE_OR_TRUE = [
    ({"anyOf": [{"const": 1}, {"const": True}]}, ["1", "true"]),
    ({"oneOf": [{"const": True}, {"const": 1}]}, ["1", "true"]),
    ({"anyOf": [{"enum": [1, 0]}, {"type": "boolean"}]}, ["1", "0", "true", "false"]),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"t": {"const": value}}, "required": ["t"]} for value in (1, True)
            ]
        },
        ['{"t": 1}', '{"t": true}'],
    ),
    (
        {
            "type": "array",
            "items": {"anyOf": [{"const": 1}, {"const": True}, {"const": 1.0}]},
            "uniqueItems": True,
            "minItems": 2,
        },
        ["[1, true]", "[true, 1]"],
    ),
]


@BACKENDS
@pytest.mark.parametrize(("schema", "texts"), ONE_OR_TRUE, ids=str)
def test_one_is_not_true(kit: Toolkit, backend: BackendName, schema: Any, texts: list[str]) -> None:
    assert all(takes(kit, schema, text, backend) for text in texts)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "integer", "multipleOf": 12345678901}, "too many digits"),
        ({"type": "string", "minLength": 9223372036854775807}, "decimal literal invalid"),
    ],
)
def test_what_only_a_backend_finds_wrong_is_told_in_its_words(kit: Toolkit, schema: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        kit.compile(schema_spec(schema))
