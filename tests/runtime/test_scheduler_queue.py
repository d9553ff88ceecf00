"""Who is offered a place, who must stand back, and for how long: walls, rotation, patience, accounts."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.config import EngineConfig
from runtime.delta import error_of
from runtime.errors import InvalidRequest, QueueTimeout
from runtime.messages import Hints
from runtime.request import Request
from runtime.scheduler.policy import POLICIES, Waiting
from runtime.scheduler.queue import SCAN, WALL_AFTER, WaitingQueue
from tests.runtime.world import Clock, World, make_submit


def ids(n: int, start: int = 2) -> list[int]:
    return [2 + (start + 7 * i + i * i // 5) % 60 for i in range(n)]


def queue_of(policy: str, n: int) -> tuple[WaitingQueue, list[Request]]:
    queue = WaitingQueue(POLICIES[policy], lambda r: Waiting(r.num))
    requests = [Request.from_submit(i, make_submit(f"r{i}", [5]), lambda m: None, 0.0) for i in range(n)]
    for request in requests:
        queue.add(request)
    return queue, requests


# -- nobody is out of sight ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(st.integers(1, 400))
@settings(max_examples=10, deadline=None)
def test_everyone_is_looked_at_again_and_again_though_nobody_fits(policy: str, n: int) -> None:
    queue, requests = queue_of(policy, n)
    seen: set[int] = set()
    for _ in range(1 + n // 8):
        looked_at = [r.num for r in queue.candidates(0)]
        assert len(looked_at) == len(set(looked_at))
        seen.update(looked_at)
    assert seen == {r.num for r in requests}


def test_small_ones_pass_more_big_ones_than_are_looked_at_in_one_step() -> None:
    world = World(page_size=4, n_pages=64, max_running=4, schedule_policy="fcfs", audit=False)
    world.ask("running", ids(160), max_tokens=80)
    world.turn(8)
    for i in range(SCAN + 6):
        world.ask(f"big{i}", ids(150, start=i + 3), max_tokens=2)
    world.ask("small", ids(5), max_tokens=2)
    world.turn(12)
    assert world.said["small"].finish is not None
    assert "running" in world.said
    assert not any(rid.startswith("big") for rid in world.said)
    world.run()


def test_the_first_that_was_skipped_becomes_the_wall_in_time_though_others_rank_before_it() -> None:
    """Its time is counted in admissions since it was first skipped, not in how often it was looked at."""
    queue, requests = queue_of("fcfs", 3)
    queue.skip(requests[1], 10)
    queue.skip(requests[2], 12)
    assert [r.num for r in queue.candidates(0, 10 + WALL_AFTER - 1)] == [0, 1, 2]
    assert [r.num for r in queue.candidates(0, 10 + WALL_AFTER)] == [1]
    queue.remove(requests[1])
    assert [r.num for r in queue.candidates(0, 12 + WALL_AFTER)] == [2]


# -- who gives way does so for good reason -------------------------------------------------------------------------

shapes = st.lists(
    st.tuples(st.integers(1, 70), st.integers(1, 40), st.integers(0, 3), st.booleans()), min_size=2, max_size=8
)


@settings(max_examples=40, deadline=None)
@given(shapes, st.sampled_from([1, 4, 16]), st.integers(96, 200), st.integers(1, 4))
@example([(48, 8, 0, False), (26, 9, 1, False), (1, 1, 0, False), (1, 1, 0, False), (2, 1, 1, True)], 16, 96, 2)
def test_a_preemption_always_lets_the_higher_one_in(
    asked: list[tuple[int, int, int, bool]], page_size: int, pool: int, rows: int
) -> None:
    """What is cached and held by nobody is not counted twice, as cached and as room to be made."""
    world = World(
        page_size=page_size,
        n_pages=pool // page_size,
        context_length=128,
        max_running=rows,
        schedule_policy="priority",
        audit=False,
    )
    for i, (n, max_tokens, priority, shared) in enumerate(asked):
        world.ask(f"r{i}", ids(n, start=0 if shared else 7 * i), max_tokens=max_tokens, priority=priority)
        for _ in range(2):
            before = world.scheduler.stats()["preemptions"]
            names = {r.rid for r in world.state.queue} | {f"r{i}"}
            world.turn()
            if world.scheduler.stats()["preemptions"] > before:
                started = [r.rid for r in world.state.rows.running() if r.rid in names]
                assert started, "somebody gave way and nobody took the place"
    world.run()


# -- patience ------------------------------------------------------------------------------------------------------


def test_who_waits_longer_than_allowed_is_told_so_and_those_who_run_go_on() -> None:
    clock = Clock()
    world = World(max_running=1, max_queue_time_s=5.0, clock=clock)
    world.ask("runs", ids(5), max_tokens=40)
    world.turn(2)
    world.ask("waits", ids(6), max_tokens=4)
    world.turn()
    clock.now += 4.9
    world.turn()
    assert "waits" not in world.said
    clock.now += 0.2
    world.turn()
    finish = world.said["waits"].finish
    assert finish is not None
    assert (finish.reason, finish.status, finish.param) == ("error", 503, "max_queue_time_s")
    assert "5 s" in (finish.message or "")
    assert isinstance(error_of(finish), QueueTimeout)
    world.run()
    assert len(world.tokens("runs")) == 40
    assert world.scheduler.stats()["queue_timed_out"] == 1


def test_one_that_was_taken_back_has_started_and_may_wait() -> None:
    clock = Clock()
    world = World(page_size=4, n_pages=24, max_running=4, max_queue_time_s=5.0, clock=clock)
    for i in range(3):
        world.ask(f"r{i}", ids(10, start=i), max_tokens=60)
    while world.scheduler.busy:
        clock.now += 0.5
        world.turn()
    assert world.scheduler.stats()["retractions"] > 0
    assert all(len(world.tokens(f"r{i}")) == 60 for i in range(3))


def test_an_idle_loop_wakes_for_the_end_of_patience() -> None:
    world = World(max_running=1, max_queue_time_s=5.0)
    world.ask("a", ids(5), max_tokens=9)
    world.turn()
    assert world.scheduler._ingest.next_deadline() == world.clock() + 5.0


def test_those_who_started_are_not_remembered_for_the_sake_of_one_that_waits() -> None:
    world = World(max_running=1, max_queue_time_s=5.0, schedule_policy="priority", audit=False)
    world.ask("last", ids(9), max_tokens=1, priority=-1)
    for i in range(201):
        world.ask(f"r{i}", ids(6), max_tokens=1)
        while f"r{i}" not in world.said:
            world.turn()
    assert "last" not in world.said
    assert len(world.scheduler._ingest._patience) <= 100
    world.run()


@pytest.mark.parametrize("value", [0, -1.0])
@pytest.mark.parametrize("name", ["max_queue_time_s", "stall_s"])
def test_patience_must_be_positive(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        EngineConfig(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["context_length", "kv_pool_tokens", "threads", "page_size", "chunk_tokens"])
def test_sizes_must_be_positive(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        EngineConfig(**{name: 0})  # type: ignore[arg-type]
    assert caught.value.param == name


# -- accounts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "field"), [("program", "group"), ("fair", "client")])
def test_service_is_booked_while_a_request_runs(policy: str, field: str) -> None:
    world = World(schedule_policy=policy, max_running=1, n_pages=128)
    world.ask("long", ids(10), max_tokens=100, **{field: "greedy"})
    world.turn(40)
    world.ask("more", ids(11), max_tokens=2, **{field: "greedy"})
    world.ask("other", ids(12), max_tokens=2, **{field: "modest"})
    world.turn()
    order = [r.rid for r in world.state.queue.candidates(world.state.work)]
    assert order == ["other", "more"]
    services = world.state.queue._service
    assert services["greedy"] >= 10 + 35
    world.run()
    assert services["greedy"] == 10 + 100 + (11 - 10) + 2  # the second prompt repeats all but its last token


def test_service_counts_what_was_computed_for_it_and_not_what_a_retraction_cost() -> None:
    world = World(schedule_policy="fair", page_size=4, n_pages=24, max_running=4)
    for i in range(3):
        world.ask(f"r{i}", ids(10, start=20 * i), max_tokens=60, client=f"c{i}")
    world.run()
    assert world.scheduler.stats()["recomputed"] > 0
    assert {world.state.queue._service[f"c{i}"] for i in range(3)} <= {68, 69, 70}


def test_sub_agents_are_booked_to_the_program_that_started_them() -> None:
    world = World(schedule_policy="program", max_running=1, n_pages=256)
    world.ask("boss", ids(10), max_tokens=30, hints=Hints(program_id="boss"))
    world.run()
    world.ask("runs", ids(3), max_tokens=60, hints=Hints(program_id="runner"))
    world.turn(2)
    world.ask("helper", ids(12), max_tokens=2, hints=Hints(program_id="helper", parent_id="boss"))
    world.ask("stranger", ids(13), max_tokens=2, hints=Hints(program_id="stranger", parent_id="who?"))
    world.turn()
    order = [r.rid for r in world.state.queue.candidates(world.state.work)]
    assert order == ["stranger", "helper"]  # the boss has had its share
    world.run()
    usage = {rid: world.said[rid].usage for rid in ("helper", "stranger")}
    assert "parent_id" in usage["helper"].hints_honoured  # type: ignore[union-attr]
    assert "parent_id" not in usage["stranger"].hints_honoured  # type: ignore[union-attr]


# -- hints that keep -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "kept"), [("hints", True), ("lru", False)])
def test_a_fork_point_is_kept_until_the_children_that_were_announced_have_come(policy: str, kept: bool) -> None:
    world = World(page_size=4, n_pages=40, eviction_policy=policy)
    trunk = ids(42)
    world.ask("trunk", trunk, max_tokens=1, hints=Hints(expected_fanout=2))
    world.run()
    for i in range(4):
        world.ask(f"noise{i}", ids(60, start=100 + 31 * i), max_tokens=1)
        world.run()
    for i in range(2):
        world.ask(f"child{i}", [*trunk, 3 + i], max_tokens=1)
        world.run()
    usage = world.said["child0"].usage
    assert usage is not None
    assert (usage.cached_tokens == 42) is kept
    honoured = world.said["trunk"].usage
    assert honoured is not None
    assert ("expected_fanout" in honoured.hints_honoured) is kept
    for i in range(4):
        world.ask(f"later{i}", ids(60, start=305 + 31 * i), max_tokens=1)
        world.run()
    world.ask("late child", [*trunk, 9], max_tokens=1)
    late = world.run().said["late child"].usage
    assert late is not None
    assert late.cached_tokens < 42  # both have come: it is kept no longer


@pytest.mark.parametrize(("depth", "kept"), [(2, True), (0, False)])
def test_a_tail_that_the_program_goes_on_from_is_kept_until_then(depth: int, kept: bool) -> None:
    world = World(page_size=4, n_pages=40, eviction_policy="hints")
    world.ask("first step", ids(42), max_tokens=1, hints=Hints(depth=depth))
    world.run()
    for i in range(4):
        world.ask(f"noise{i}", ids(60, start=100 + 31 * i), max_tokens=1)
        world.run()
    world.ask("second step", [*ids(42), 3], max_tokens=1)
    usage = world.run().said["second step"].usage
    assert usage is not None
    assert (usage.cached_tokens == 42) is kept


def test_children_that_never_come_keep_nothing_for_long() -> None:
    clock = Clock()
    world = World(page_size=4, n_pages=40, eviction_policy="hints", clock=clock)
    world.ask("trunk", ids(42), max_tokens=1, hints=Hints(expected_fanout=2))
    world.run()
    clock.now += 61.0
    for i in range(4):
        world.ask(f"noise{i}", ids(60, start=100 + 31 * i), max_tokens=1)
        world.run()
    world.ask("child", [*ids(42), 3], max_tokens=1)
    usage = world.run().said["child"].usage
    assert usage is not None
    assert usage.cached_tokens < 42


# -- floors --------------------------------------------------------------------------------------------------------


def test_a_salt_keeps_its_floor_while_others_flood_the_pool() -> None:
    """By any spelling a door gives the salt: the digest of an API key may stand before it."""
    from runtime.messages import NamespaceKey

    for salt in ("team-a", "1f2e3d/team-a"):
        world = World(page_size=4, n_pages=40, cache_floors='{"team-a": 40}')
        for rid, name in (("kept", salt), ("lost", "team-b")):
            world.ask(rid, ids(40), max_tokens=1, namespace=NamespaceKey(salt=name))
            world.run()
        for i in range(6):
            world.ask(f"flood{i}", ids(60, start=9 * i), max_tokens=1)
            world.run()
        world.ask("kept again", ids(40), max_tokens=1, namespace=NamespaceKey(salt=salt))
        world.ask("lost again", ids(40), max_tokens=1, namespace=NamespaceKey(salt="team-b"))
        world.run()
        cached = [world.said[rid].usage.cached_tokens for rid in ("kept again", "lost again")]  # type: ignore[union-attr]
        assert cached == [39, 0]


@pytest.mark.parametrize("text", ["{", "[]", '{"a": -1}', '{"a": 1.5}', '{"a": true}', "3"])
def test_floors_that_make_no_sense_are_refused_at_the_start(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        EngineConfig(cache_floors=text)
    assert caught.value.param == "cache_floors"
