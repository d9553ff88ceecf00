"""Reported faults at the sizes they were reported with: long prompts, full pools, borders of pages of 64."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from runtime.execute.fake import FakeRunner, fake_spec
from runtime.scheduler.retract import retract
from runtime.step import StepPlan
from tests.runtime.world import World, alone, make_submit

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])


def ids(n: int, start: int = 2) -> list[int]:
    return [2 + (start + 7 * i + i * i // 5) % 60 for i in range(n)]


def linear_device(plan: StepPlan) -> float:
    """10 ms a step, 40 µs a token, and what reading the KV takes; time is virtual."""
    return 0.010 + 40e-6 * plan.n_tokens + 1e-7 * float(plan.kv_lens.sum())


def virtual(overlap: bool, *, context: int = 512, **options: Any) -> World:
    """A world whose clock is its device's."""
    runner_options = {k: options.pop(k) for k in ("n_pages", "page_size", "max_running") if k in options}
    runner = FakeRunner(fake_spec(64, context), check=False, cost=linear_device, **runner_options)
    return World(overlap=overlap, runner=runner, clock=lambda: runner.device_now, audit=False, **options)


@BOTH
def test_lengths_around_a_page_of_64_answer_as_if_cold_and_alone(overlap: bool) -> None:
    world = World(overlap=overlap, page_size=64, n_pages=64, max_running=8, max_step_tokens=512, chunk_tokens=512)
    world.ask("warm", ids(64), max_tokens=1)
    world.run()
    lengths = [63, 64, 65, 128, 129]
    world.ask_together(
        *(make_submit(f"n{n}", ids(n), max_tokens=32) for n in lengths),
        make_submit("other", ids(150, start=31), max_tokens=32),
    )
    world.run()
    for n in lengths:
        assert world.tokens(f"n{n}") == alone(ids(n), max_tokens=32, world={"page_size": 64}).tokens
        usage = world.said[f"n{n}"].usage
        assert usage is not None
        assert usage.cached_tokens >= min(n - 1, 64)


@BOTH
def test_three_prompts_of_20k_tokens_stall_no_stream(overlap: bool) -> None:
    """The bound of the gap is one chunk and one decode step, whatever the number of prompts."""
    world = virtual(
        overlap, context=24_000, n_pages=6000, page_size=16, max_running=8, max_step_tokens=256, chunk_tokens=256
    )
    world.ask("stream", ids(8), max_tokens=4000)
    world.turn(100)
    start = len(world.said["stream"].arrived)
    for i in range(3):
        world.ask(f"long{i}", [*ids(20_000, start=11 * i)], max_tokens=1)
    progress: list[list[int]] = []
    while not {"long0", "long1", "long2"} <= set(world.said):
        world.turn()
        if world.n_turns == 300:
            progress.append(sorted(int(world.state.rows.done[r.slot]) for r in world.state.rows.running())[1:])
    gaps = np.diff(world.said["stream"].arrived[start:])
    chunk_and_decode = 0.010 + 40e-6 * (256 + 1) + 1e-7 * 64_000
    assert len(gaps) > 200  # it streamed all the while
    assert max(gaps) <= 1.5 * chunk_and_decode
    lowest, highest = progress[0][0], progress[0][-1]
    assert lowest > 0
    assert highest - lowest <= 1024  # all three move


@BOTH
def test_a_pool_that_is_full_is_told_once_a_minute(overlap: bool, caplog: pytest.LogCaptureFixture) -> None:
    world = World(overlap=overlap, page_size=16, n_pages=32, max_running=8, max_step_tokens=1024, chunk_tokens=512)
    for i in range(8):
        world.ask(f"r{i}", ids(48, start=11 * i), max_tokens=200)
    with caplog.at_level(logging.WARNING, "ramet.scheduler"):
        world.run()
        assert world.scheduler.stats()["retractions"] > 3
        assert sum("KV pool is full" in r.getMessage() for r in caplog.records) == 1
        world.clock.now += 61.0  # type: ignore[attr-defined]
        for i in range(8):
            world.ask(f"again{i}", ids(48, start=11 * i + 5), max_tokens=200)
        world.run()
    lines = [r.getMessage() for r in caplog.records if "KV pool is full" in r.getMessage()]
    assert len(lines) == 2
    assert "such lines left out" in lines[1]
    assert all(said.finish and said.finish.reason == "length" for said in world.said.values())


@BOTH
def test_a_retraction_costs_no_speed_for_longer_than_two_seconds(overlap: bool) -> None:
    """Tokens a (virtual) second, before one is taken back in the midst of decoding and two seconds after."""
    world = virtual(overlap, context=8192, n_pages=4096, page_size=16, max_running=8)
    prompts = {f"r{i}": ids(400, start=9 * i) for i in range(6)}
    for rid, prompt in prompts.items():
        world.ask(rid, prompt, max_tokens=700)

    def rate(seconds: float) -> float:
        start, before = world.clock(), sum(len(s.tokens) for s in world.said.values())
        while world.clock() < start + seconds:
            world.turn()
        return (sum(len(s.tokens) for s in world.said.values()) - before) / (world.clock() - start)

    while len(world.state.decode) < 6:
        world.turn()
    steady = rate(1.0)
    victim = world.state.rows.running()[3]
    retract(world.state, victim)
    assert rate(2.0) > 0.5 * steady
    assert rate(1.0) >= 0.9 * steady
    assert victim.tally.retractions == 1
    usual = virtual(overlap, context=8192, n_pages=4096, page_size=16, max_running=8)
    for rid, prompt in prompts.items():
        usual.ask(rid, prompt, max_tokens=700)
    assert {rid: world.run().tokens(rid) for rid in prompts} == {rid: usual.run().tokens(rid) for rid in prompts}


@BOTH
@pytest.mark.parametrize("everything", [False, True], ids=["by id", "all"])
def test_an_abort_after_any_of_16_chunks_restores_the_pool(overlap: bool, everything: bool) -> None:
    for chunk in range(17):
        world = World(overlap=overlap, context_length=1024, page_size=16, n_pages=80, chunk_tokens=64)
        world.ask("a", ids(1000), max_tokens=9)
        world.turn(chunk)
        world.abort(everything=True) if everything else world.abort("a")
        world.run()  # checks that no page is held
        finish = world.said["a"].finish
        assert finish is not None
        assert finish.reason == "abort"


@BOTH
def test_what_an_aborted_request_had_computed_stays_in_the_tree(overlap: bool) -> None:
    world = World(overlap=overlap, context_length=1024, page_size=16, n_pages=80, chunk_tokens=64)
    world.ask("a", ids(1000), max_tokens=9)
    world.turn(5)
    done = int(world.state.rows.done[world.state.live["a"].slot])
    assert done > 100
    world.abort("a")
    world.run()
    world.ask("b", ids(1000), max_tokens=1)
    usage = world.run().said["b"].usage
    assert usage is not None
    assert usage.cached_tokens >= done


def test_counting_up_for_ever_stops_at_a_context_of_256() -> None:
    world = World(context_length=256, n_pages=128)
    world.ask("a", ids(9), max_tokens=1000)
    said = world.run().said["a"]
    assert said.usage is not None
    assert (said.usage.prompt_tokens, len(said.tokens)) == (9, 247)
    assert said.finish is not None
    assert said.finish.reason == "length"


# -- the table of tokens in flight -----------------------------------------------------------------------------------


class PaddedRunner(FakeRunner):
    """Pads the prefill rows of every step to eight, as a device with graphs does: padding samples into row 0."""

    n_padded = 0

    def launch(self, plan: StepPlan) -> Any:
        assert (plan.table_row > 0).all(), "a request uses the row that padding writes to"
        self.n_padded += max(0, 8 - (plan.n_rows - plan.n_decode))
        self._queue.append(("token", None, (0, -7)))
        pending = super().launch(plan)
        self._queue.append(("token", None, (0, -8)))
        return pending


def test_padding_and_more_requests_than_rows_change_no_token() -> None:
    said = []
    for overlap in (False, True):
        runner = PaddedRunner(fake_spec(64, 512), n_pages=128, page_size=4, max_running=2)
        world = World(overlap=overlap, runner=runner)
        for i in range(12):
            world.ask(f"r{i}", ids(3 + 5 * i, start=i), max_tokens=40)
        world.run()
        assert runner.n_padded > 0
        said.append([world.tokens(f"r{i}") for i in range(12)])
    assert said[0] == said[1]
    assert said[0] == [alone(ids(3 + 5 * i, start=i), max_tokens=40).tokens for i in range(12)]


@pytest.mark.parametrize("wrong", [(99, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["request", "attempt", "position"])
def test_a_token_of_another_request_or_attempt_or_position_is_noticed(wrong: tuple[int, int, int]) -> None:
    """What a row takes from the table carries whose it is; a table that is overwritten too early cannot pass."""
    runner = FakeRunner(fake_spec(64, 512), n_pages=128, page_size=4, max_running=2)
    world = World(overlap=True, runner=runner)
    world.ask("a", ids(5), max_tokens=40)
    world.turn(4)
    (slot,) = (r.slot for r in world.state.rows.running())
    held = runner._table_tag[slot]
    assert held is not None
    runner._table_tag[slot] = (held[0] + wrong[0], held[1] + wrong[1], held[2] + wrong[2])
    world.run()
    finish = world.said["a"].finish
    assert finish is not None
    assert "table row" in (finish.message or "")


def test_overlap_leaves_every_gap_of_a_lone_stream_alike() -> None:
    world = virtual(True, n_pages=128, page_size=4, max_running=2)
    world.ask("a", ids(5), max_tokens=60)
    world.run()
    gaps = [b - a for a, b in pairwise(world.said["a"].arrived)]
    assert max(gaps[1:]) <= 1.1 * min(gaps[1:])
