"""The runner's contract: FIFO, token table, late samples, scores, failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from runtime.config import EngineConfig
from runtime.execute.runner import ModelRunner
from runtime.models.loader import load_runner
from runtime.step import FROM_TABLE, Adjust
from tests.runtime.step_plans import Row, Seq, make_plan
from tests.runtime.tiny_models import VOCAB, save, tiny_model

PROMPT = [7, 3, 50, 22, 9, 81]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def runner(folder: Path) -> Iterator[ModelRunner]:
    config = EngineConfig(model=str(folder), backend="reference", kv_pool_tokens=256, page_size=4, threads=1)
    runner = load_runner(config)
    yield runner
    runner.close()


def greedy(runner: ModelRunner, seq: Seq, n: int) -> list[int]:
    """The host looks at every token before it plans the next step."""
    out = [run(runner, Row(seq, 0, len(seq.tokens)))]
    while len(out) < n:
        seq.tokens.append(out[-1])
        out.append(run(runner, Row(seq, len(seq.tokens) - 1, len(seq.tokens))))
    return out


def run(runner: ModelRunner, *rows: Row) -> int:
    return int(runner.launch(make_plan(rows, 4)).result(30).tokens[0])


def test_tokens_the_host_has_not_seen_come_from_the_table(runner: ModelRunner) -> None:
    seen = greedy(runner, Seq(list(PROMPT), [0, 1, 2, 3]), 6)
    seq = Seq(list(PROMPT), [9, 8, 7, 6], table_row=3)
    steps = [runner.launch(make_plan([Row(seq, 0, 6)], 4))]
    for n in range(6, 11):
        assert make_plan([Row(seq, n, n + 1)], 4).token_ids.tolist() == [FROM_TABLE]
        steps.append(runner.launch(make_plan([Row(seq, n, n + 1)], 4)))
    assert [int(step.result(30).tokens[0]) for step in steps] == seen


def test_late_samples_wait_for_their_adjustments(runner: ModelRunner) -> None:
    early, late = Seq(list(PROMPT), [0, 1]), Seq(list(PROMPT), [2, 3], table_row=2)
    pending = runner.launch(make_plan([Row(early, 0, 6), Row(late, 0, 6, late=True)], 4))
    with pytest.raises(TimeoutError):
        pending.result(0.2)
    runner.sample_late(pending, [Adjust(sample=1, forced=33)])
    result = pending.result(30)
    assert result.tokens[1] == 33
    assert result.logprobs[0] > result.logprobs[1]  # the early one is the greedy choice of the same prompt


def test_a_bitmask_leaves_only_what_it_allows(runner: ModelRunner) -> None:
    mask = np.zeros(-(-VOCAB // 32), np.int32)
    mask[64 // 32] = 1 << (64 % 32)
    plan = make_plan([Row(Seq(list(PROMPT), [0, 1]), 0, 6)], 4, adjust=[Adjust(sample=0, mask=mask)])
    assert runner.launch(plan).result(30).tokens.tolist() == [64]


def test_a_row_without_any_allowed_token_fails_alone(runner: ModelRunner) -> None:
    nothing = Adjust(sample=0, mask=np.zeros(-(-VOCAB // 32), np.int32))
    rows = [Row(Seq(list(PROMPT), [0, 1]), 0, 6), Row(Seq(list(PROMPT), [2, 3], table_row=2), 0, 6)]
    result = runner.launch(make_plan(rows, 4, adjust=[nothing])).result(30)
    assert result.failed == (0,)
    assert result.tokens[1] == run(runner, rows[1])


def test_scores_are_the_logprobs_of_the_given_tokens(runner: ModelRunner) -> None:
    seq = Seq(list(PROMPT), [0, 1])
    whole = runner.launch(make_plan([Row(seq, 0, 6, score=True)], 4, n_top=VOCAB)).result(30)
    assert len(whole.score_logprobs) == 5
    for k, target in enumerate(PROMPT[1:]):
        place = whole.score_top_ids[k].tolist().index(target)
        assert whole.score_top_logprobs[k, place] == whole.score_logprobs[k]


def test_a_seeded_draw_does_not_see_its_batch(runner: ModelRunner) -> None:
    rows = [
        Row(Seq(list(PROMPT), [2 * i, 2 * i + 1], table_row=i + 1), 0, 6, temperature=1.5, seed=11, counter=i)
        for i in range(4)
    ]
    together = runner.launch(make_plan(rows, 4)).result(30).tokens.tolist()
    apart = [run(runner, row) for row in reversed(rows)][::-1]
    assert together == apart
    assert len(set(together)) > 1


def test_a_failed_step_raises_for_its_waiter_and_the_next_one_runs(runner: ModelRunner) -> None:
    seq = Seq([7, VOCAB + 5], [0])
    broken = runner.launch(make_plan([Row(seq, 0, 2, late=True)], 4))
    with pytest.raises(IndexError):
        broken.result(30)
    runner.sample_late(broken, [Adjust(sample=0)])  # comes too late, does no harm
    assert run(runner, Row(Seq(list(PROMPT), [0, 1]), 0, 6)) >= 0


def test_launch_does_not_wait(runner: ModelRunner) -> None:
    gate = threading.Event()
    runner._device.submit(lambda: gate.wait(30) and None)
    pending = runner.launch(make_plan([Row(Seq(list(PROMPT), [0, 1]), 0, 6)], 4))
    assert not pending.done()
    gate.set()
    assert pending.result(30).device_s > 0
