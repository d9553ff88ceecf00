"""A whole step in one native call gives, to the bit, what its operations give one by one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.config import EngineConfig
from runtime.execute.runner import ModelRunner
from runtime.models.loader import load_runner
from runtime.step import Adjust, StepResult
from tests.runtime.step_plans import Row, Seq, make_plan
from tests.runtime.tiny_models import VOCAB, save, tiny_model

PAGE = 16
SIZES = {"hidden_size": 96, "intermediate_size": 160}  # whole groups of 32, so that they can be quantised
ODD = {"hidden_size": 48, "intermediate_size": 80}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", ODD, "none"),
    "a window": ("mistral", {**ODD, "sliding_window": 7}, "none"),
    "biases": ("qwen2", SIZES, "none"),
    "int8, normed heads": ("qwen3", SIZES, "int8"),
    "q4, tied": ("llama", {**SIZES, "tie_word_embeddings": True}, "q4"),
}


@pytest.fixture(scope="module", params=MODELS)
def runners(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ModelRunner]]:
    """The same model twice; the second knows no whole steps."""
    kind, sizes, quantization = MODELS[request.param]
    folder = save(tiny_model(kind, **sizes), tmp_path_factory.mktemp("tiny"))
    config = EngineConfig(
        model=str(folder), backend="native", kv_pool_tokens=1024, page_size=PAGE, threads=2, quantization=quantization
    )
    made = [load_runner(config) for _ in range(2)]
    made[1]._model.trunk.whole_step = None  # type: ignore[attr-defined]
    assert made[0]._model.whole_step is not None
    yield made
    for one in made:
        one.close()


def run(runner: ModelRunner, *rows: Row, late: tuple[Adjust, ...] = (), **options: Any) -> StepResult:
    pending = runner.launch(make_plan(rows, PAGE, **options))
    if any(row.late for row in rows):
        runner.sample_late(pending, late)
    return pending.result(60)


def story(runner: ModelRunner) -> Iterator[StepResult]:
    """Two sequences: chunked prefill, decoding from the token table, filters, penalties, late samples, a copy."""
    rng = np.random.default_rng(5)
    short = Seq(rng.integers(0, VOCAB, 6).tolist(), [3], table_row=1)
    long = Seq(rng.integers(0, VOCAB, 90).tolist(), [9, 1, 7, 20, 11, 30], table_row=2)
    yield run(runner, Row(short, 0, 6), Row(long, 0, 40, sample=False), n_top=3)
    yield run(runner, Row(short, 6, 7), Row(long, 40, 90), n_top=3)
    yield run(runner, Row(long, 40, 41, sample=False))  # nothing is sampled at all
    noisy = {"temperature": 0.8, "top_p": 0.9, "seed": 11}
    twice = Adjust(sample=1, rep_ids=np.array([4, 9], np.int32), rep_penalty=1.5, add_ids=np.array([2], np.int32),
                   add_values=np.array([3.0], np.float32))  # fmt: skip
    yield run(runner, Row(short, 7, 8, counter=1, **noisy), Row(long, 90, 91, counter=1, top_k=9, **noisy),
              adjust=[twice])  # fmt: skip
    words = np.full(-(-VOCAB // 32), 0x0F0F0F0F, np.int32)
    yield run(runner, Row(long, 91, 92, late=True), Row(short, 8, 9), n_top=2, late=(Adjust(sample=0, mask=words),))
    yield run(runner, Row(short, 9, 10), Row(long, 92, 93, late=True), late=(Adjust(sample=1, forced=33),))
    fork = Seq([*short.tokens, 8], [5], table_row=3)
    copies = [(short.pages[0] * PAGE + i, fork.pages[0] * PAGE + i) for i in range(6)]
    yield run(runner, Row(fork, 6, 7, copies=copies), n_top=5)
    yield run(runner, Row(fork, 7, 8))
    yield run(runner, Row(fork, 8, 9, score=True), Row(long, 40, 89, score=True), n_top=1)


def same(a: StepResult, b: StepResult) -> str | None:
    """What differs, if anything does."""
    for name in ("tokens", "logprobs", "top_ids", "top_logprobs", "score_logprobs", "score_top_ids", "failed"):
        x, y = np.asarray(getattr(a, name)), np.asarray(getattr(b, name))
        if x.dtype != y.dtype or not np.array_equal(x, y, equal_nan=x.dtype.kind == "f"):
            return f"{name}: {x} is not {y}"
    return None


def test_one_call_is_the_operations_one_by_one(runners: list[ModelRunner]) -> None:
    for step, pair in enumerate(zip(*map(story, runners), strict=True)):
        assert same(*pair) is None, f"in step {step}"


def mask_of(tokens: Iterable[int]) -> np.ndarray:
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def changed(rng: np.random.Generator, sample: int) -> Adjust:
    """Any of: nothing, a forced token, a mask that allows from none to all, alone or beside a bias and a penalty."""
    kind = rng.integers(5)
    if kind == 0:
        return Adjust(sample=sample)
    if kind == 1:
        return Adjust(sample=sample, forced=int(rng.integers(VOCAB)))
    mask = mask_of(rng.choice(VOCAB, int(rng.choice([0, 1, 2, 5, 30, VOCAB])), replace=False).tolist())
    if kind == 2:
        return Adjust(
            sample=sample, mask=mask, rep_ids=rng.choice(VOCAB, 9).astype(np.int32), rep_penalty=1.4,
            add_ids=np.unique(rng.integers(0, VOCAB, 9)).astype(np.int32)[:3], add_values=np.float32([4, -2, 9]),
        )  # fmt: skip
    return Adjust(sample=sample, mask=mask)


def crowd(runner: ModelRunner, seed: int) -> StepResult:
    """Many rows of all kinds, after a step that left other logits where theirs will be."""
    rng = np.random.default_rng(seed)
    seqs = [Seq(rng.integers(0, VOCAB, 4).tolist(), [i], table_row=i + 1) for i in range(13)]
    run(runner, *(Row(seq, 0, 3) for seq in seqs))
    rows = [
        Row(seq, 3, 4, late=bool(rng.random() < 0.7), logprob=bool(rng.random() < 0.2), counter=4, seed=seed,
            temperature=float(rng.choice([0.0, 0.9])), top_k=int(rng.choice([0, 6])))
        for seq in seqs
    ]  # fmt: skip
    changes = [changed(rng, i) for i in range(len(rows))]
    late = tuple(one for one, row in zip(changes, rows, strict=True) if row.late)
    return run(runner, *rows, late=late, adjust=[one for one, row in zip(changes, rows, strict=True) if not row.late])


@pytest.mark.parametrize("seed", range(8))
def test_logits_that_nobody_looks_at_change_nothing(runners: list[ModelRunner], seed: int) -> None:
    assert same(*(crowd(runner, seed) for runner in runners)) is None


def test_a_step_gives_up_on_late_samples_that_nobody_asked_for(runners: list[ModelRunner]) -> None:
    runner, seq = runners[0], Seq([5, 6, 7], [0])
    forgotten = runner.launch(make_plan([Row(seq, 0, 3, late=True)], PAGE))
    with pytest.raises(TimeoutError):
        forgotten.result(0.1)
    assert run(runner, Row(seq, 0, 3)).failed == ()
    with pytest.raises(RuntimeError, match="late samples"):
        forgotten.result(60)


def test_a_step_whose_late_samples_come_late_says_how_long_it_computed(runners: list[ModelRunner]) -> None:
    row = Row(Seq([5, 6, 7], [0]), 0, 3, late=True)
    pending = runners[0].launch(make_plan([row], PAGE))
    time.sleep(0.3)
    runners[0].sample_late(pending, [Adjust(sample=0)])
    assert pending.result(60).device_s < 0.2


@pytest.mark.parametrize(
    "wrong",
    [
        Adjust(sample=1),
        Adjust(sample=0, forced=VOCAB),
        Adjust(sample=0, add_ids=np.array([VOCAB], np.int32), add_values=np.zeros(1, np.float32)),
        Adjust(sample=0, add_ids=np.array([1], np.int32), add_values=np.zeros(2, np.float32)),
        Adjust(sample=0, rep_ids=np.array([-1], np.int32), rep_penalty=2.0),
    ],
    ids=["no late one", "forced", "id", "values", "negative id"],
)
def test_a_change_that_does_not_fit_is_refused(runners: list[ModelRunner], wrong: Adjust) -> None:
    runner, rows = runners[0], [Row(Seq([5, 6, 7], [0]), 0, 3, late=True), Row(Seq([5, 6], [1], table_row=2), 0, 2)]
    pending = runner.launch(make_plan(rows, PAGE))
    with pytest.raises(RuntimeError):
        runner.sample_late(pending, [wrong])
    assert run(runner, Row(Seq([5, 6, 7], [2]), 0, 3)).failed == ()
    with pytest.raises(RuntimeError, match="late samples"):
        pending.result(60)


def test_closing_does_not_wait_for_late_samples(tmp_path: Path) -> None:
    folder = save(tiny_model("llama", **SIZES), tmp_path)
    runner = load_runner(EngineConfig(model=str(folder), backend="native", kv_pool_tokens=256, page_size=PAGE))
    pending = runner.launch(make_plan([Row(Seq([5, 6, 7], [0]), 0, 3, late=True)], PAGE))
    runner.close()
    with pytest.raises(RuntimeError, match="late samples"):
        pending.result(60)


def test_arrays_that_do_not_fit_are_refused(runners: list[ModelRunner]) -> None:
    runner = runners[0]
    plan = make_plan([Row(Seq([5, 6, 7], [0]), 0, 3)], PAGE)
    wrong = {
        "token_ids": np.array([5, VOCAB, 7], np.int32),
        "slots": np.array([0, 1, 1 << 40]),
        "positions": np.array([0, 1, 1 << 20], np.int32),
        "sample_index": np.array([3], np.int32),
        "sample_row": np.array([1], np.int32),
        "kv_indices": np.array([1 << 20], np.int32),
        "temperature": np.zeros(2, np.float32),
        "kv_lens": np.array([PAGE + 1], np.int32),
        "top_p": np.zeros(1, np.float64),
    }
    for name, values in wrong.items():
        bad = type(plan)(**{field: getattr(plan, field) for field in plan.__struct_fields__} | {name: values})
        with pytest.raises(RuntimeError):
            runner.launch(bad).result(60)
    assert run(runner, Row(Seq([5, 6, 7], [0]), 0, 3)).failed == ()
