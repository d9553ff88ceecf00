"""Faults that users of such runtimes have met: cache, full pools, overlap, disconnects. One test each."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from runtime.execute.fake import FakeRunner
from runtime.messages import NamespaceKey
from tests.runtime.world import World, alone, make_submit

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])


def ids(n: int, start: int = 2) -> list[int]:
    return [2 + (start + 7 * i + i * i // 5) % 60 for i in range(n)]


def cached(world: World, rid: str) -> int:
    usage = world.said[rid].usage
    assert usage is not None
    return usage.cached_tokens


# -- the cache must not lie ------------------------------------------------------------------------------------


def test_adapters_share_nothing_even_under_one_name() -> None:
    world, prompt = World(n_pages=512, vocab_size=64), ids(100)
    for rid, adapter in (("a", 1), ("again", 1), ("reloaded", 2), ("base", 0)):
        world.ask(rid, prompt, max_tokens=2, namespace=NamespaceKey(adapter=adapter))
        world.run()
    assert [cached(world, rid) for rid in ("a", "again", "reloaded", "base")] == [0, 99, 0, 0]


def test_another_picture_is_another_prefix() -> None:
    world, prompt = World(n_pages=256), ids(60)
    for rid, digest in (("a", "d" * 31 + "1"), ("b", "d" * 31 + "2"), ("a2", "d" * 31 + "1")):
        world.ask(rid, prompt, max_tokens=1, namespace=NamespaceKey(media=digest))
        world.run()
    assert [cached(world, rid) for rid in ("a", "b", "a2")] == [0, 0, 59]


@BOTH
def test_lengths_around_a_page_border_answer_as_if_cold_and_alone(overlap: bool) -> None:
    size = 16
    world = World(overlap=overlap, page_size=size, n_pages=128, max_running=8, max_step_tokens=256)
    world.ask("warm", ids(size), max_tokens=1)
    world.run()
    lengths = [size - 1, size, size + 1, 2 * size, 2 * size + 1]
    world.ask_together(
        *(make_submit(f"n{n}", ids(n), max_tokens=12) for n in lengths),
        make_submit("other", ids(50, start=31), max_tokens=12),
    )
    world.run()
    for n in lengths:
        assert world.tokens(f"n{n}") == alone(ids(n), max_tokens=12, world={"page_size": size}).tokens


@BOTH
def test_two_cold_twins_are_remapped_before_their_pages_go_to_a_third(overlap: bool) -> None:
    world = World(overlap=overlap, page_size=16, n_pages=40, max_step_tokens=128, chunk_tokens=64)
    twins = [make_submit(f"twin{i}", ids(200), max_tokens=40) for i in range(2)]
    world.ask_together(*twins)
    world.turn(2)
    world.ask("third", ids(60, start=40), max_tokens=30)
    world.run()
    want = alone(ids(200), max_tokens=40, world={"page_size": 16}).tokens
    assert world.tokens("twin0") == world.tokens("twin1") == want
    assert world.scheduler.stats()["prefilled"] < 300  # the second twin computed next to nothing


@BOTH
def test_twins_that_generate_the_same_share_what_they_decode(overlap: bool) -> None:
    world = World(overlap=overlap, n_pages=256)
    world.ask("a", ids(10), max_tokens=120)
    world.ask("b", ids(10), max_tokens=120)
    world.run()
    assert world.tokens("a") == world.tokens("b")
    stats = world.state.cache.stats()
    assert stats["tree"] <= 35  # one copy of 130 tokens in pages of 4, and a tail or two


def test_a_plan_names_the_pages_of_the_table_from_the_step_after_a_remap_on() -> None:
    world = World(overlap=False, n_pages=256)
    for rid in "ab":
        world.ask(rid, ids(10), max_tokens=120)
    world.turn(2)
    rows = world.state.rows
    while len(world.tokens("b")) < 110:
        tables = {slot: rows.row_pages(slot).copy() for slot in world.state.decode.frame().slots.tolist()}
        world.turn()
        plan = world.runner.plans[-1]  # type: ignore[attr-defined]
        for i, slot in enumerate(plan.table_row.tolist()):
            named = plan.kv_indices[plan.kv_indptr[i] : plan.kv_indptr[i + 1]]
            assert (named[: len(tables[slot])] == tables[slot]).all()


# -- no stalls, no walls, no storms ------------------------------------------------------------------------------


@BOTH
def test_streams_run_on_while_long_prompts_are_ingested(overlap: bool) -> None:
    world = World(
        overlap=overlap, n_pages=2048, page_size=16, context_length=4096, max_step_tokens=256, chunk_tokens=256
    )
    world.ask("stream", ids(8), max_tokens=60)
    world.turn(3)
    for i in range(3):
        world.ask(f"long{i}", ids(2000, start=i), max_tokens=1)
    gaps, said = [], len(world.tokens("stream"))
    for _ in range(40):
        world.turn()
        gaps.append(len(world.tokens("stream")) - said)
        said = len(world.tokens("stream"))
    assert gaps == [1] * 40
    assert isinstance(world.runner, FakeRunner)
    mixed = [p for p in world.runner.plans if p.n_decode and p.n_rows > p.n_decode]
    assert mixed
    assert all(plan.n_tokens <= 256 for plan in mixed)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_forks_that_waited_for_a_long_prefix_start_as_soon_as_it_is_there(policy: str) -> None:
    """Only four long prompts are ingested at once; what is cached by now does not count as long."""
    world = World(
        schedule_policy=policy,
        n_pages=1024,
        page_size=16,
        context_length=4096,
        max_running=32,
        max_step_tokens=256,
        chunk_tokens=128,
    )
    shared = ids(2000)
    for i in range(16):
        world.ask(f"f{i}", [*shared, 3 + i], max_tokens=30)
    while len(world.state.decode) < 16:
        world.turn()
        assert world.n_turns < 14
    assert world.scheduler.stats()["prefilled"] == 2000 + 16


def test_several_long_prompts_progress_together_from_a_rotating_start() -> None:
    world = World(n_pages=1024, page_size=16, context_length=4096, max_step_tokens=64, chunk_tokens=64, audit=False)
    for i in range(3):
        world.ask(f"long{i}", ids(600, start=20 * i), max_tokens=1)
    world.turn(12)
    done = sorted(int(world.state.rows.done[r.slot]) for r in world.state.rows.running())
    assert len(done) == 3
    assert done[0] > 0
    assert done[-1] - done[0] <= 128
    starts = [plan.rids[0] for plan in list(world.runner.plans)[3:9]]  # type: ignore[attr-defined]
    assert len(set(starts)) == 3


def test_a_short_warm_request_overtakes_the_ingest_of_long_ones() -> None:
    world = World(n_pages=8192, page_size=16, context_length=17000, max_step_tokens=512, chunk_tokens=256, audit=False)
    warm = ids(200)
    world.ask("first", warm, max_tokens=1)
    world.run()
    for i in range(6):
        world.ask(f"long{i}", ids(16_000, start=9 * i), max_tokens=1)
    world.turn(4)
    world.ask("short", [*warm, 3, 4, 5], max_tokens=1)
    turns = 0
    while "short" not in world.said:
        world.turn()
        turns += 1
    assert turns <= 4


@BOTH
def test_a_pool_for_two_serves_eight_without_a_storm(overlap: bool) -> None:
    world = World(overlap=overlap, page_size=16, n_pages=32, max_running=8, max_step_tokens=1024, chunk_tokens=512)
    for i in range(8):
        world.ask(f"r{i}", ids(48, start=11 * i), max_tokens=200)
    world.turn()
    marks: dict[int, int] = {}
    while world.scheduler.busy:
        oldest = next(iter(world.state.rows.running() or world.state.live.values()))
        victim_before = oldest.tally.retractions
        n_live, n_steps = len(world.state.live), world.scheduler.stats()["steps"]
        world.turn()
        assert oldest.tally.retractions == victim_before, "the oldest was made a victim"
        if not overlap and oldest.rid in world.state.live:
            assert oldest.num in world.runner.plans[-1].rids, "the oldest had to wait"  # type: ignore[attr-defined]
        now = {r.num: max(r.high_water, int(world.state.rows.done[r.slot])) for r in world.state.live.values()}
        rose = any(high > marks.get(num, 0) for num, high in now.items())
        marks.update({num: max(high, marks.get(num, 0)) for num, high in now.items()})
        assert rose or len(world.state.live) < n_live or world.scheduler.stats()["steps"] == n_steps
    for i in range(8):
        want = alone(ids(48, start=11 * i), max_tokens=200, world={"page_size": 16})
        assert world.tokens(f"r{i}") == want.tokens
    assert world.scheduler.stats()["retractions"] <= 24


@BOTH
def test_small_requests_pass_one_that_does_not_fit(overlap: bool) -> None:
    world = World(overlap=overlap, page_size=16, n_pages=64, context_length=1024, max_step_tokens=1024)
    world.ask("running", ids(700), max_tokens=60)
    world.turn(3)
    world.ask("big", ids(600, start=30), max_tokens=4)
    for i in range(5):
        world.ask(f"small{i}", ids(10, start=i), max_tokens=4)
    world.turn(12)
    assert all(world.said[f"small{i}"].finish for i in range(5))
    assert "big" not in world.said
    world.run()
    assert len(world.tokens("big")) == 4


def test_a_request_that_does_not_fit_is_not_overtaken_for_ever() -> None:
    """A stream of small ones that would always fit cannot starve a big one."""
    world = World(page_size=4, n_pages=64, max_running=8, audit=False)
    n = 0
    for _ in range(4):
        world.ask(f"s{n}", ids(40, start=n), max_tokens=4)
        n += 1
    world.turn(2)
    world.ask("big", ids(200, start=50), max_tokens=4)
    for _ in range(3000):
        while len(world.state.queue) < 5:
            world.ask(f"s{n}", ids(40, start=n), max_tokens=6)
            n += 1
            world.scheduler._take_messages()
        world.turn()
        if "big" in world.said:
            break
    assert "big" in world.said
    assert n < 400


@BOTH
def test_victims_are_chosen_until_enough_pages_are_free(overlap: bool) -> None:
    world = World(overlap=overlap, page_size=64, n_pages=30, max_running=12, context_length=1024)
    for i in range(12):
        world.ask(f"r{i}", ids(60, start=3 * i), max_tokens=300)
    world.run(20000)
    assert all(len(world.tokens(f"r{i}")) == 300 for i in range(12))


@BOTH
def test_a_retracted_request_goes_on_where_it_was(overlap: bool) -> None:
    world = World(overlap=overlap, page_size=4, n_pages=24, max_running=4)
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 7, "frequency_penalty": 0.5}
    for i in range(3):
        world.ask(f"r{i}", ids(10, start=i), **options)
    world.run()
    assert world.scheduler.stats()["retractions"] > 0
    for i in range(3):
        assert world.tokens(f"r{i}") == alone(ids(10, start=i), **options).tokens
        assert len(world.said[f"r{i}"].arrived) == 60  # nothing was said twice


def test_steps_are_as_full_after_a_retraction_as_before() -> None:
    world = World(page_size=4, n_pages=40, max_running=4, audit=False)
    for i in range(4):
        world.ask(f"r{i}", ids(10, start=i), max_tokens=60)
    world.run()
    plans = list(world.runner.plans)  # type: ignore[attr-defined]
    generated = 4 * 60
    assert len(plans) < generated * 0.75  # with the pool too small for all, never down to one row for long


@BOTH
def test_one_that_fills_the_pool_alone_ends_by_length(overlap: bool) -> None:
    world = World(overlap=overlap, page_size=4, n_pages=8, context_length=512)
    world.ask("a", ids(10), max_tokens=None)
    said = world.run().said["a"]
    assert said.finish is not None
    assert said.finish.reason == "length"
    assert len(said.tokens) == 22


@BOTH
def test_a_prompt_as_big_as_the_pool_is_served_cold_and_warm(overlap: bool) -> None:
    """Warm, the tail's source and its copy do not both fit: the copy is given up, the answer is not."""
    world = World(overlap=overlap, page_size=4, n_pages=8)
    for rid in ("cold", "warm", "again"):
        world.ask(rid, ids(31), max_tokens=1)
        world.run()
    assert world.tokens("cold") == world.tokens("warm") == world.tokens("again")


# -- overlap -----------------------------------------------------------------------------------------------------


def test_more_requests_than_rows_of_the_token_table() -> None:
    said = []
    for overlap in (False, True):
        world = World(overlap=overlap, max_running=2, n_pages=128)
        for i in range(12):
            world.ask(f"r{i}", ids(3 + 5 * i, start=i), max_tokens=40)
        world.run()
        said.append([world.tokens(f"r{i}") for i in range(12)])
    assert said[0] == said[1]
    assert said[0] == [alone(ids(3 + 5 * i, start=i), max_tokens=40).tokens for i in range(12)]


def test_abort_between_launch_and_commit_of_the_last_chunk_says_nothing() -> None:
    world = World(overlap=True, chunk_tokens=64, max_step_tokens=64, n_pages=64)
    world.ask("a", ids(128), max_tokens=9)
    world.turn(2)  # both chunks are launched, the second is not committed
    world.abort("a")
    said = world.run().said["a"]
    assert said.tokens == []
    assert said.finish is not None
    assert said.finish.reason == "abort"


@pytest.mark.parametrize(
    "options",
    [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.3}, {"logit_bias": {7: 6.0}}],
    ids=lambda o: next(iter(o)),
)
def test_penalties_see_the_true_last_token(options: dict[str, Any]) -> None:
    said = [alone(ids(5), overlap=overlap, max_tokens=30, **options).tokens for overlap in (False, True)]
    assert said[0] == said[1]
    assert said[0] != alone(ids(5), max_tokens=30).tokens


def test_a_penalty_is_its_rows_own_whatever_joins_the_batch() -> None:
    world = World(overlap=True)
    world.ask("with", ids(5), max_tokens=20, presence_penalty=2.0)
    world.ask("without", ids(6), max_tokens=20)
    world.turn(6)
    world.ask("later", ids(7), max_tokens=20, repetition_penalty=1.5)
    world.run()
    assert world.tokens("with") == alone(ids(5), max_tokens=20, presence_penalty=2.0).tokens
    assert world.tokens("without") == alone(ids(6), max_tokens=20).tokens
    assert world.tokens("later") == alone(ids(7), max_tokens=20, repetition_penalty=1.5).tokens


def test_a_penalty_really_forbids_repeats() -> None:
    free = alone(ids(5), max_tokens=30).tokens
    penalized = alone(ids(5), max_tokens=30, presence_penalty=2.0, frequency_penalty=2.0).tokens
    assert len(set(free)) < 30
    assert len(set(penalized)) == 30


# -- those who leave -----------------------------------------------------------------------------------------------


@BOTH
def test_ghosts_give_their_rows_back_within_a_step(overlap: bool) -> None:
    world = World(overlap=overlap, max_running=2)
    world.ask("ghost0", ids(5), max_tokens=400)
    world.ask("ghost1", ids(6), max_tokens=400)
    world.ask("queued", ids(7), max_tokens=400)
    world.turn(5)
    for rid in ("ghost0", "ghost1", "queued"):
        world.abort(rid)
    world.ask("third", ids(8), max_tokens=2)
    world.turn()
    assert world.scheduler.stats()["running"] == 1
    world.run()
    assert len(world.tokens("third")) == 2
    assert world.scheduler.stats()["aborted"] == 3


@BOTH
@pytest.mark.parametrize("chunk", range(17))
def test_abort_after_any_chunk_restores_the_pool(overlap: bool, chunk: int) -> None:
    world = World(overlap=overlap, chunk_tokens=16, max_step_tokens=16, n_pages=80)
    world.ask("a", ids(256), max_tokens=9)
    world.turn(chunk)
    world.abort(everything=True) if chunk % 2 else world.abort("a")
    world.run()  # checks that no page is held


def test_a_thousand_normal_ends_count_no_abort() -> None:
    world = World(n_pages=256, max_running=16, audit=False, max_queue=2000)
    for i in range(1000):
        world.ask(f"r{i}", [2 + i % 60], max_tokens=2)
    world.run()
    stats = world.scheduler.stats()
    assert (stats["aborted"], stats["finished"]) == (0, 1000)


@BOTH
def test_aborts_at_random_steps_change_nobody_else(overlap: bool) -> None:
    rng = random.Random(4)
    world = World(overlap=overlap, n_pages=256, max_running=8)
    for i in range(8):
        world.ask(f"r{i}", [*ids(64), 3 + i], max_tokens=30)
    for i in range(4):
        world.turn(rng.randrange(1, 5))
        world.abort(f"r{2 * i}")
    world.run()
    for i in range(1, 8, 2):
        assert world.tokens(f"r{i}") == alone([*ids(64), 3 + i], max_tokens=30).tokens


def test_counting_up_for_ever_stops_at_the_context() -> None:
    world = World(context_length=64, n_pages=64)
    world.ask("a", ids(9), max_tokens=1000)
    said = world.run().said["a"]
    assert len(said.tokens) == 55
    assert said.finish is not None
    assert said.finish.reason == "length"


def test_outputs_of_one_step_leave_as_one_batch() -> None:
    world, batches = World(), []
    for i in range(5):
        world.scheduler.receive(make_submit(f"r{i}", ids(4, start=i), max_tokens=4), batches.append)
    world.run()
    sizes = [len(batch.items) for batch in batches]
    assert max(sizes) == 5
    assert len(batches) <= 7
    assert all(a.items for a, _ in pairwise(batches))
