"""Forced tokens: canonical, exact in bytes, and far fewer model steps."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from bench.jumps import flat_objects, follow
from runtime.grammar.backends import BackendName
from runtime.grammar.pieces import Pieces
from runtime.grammar.protocol import Vocabulary, forced_run
from runtime.messages import GrammarSpec
from runtime.text.tokenizer import Tokenizer
from tests.grammar.toolkit import Toolkit, schema_spec


@pytest.fixture
def encode(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special=False)


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_jumping_keeps_the_canonical_tokens(
    kit: Toolkit, encode: Callable[[str], list[int]], backend: BackendName
) -> None:
    same = steps = plain_steps = 0
    objects = flat_objects(100)
    for schema, value in objects:
        compiled = kit.compile(schema_spec(schema), backend)
        text = json.dumps(value, ensure_ascii=False)
        ids, n = follow(compiled.cursor(), text, encode, kit.vocab.token_bytes, jump=True)
        assert b"".join(kit.vocab.token_bytes[t] for t in ids) == text.encode()
        same += ids == encode(text)
        steps += n
        plain_steps += len(encode(text))
    assert same >= 0.95 * len(objects)
    assert steps <= 0.55 * plain_steps


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("literal", ["naïve—😀", "日本語", "a\u0301", "🏳️‍🌈 flag", 'q"\\\n'])
def test_forced_text_never_ends_inside_a_character(kit: Toolkit, backend: BackendName, literal: str) -> None:
    compiled = kit.compile(schema_spec({"const": literal}), backend)
    cursor, data, steps = compiled.cursor(), b"", 0
    wanted = json.dumps(literal, ensure_ascii=False).encode()
    while not cursor.done:
        run = forced_run(cursor, 64)
        if not run:
            run = [kit.pieces.split(wanted[len(data) :])[0]]
            assert cursor.accept(run[0])
            steps += 1
        data += b"".join(kit.vocab.token_bytes[t] for t in run)
        data.decode()
    assert data == wanted
    assert steps <= 2


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_nothing_is_forced_where_there_is_a_choice(kit: Toolkit, backend: BackendName) -> None:
    free = kit.compile(schema_spec({"type": "string"}), backend).cursor()
    forced_run(free, 64)
    assert free.forced_tokens(64) == []
    either = kit.compile(GrammarSpec(kind="choices", spec='["a", "ab"]'), backend).cursor()
    assert either.accept(kit.pieces.split(b"a")[0])
    assert either.can_stop
    assert either.forced_tokens(64) == []  # a stop id is a choice too


def test_stop_ids_are_never_forced_and_the_limit_holds(kit: Toolkit) -> None:
    compiled = kit.compile(schema_spec({"const": ["x"] * 50}))
    cursor = compiled.cursor()
    assert len(cursor.forced_tokens(5)) == 5
    while not cursor.done:
        run = forced_run(cursor, 1000)
        assert not set(run) & set(kit.vocab.stop_ids)
        assert run or cursor.accept(kit.pieces.split(b'"]')[0])


def test_the_last_piece_is_held_back_if_it_could_grow() -> None:
    pieces = Pieces(Vocabulary((b"ab", b"a", b"abc", b"x", b"<s>"), 5, (4,), frozenset({4})))
    assert pieces.stable(b"xab", 9) == [3]  # "ab" could become "abc"
    assert pieces.stable(b"xabc", 9) == [3, 2]
    assert pieces.stable(b"xabx", 9) == [3, 0, 3]
    assert pieces.stable(b"xabx", 2) == [3, 0]
    assert pieces.split(b"xab") == [3, 0]


def test_flexible_whitespace_is_bounded_and_forces_little(kit: Toolkit) -> None:
    spec = schema_spec(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, whitespace="flexible"
    )
    compiled = kit.compile(spec)
    assert kit.takes(compiled, '{\n    "a" : 1\n}')
    assert not kit.takes(compiled, '{\n\n"a": 1}')
    assert not kit.takes(compiled, "{" + " " * 40 + '"a": 1}')
