"""Structured output through the whole engine with a real model: overlap and jumps change nothing but the cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import ramet as rt
from runtime.errors import InvalidRequest
from runtime.messages import unpack_ids
from tests.grammar.conftest import MODEL
from tests.grammar.toolkit import is_valid

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "continent": {"enum": ["Europe", "Asia", "Africa"]},
        "is_capital": {"type": "boolean"},
    },
    "required": ["name", "population", "continent", "is_capital"],
    "additionalProperties": False,
}
CITIES = ["Paris", "Rome", "Tokyo", "Cairo"]


def prompt(city: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Describe the city {city} as JSON."}]


def engine(**options: Any) -> rt.Engine:
    return rt.Engine(model=str(MODEL), kv_pool_tokens=2048, threads=1, **options)


@pytest.fixture(scope="module")
def default() -> Iterator[rt.Engine]:
    with engine() as one:
        yield one


def answers(one: rt.Engine, **options: Any) -> list[Any]:
    params = {"temperature": 0, "max_tokens": 64, "json_schema": CITY, **options}
    return one.generate([prompt(city) for city in CITIES], **params)


@pytest.fixture(scope="module")
def expected(default: rt.Engine) -> list[Any]:
    return answers(default)


def test_every_answer_fits_its_schema(expected: list[Any]) -> None:
    for answer in expected:
        assert answer.finish_reason == "stop"
        assert is_valid(CITY, answer.text), answer.text


def test_forced_tokens_are_reported_and_save_steps(default: rt.Engine, expected: list[Any]) -> None:
    """E4: a feature that nobody measures may be off for months."""
    assert all(answer.usage.forced_tokens > 8 for answer in expected)
    before = default.stats()
    (answer,) = default.generate([prompt("Lima")], json_schema=CITY, temperature=0, max_tokens=64)
    after = default.stats()
    assert after["forced"] - before["forced"] == answer.usage.forced_tokens
    assert after["steps"] - before["steps"] <= 0.75 * answer.usage.completion_tokens


def test_overlap_changes_no_token(default: rt.Engine, expected: list[Any]) -> None:
    """Greedy and sampled."""
    sampled = {"temperature": 1.0, "top_p": 0.9, "seed": 5}
    with engine(overlap=False) as one:
        assert [a.token_ids for a in answers(one)] == [a.token_ids for a in expected]
        assert [a.token_ids for a in answers(one, **sampled)] == [a.token_ids for a in answers(default, **sampled)]


def test_jumping_changes_no_value(expected: list[Any]) -> None:
    """E1: jump-forward once turned 2140000 into 2."""
    with engine(jump_forward=False) as one:
        plain = answers(one)
    assert all(a.usage.forced_tokens == 0 for a in plain)
    assert [json.loads(a.text) for a in plain] == [json.loads(a.text) for a in expected]
    assert [a.token_ids for a in plain] == [a.token_ids for a in expected]


def test_e1_twenty_prompts_have_the_same_values_with_and_without_jumps(default: rt.Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "population": {"type": "integer"}},
        "required": ["name", "population"],
        "additionalProperties": False,
    }
    names = "Paris Rome Tokyo Cairo Lima Oslo Delhi Quito Bonn Kyiv Bern Riga Doha Baku Lyon Nice York Bath Cork Graz"
    question = "How many people live in {}? Answer as JSON."
    asked = [[{"role": "user", "content": question.format(city)}] for city in names.split()]
    options: dict[str, Any] = {"json_schema": schema, "temperature": 0, "max_tokens": 32}
    jumped = default.generate(asked, **options)
    with engine(jump_forward=False) as one:
        plain = one.generate(asked, **options)
    assert all(a.usage.forced_tokens >= 4 for a in jumped)
    for a, b in zip(jumped, plain, strict=True):
        assert a.text == b.text
        assert " :" not in a.text
    assert sum(a.finish_reason == "stop" for a in jumped) >= 15


def test_logprobs_of_forced_tokens_are_the_models_own(default: rt.Engine, expected: list[Any]) -> None:
    """Exact, from the same forward: what scoring the whole text afterwards says."""
    (answer,) = default.generate([prompt("Paris")], json_schema=CITY, temperature=0, max_tokens=64, logprobs=True)
    assert answer.token_ids == expected[0].token_ids
    assert answer.usage.forced_tokens > 8
    assert [lp.token for lp in answer.logprobs] == list(answer.token_ids)
    asked = unpack_ids(default.submit_of(prompt("Paris")).tokens).tolist()
    (scored,) = default.generate(
        [[*asked, *answer.token_ids]], max_tokens=1, logprobs=True, prompt_logprobs_from=len(asked)
    )
    assert [lp.token for lp in scored.prompt_logprobs] == list(answer.token_ids)
    assert [lp.logprob for lp in answer.logprobs] == [lp.logprob for lp in scored.prompt_logprobs]


def test_the_other_engine_says_the_same(expected: list[Any]) -> None:
    with engine(grammar_backend="llguidance") as one:
        assert [json.loads(a.text) for a in answers(one)] == [json.loads(a.text) for a in expected]


def test_sampled_answers_always_parse(default: rt.Engine) -> None:
    """D10, at high temperature."""
    schema = {"type": "object", "properties": {"q": {"type": "array", "items": {"type": "string", "maxLength": 6}}}}
    schema |= {"required": ["q"]}
    found = default.generate(prompt("Oslo"), json_schema=schema, temperature=1.5, max_tokens=48, seed=3, n=6)
    ended = [a for a in found if a.finish_reason == "stop"]
    assert ended
    assert all(is_valid(schema, a.text) for a in ended)


def test_retraction_keeps_the_place_in_the_grammar() -> None:
    """D19: a pool too small for all of them at once."""
    schema = {"type": "array", "items": {"type": "integer", "maximum": 9}, "minItems": 20, "maxItems": 20}
    with rt.Engine(model=str(MODEL), kv_pool_tokens=272, threads=1, context_length=256) as one:
        found = one.generate([prompt(c) for c in CITIES], json_schema=schema, temperature=0, max_tokens=150)
        assert all(is_valid(schema, a.text) for a in found)
        assert sum(a.usage.retractions for a in found) > 0


def test_retraction_changes_no_token_of_a_penalised_answer() -> None:
    """Forced tokens are penalised once, before and after; greedy, so the least difference would show."""
    schema = {"type": "array", "items": {"enum": ["red", "green", "blue", "grey"]}, "minItems": 20, "maxItems": 20}
    options: dict[str, Any] = {"json_schema": schema, "temperature": 0, "max_tokens": 150}
    options |= {"frequency_penalty": 0.6, "presence_penalty": 0.4, "repetition_penalty": 1.1}
    asked = [prompt(c) for c in CITIES]
    with engine(grammar_backend="xgrammar") as one:  # both engines: their masks differ in what no tokenizer would write
        roomy = one.generate(asked, **options)
        plain = one.generate(asked[0], **(options | {"frequency_penalty": 0.0, "presence_penalty": 0.0}))
    tiny: dict[str, Any] = {"kv_pool_tokens": 272, "context_length": 256, "grammar_backend": "xgrammar"}
    with rt.Engine(model=str(MODEL), threads=1, **tiny) as one:
        tight = one.generate(asked, **options)
    assert sum(a.usage.retractions for a in tight) > 0 == sum(a.usage.retractions for a in roomy)
    assert [a.token_ids for a in tight] == [a.token_ids for a in roomy]
    assert all(a.usage.forced_tokens > 20 and is_valid(schema, a.text) for a in roomy)
    assert plain.token_ids != roomy[0].token_ids  # they do something here


def test_an_utf8_literal_comes_whole(default: rt.Engine) -> None:
    """E6: no half characters in any delta."""
    deltas = [d.text for d in default.stream("Say:", json_schema={"const": "naïve—😀"}, max_tokens=32, temperature=0)]
    assert "".join(deltas) == '"naïve—😀"'
    assert not any("\ufffd" in text for text in deltas)


def test_other_kinds(default: rt.Engine) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
    assert default.generate("A number:", regex="[0-9]{3}", **options).text.isdecimal()
    assert default.generate("A pet:", choices=["cat", "dog"], **options).text in ("cat", "dog")
    assert default.generate("Yes?", ebnf='root ::= "yes" | "no"', **options).text in ("yes", "no")


def test_thinking_then_the_answer(default: rt.Engine) -> None:
    grammar = rt.GrammarSpec(kind="regex", spec="[0-9]{2}", after="\n")
    answer = default.generate("First a line, then a number.\n", grammar=grammar, temperature=0, max_tokens=120)
    thought, _, rest = answer.text.partition("\n")
    assert answer.finish_reason == "length" or rest.strip("\n").isdecimal(), (thought, rest)


@pytest.mark.parametrize(
    "options",
    [{"json_schema": {"type": "no"}}, {"regex": "("}, {"ebnf": "root ::= missing"}, {"json_schema": {"enum": []}}],
    ids=str,
)
def test_bad_grammars_are_refused_and_the_engine_lives(default: rt.Engine, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        default.generate("x", max_tokens=4, **options)
    assert caught.value.param in ("json_schema", "regex", "ebnf")
    assert default.generate("x", max_tokens=1, temperature=0).usage.completion_tokens == 1
