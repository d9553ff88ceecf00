"""Forced text without an end: nothing that a grammar forces may take long to find, hang, or fill memory."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from runtime.errors import InvalidRequest
from runtime.grammar.distance import SHORT, forces_little
from runtime.grammar.emit import schema_grammar
from runtime.grammar.limits import Limits
from runtime.grammar.prepare import prepare
from runtime.grammar.regular import fullmatch, lit, repeat
from runtime.grammar.rules import ROOT, Choice, Grammar, Join, Many, Rule, Text
from runtime.grammar.service import CompileService
from runtime.grammar.stepwise import MAX_BYTES, StepwiseMatcher
from runtime.grammar.work import TooMuchWork, bounded_work
from runtime.messages import GrammarSpec
from tests.grammar.test_engine import engine
from tests.grammar.test_places import SHAPES
from tests.grammar.toolkit import Toolkit, schema_spec

QUICK_S = 1.0


def doubling(depth: int) -> dict[str, Any]:
    """An array of two arrays of two arrays ...: one text only, of 2 ** depth numbers."""
    pair = lambda i: {
        "type": "array",
        "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2,
        "items": False,
        "minItems": 2,
    }
    return {"$defs": {f"d{i}": pair(i) for i in range(depth)} | {f"d{depth}": {"const": 1}}, "$ref": "#/$defs/d0"}


ENDLESS = {
    "from the start": GrammarSpec(kind="ebnf", spec='root ::= "a" root'),
    "after a choice": GrammarSpec(kind="ebnf", spec='root ::= "x" l | "y"\nl ::= "ab" l'),
    "doubling": schema_spec(doubling(30)),
    "in a tool": GrammarSpec(
        kind="structural_tag",
        spec=json.dumps({"structures": [{"begin": "<f>", "schema": doubling(30), "end": "</f>"}], "triggers": ["<f>"]}),
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_forced_text_without_an_end_is_found_piece_by_piece(service: CompileService, kit: Toolkit, name: str) -> None:
    cursor = service.compile_async(ENDLESS[name]).result().cursor()
    said: list[int] = []
    for token in kit.pieces.split(b"<f>") if name == "in a tool" else []:
        assert cursor.accept(token)
    start = time.monotonic()
    while len(said) < 40:
        forced = cursor.forced_tokens(64)
        if not forced:
            row = cursor.allowed()
            assert row is not None
            forced = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[:1].tolist()
        for token in forced:
            assert cursor.accept(token)
        said += forced
    assert time.monotonic() - start < 5 * QUICK_S


def test_llguidance_refuses_what_it_would_give_up_on(vocab: Any) -> None:
    service = CompileService(vocab, "llguidance")
    with pytest.raises(InvalidRequest, match=r"costly|no text"):
        service.compile_async(schema_spec(doubling(14))).result()
    service.close()


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_are_what_the_engine_finds_at_once(kit: Toolkit, backend: Any, shape: str) -> None:
    if (backend, shape) == ("xgrammar", "pattern"):  # which it refuses
        return
    compiled: Any = kit.compile(schema_spec(SHAPES[shape]), backend)
    whole, pieces = compiled.template.matcher(), StepwiseMatcher(compiled.template.matcher(), kit.pieces)
    row = np.zeros(kit.n_words, np.int32)
    for _ in range(30):
        if not whole.complete:
            assert pieces.forced(64) == whole.forced(64)
        assert whole.mask(row)
        ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        token = next((t for t in ids if t not in kit.vocab.stop_ids), None)
        if token is None:
            break
        assert whole.advance(token)
        assert pieces.advance(token)


def test_a_long_constant_is_forced_in_several_runs(service: CompileService) -> None:
    text = "The quick brown fox. " * 200
    cursor = service.compile_async(schema_spec({"const": text})).result().cursor()
    first = cursor.forced_tokens(64)
    assert 0 < len(first) <= MAX_BYTES
    for token in first:
        assert cursor.accept(token)
    assert cursor.forced_tokens(64)


@pytest.mark.parametrize(
    ("rules", "little"),
    [
        ({ROOT: Text("a" * SHORT)}, True),
        ({ROOT: Text("a" * SHORT + "b")}, False),
        ({ROOT: Choice((Text("a"), Text("b" * 2 * SHORT)))}, False),  # after a choice
        ({ROOT: Many(Text("ab"), 0, None)}, True),
        ({ROOT: Many(Text("ab"), SHORT, None)}, False),
        ({ROOT: Join((Text("a"), Rule(ROOT)))}, False),  # never ends
        ({ROOT: Choice((Text("a"), Join((Text("("), Rule(ROOT), Text(")")))))}, True),
    ],
)
def test_whether_a_grammar_forces_little_is_known_before(rules: dict[str, Any], little: bool) -> None:
    assert forces_little(Grammar(rules)) is little


def test_a_chain_of_rules_is_looked_through_in_few_passes() -> None:
    n = 3000
    for order in (range(n), range(n - 1, -1, -1)):
        chain = {f"r{i}": Rule(f"r{i + 1}") if i < n - 1 else Text("x") for i in order}
        start = time.monotonic()
        assert forces_little(Grammar({ROOT: Rule("r0"), **chain}))
        assert time.monotonic() - start < QUICK_S


def test_ordinary_schemas_force_little() -> None:
    for shape in SHAPES.values():
        assert forces_little(schema_grammar(shape, "default"))


def test_matching_constants_against_patterns_has_a_limit() -> None:
    hostile = repeat(repeat(lit("a"), 1, 100), 1, 99)
    with bounded_work(), pytest.raises(TooMuchWork):
        fullmatch(hostile, "a" * 4000)
    schema = {"enum": ["a" * 4000], "pattern": "^(a{1,100}){1,99}$"}
    start = time.monotonic()
    with pytest.raises(InvalidRequest, match="too long") as caught:
        prepare(schema_spec(schema), "auto", Limits())
    assert caught.value.param == "json_schema"
    assert time.monotonic() - start < 2 * QUICK_S
    plain = {"enum": [f"item-{i}" for i in range(3000)], "pattern": "^[a-z]+-[0-9]{1,4}$"}
    assert prepare(schema_spec(plain), "auto", Limits()).text


@pytest.mark.parametrize("name", ["doubling", "after a choice"])
def test_jumps_change_nothing_where_forced_text_has_no_end(name: str) -> None:
    spec = ENDLESS[name]
    options = {"json_schema": doubling(20)} if spec.kind == "json_schema" else {"ebnf": spec.spec}
    found = []
    for jump in (False, True):
        with engine(jump_forward=jump) as one:
            answer = one.generate("Say it.", temperature=0, max_tokens=40, **options)
            found.append((answer.text, answer.finish_reason))
            assert one.generate("Hello", temperature=0, max_tokens=2).usage.completion_tokens == 2
    texts = sorted((text for text, _ in found), key=len)
    assert texts[1].startswith(texts[0])  # forced text may be split otherwise, so 40 tokens may reach further
    assert {finish for _, finish in found} <= {"length", "stop"}
