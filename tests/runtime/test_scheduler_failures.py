"""Steps that fail, rows that cannot be sampled, devices that hang, faults of our own: the loop lives on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.execute.fake import FakeRunner, ScriptedRunner, fake_spec
from runtime.scheduler.commit import Committer
from tests.runtime.world import World, alone, make_submit

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])


def failing(*steps: int, **options: Any) -> FakeRunner:
    return FakeRunner(fake_spec(), n_pages=64, page_size=4, max_running=8, fail_at=steps, **options)


@BOTH
@pytest.mark.parametrize("step", [0, 1, 2, 5])
def test_a_failed_step_ends_its_requests_and_nobody_else(overlap: bool, step: int) -> None:
    world = World(overlap=overlap, runner=failing(step), max_step_tokens=16, chunk_tokens=8)
    prompts = {f"r{i}": list(range(2, 14 + 5 * i)) for i in range(3)}
    for rid, prompt in prompts.items():
        world.ask(rid, prompt, max_tokens=4)
    world.run()
    world.ask("after", prompts["r2"], max_tokens=4)
    world.run()
    assert world.tokens("after") == alone(prompts["r2"], max_tokens=4).tokens
    failed = [rid for rid in prompts if world.said[rid].finish.reason == "error"]  # type: ignore[union-attr]
    assert failed
    for rid in prompts:
        if rid not in failed:
            assert world.tokens(rid) == alone(prompts[rid], max_tokens=4).tokens
    assert world.scheduler.stats()["steps_failed"] == 1


@BOTH
def test_what_a_failed_step_was_to_write_is_never_reused(overlap: bool) -> None:
    """The prompt's pages are in the tree when the step fails; the next request must not match them."""
    world = World(overlap=overlap, runner=failing(0))
    world.ask("first", range(2, 22), max_tokens=4)
    world.ask("second", range(2, 22), max_tokens=4)
    world.run()
    world.ask("third", range(2, 22), max_tokens=4)
    said = world.run().said["third"]
    assert said.usage is not None
    assert said.usage.cached_tokens == 0
    assert said.tokens == alone(range(2, 22), max_tokens=4).tokens


@pytest.mark.parametrize("step", range(2, 9))
def test_what_a_step_in_flight_was_to_write_is_not_kept_when_its_request_ends(step: int) -> None:
    """The request leaves while a step that writes its newest token is in flight; then that step fails."""
    world = World(overlap=True, runner=failing(step))
    world.ask("leaves", range(2, 9), max_tokens=50)
    while world.state.step <= step:
        world.turn()
    world.abort("leaves")
    world.run()
    longer = [*range(2, 9), *world.tokens("leaves"), 33]
    world.ask("next", longer, max_tokens=3)
    assert world.run().tokens("next") == alone(longer, max_tokens=3).tokens


@BOTH
def test_a_request_of_the_step_behind_a_failed_one_starts_again(overlap: bool) -> None:
    world = World(overlap=overlap, runner=failing(1))
    world.ask("first", range(2, 12), max_tokens=6)
    world.turn(2)
    world.ask("second", range(2, 13), max_tokens=6)
    world.run()
    finish = world.said["first"].finish
    assert finish is not None
    assert finish.reason == "error"
    assert "told to fail" in (finish.message or "")
    assert world.tokens("second") == alone(range(2, 13), max_tokens=6).tokens


def test_a_launch_that_raises_is_a_failed_step() -> None:
    runner = failing()
    world = World(runner=runner)
    launch = runner.launch
    runner.launch = lambda plan: (_ for _ in ()).throw(MemoryError("no room")) if plan.step == 1 else launch(plan)  # type: ignore[method-assign]
    world.ask("a", [5, 6], max_tokens=5)
    world.run()
    world.ask("b", [5, 6], max_tokens=5)
    world.run()
    assert world.said["a"].finish.reason == "error"  # type: ignore[union-attr]
    assert world.tokens("b") == alone([5, 6], max_tokens=5).tokens


@BOTH
def test_a_row_with_no_possible_token_fails_alone(overlap: bool) -> None:
    class Picky(FakeRunner):
        def choose(self, plan: Any, sample: int, tokens: Any, digest: int, adjust: Any) -> int:
            return -1 if tokens[0] == 13 and len(tokens) == 6 else super().choose(plan, sample, tokens, digest, adjust)

    world = World(overlap=overlap, runner=Picky(fake_spec(), n_pages=64, page_size=4, max_running=8))
    world.ask("bad", [13, 2, 3], max_tokens=9)
    world.ask("good", [12, 2, 3], max_tokens=9)
    world.run()
    finish = world.said["bad"].finish
    assert finish is not None
    assert (finish.reason, finish.status) == ("error", 500)
    assert len(world.tokens("bad")) == 3
    assert world.tokens("good") == alone([12, 2, 3], max_tokens=9).tokens


def test_a_frontend_that_cannot_listen_does_not_stop_the_others() -> None:
    world = World()

    def deaf(message: object) -> None:
        raise ConnectionError("gone")

    world.scheduler.receive(make_submit("lost", [5, 6], max_tokens=4), deaf)
    world.ask("heard", [5, 7], max_tokens=4)
    world.run()
    assert len(world.tokens("heard")) == 4
    assert world.scheduler.stats()["outputs_lost"] == 4


def test_a_message_nobody_knows_is_dropped() -> None:
    world = World()
    world.scheduler.receive(object(), world.sink)  # type: ignore[arg-type]
    world.ask("a", [5, 6], max_tokens=2)
    assert len(world.run().tokens("a")) == 2


def test_two_steps_that_fail_together_leave_nothing_of_either() -> None:
    """The launch of a step fails while the one before it is failing on the device."""
    runner = failing(1)
    world = World(runner=runner, max_step_tokens=8, chunk_tokens=8)
    launch = runner.launch
    runner.launch = lambda plan: (_ for _ in ()).throw(MemoryError("no room")) if plan.step == 2 else launch(plan)  # type: ignore[method-assign]
    prompt = list(range(2, 40))
    world.ask("a", prompt, max_tokens=3)
    world.turn(3)
    world.ask("b", prompt, max_tokens=3)
    world.run()
    world.ask("c", prompt, max_tokens=3)
    assert world.run().tokens("c") == alone(prompt, max_tokens=3).tokens


def test_a_step_that_does_not_return_is_reported_and_flips_health() -> None:
    runner = ScriptedRunner(fake_spec(), default=[7] * 9, stuck_at=(2,))
    world = World(runner=runner, stall_s=0.01)
    seen: list[tuple[bool, str]] = []
    stuck = world.scheduler.watchdog.stuck

    def report(*args: Any) -> None:
        stuck(*args)
        seen.append(world.scheduler.health())
        runner.stuck_at.clear()  # and now it returns

    world.scheduler.watchdog.stuck = report  # type: ignore[method-assign]
    world.ask("a", [5, 6], max_tokens=6)
    world.run()
    ready, why = seen[0]
    assert not ready
    assert "Step 2 has not returned" in why
    assert "1 decode" in why
    assert "'a'" in why
    assert world.scheduler.health() == (True, "")
    assert len(world.tokens("a")) == 6
    assert world.scheduler.stats()["stalls"] == 1


def test_turning_without_progress_flips_health() -> None:
    world = World(stall_s=5.0)
    world.ask("a", [5], max_tokens=2)
    world.scheduler._planner.plan = lambda: None  # type: ignore[method-assign]  # the fault
    world.turn(2)
    assert world.scheduler.health()[0]
    world.clock.now += 6.0  # type: ignore[attr-defined]
    world.turn()
    ready, why = world.scheduler.health()
    assert not ready
    assert "1 waiting" in why


def test_a_fault_of_our_own_fails_what_runs_and_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.ask("a", [5, 6], max_tokens=9)
    world.turn(3)
    commit = Committer.commit
    monkeypatch.setattr(Committer, "commit", lambda *_: 1 / 0)
    world.scheduler._turn()
    monkeypatch.setattr(Committer, "commit", commit)
    finish = world.said["a"].finish
    assert finish is not None
    assert (finish.reason, finish.status) == ("error", 500)
    world.ask("b", [5, 6], max_tokens=3)
    assert world.run().tokens("b") == alone([5, 6], max_tokens=3).tokens
    assert world.scheduler.stats()["audit_failures"] == 1


def test_a_fault_that_recurs_at_once_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(Committer, "commit", lambda *_: 1 / 0)
    for i in range(9):
        world.ask(f"r{i}", [5], max_tokens=30)
    with pytest.raises(ZeroDivisionError):
        keep_turning(world)


def keep_turning(world: World) -> None:
    for i in range(20):
        world.ask(f"more{i}", [5], max_tokens=30)
        world.scheduler._turn()


def test_run_drains_what_was_accepted_and_refuses_the_rest() -> None:
    world, late = World(), []
    for i in range(4):
        world.ask(f"r{i}", [5 + i], max_tokens=6)
    world.turn()
    world.scheduler.stop(drain=True)
    world.scheduler.receive(make_submit("late", [9], max_tokens=1), late.append)
    world.scheduler.state.draining = True
    world.scheduler.run()
    assert all(len(world.tokens(f"r{i}")) == 6 for i in range(4))
    assert late[0].items[0].finish.status == 503


def test_stopping_now_does_not_wait_for_requests() -> None:
    world = World()
    world.ask("a", [5], max_tokens=400)
    world.turn(3)
    world.scheduler.stop()
    world.scheduler.run()
    assert world.said["a"].finish is None


def test_steps_are_traced_for_a_person_to_open(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    world = World(trace_steps=str(path))
    world.ask("a", range(2, 12), max_tokens=4)
    world.run()
    world.scheduler.stop()
    world.scheduler.run()
    events = json.loads(path.read_text())
    spans = [e for e in events if e.get("ph") == "X"]
    assert {e["name"] for e in spans} >= {"plan", "launch", "wait", "commit", "step 0"}
    device = next(e for e in spans if e["name"] == "step 0")
    assert device["args"]["tokens"] == 10
    assert all(e["dur"] >= 0 for e in spans)
