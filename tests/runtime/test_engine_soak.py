"""Random work on the real engine under eviction pressure: submits, forks, aborts, retractions; audited every step.

Each finished answer is compared, bit for bit, with the same request served alone without a cache.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import ramet as rt
from runtime.errors import InvalidRequest
from runtime.generate import Completion
from tests.runtime.tiny import tiny_engine, write_tiny

PROGRAMS = ["You are a helpful agent. ", "Tools: search, read, write. " * 3, "Answer in JSON. ", ""]
POOL_TOKENS = 512
N_CLIENTS = 8


@dataclass
class Tally:
    """What a soak did, so that it cannot pass by doing nothing."""

    finished: int = 0
    aborted: int = 0
    refused: int = 0
    cached: int = 0
    retractions: int = 0
    answers: dict[tuple[str, tuple[tuple[str, Any], ...]], tuple[int, ...]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def engine(folder: Path) -> Iterator[rt.Engine]:
    options = {
        "kv_pool_tokens": POOL_TOKENS,
        "page_size": 4,
        "chunk_tokens": 16,
        "max_step_tokens": 48,
        "max_running": 6,
    }
    with tiny_engine(folder, **options) as engine:
        yield engine


def random_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """One of a bounded set, so that prompts repeat, share prefixes and diverge."""
    text = rng.choice(PROGRAMS) + "".join(
        rng.choice(["a", "bb ", "call(1) ", "ok. "]) for _ in range(rng.randrange(1, 12))
    )
    options: dict[str, Any] = {"max_tokens": rng.choice([0, 1, 3, 12, 40]), "ignore_eos": True, "temperature": 0}
    if rng.random() < 0.4:
        options |= {"temperature": 0.8, "seed": rng.randrange(4)}
    if rng.random() < 0.2:
        options |= {"repetition_penalty": 1.3, "presence_penalty": 0.5}
    return text, options


async def client(engine: rt.Engine, seed: int, rounds: int, tally: Tally) -> None:
    rng = random.Random(seed)
    for _ in range(rounds):
        text, options = random_request(rng)
        fate = rng.random()
        if fate < 0.6:
            note(tally, text, options, await engine.generator.complete(engine.submit_of(text, **options)))
        elif fate < 0.7:
            siblings = [engine.submit_of(text + end, **options) for end in ("x", "y", "xx")]
            for one, end in zip(await engine.generator.complete_many(siblings), ("x", "y", "xx"), strict=True):
                note(tally, text + end, options, one)
        elif fate < 0.8:
            with pytest.raises(InvalidRequest):
                await engine.agenerate("x" * 10_000)
            tally.refused += 1
        else:
            await abandon(engine, text, options, rng, tally)


async def abandon(engine: rt.Engine, text: str, options: dict[str, Any], rng: random.Random, tally: Tally) -> None:
    """Leave at a random moment: before the first token, or after some."""
    stream = engine.generator.stream(engine.submit_of(text, **{**options, "max_tokens": 200}), n=rng.choice([1, 2]))
    patience = rng.choice([0, 1, 4])
    try:
        async with asyncio.timeout(0.02 if patience == 0 else 60):
            async for _ in stream:
                patience -= 1
                if patience <= 0:
                    break
    except TimeoutError:
        pass
    await stream.aclose()
    tally.aborted += 1


def note(tally: Tally, text: str, options: dict[str, Any], completions: list[Completion]) -> None:
    (done,) = completions
    tally.finished += 1
    tally.cached += done.usage.cached_tokens
    tally.retractions += done.usage.retractions
    key = (text, tuple(sorted(options.items())))
    assert tally.answers.setdefault(key, done.token_ids) == done.token_ids


async def crowd(engine: rt.Engine, rounds: int, seed: int) -> Tally:
    tally = Tally()
    await asyncio.gather(*(client(engine, seed * 1000 + i, rounds, tally) for i in range(N_CLIENTS)))
    return tally


def check(engine: rt.Engine, folder: Path, tally: Tally, sample: int) -> None:
    """The pool is whole again, nothing failed inside, and answers are those of the same requests alone."""
    assert engine.generator.n_live == 0
    engine.flush()
    stats = engine.stats()
    cache = stats["cache"]
    assert (stats["running"], stats["waiting"], cache["request"], cache["leases"]) == (0, 0, 0, 0)
    assert cache["free"] + cache["quarantined"] == cache["n_pages"]
    assert (stats["audit_failures"], stats["steps_failed"], stats["failed"]) == (0, 0, 0)
    assert cache["evicted"] > 0
    chosen = random.Random(1).sample(list(tally.answers.items()), min(sample, len(tally.answers)))
    with tiny_engine(folder, prefix_cache=False, overlap=False, page_size=16) as solo:
        for (text, options), tokens in chosen:
            assert solo.generate(text, **dict(options)).token_ids == tokens


def test_a_crowd_of_random_clients_changes_no_answer_and_leaks_no_page(engine: rt.Engine, folder: Path) -> None:
    tally = asyncio.run(crowd(engine, rounds=10, seed=1))
    assert tally.finished > 40
    assert tally.aborted > 5
    assert tally.refused > 0
    assert tally.cached > 0
    check(engine, folder, tally, sample=12)


@pytest.mark.soak
def test_a_long_crowd(engine: rt.Engine, folder: Path) -> None:
    tally = asyncio.run(crowd(engine, rounds=400, seed=2))
    assert tally.retractions > 0
    check(engine, folder, tally, sample=100)
