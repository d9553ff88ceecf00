"""Every keyword, on every backend that takes it: exactly the right texts, and nothing the reference calls invalid."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from runtime.errors import InvalidRequest
from runtime.grammar.backends import BackendName
from runtime.grammar.schema import Normaliser
from tests.grammar.keywords import INT, REFUSED, ROWS, Refused, Row
from tests.grammar.toolkit import Toolkit, is_valid, schema_spec

BACKENDS: tuple[BackendName, ...] = get_args(BackendName)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_takes_what_is_valid_and_nothing_else(kit: Toolkit, row: Row) -> None:
    taken_by = 0
    for backend in BACKENDS:
        try:
            compiled = kit.compile(schema_spec(row.schema), backend)
        except InvalidRequest:
            continue
        taken_by += 1
        for text in row.good:
            narrow = backend == "xgrammar" and "\\" in text  # bounded strings: written without escapes
            assert kit.takes(compiled, text) or narrow, (backend, text)
        for text in row.bad:
            assert not kit.takes(compiled, text), (backend, text)
    assert taken_by


@pytest.mark.parametrize("row", [r for r in ROWS if r.keyword != "nullable"], ids=str)
def test_the_rows_agree_with_the_reference_validator(row: Row) -> None:
    for text in row.good:
        assert is_valid(row.schema, text), text


@pytest.mark.parametrize("row", [r for r in ROWS if r.keyword != "nullable"], ids=str)
def test_random_walks_stay_valid(kit: Toolkit, row: Row) -> None:
    for backend in BACKENDS:
        try:
            compiled = kit.compile(schema_spec(row.schema), backend)
        except InvalidRequest:
            continue
        for seed in range(2):
            text = kit.random_text(compiled, seed)
            assert text is None or is_valid(row.schema, text), (backend, text)


@pytest.mark.parametrize("row", REFUSED, ids=str)
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_refusals_name_the_place(kit: Toolkit, row: Refused, backend: BackendName) -> None:
    with pytest.raises(InvalidRequest) as caught:
        kit.compile(schema_spec(row.schema), backend)
    assert f"'{row.pointer}'" in str(caught.value), str(caught.value)
    assert caught.value.param == "json_schema"


def test_auto_takes_what_either_takes(kit: Toolkit) -> None:
    for row in ROWS:
        assert kit.compile(schema_spec(row.schema), "auto"), row.keyword


def test_strict_texts_are_json(kit: Toolkit) -> None:
    compiled = kit.compile(schema_spec({"type": "object"}))
    texts = [t for t in (kit.random_text(compiled, seed) for seed in range(6)) if t is not None]
    assert texts
    assert all(isinstance(json.loads(t), dict) for t in texts)


class Watched(dict[str, Any]):
    """A schema that notes which keywords are looked up in it, and in the schemas inside it."""

    def __init__(self, schema: dict[str, Any], asked: set[str]) -> None:
        super().__init__({key: watched(value, asked) for key, value in schema.items()})
        self.asked = asked

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def watched(value: Any, asked: set[str]) -> Any:
    if isinstance(value, list):
        return [watched(part, asked) for part in value]
    return Watched(value, asked) if isinstance(value, dict) else value


def normal_form(schema: Any) -> Any:
    """None where it is refused."""
    try:
        return Normaliser(schema).root()
    except InvalidRequest:
        return None


def shape(value: Any) -> str:
    return "int" if isinstance(value, float) else type(value).__name__


def shapes_in(schema: Any) -> set[tuple[str, str]]:
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    own = {(key, shape(value)) for key, value in schema.items()} if isinstance(schema, dict) else set()
    return own.union(*map(shapes_in, inner))


def test_every_keyword_that_is_read_has_a_row() -> None:
    """In every shape that means something: beside some other keyword the normal form is not the same without it."""
    asked: set[str] = set()
    for row in [*ROWS, *REFUSED]:
        normal_form(watched(row.schema, asked))
    told = set().union(*(shapes_in(row.schema) for row in [*ROWS, *REFUSED]))
    names = {key for key, _ in told}
    assert {"type", "if", "contains", "$ref", "$anchor", "dependencies"} <= asked & names
    places = {"a", "b", "c", "k", "v", "x", "n", "node", "next"}  # keys under properties and $defs
    assert asked - names - places - {"$recursiveRef"} == set()
    a = {"type": "object", "properties": {"a": INT}}
    every = {"type": ["null", "boolean", "number", "string", "array", "object"]}
    beside: list[dict[str, Any]] = [every, {"type": "string"}, {"type": "number", "minimum": 3, "maximum": 5}]
    beside += [{"type": "array"}, {"type": "array", "items": [INT]}, {"type": "array", "contains": INT}, a]
    beside += [{"if": a, "type": "object"}, {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1}]
    values: list[Any] = [True, False, 1, 2, "^a", "date", "string", "int32", "#/$defs/a", ["a", "b"], ["string"]]
    values += [[INT], INT, {"a": INT}, {"a": ["b"]}]
    unsaid: set[tuple[str, str]] = set()
    for keyword in asked - places - {"const"}:  # whose value may be of any shape
        for base in beside:
            plain = {"$defs": {"a": INT}, **base}
            for value in values:
                is_schema = isinstance(value, bool) and (keyword, "dict") in told  # as true and false are
                if not (is_schema or keyword in base or (keyword, shape(value)) in told):
                    form = normal_form(plain | {keyword: value})
                    if form not in (None, normal_form(plain)):
                        unsaid.add((keyword, shape(value)))
    assert sorted(unsaid) == []
