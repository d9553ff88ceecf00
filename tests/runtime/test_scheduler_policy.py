"""Orders of waiting requests: pure functions first, then what they do to a queue and to a running scheduler."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.messages import Hints
from runtime.request import Request
from runtime.scheduler.policy import (
    AGE,
    POLICIES,
    Waiting,
    arrange_dfs,
    bucket_program,
    key_fcfs,
    key_lpm,
    key_priority,
)
from runtime.scheduler.queue import OVERDUE, ROTATE, SCAN, WALL_AFTER, WaitingQueue
from tests.runtime.world import World, make_submit


def order(views: list[Waiting], key: object) -> list[int]:
    return [w.num for w in sorted(views, key=key)]  # type: ignore[call-overload]


def prefix(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


# -- pure --------------------------------------------------------------------------------------------------------


def test_fcfs_is_arrival_after_those_taken_back() -> None:
    assert order([Waiting(2), Waiting(1), Waiting(3, resumed=True)], key_fcfs) == [3, 1, 2]


def test_lpm_prefers_the_longest_cached_prefix() -> None:
    assert order([Waiting(1), Waiting(2, hit=50), Waiting(3, hit=10)], key_lpm) == [2, 3, 1]


def test_lpm_ages_by_the_prefill_work_done_since_arrival() -> None:
    cold = Waiting(1, hit=0, work_at_arrival=0)
    warm_soon = Waiting(2, hit=100, work_at_arrival=99)
    warm_late = Waiting(3, hit=100, work_at_arrival=101)
    assert AGE == 1.0
    assert order([warm_soon, warm_late, cold], key_lpm) == [2, 1, 3]


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 2000)), min_size=2, max_size=20),
    st.integers(0, 10**6),
)
def test_lpm_order_never_changes_with_time(pairs: list[tuple[int, int]], now: int) -> None:
    """hit + age is compared at any time the same way, so a queue may keep it sorted."""
    views = [Waiting(i, hit=hit, work_at_arrival=came) for i, (hit, came) in enumerate(pairs)]
    by_score = sorted(views, key=lambda w: (-(w.hit + AGE * (now - w.work_at_arrival)), w.num))
    assert [w.num for w in by_score] == order(views, key_lpm)


def test_priority_then_arrival() -> None:
    assert order(
        [Waiting(1), Waiting(2, priority=5), Waiting(3, priority=5), Waiting(4, priority=-1)], key_priority
    ) == [
        2,
        3,
        1,
        4,
    ]


def test_dfs_weight_visits_the_heaviest_subtree_first_and_stays_in_it() -> None:
    views = [
        Waiting(1, prefix=prefix(1, 2)),
        Waiting(2, prefix=prefix(7, 7)),
        Waiting(3, prefix=prefix(1, 2, 3)),
        Waiting(4, prefix=prefix(1, 9)),
        Waiting(5, prefix=prefix(1, 2, 3)),
        Waiting(6),
    ]
    # cold ones at the root first, then below [1]: [1 2] (three wait there) before [1 9]; [7 7] last
    assert [w.num for w in arrange_dfs(views)] == [6, 1, 3, 5, 4, 2]


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=12))
def test_dfs_keeps_everyone_and_keeps_equal_prefixes_together(prefixes: list[list[int]]) -> None:
    views = [Waiting(i, prefix=prefix(*p)) for i, p in enumerate(prefixes)]
    arranged = arrange_dfs(views)
    assert sorted(w.num for w in arranged) == list(range(len(views)))
    seen: list[bytes] = []
    for w in arranged:
        if not seen or seen[-1] != w.prefix:
            assert w.prefix not in seen
            seen.append(w.prefix)


def test_a_request_without_a_program_is_its_own_program() -> None:
    assert bucket_program(Waiting(3, program="p")) == "p"
    assert bucket_program(Waiting(3)) != bucket_program(Waiting(4))


# -- the queue ---------------------------------------------------------------------------------------------------


def make_queue(policy: str) -> tuple[WaitingQueue, dict[int, Waiting]]:
    views: dict[int, Waiting] = {}
    return WaitingQueue(POLICIES[policy], lambda r: views[r.num]), views


def put(queue: WaitingQueue, views: dict[int, Waiting], view: Waiting) -> Request:
    request = Request.from_submit(view.num, make_submit(f"r{view.num}", [5]), lambda m: None, 0.0)
    request.work_at_arrival = view.work_at_arrival
    views[view.num] = view
    queue.add(request)
    return request


def drain(queue: WaitingQueue, cost: float = 0.0, limit: int = 1000) -> list[int]:
    """Admit one request after the other, charging each."""
    out = []
    while len(queue) and len(out) < limit:
        request = next(queue.candidates(0))
        queue.remove(request)
        queue.charge(request.account, cost)
        out.append(request.num)
    return out


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_everyone_comes_out_exactly_once(policy: str) -> None:
    queue, views = make_queue(policy)
    for i in range(50):
        put(queue, views, Waiting(i, hit=i * 7 % 13, priority=i % 3, client=str(i % 4), program=str(i % 5)))
    assert sorted(drain(queue, cost=10)) == list(range(50))
    assert len(queue) == 0


def test_fair_gives_each_client_its_turn() -> None:
    queue, views = make_queue("fair")
    for i in range(30):
        put(queue, views, Waiting(i, client="greedy"))
    put(queue, views, Waiting(30, client="modest"))
    put(queue, views, Waiting(31, client="modest"))
    out = drain(queue, cost=100)
    assert out.index(30) <= 1
    assert out.index(31) <= 3


def test_fair_lets_nobody_save_up_while_idle() -> None:
    queue, views = make_queue("fair")
    for i in range(10):
        put(queue, views, Waiting(i, client="busy"))
    drain(queue, cost=1000, limit=9)
    for i in range(10, 20):
        put(queue, views, Waiting(i, client="busy"))
        put(queue, views, Waiting(i + 10, client="idle"))
    out = drain(queue, cost=1000)
    late = [i for i, num in enumerate(out) if num >= 20]
    assert late != list(range(10))  # not ten in a row on credit
    assert max(late[:5]) <= 10


def test_fair_takes_the_warmest_of_a_client_first() -> None:
    queue, views = make_queue("fair")
    put(queue, views, Waiting(0, client="a"))
    put(queue, views, Waiting(1, client="a", hit=40))
    assert drain(queue)[0] == 1


def test_program_serves_the_one_that_has_had_least() -> None:
    queue, views = make_queue("program")
    queue.charge("long", 5000)
    put(queue, views, Waiting(0, program="long", hit=900))
    put(queue, views, Waiting(1, program="young"))
    put(queue, views, Waiting(2, program="young", hit=5))
    assert drain(queue) == [2, 1, 0]


def test_a_changed_hit_moves_a_request() -> None:
    queue, views = make_queue("lpm")
    put(queue, views, Waiting(0, hit=5))
    late = put(queue, views, Waiting(1))
    views[1] = Waiting(1, hit=50)
    queue.rekey(late)
    assert drain(queue) == [1, 0]


def test_looking_is_bounded_however_many_wait() -> None:
    queue, views = make_queue("lpm")
    for i in range(5000):
        put(queue, views, Waiting(i, hit=i % 97))
    assert len(list(queue.candidates(0))) == SCAN + ROTATE
    assert len(queue.stale_hits(4)) == 4


def test_one_overtaken_too_often_becomes_a_wall() -> None:
    queue, views = make_queue("fcfs")
    big = put(queue, views, Waiting(0))
    put(queue, views, Waiting(1))
    queue.skip(big, 0)
    assert [r.num for r in queue.candidates(0)] == [0, 1]
    queue.skip(big, WALL_AFTER)
    assert [r.num for r in queue.candidates(0)] == [0]
    queue.remove(big)
    assert [r.num for r in queue.candidates(0)] == [1]


def test_strict_priorities_are_held_up_by_no_wall_and_no_age() -> None:
    queue, views = make_queue("priority")
    low = put(queue, views, Waiting(0, priority=0, work_at_arrival=0))
    for num, priority in ((1, 5), (2, 0), (3, 7)):
        put(queue, views, Waiting(num, priority=priority, work_at_arrival=OVERDUE * 2))
    queue.skip(low, 0)
    queue.skip(low, WALL_AFTER)
    assert [r.num for r in queue.candidates(OVERDUE * 3)] == [3, 1, 0]  # equals do not pass the wall


@pytest.mark.parametrize("policy", ["dfs-weight", "program", "lpm"])
def test_an_overdue_request_goes_first_under_any_policy(policy: str) -> None:
    queue, views = make_queue(policy)
    queue.charge("old", 10**9)
    put(queue, views, Waiting(0, program="old", work_at_arrival=0))
    for i in range(1, 9):
        put(queue, views, Waiting(i, program="new", hit=500, prefix=prefix(1, 2), work_at_arrival=OVERDUE // 2))
    assert next(queue.candidates(OVERDUE + 1)).num == 0


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 3)), min_size=1, max_size=60),
)
def test_queue_survives_any_sequence(policy: str, actions: list[tuple[int, int, int]]) -> None:
    queue, views = make_queue(policy)
    inside: dict[int, Request] = {}
    for n, (action, hit, kind) in enumerate(actions):
        if action <= 1:
            inside[n] = put(queue, views, Waiting(n, hit=hit, priority=kind, client=str(kind), program=str(kind)))
        elif action == 2 and inside:
            num, request = inside.popitem()
            queue.remove(request)
            queue.charge(request.account, hit)
        elif inside:
            num, request = next(iter(inside.items()))
            views[num] = Waiting(num, hit=hit, priority=kind, client=views[num].client, program=views[num].program)
            queue.rekey(request)
    assert sorted(drain(queue, cost=1)) == sorted(inside)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_requests_that_left_leave_nothing_behind(policy: str) -> None:
    queue, views = make_queue(policy)
    put(queue, views, Waiting(0, priority=-1))  # waits throughout
    for n in range(1, 2000):
        queue.remove(put(queue, views, Waiting(n)))
    assert len(queue) == 1
    assert len(queue._round) <= 100
    assert len(queue._ages) <= 100


# -- in the scheduler ----------------------------------------------------------------------------------------------


def finish_order(world: World) -> list[str]:
    return [rid for rid, said in world.said.items() if said.finish]


def test_longest_match_goes_before_earlier_cold_ones() -> None:
    world = World(schedule_policy="lpm", max_running=1)
    warm = list(range(2, 32))
    world.ask("warmer", warm, max_tokens=1)
    world.run()
    world.ask("busy", [60], max_tokens=5)
    world.turn(2)
    world.ask("cold", range(40, 60), max_tokens=1)
    world.ask("warm", [*warm, 5], max_tokens=1)
    world.run()
    assert finish_order(world) == ["warmer", "busy", "warm", "cold"]


def test_strictly_lower_priority_is_preempted_equals_never() -> None:
    world = World(schedule_policy="priority", max_running=2)
    world.ask("low", [5], max_tokens=40, priority=0)
    world.ask("mid", [6], max_tokens=40, priority=1)
    world.turn(3)
    world.ask("equal", [7], max_tokens=3, priority=1)
    world.turn(2)
    assert world.scheduler.stats()["preemptions"] == 1
    assert world.state.live["low"].slot == 0
    assert world.state.live["mid"].slot != 0
    world.ask("equal2", [8], max_tokens=3, priority=1)
    world.turn(1)
    assert world.scheduler.stats()["preemptions"] == 1
    world.run()
    assert len(world.tokens("low")) == 40


@pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])
def test_nobody_gives_way_in_vain(overlap: bool) -> None:
    """An equal holds the pool: taking the low one back would not make room, so it runs on."""
    world = World(overlap=overlap, schedule_policy="priority", page_size=4, n_pages=64, max_running=8)
    long = [2 + (7 * i + i * i) % 60 for i in range(150)]
    world.ask("equal", long, max_tokens=60, priority=5)
    world.turn(3)
    world.ask("low", long[30:40], max_tokens=20)
    world.turn(3)
    world.ask("big", long[::-1], max_tokens=4, priority=5)
    world.turn(30)
    assert len(world.tokens("low")) == 20
    assert world.scheduler.stats()["preemptions"] == 0
    world.run()
    assert len(world.tokens("big")) == 4


def test_fair_clients_share_the_machine() -> None:
    world = World(schedule_policy="fair", max_running=2, n_pages=256)
    for i in range(12):
        world.ask(f"greedy{i}", [5 + i, *range(2, 20)], max_tokens=10, client="greedy")
    world.ask("modest", [60, *range(2, 20)], max_tokens=10, client="modest")
    world.run()
    assert finish_order(world).index("modest") <= 3


def test_a_new_program_goes_before_the_next_call_of_a_long_one() -> None:
    world = World(schedule_policy="program", max_running=1)
    hints = Hints(program_id="long")
    world.ask("long0", range(2, 50), max_tokens=30, hints=hints)
    world.run()
    world.ask("busy", [60], max_tokens=3, hints=Hints(program_id="busy"))
    world.turn(2)
    world.ask("long1", range(2, 52), max_tokens=2, hints=hints)
    world.ask("young", [7, 8], max_tokens=2, hints=Hints(program_id="young"))
    world.run()
    assert finish_order(world)[-2:] == ["young", "long1"]


def test_hints_that_have_an_effect_are_named_in_the_reply() -> None:
    hints = Hints(program_id="p", priority=2, expect_return_s=5.0, retain_ttl_s=3.0)
    for policy, eviction, want in (
        ("lpm", "lru", ()),
        ("priority", "lru", ("priority",)),
        ("lpm", "priority", ("retain",)),
        ("program", "hints", ("program_id", "expect_return_s", "retain")),
    ):
        world = World(schedule_policy=policy, eviction_policy=eviction)
        world.ask("a", [5], max_tokens=1, hints=hints)
        usage = world.run().said["a"].usage
        assert usage is not None
        assert usage.hints_honoured == want


@pytest.mark.parametrize(
    ("eviction", "hints", "acts"),
    [
        ("hints", Hints(depth=3), True),
        ("lru", Hints(depth=3), False),
        ("hints", Hints(), False),
        ("hints", Hints(depth=3, expect_return_s=5.0), False),  # says more: the time itself
        ("hints", Hints(depth=3, expected_fanout=2), False),
        ("hints", Hints(depth=3, final=True), False),
    ],
)
def test_depth_is_named_where_it_is_what_keeps_the_tail(eviction: str, hints: Hints, acts: bool) -> None:
    world = World(eviction_policy=eviction)
    world.ask("a", [5], max_tokens=1, hints=hints)
    usage = world.run().said["a"].usage
    assert usage is not None
    assert ("depth" in usage.hints_honoured) is acts


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["lpm", "dfs-weight", "fcfs", "fair"]), st.integers(0, 10**6))
def test_a_cold_request_is_served_in_bounded_time_whatever_keeps_coming(policy: str, seed: int) -> None:
    """Warm requests arrive for ever; the cold one waits for about as much work as its prefix is shorter."""
    rng = np.random.default_rng(seed)
    world = World(schedule_policy=policy, max_running=2, n_pages=128, audit=False)
    warm = list(range(2, 62))
    world.ask("seed", warm, max_tokens=1)
    world.run()
    world.ask("cold", rng.integers(2, 60, 30).tolist(), max_tokens=2)
    n = 0
    while "cold" not in world.said:
        while len(world.state.queue) < 4:
            world.ask(f"w{n}", [*warm, *rng.integers(2, 60, 3).tolist()], max_tokens=2, client=f"c{n % 3}")
            n += 1
            world.scheduler._take_messages()
        world.turn()
        assert n < 60
