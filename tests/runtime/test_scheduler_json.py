"""The scheduler with the real grammar service: a model of noise must still speak JSON that fits its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.execute.fake import FakeRunner, fake_spec
from runtime.grammar.service import CompileService, vocabulary
from runtime.messages import GrammarSpec
from tests.runtime.toys import EOS, ByteTokenizer
from tests.runtime.world import World

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tool": {"enum": ["search", "send_mail"]},
        "urgent": {"type": "boolean"},
        "items": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 6,
            "maxItems": 6,
        },
        "note": {"const": "naïve—😀"},
    },
    "required": ["tool", "urgent", "items", "note"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def service() -> Iterator[CompileService]:
    tok = ByteTokenizer()
    service = CompileService(vocabulary(tok.token_bytes, tok.vocab_size, tok.special_ids, tok.eos_ids), "auto")
    yield service
    service.close()


def world_of(service: CompileService, overlap: bool, *, jump: bool = True, n_pages: int = 512) -> World:
    runner = FakeRunner(fake_spec(257, 1024, (EOS,)), n_pages=n_pages, page_size=4, max_running=8)
    tok = ByteTokenizer()
    return World(
        overlap=overlap,
        runner=runner,
        grammar=service,
        jump_forward=jump,
        token_bytes=tok.token_bytes,
        special_ids=tok.special_ids,
    )


def said(world: World, rid: str) -> Any:
    finish = world.said[rid].finish
    assert finish is not None
    assert finish.reason == "stop", finish
    return json.loads(bytes(t for t in world.tokens(rid) if t != EOS))


def ask(world: World, service: CompileService, n: int, **options: Any) -> None:
    spec = GrammarSpec(kind="json_schema", spec=json.dumps(SCHEMA))
    service.compile_async(spec).result()
    for i in range(n):
        world.ask(f"r{i}", [40 + i, *range(60, 70)], grammar=spec, max_tokens=400, ignore_eos=False, **options)


@pytest.mark.parametrize("jump", [False, True], ids=["stepwise", "jump"])
@pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])
def test_noise_speaks_json_that_fits(service: CompileService, overlap: bool, jump: bool) -> None:
    world = world_of(service, overlap, jump=jump)
    ask(world, service, 6)
    world.run()
    for i in range(6):
        value = said(world, f"r{i}")
        assert set(value) == set(SCHEMA["required"])
        assert value["note"] == "naïve—😀"
        assert len(value["items"]) == 6
    stats = world.scheduler.stats()
    assert (stats["forced"] > 0) == jump
    if jump:
        assert stats["steps"] < stats["generated"] + stats["forced"]


@pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])
def test_jumping_says_the_same(service: CompileService, overlap: bool) -> None:
    """With one token a byte there is one way to spell a text, so jumps may not change a token."""
    tokens = []
    for jump in (False, True):
        world = world_of(service, overlap, jump=jump)
        ask(world, service, 3, temperature=1.0, seed=4)
        world.run()
        tokens.append([world.tokens(f"r{i}") for i in range(3)])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])
def test_a_full_pool_breaks_no_json(service: CompileService, overlap: bool) -> None:
    world = world_of(service, overlap, n_pages=64)
    ask(world, service, 6, frequency_penalty=0.3)
    world.run()
    assert world.scheduler.stats()["retractions"] > 0
    for i in range(6):
        assert said(world, f"r{i}")["note"] == "naïve—😀"


@pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])
def test_retraction_changes_no_token_of_a_penalised_answer(service: CompileService, overlap: bool) -> None:
    """What was said before counts once, whether it was computed or forced, and in the order it was said."""
    found, retractions = [], []
    for n_pages in (512, 64):
        world = world_of(service, overlap, n_pages=n_pages)
        penalties = {"frequency_penalty": 0.3, "presence_penalty": 0.5, "repetition_penalty": 1.2}
        ask(world, service, 6, temperature=1.0, seed=7, **penalties)
        world.run()
        found.append([world.tokens(f"r{i}") for i in range(6)])
        retractions.append(world.scheduler.stats()["retractions"])
    assert retractions[0] == 0 < retractions[1]
    assert found[0] == found[1]
