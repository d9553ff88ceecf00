"""The scheduler over a real model: hundreds of steps of random work, and the same tokens whatever the depth."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.config import EngineConfig
from runtime.execute.runner import ModelRunner
from runtime.models.loader import load_runner
from tests.runtime.tiny import write_tiny
from tests.runtime.world import World, make_submit

TRUNK = random.Random(5).choices(range(256), k=120)
MakeRunner = Callable[..., ModelRunner]


@pytest.fixture
def make_runner(tmp_path: Path) -> Iterator[MakeRunner]:
    """Runners over one tiny random model, closed at the end."""
    folder, made = write_tiny(tmp_path / "model"), []

    def make(**options: Any) -> ModelRunner:
        settings = {"kv_pool_tokens": 200, "page_size": 4, "max_running": 6, **options}
        config = EngineConfig(
            model=str(folder), load_format="dummy", backend="reference", dtype="float32", threads=1, **settings
        )
        made.append(load_runner(config))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def request_of(rng: random.Random) -> tuple[list[int], dict[str, Any]]:
    n = rng.randrange(1, 80)
    shared = TRUNK[: rng.randrange(n + 1)]
    options: dict[str, Any] = {"max_tokens": rng.choice([1, 8, 60])}
    if rng.random() < 0.3:
        options |= {"temperature": 0.9, "seed": rng.randrange(9)}
    if rng.random() < 0.3:
        options |= {"repetition_penalty": 1.2, "frequency_penalty": 0.4}
    return shared + rng.choices(range(256), k=n - len(shared)), options


def crowd(world: World, seed: int, turns: int) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Random arrivals, some of siblings together, and aborts; returns what was asked and not aborted."""
    rng, more, asked = random.Random(seed), random.Random(seed + 1), {}
    for i in range(turns):
        if rng.random() < 0.35 and len(world.state.live) < 12:
            prompt, options = asked[f"r{i}"] = request_of(rng)
            for j in range(more.choice([0, 0, 1, 2])):  # they copy, in its own step, the page it leaves unfilled
                asked[f"r{i}.{j}"] = [*prompt, more.randrange(256)], options
            together = [rid for rid in asked if rid.partition(".")[0] == f"r{i}"]
            world.ask_together(*(make_submit(rid, asked[rid][0], **options) for rid in together))
        elif rng.random() < 0.05 and world.state.live:
            world.abort(rng.choice(list(world.state.live)))
        world.turn()
    world.run()
    return {rid: what for rid, what in asked.items() if world.said[rid].finish.reason == "length"}  # type: ignore[union-attr]


@pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])
def test_hundreds_of_random_steps_answer_as_if_alone(make_runner: MakeRunner, overlap: bool) -> None:
    world = World(overlap=overlap, runner=make_runner(), max_step_tokens=48, chunk_tokens=16)
    asked = crowd(world, seed=3, turns=150)
    stats = world.scheduler.stats()
    assert stats["steps"] > 150
    assert stats["steps_failed"] == 0
    assert stats["retractions"] > 0
    assert stats["reused"] > 300
    assert stats["copied"] > 20
    solo = World(overlap=False, runner=make_runner(page_size=10), prefix_cache=False, max_step_tokens=512)
    for rid in list(asked)[::3]:
        prompt, options = asked[rid]
        solo.ask(rid, prompt, **options)
        assert solo.run().tokens(rid) == world.tokens(rid)


def test_overlap_gives_the_same_tokens(make_runner: MakeRunner) -> None:
    said = []
    for overlap in (False, True):
        world = World(overlap=overlap, runner=make_runner(kv_pool_tokens=2048), max_step_tokens=64)
        rng = random.Random(8)
        for i in range(10):
            prompt, options = request_of(rng)
            world.ask(f"r{i}", prompt, **options)
        world.run()
        said.append({rid: s.tokens for rid, s in world.said.items()})
    assert said[0] == said[1]


@pytest.mark.soak
@pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])
def test_hundreds_of_random_steps_of_the_embedded_model_answer_as_if_alone(smollm2: Path, overlap: bool) -> None:
    """SmolLM2 on its own kernels and quantised weights, in a pool too small for the crowd; audited after every step."""

    def load(**options: Any) -> ModelRunner:
        settings = {"kv_pool_tokens": 256, "page_size": 16, "max_running": 6, "context_length": 256, **options}
        return load_runner(EngineConfig(model=str(smollm2), threads=1, **settings))

    crowded, quiet = load(), load(page_size=8, kv_pool_tokens=512)
    try:
        world = World(overlap=overlap, runner=crowded, max_step_tokens=64, chunk_tokens=32)
        asked = crowd(world, seed=11, turns=300)
        stats = world.scheduler.stats()
        assert stats["steps"] > 300
        assert stats["steps_failed"] == 0
        assert stats["retractions"] > 0
        assert stats["reused"] > 500
        assert stats["copied"] > 20
        solo = World(overlap=False, runner=quiet, prefix_cache=False, max_step_tokens=512, chunk_tokens=512)
        assert len(asked) > 10
        for rid in list(asked)[::2]:
            prompt, options = asked[rid]
            solo.ask(rid, prompt, **options)
            assert solo.run().tokens(rid) == world.tokens(rid)
    finally:
        crowded.close()
        quiet.close()
