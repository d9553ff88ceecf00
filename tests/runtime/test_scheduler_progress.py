"""No starvation, no livelock: bounds that hold for any mix of requests and any pool."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.execute.fake import FakeRunner, fake_spec
from runtime.messages import GrammarSpec
from runtime.scheduler import Scheduler, loop
from runtime.scheduler.policy import POLICIES
from runtime.step import StepPlan
from tests.runtime.fake_grammar import FakeGrammars, spec_of
from tests.runtime.world import World, make_submit
from tests.serve.running import wait_until

requests = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60), st.integers(0, 2)), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(
    requests,
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([1, 4]),
    st.integers(70, 200),
    st.booleans(),
    st.sampled_from([(8, 4), (64, 32)]),
)
def test_everyone_finishes_within_bounded_work(
    asked: list[tuple[int, int, int]],
    policy: str,
    page_size: int,
    pool: int,
    overlap: bool,
    budget: tuple[int, int],
) -> None:
    """The oldest running request is never taken back, so the work done again is bounded by what others hold."""
    world = World(
        overlap=overlap,
        schedule_policy=policy,
        page_size=page_size,
        n_pages=pool // page_size,
        context_length=128,
        max_running=4,
        max_step_tokens=budget[0],
        chunk_tokens=budget[1],
    )
    for i, (n_prompt, max_tokens, kind) in enumerate(asked):
        prompt = [2 + (i * 7 + j) % 60 for j in range(n_prompt)]
        world.ask(f"r{i}", prompt, max_tokens=max_tokens, priority=kind, client=str(kind), group=str(kind))
    most = world.state.limits.max_len
    while world.scheduler.busy:
        running = world.state.rows.running()
        first = None
        if running and policy != "priority":
            first = min(running, key=lambda r: r.num)
        before = first.tally.retractions if first else 0
        world.turn()
        if first is not None and len(running) > 1:
            assert first.tally.retractions == before
        assert world.n_turns < 400 + 40 * len(asked) * most
    world.check_idle()
    stats = world.scheduler.stats()
    for i, (n_prompt, max_tokens, _) in enumerate(asked):
        assert len(world.tokens(f"r{i}")) == min(max_tokens, most - n_prompt)
    assert stats["retractions"] <= 4 * len(asked) * most / page_size


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(["lpm", "fcfs", "fair", "program", "dfs-weight"]))
def test_a_big_request_gets_in_whatever_small_ones_keep_coming(seed: int, policy: str) -> None:
    world = World(schedule_policy=policy, page_size=4, n_pages=40, max_running=8, audit=False)
    n = 0

    def refill() -> None:
        nonlocal n
        while len(world.state.queue) < 4:
            world.ask(f"s{n}", [2 + (seed + n + j) % 60 for j in range(20)], max_tokens=6, client=f"c{n % 5}")
            n += 1
            world.scheduler._take_messages()

    refill()
    world.turn(3)
    world.ask("big", [2 + j % 60 for j in range(120)], max_tokens=2, client="big")
    while "big" not in world.said:
        refill()
        world.turn()
        assert n < 300


def test_an_idle_loop_wakes_for_a_message_and_for_a_finished_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in its own thread, the loop sleeps when there is nothing to do; both events must wake it at once."""
    monkeypatch.setattr(loop, "IDLE_S", 60.0)  # it would be late if it woke by itself
    grammars = FakeGrammars(slow=True)
    world = World(grammar=grammars, clock=time.monotonic)
    scheduler: Scheduler = world.scheduler
    done = threading.Event()

    def sink(message: object) -> None:
        world.sink(message)  # type: ignore[arg-type]
        if any(said.usage for said in world.said.values()):
            done.set()

    thread = threading.Thread(target=scheduler.run)
    thread.start()
    try:
        spec: GrammarSpec = spec_of([[5], [6], [7]])
        scheduler.receive(make_submit("a", [2, 3, 4], grammar=spec, max_tokens=9), sink)
        wait_until(lambda: bool(grammars.waiting), 20)
        assert not done.wait(0.05)
        grammars.finish()
        assert done.wait(20)
        assert world.tokens("a") == [5, 6, 7]
    finally:
        scheduler.stop()
        thread.join(20)
    assert not thread.is_alive()


def linear_device(plan: StepPlan) -> float:
    """10 ms a step, 40 µs a token, and what reading the KV takes; time is virtual."""
    return 0.010 + 40e-6 * plan.n_tokens + 1e-7 * float(plan.kv_lens.sum())


def test_streams_keep_their_pace_through_a_burst_of_prefill() -> None:
    runner = FakeRunner(
        fake_spec(64, 8192), n_pages=2048, page_size=16, max_running=16, check=False, cost=linear_device
    )
    world = World(runner=runner, clock=lambda: runner.device_now, max_step_tokens=1024, chunk_tokens=512, audit=False)
    for i in range(4):
        world.ask(f"stream{i}", [2 + i] * 40, max_tokens=400)
    world.turn(60)
    alone = max(np.diff(world.said["stream0"].arrived[20:]))
    start = len(world.said["stream0"].arrived)
    for i in range(2):
        world.ask(f"burst{i}", [2 + (i + j) % 60 for j in range(4096)], max_tokens=2)
    world.turn(2)
    world.ask("short", [9] * 30, max_tokens=1)
    came = world.clock()
    while not {"burst0", "burst1", "short"} <= set(world.said):
        world.turn()
    gaps = sorted(np.diff(world.said["stream0"].arrived[start:]))
    assert gaps[int(len(gaps) * 0.99)] <= 1.5 * alone
    assert gaps[-1] <= linear_device_full_step()
    assert world.said["short"].arrived[0] - came <= 6 * alone


@pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])
def test_a_device_without_requests_is_not_idle_between_steps(overlap: bool) -> None:
    runner = FakeRunner(fake_spec(64, 512), n_pages=64, page_size=4, max_running=4, check=False, cost=linear_device)
    world = World(overlap=overlap, runner=runner, clock=lambda: runner.device_now)
    world.ask("a", [5], max_tokens=20)
    world.turn(5)
    runner.device_now += 0.05  # while a request runs: idle
    world.run()
    idle = world.scheduler.stats()["device_idle_s"]["total"]
    assert idle == pytest.approx(0.05)
    world.turn(2)
    runner.device_now += 1000.0  # while there is none: at rest
    world.ask("b", [6], max_tokens=20)
    world.run()
    assert world.scheduler.stats()["device_idle_s"]["total"] == pytest.approx(0.05)


def linear_device_full_step() -> float:
    return 0.010 + 40e-6 * 1024 + 1e-7 * 20_000
