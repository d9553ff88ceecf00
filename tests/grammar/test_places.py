"""What an engine said of a place is said again wherever the same texts may follow, and nowhere else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from runtime.grammar.backends import BackendName
from runtime.grammar.beginnings import MAX_DEPTH, MAX_PLACES, Beginnings
from runtime.grammar.limits import Limits
from runtime.grammar.places import _characters
from runtime.grammar.prepare import prepare
from runtime.messages import GrammarSpec
from tests.grammar.keywords import ROWS, Row
from tests.grammar.toolkit import Toolkit, schema_spec

BACKENDS = pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
SHORT = {"type": "string", "maxLength": 5}
SHAPES: dict[str, Any] = {
    "bounded strings": {"type": "object", "properties": {"a": SHORT, "b": SHORT}, "required": ["a", "b"]},
    "list": {"type": "array", "items": {"type": "integer", "maximum": 30}, "minItems": 2, "maxItems": 6},
    "tree": {
        "$defs": {"n": {"type": "object", "properties": {"v": {"enum": ["x", "xy"]}, "n": {"$ref": "#/$defs/n"}}}},
        "$ref": "#/$defs/n",
    },
    "pattern": {"type": "string", "pattern": "^(ab?c|é+x|[a-f]{2,4})*$", "maxLength": 9},
    "any": {},
    "union": {"anyOf": [{"type": "integer"}, {"const": "12"}, {"type": "array", "items": {"type": "boolean"}}]},
}


def walk_beside(kit: Toolkit, spec: GrammarSpec, backend: BackendName, n_walks: int, n_tokens: int = 40) -> None:
    """Random walks, each beside a matcher of the engine that knows no other walk."""
    compiled: Any = kit.compile(spec, backend)
    row, bare = np.zeros(kit.n_words, np.int32), np.zeros(kit.n_words, np.int32)
    for seed in range(n_walks):
        chooser = random.Random(seed)
        cursor, alone = compiled.cursor(), compiled.template.matcher()
        for _ in range(n_tokens):
            row[:], bare[:] = -1, -1
            limited = cursor.fill(row)
            assert alone.mask(bare) == limited
            assert (row == bare).all()
            assert cursor.can_stop == alone.complete
            open_here = cursor.goes_on(unforced=True)
            looked = cursor.can_stop or cursor.near_end or cursor.last_token() is not None or cursor.forced_tokens(64)
            assert not (open_here and looked)
            if not alone.complete:
                assert cursor.forced_tokens(64) == alone.forced(64)
            ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            ids = [t for t in ids if t not in kit.vocab.stop_ids]
            if not ids:
                break
            token = min(chooser.sample(ids, min(3, len(ids))))  # low ids are short pieces: walks meet again
            assert cursor.accept(token)
            assert alone.advance(token)


@BACKENDS
@pytest.mark.parametrize("shape", SHAPES)
def test_masks_and_forced_tokens_are_the_engines_own(kit: Toolkit, backend: BackendName, shape: str) -> None:
    if (backend, shape) != ("xgrammar", "pattern"):  # which it refuses
        walk_beside(kit, schema_spec(SHAPES[shape]), backend, n_walks=8)


@pytest.mark.parametrize("row", ROWS[::3], ids=str)
def test_the_same_for_every_kind_of_keyword(kit: Toolkit, row: Row) -> None:
    spec = schema_spec(row.schema)
    walk_beside(kit, spec, prepare(spec, "auto", Limits()).backend, n_walks=2, n_tokens=25)


UNFOLLOWED = {
    "long counter": GrammarSpec(kind="regex", spec="(ab|a|c){0,300}[a-z]{1,900}"),
    "ambiguous": GrammarSpec(kind="ebnf", spec='root ::= root root | "a" | "bc" | ""'),
    "long string": schema_spec({"type": "string", "pattern": "^.{1,5000}$"}),
}


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_the_beginnings_of_unfollowed_grammars_are_the_engines_own(kit: Toolkit, name: str) -> None:
    spec = UNFOLLOWED[name]
    compiled: Any = kit.compile(spec)
    assert isinstance(compiled.places, Beginnings)
    walk_beside(kit, spec, prepare(spec, "auto", Limits()).backend, n_walks=6, n_tokens=MAX_DEPTH + 4)


def test_a_beginning_is_asked_of_an_engine_once(kit: Toolkit) -> None:
    compiled: Any = kit.compile(UNFOLLOWED["long counter"])
    row = np.zeros(kit.n_words, np.int32)
    first = compiled.cursor()
    assert first.fill(row)
    token = int(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0])
    assert first.accept(token)
    first.fill(row)
    again = compiled.cursor()
    assert again.allowed() is compiled.cursor().allowed()  # the very same row
    assert again.accept(token)
    assert again.allowed() is not None
    assert again._matcher._inner is None  # no engine was needed


def test_beginnings_are_bounded() -> None:
    known = Beginnings([bytes([i]) for i in range(256)])
    chooser = random.Random(0)
    start = known.start()
    for _ in range(MAX_PLACES):
        place = known.start()
        for _ in range(MAX_DEPTH + 3):
            token = chooser.randrange(256)
            place = place.by_token.get(token) or known.after(place, token)
        assert place.ways is None  # too far from the beginning
        assert known._n_places <= MAX_PLACES + MAX_DEPTH
    assert known.start() is not start


@pytest.mark.parametrize(
    ("data", "whole", "rest"),
    [
        (b"ab", "ab", b""),
        (b"", "", b""),
        ("aé".encode()[:-1], "a", b"\xc3"),
        ("😀".encode()[:3], "", "😀".encode()[:3]),
        (b"a\xff", None, b""),
        (b"\x80", None, b""),
    ],
)
def test_cut_characters_wait(data: bytes, whole: str | None, rest: bytes) -> None:
    assert _characters(data) == (whole, rest)


@pytest.mark.parametrize(
    ("shape", "text", "near"),
    [
        ("bounded strings", '{"a": "", "b": "q"}', ['{"a": "", "b": ' + last for last in ("", '"', '"q', '"q"')]),
        ("list", "[1, 23]", ["[1,", "[1, ", "[1, 2", "[1, 23"]),
        ("union", "[true]", ["", "[", "[tr", "[tru", "[true"]),
        ("tree", '{"v": "x"}', ["", "{", '{"v": "', '{"v": "x', '{"v": "x"']),
    ],
)
def test_a_place_knows_when_a_token_may_end_the_text(kit: Toolkit, shape: str, text: str, near: list[str]) -> None:
    compiled: Any = kit.compile(schema_spec(SHAPES[shape]))
    cursor, found = compiled.cursor(), []
    for at, char in enumerate(text):
        if cursor.near_end:
            found.append(text[:at])
        assert cursor.accept(kit.pieces.split(char.encode())[0])
    assert found == near
    assert compiled.template.matcher().near_end is False  # an engine alone cannot tell


@BACKENDS
def test_other_values_of_the_same_length_lead_to_known_places(kit: Toolkit, backend: BackendName) -> None:
    """The second answer needs no engine at all, and a longer one only where it leaves the first one's path."""
    compiled: Any = kit.compile(schema_spec({**SHAPES["bounded strings"], "additionalProperties": False}), backend)
    asked, open_at = [], []
    for text in ('{"a": "xyz", "b": "q"}', '{"a": "pqr", "b": "w"}', '{"a": "pqrs", "b": "w"}'):
        cursor, row = compiled.cursor(), np.zeros(kit.n_words, np.int32)
        n_open = 0
        for token in [piece for char in text for piece in kit.pieces.split(char.encode())]:
            n_open += cursor.goes_on(unforced=True)
            cursor.fill(row)
            if not cursor.can_stop and not cursor.near_end and cursor.last_token() is None:
                cursor.forced_tokens(64)
            assert cursor.accept(token)
        assert cursor.done
        open_at.append(n_open)
        asked.append(cursor._matcher._fed if cursor._matcher._inner is not None else 0)
    assert asked[0] > 0
    assert asked[1] == 0
    assert asked[2] > 0
    assert open_at[0] < open_at[1]  # where nobody has been before, somebody has to look
