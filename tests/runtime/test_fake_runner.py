"""The fake device must catch what it is there to catch: each test breaks a plan in one way."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.execute.fake import FakeKVError, FakeRunner, ScriptedRunner, fake_spec
from runtime.step import Adjust, StepPlan
from tests.runtime.world import World

PAGES = np.array([3, 7], np.int32)


def plan_of(tokens: list[int], start: int = 0, step: int = 0, **changes: Any) -> StepPlan:
    """One row that feeds `tokens` at positions from `start`, in pages 3 and 7 of four tokens each."""
    n, kv = len(tokens), start + len(tokens)
    positions = np.arange(start, kv, dtype=np.int32)
    empty = np.zeros(0, np.int64)
    fields: dict[str, Any] = {
        "step": step,
        "rids": (1,),
        "attempts": (0,),
        "table_row": np.array([1], np.int32),
        "qo_indptr": np.array([0, n], np.int32),
        "kv_indptr": np.array([0, (kv + 3) // 4], np.int32),
        "kv_indices": PAGES[: (kv + 3) // 4],
        "last_page_len": np.array([(kv - 1) % 4 + 1], np.int32),
        "kv_lens": np.array([kv], np.int32),
        "n_decode": 0,
        "token_ids": np.array(tokens, np.int32),
        "token_row": np.zeros(n, np.int32),
        "positions": positions,
        "slots": PAGES[positions // 4].astype(np.int64) * 4 + positions % 4,
        "copy_src": empty,
        "copy_dst": empty,
        "share_indptr": np.zeros(1, np.int32),
        "share_n_pages": np.zeros(0, np.int32),
        "sample_index": np.array([n - 1], np.int32),
        "sample_row": np.zeros(1, np.int32),
        "temperature": np.zeros(1, np.float32),
        "top_k": np.zeros(1, np.int32),
        "top_p": np.ones(1, np.float32),
        "min_p": np.zeros(1, np.float32),
        "seed": np.zeros(1, np.uint64),
        "counter": np.array([kv], np.int64),
        "late": np.zeros(1, np.bool_),
        "want_logprob": np.zeros(1, np.bool_),
    }
    return StepPlan(**{**fields, **changes})


def make() -> FakeRunner:
    return FakeRunner(fake_spec(), n_pages=16, page_size=4, max_running=4)


def test_chunks_give_the_token_of_the_whole() -> None:
    whole = make().launch(plan_of([5, 6, 7, 8, 9, 10])).result()
    runner = make()
    runner.launch(plan_of([5, 6, 7, 8]))
    parts = runner.launch(plan_of([9, 10], start=4, step=1)).result()
    assert whole.tokens == parts.tokens


def test_a_row_may_feed_the_token_sampled_in_the_step_before() -> None:
    runner = make()
    first = runner.launch(plan_of([5, 6]))
    second = runner.launch(plan_of([-1], start=2, step=1))
    known = make()
    known.launch(plan_of([5, 6])).result()
    want = known.launch(plan_of([int(first.result().tokens[0])], start=2, step=1)).result()
    assert second.result().tokens == want.tokens


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"slots": np.arange(40, 46)}, "positions or slots"),
        ({"last_page_len": np.array([3], np.int32)}, "disagree"),
        ({"kv_indices": np.array([3, 8], np.int32)}, "positions or slots"),
        ({"table_row": np.array([0], np.int32)}, "token table"),
        ({"copy_src": np.array([12]), "copy_dst": np.array([12])}, "a copy reads what another"),
        ({"token_ids": np.full(6, -1, np.int32)}, "table row 1 holds None"),
    ],
)
def test_a_broken_plan_is_caught(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(FakeKVError, match=why):
        make().launch(plan_of([5, 6, 7, 8, 9, 10], **changes)).result()


def test_reading_pages_nobody_wrote_is_caught() -> None:
    with pytest.raises(FakeKVError, match="never written"):
        make().launch(plan_of([9], start=5)).result()


def test_reading_another_sequences_page_is_caught() -> None:
    runner = make()
    runner.launch(plan_of([5, 6, 7, 8])).result()
    other = np.array([9, 3], np.int32)
    runner.launch(plan_of([5, 6, 7, 60], kv_indices=other[:1], slots=np.arange(36, 40))).result()
    mixed = np.array([9, 7], np.int32)
    good = plan_of([1], start=4, step=2)
    runner.launch(plan_of([5, 6, 7, 8, 1], step=3)).result()
    with pytest.raises(FakeKVError, match="another sequence"):
        runner.launch(plan_of([2], start=5, step=4, kv_indices=mixed, slots=np.array([29]))).result()
    assert good.n_tokens == 1


def test_a_late_sample_waits_for_its_adjustment() -> None:
    runner = make()
    pending = runner.launch(plan_of([5, 6], late=np.ones(1, np.bool_)))
    with pytest.raises(FakeKVError, match="never queued"):
        pending.result()
    pending = runner.launch(plan_of([5, 6], step=1, late=np.ones(1, np.bool_)))
    runner.sample_late(pending, [Adjust(0, forced=33)])
    assert pending.result().tokens.tolist() == [33]


def test_everything_masked_is_a_failed_sample() -> None:
    runner = make()
    pending = runner.launch(plan_of([5], adjust=(Adjust(0, mask=np.zeros(2, np.int32)),)))
    assert pending.result().failed == (0,)


def test_work_runs_only_when_asked_for_so_reused_arrays_are_caught() -> None:
    runner = make()
    plan = plan_of([5, 6, 7])
    pending = runner.launch(plan)
    plan.positions[:] = 0
    with pytest.raises(FakeKVError):
        pending.result()


def test_plans_are_immutable() -> None:
    with pytest.raises(AttributeError):
        plan_of([5]).step = 3
    assert msgspec.structs.fields(StepPlan)[0].name == "step"


def test_a_script_is_said_per_prompt() -> None:
    runner = ScriptedRunner(fake_spec(), scripts={(5, 6): [10, 11], (5, 7): [20]}, default=[30])
    world = World(runner=runner)
    for rid, prompt in (("a", [5, 6]), ("b", [5, 7]), ("c", [9])):
        world.ask(rid, prompt, max_tokens=9, ignore_eos=False)
    world.run()
    assert [world.tokens(rid) for rid in "abc"] == [[10, 11, 1], [20, 1], [30, 1]]
