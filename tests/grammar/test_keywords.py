"""Every keyword, on every backend that takes it: exactly the right texts, and nothing the reference calls invalid."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from runtime.errors import InvalidRequest
from runtime.grammar.backends import BackendName
from tests.grammar.keywords import REFUSED, ROWS, Refused, Row
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
