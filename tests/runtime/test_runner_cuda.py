"""The GPU runner's stream logic on a device that runs its queue late. No kernel of a GPU runs here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.base import AttnMeta, KVStore, LayerSpec
from kernels.reference import ReferenceOps, _Tiles
from runtime.config import EngineConfig
from runtime.execute.cuda import CudaRunner
from runtime.execute.graphs import DecodeGraphs, EagerCapture, pad_decode
from runtime.execute.runner import ModelRunner
from runtime.models.decoder import distinct_specs
from runtime.models.layers import Builder
from runtime.models.llama import Llama
from runtime.models.loader import load_runner, open_checkpoint
from runtime.step import Adjust
from tests.runtime.late_device import LateDevice
from tests.runtime.step_plans import Row, Seq, make_plan
from tests.runtime.tiny_models import VOCAB, save, tiny_model

PAGE = 4
N_PAGES = 64
PROMPTS = [[7, 3, 50, 22, 9, 81], [4, 4, 60], [90, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


class GraphReference(ReferenceOps):
    """Reference kernels that can be planned for a static meta, as FlashInfer's are for a graph."""

    def plan_graph(self, static: AttnMeta, step: AttnMeta, spec: LayerSpec) -> None:
        self._tiles = replace(_Tiles.of(step), meta=static)

    def chunks_of(self, kv_indptr: Tensor, page_size: int, specs: Sequence[LayerSpec]) -> int:
        return len(kv_indptr) - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[ModelRunner]:
    config = EngineConfig(
        model=str(folder), backend="reference", kv_pool_tokens=N_PAGES * PAGE, page_size=PAGE, threads=1
    )
    runner = load_runner(config)
    yield runner
    runner.close()


def late_runner(
    folder: Path,
    plain: ModelRunner,
    device: LateDevice,
    *,
    graphs: bool = False,
    n_pages: int = N_PAGES,
    max_rows: int = 6,
) -> CudaRunner:
    checkpoint = open_checkpoint(folder)
    ops, c = GraphReference(), checkpoint.config
    with torch.inference_mode():
        model = Llama(Builder(c, checkpoint.source, ops, torch.float32, torch.device("cpu")), 256)
        kv = KVStore(c.n_layers, n_pages + 1, PAGE, c.n_kv_heads, c.head_dim, torch.float32)
    specs = distinct_specs(model.blocks)
    decode = DecodeGraphs(model, kv, ops, specs, EagerCapture(), sizes=(1, 2, 4), max_rows=max_rows) if graphs else None
    return CudaRunner(model, kv, plain.spec, device, max_running=max(8, max_rows), graphs=decode)


def sequences(n: int = 3) -> list[Seq]:
    pages = np.random.default_rng(1).permutation(N_PAGES)[: 8 * n].reshape(n, 8)
    return [Seq(list(PROMPTS[i % 3]), pages[i].tolist(), table_row=i + 1) for i in range(n)]


def pipelined(runner: CudaRunner | ModelRunner, seqs: list[Seq], n_new: int = 8) -> list[list[int]]:
    """Sampled tokens of each step; the host looks at a step only after it has launched the next one."""
    rows = [Row(seq, 0, len(seq.tokens), temperature=0.8, seed=3, counter=i, score=True) for i, seq in enumerate(seqs)]
    pending = [runner.launch(make_plan(rows, PAGE, n_top=2))]
    tokens = []
    for step in range(n_new - 1):
        active = seqs[: len(seqs) - step // 3]  # sequences end at different steps
        rows = [
            Row(
                seq, len(seq.tokens) + step, len(seq.tokens) + step + 1, temperature=0.8, seed=3, counter=100 * step + i
            )
            for i, seq in enumerate(active)
        ]
        pending.append(runner.launch(make_plan(rows, PAGE)))
        tokens.append(pending[-2].result(30).tokens.tolist())
    return [*tokens, pending[-1].result(30).tokens.tolist()]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_late_device_gives_the_tokens_of_the_plain_runner(
    folder: Path, plain: ModelRunner, seed: int | None, graphs: bool
) -> None:
    runner = late_runner(folder, plain, LateDevice(seed), graphs=graphs)
    assert pipelined(runner, sequences()) == pipelined(plain, sequences())


def test_streams_that_ignore_each_other_are_caught(folder: Path, plain: ModelRunner) -> None:
    """A test of the test: without its waits the runner gives wrong tokens, or fails, on the late device."""
    runner = late_runner(folder, plain, LateDevice(honours_waits=False))
    try:
        tokens: object = pipelined(runner, sequences())
    except (RuntimeError, IndexError, ValueError, TimeoutError):
        tokens = None
    assert tokens != pipelined(plain, sequences())


def test_buffers_rewritten_too_early_are_caught(folder: Path, plain: ModelRunner) -> None:
    """A test of the test: a runner that does not wait for its step buffers changes steps still queued."""
    runner = late_runner(folder, plain, LateDevice())
    for slot in runner._slots:
        slot.left.synchronize = lambda: None  # type: ignore[method-assign]
    seq = sequences(1)[0]
    steps = [runner.launch(make_plan([Row(seq, 0, len(seq.tokens))], PAGE))]
    steps += [runner.launch(make_plan([Row(seq, n, n + 1)], PAGE)) for n in range(6, 10)]
    plain_steps = [plain.launch(make_plan([Row(seq, 0, len(seq.tokens))], PAGE))]
    plain_steps += [plain.launch(make_plan([Row(seq, n, n + 1)], PAGE)) for n in range(6, 10)]
    try:
        tokens: object = [step.result(30).tokens.tolist() for step in steps]
    except (RuntimeError, IndexError, ValueError):
        tokens = None
    assert tokens != [step.result(30).tokens.tolist() for step in plain_steps]


def test_many_steps_may_be_in_flight(folder: Path, plain: ModelRunner) -> None:
    seq = sequences(1)[0]
    answers = []
    for runner in (late_runner(folder, plain, LateDevice()), plain):
        steps = [runner.launch(make_plan([Row(seq, 0, 6)], PAGE))]
        steps += [runner.launch(make_plan([Row(seq, n, n + 1)], PAGE)) for n in range(6, 20)]
        answers.append([step.result().tokens.tolist() for step in steps])
    assert answers[0] == answers[1]


def test_late_samples_scores_and_alternatives_come_home(folder: Path, plain: ModelRunner) -> None:
    first, second, _ = sequences()
    results = []
    for runner in (late_runner(folder, plain, LateDevice()), plain):
        rows = [Row(first, 0, 6, score=True), Row(second, 0, 3, score=True, late=True)]
        pending = runner.launch(make_plan(rows, PAGE, n_top=3))
        assert not pending.done()
        runner.sample_late(pending, [Adjust(sample=1, forced=33)])
        results.append(pending.result(30))
    for name in ("tokens", "logprobs", "top_ids", "score_logprobs", "score_top_ids", "score_top_logprobs"):
        np.testing.assert_array_equal(getattr(results[0], name), getattr(results[1], name), err_msg=name)
    assert results[0].tokens[1] == 33


def test_waiting_for_late_samples_that_never_come_times_out(folder: Path, plain: ModelRunner) -> None:
    runner = late_runner(folder, plain, LateDevice())
    pending = runner.launch(make_plan([Row(sequences(1)[0], 0, 6, late=True)], PAGE))
    with pytest.raises(TimeoutError):
        pending.result(0.05)


def test_a_failed_step_fails_alone(folder: Path, plain: ModelRunner) -> None:
    runner = late_runner(folder, plain, LateDevice())
    seq = sequences(1)[0]
    broken = runner.launch(make_plan([Row(Seq([7, VOCAB + 5], [40]), 0, 2)], PAGE))
    fine = runner.launch(make_plan([Row(seq, 0, 6)], PAGE))
    with pytest.raises(IndexError):
        broken.result(30)
    assert fine.result(30).tokens.tolist() == plain.launch(make_plan([Row(seq, 0, 6)], PAGE)).result(30).tokens.tolist()


def test_padding_rows_live_on_the_scratch_page() -> None:
    seqs = sequences(3)
    plan = make_plan([Row(seq, len(seq.tokens) - 1, len(seq.tokens)) for seq in seqs], PAGE)
    padded = pad_decode(plan, 5, scratch_page=N_PAGES, page_size=PAGE)
    assert padded.qo_indptr.tolist() == [0, 1, 2, 3, 4, 5]
    assert padded.kv_indices[-2:].tolist() == [N_PAGES, N_PAGES]
    assert np.diff(padded.kv_indptr)[-2:].tolist() == [1, 1]
    assert padded.last_page_len[-2:].tolist() == padded.kv_lens[-2:].tolist() == [1, 1]
    assert padded.slots[-2:].tolist() == [N_PAGES * PAGE] * 2
    assert padded.table_row[padded.token_row[-2:]].tolist() == [0, 0]
    assert padded.sample_index.tolist() == plan.sample_index.tolist()
    assert pad_decode(plan, 3, N_PAGES, PAGE) is plan


def test_only_plain_decode_steps_are_replayed(folder: Path, plain: ModelRunner) -> None:
    runner = late_runner(folder, plain, LateDevice(), graphs=True)
    graphs = runner.graphs
    assert graphs is not None
    assert graphs.sizes == [1, 2, 4, 6]
    one = lambda n: make_plan([Row(seq, 2, 3) for seq in sequences(n)], PAGE)
    rows = [size and size.rows for size in (graphs.size_for(one(n)) for n in (1, 2, 3, 5, 7))]
    assert rows == [1, 2, 4, 6, None]
    assert graphs.size_for(make_plan([Row(sequences(1)[0], 0, 6)], PAGE)) is None
    assert graphs.size_for(make_plan([Row(sequences(1)[0], 2, 3, copies=[(0, 9)])], PAGE)) is None
