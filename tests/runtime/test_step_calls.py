"""One step costs a small, fixed number of Python-level calls, whatever the model's depth and the number of rows."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from runtime.config import EngineConfig
from runtime.execute.runner import ModelRunner
from runtime.models.loader import load_runner
from runtime.step import StepPlan
from tests.runtime.step_plans import Row, Seq, make_plan
from tests.runtime.tiny_models import save, tiny_model

MOST = 100  # Python and C functions called on the device's thread in one decode step


def calls_of(runner: ModelRunner, plan: StepPlan) -> int:
    """Function calls, Python's and C's, that the device's thread makes for one step."""
    seen: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, what: Any) -> None:
        seen[event] += 1

    step = runner.launch(plan)  # once before, so that nothing is counted that happens only once
    step.result(60)
    runner._device.call(lambda: sys.setprofile(watch))

    def begin() -> None:
        """Not before this step's caller waits for it: a caller that does not yet wait needs no waking."""
        time.sleep(0.05)
        seen.clear()

    runner._device.submit(begin)
    step = runner.launch(plan)
    step.result(60)
    runner._device.call(lambda: sys.setprofile(None))
    return seen["call"] + seen["c_call"]


def decode_plan(rows: int) -> StepPlan:
    seqs = [Seq([1, 2, 3, 4], [i], table_row=i + 1) for i in range(rows)]
    return make_plan([Row(seq, 3, 4) for seq in seqs], 16)


@pytest.fixture
def shallow_and_deep(tmp_path: Path) -> tuple[ModelRunner, ModelRunner]:
    runners = []
    for layers in (1, 12):
        folder = tmp_path / str(layers)
        folder.mkdir()
        save(tiny_model("llama", num_hidden_layers=layers), folder)
        config = EngineConfig(model=str(folder), backend="native", kv_pool_tokens=1024, threads=1, max_running=64)
        runners.append(load_runner(config))
    return runners[0], runners[1]


def test_calls_do_not_grow_with_layers_or_rows(shallow_and_deep: tuple[ModelRunner, ModelRunner]) -> None:
    shallow, deep = shallow_and_deep
    counts = {(name, rows): calls_of(runner, decode_plan(rows))
              for name, runner in (("shallow", shallow), ("deep", deep)) for rows in (1, 32)}  # fmt: skip
    for runner in shallow_and_deep:
        runner.close()
    assert len(set(counts.values())) == 1, counts
    assert max(counts.values()) <= MOST, counts
