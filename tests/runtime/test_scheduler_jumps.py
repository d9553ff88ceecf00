"""When a step is not planned ahead of a grammar, what a jump must bring, and what needs no step at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runtime.execute.fake import FakeRunner, fake_spec
from runtime.scheduler.grammar import CLOSING_TOKENS
from tests.runtime.fake_grammar import END, FakeCursor, spec_of
from tests.runtime.test_scheduler_grammar import BOTH, CHOICES, JUMP, follows, world_of


def named(backend: str) -> FakeRunner:
    return FakeRunner(replace(fake_spec(64, 512, (END,)), backend=backend), n_pages=64, page_size=4, max_running=8)


@pytest.mark.parametrize("backend", ["native", "flashinfer"])
def test_a_cpu_does_not_plan_ahead_of_frequent_jumps(backend: str) -> None:
    """The same tokens; a step less for every jump, since none is in flight that samples what is forced."""
    places = [place for i in range(6) for place in ([5, 6], [7 + i], [8 + i], [9 + i], [10 + i])]
    found, steps = [], []
    for name in ("fake", backend):
        world = world_of(True, runner=named(name))
        world.ask("a", range(2, 9), grammar=spec_of(places), max_tokens=50)
        found.append(world.run().tokens("a"))
        steps.append(world.scheduler.stats()["steps"])
    assert found[0] == found[1]
    saved = steps[0] - steps[1]
    assert saved >= 5 if backend == "native" else saved <= 0


def test_a_row_without_a_grammar_keeps_the_overlap() -> None:
    world = world_of(True, runner=named("native"))
    world.ask("a", range(2, 9), grammar=spec_of(CHOICES), max_tokens=50)
    world.ask("b", range(2, 9), max_tokens=12)
    world.turn(3)
    assert len(world.scheduler._pipeline) == 1
    world.run()


def test_rare_jumps_are_not_waited_for() -> None:
    world = world_of(True, runner=named("native"))
    world.ask("a", range(2, 9), grammar=spec_of([[5, 6, 7]] * 120), max_tokens=150)
    world.turn(90)
    assert len(world.scheduler._pipeline) == 1
    world.run()


def test_no_step_is_planned_behind_the_token_that_must_be_the_last() -> None:
    places = [[5, 6], [7, 8], [9, 10], [11]]
    world = world_of(True, jump_forward=False)
    world.ask("a", range(2, 9), grammar=spec_of(places), max_tokens=50)
    assert follows(world.run().tokens("a"), places)
    stats = world.scheduler.stats()
    assert (stats["steps"], stats["rows_stale"]) == (4, 0)


@pytest.mark.parametrize(("backend", "n_stale"), [("native", 0), ("flashinfer", 1)])
def test_a_cpu_plans_nothing_behind_a_token_that_may_be_the_last(backend: str, n_stale: int) -> None:
    """Any of the last place's tokens ends the answer: nothing forces it, so only waiting shows it."""
    places = [[5, 6], [7, 8], [9, 10], [11, 12], [13, 14]]
    world = world_of(True, runner=named(backend), jump_forward=False)
    world.ask("a", range(2, 9), grammar=spec_of(places), max_tokens=50)
    world.turn(3)
    assert len(world.scheduler._pipeline) == 1  # far from its end a step is planned ahead
    assert follows(world.run().tokens("a"), places)
    stats = world.scheduler.stats()
    assert (stats["steps"], stats["rows_stale"]) == (5 + n_stale, n_stale)


@BOTH
def test_the_token_that_must_be_the_last_is_said_at_once(overlap: bool) -> None:
    """Nobody needs its KV, so nothing computes it; its log-probability, where wanted, does need the forward."""
    for logprobs, forced in ((False, 1), (True, 0 if overlap else 1)):
        world = world_of(overlap)
        world.ask("a", range(2, 9), grammar=spec_of([[5, 6], [7, 8], [9]]), max_tokens=50, logprobs=logprobs)
        said = world.run().said["a"]
        assert follows(said.tokens, [[5, 6], [7, 8], [9]])
        assert said.finish is not None
        assert said.finish.reason == "stop"
        assert said.usage is not None
        assert said.usage.forced_tokens == forced
        assert [lp.token for lp in said.logprobs] == (said.tokens if logprobs else [])
        stats = world.scheduler.stats()
        assert stats["steps"] - stats["rows_stale"] == (3 if logprobs else 2)


def test_one_forced_token_is_a_jump_where_no_step_is_in_flight() -> None:
    places = [[5, 6], [7], [8, 9], [10], [11, 12], [13, 14]]
    steps = []
    for overlap in (False, True):
        world = world_of(overlap)
        world.ask("a", range(2, 9), grammar=spec_of(places), max_tokens=50)
        assert follows(world.run().tokens("a"), places)
        steps.append(world.scheduler.stats()["steps"] - world.scheduler.stats()["rows_stale"])
    assert steps == [4, 6]


def test_an_end_that_does_not_come_is_not_waited_for_any_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long last string is near its end all the time."""
    monkeypatch.setattr(FakeCursor, "near_end", True)
    world = world_of(True, runner=named("native"), jump_forward=False)
    world.ask("a", range(2, 9), grammar=spec_of([[5, 6]] * 60), max_tokens=80)
    waited = 0
    for _ in range(20):
        world.turn(1)
        waited += len(world.scheduler._pipeline) == 0
    assert waited == CLOSING_TOKENS
    world.run()


@pytest.mark.parametrize("n_prompts", [0, 2])
def test_every_answer_that_jumps_has_its_row_in_the_next_step(n_prompts: int) -> None:
    """Twelve answers force five tokens after every choice: less than two pages' worth each, all in one step. Long
    prompts beside them move on too."""
    places = [place for i in range(4) for place in ([5, 6], [7 + i], [8 + i], [9 + i], [10 + i], [11 + i])]
    spec = replace(fake_spec(64, 512, (END,)), backend="native")
    runner = FakeRunner(spec, n_pages=512, page_size=16, max_running=16)
    world = world_of(True, runner=runner, max_step_tokens=128)
    for i in range(12):
        world.ask(f"r{i}", [2, 3, 4 + i], grammar=spec_of(places), max_tokens=50)
    world.turn(3)
    for i in range(n_prompts):
        world.ask(f"p{i}", [9 + i, *range(2, 60)] * 5, max_tokens=1)
    world.run()
    assert all(follows(world.tokens(f"r{i}"), places) for i in range(12))
    assert world.scheduler.stats()["steps"] <= (5 if not n_prompts else 13)


RUNS = [place for i in range(4) for place in ([5, 6], *([7 + i + k] for k in range(9)))]


@BOTH
def test_forced_tokens_are_computed_among_the_decode_rows(overlap: bool) -> None:
    """Whatever pages they fill, beside rows without a grammar; and it is the same as in rows of their own."""
    said = []
    for backend in ("fake", "flashinfer"):
        world = world_of(overlap, runner=named(backend))
        for i in range(4):
            grammar = spec_of(RUNS) if i else None
            world.ask(f"r{i}", [*range(2, 15), 20 + i], grammar=grammar, max_tokens=60)
        world.run()
        plans = list(world.runner.plans)[1:]  # without the prompts'
        ragged = [p for p in plans if p.n_tokens > p.n_rows == p.n_decode]
        apart = [p for p in plans if p.n_rows > p.n_decode]
        assert (len(ragged) >= 3, len(apart) >= 3) == ((True, False) if backend == "fake" else (False, True))
        said.append([(world.tokens(f"r{i}"), world.said[f"r{i}"].usage) for i in range(4)])
    for (tokens, usage), (again, other) in zip(*said, strict=True):
        assert tokens == again
        assert (usage.prefilled_tokens, usage.forced_tokens) == (other.prefilled_tokens, other.forced_tokens)
    assert all(follows(tokens, RUNS) for tokens, _ in said[0][1:])


@BOTH
@pytest.mark.parametrize("tight", [{"max_step_tokens": 16}, {"n_pages": 30}], ids=["tokens", "pages"])
def test_forced_tokens_wait_for_room(overlap: bool, tight: dict[str, int]) -> None:
    """Where a step or the pool has no room for all of them, they come piece by piece."""
    world = world_of(overlap, **tight)
    for i in range(6):
        world.ask(f"r{i}", range(2, 5 + i), grammar=spec_of(RUNS), max_tokens=60)
    world.run()
    assert all(follows(world.tokens(f"r{i}"), RUNS) for i in range(6))
    assert max(p.n_tokens for p in world.runner.plans) <= tight.get("max_step_tokens", 64)


def test_what_was_said_leaves_when_the_device_has_work_again() -> None:
    """A client that works at its answer must not hold up the next step; the last words leave at once."""
    world = world_of(False)
    world.ask("a", range(2, 9), max_tokens=4)
    launch, order = world.runner.launch, []

    def launched(plan: Any) -> Any:
        order.append(("launch", len(world.said["a"].tokens) if "a" in world.said else 0))
        return launch(plan)

    world.runner.launch = launched
    world.run()
    assert [n for _, n in order] == [0, 0, 1, 2]
    assert len(world.said["a"].tokens) == 4


@BOTH
@JUMP
def test_an_end_foreseen_in_vain_is_gone_past(overlap: bool, jump: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced text may come in other pieces than foreseen."""
    monkeypatch.setattr("runtime.scheduler.speak.last_token", lambda request: 1)
    world = world_of(overlap, jump_forward=jump)
    for i in range(3):
        world.ask(f"r{i}", range(2, 5 + i), grammar=spec_of(CHOICES), max_tokens=50)
    world.run()
    assert all(follows(world.tokens(f"r{i}"), CHOICES) for i in range(3))
