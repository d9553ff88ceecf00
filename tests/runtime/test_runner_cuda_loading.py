"""What is decided before a GPU is touched: types, quantisation, heads, placement; and the whole path on stand-ins."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kernels.base import KVStore
from kernels.flashinfer import FlashInferOps
from kernels.flashinfer_plan import FlashInferOptions, Shapes
from runtime.config import EngineConfig
from runtime.errors import BackendUnavailable, InvalidRequest, ModelLoadError
from runtime.execute import placement
from runtime.execute.cuda import CudaRunner
from runtime.execute.cuda_loader import MARGIN_BYTES, check_heads, gpu_method, gpu_types, load_cuda_runner, saved_reads
from runtime.execute.gpu import CudaGpu, covered
from runtime.execute.graphs import DecodeGraphs, EagerCapture, GraphSize
from runtime.execute.runner import ModelRunner
from runtime.execute.trial import blank_plan
from runtime.models.config import config_from_hf
from runtime.models.decoder import distinct_specs
from runtime.models.layers import Builder
from runtime.models.llama import Llama
from runtime.models.loader import load_runner, open_checkpoint
from tests.kernels.fake_flashinfer import FakePackage
from tests.runtime.fake_gpu import FakeGpu, fake_choice
from tests.runtime.late_device import LateDevice
from tests.runtime.step_plans import Row, Seq, make_plan
from tests.runtime.tiny import CONFIG
from tests.runtime.world import World

WIDE = {**CONFIG, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    return tmp_path


def config(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder), load_format="dummy", backend="reference", dtype="float32", threads=1,
        page_size=4, kv_pool_tokens=240, max_running=6,
    )  # fmt: skip


def gpu_path(folder: Path, plain: ModelRunner, *, invariant: bool) -> CudaRunner:
    """The GPU's runner, graphs and FlashInfer planning over a late device and a stand-in for the package."""
    checkpoint = open_checkpoint(folder, "dummy")
    c = checkpoint.config
    options = FlashInferOptions(batch_invariant=invariant, workspace_bytes=16, split_tokens=8)
    ops = FlashInferOps(torch.device("cpu"), FakePackage(), options=options)
    ops.configure(Shapes(torch.float32, torch.float32, 512))
    with torch.inference_mode():
        model = Llama(Builder(c, checkpoint.source, ops, torch.float32, torch.device("cpu")), 512)
        kv = KVStore(c.n_layers, plain.n_pages + 1, 4, c.n_kv_heads, c.head_dim, torch.float32)
    graphs = DecodeGraphs(model, kv, ops, distinct_specs(model.blocks), EagerCapture(), sizes=(1, 2, 4), max_rows=6)
    return CudaRunner(model, kv, plain.spec, LateDevice(seed=5), max_running=6, graphs=graphs)


@pytest.mark.parametrize("invariant", [True, False], ids=["fixed split", "cascade"])
def test_the_scheduler_gets_the_same_tokens_from_the_gpu_path(folder: Path, invariant: bool) -> None:
    trunk = list(range(40, 80))
    said = []
    plain = load_runner(config(folder))
    for runner in (plain, gpu_path(folder, plain, invariant=invariant)):
        world = World(runner=runner, max_step_tokens=48, chunk_tokens=16)
        for i in range(8):
            prompt = [*trunk[: 5 * i + 3], i, i + 1]
            world.ask(f"r{i}", prompt, max_tokens=12, temperature=0.0 if i % 2 else 0.8, seed=i)
            world.turn()
        world.run()
        said.append({rid: said.tokens for rid, said in world.said.items()})
        assert world.scheduler.stats()["steps_failed"] == 0
        runner.close()
    assert said[0] == said[1]


def test_a_cascade_that_saves_enough_reads_is_worth_more_than_a_graph() -> None:
    plan = make_plan([Row(Seq([1, 2, 3], [4, 5]), 2, 3)] * 5, 4)
    shared = msgspec.structs.replace(
        plan, share_indptr=np.array([0, 2, 5], np.int32), share_n_pages=np.array([10, 100], np.int32)
    )
    assert saved_reads(plan, 4) == 0
    assert saved_reads(shared, 4) == (1 * 10 + 2 * 100) * 4


def test_types_the_gpu_kernels_have() -> None:
    assert gpu_types(EngineConfig()) == (torch.bfloat16, torch.bfloat16)
    assert gpu_types(EngineConfig(dtype="float16")) == (torch.float16, torch.float16)
    assert gpu_types(EngineConfig(kv_dtype="fp8")) == (torch.bfloat16, torch.float8_e4m3fn)
    with pytest.raises(BackendUnavailable, match="no dtype 'float32'"):
        gpu_types(EngineConfig(dtype="float32"))
    with pytest.raises(BackendUnavailable, match="no KV of type 'int8'"):
        gpu_types(EngineConfig(kv_dtype="int8"))


def test_quantisation_on_a_gpu_is_fp8_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_method("auto") is gpu_method("none") is None
    assert gpu_method("fp8").name == "fp8"  # type: ignore[union-attr]
    with pytest.raises(InvalidRequest, match="none and fp8, not 'q4'"):
        gpu_method("q4")
    monkeypatch.delattr("torch.nn.functional.scaled_mm")
    with pytest.raises(BackendUnavailable, match=r"fp8 needs torch\.nn\.functional\.scaled_mm"):
        gpu_method("fp8")


def test_fp8_layers_are_for_gpus_only(folder: Path) -> None:
    with pytest.raises(BackendUnavailable, match="'fp8' runs on a GPU only"):
        load_runner(EngineConfig(model=str(folder), load_format="dummy", backend="reference", quantization="fp8"))


def test_quantised_layers_leave_the_head_alone(folder: Path) -> None:
    checkpoint = open_checkpoint(folder, "dummy")
    ops = FlashInferOps(torch.device("cpu"), FakePackage())
    build = Builder(
        checkpoint.config, checkpoint.source, ops, torch.bfloat16, torch.device("cpu"), method=gpu_method("fp8")
    )
    model = Llama(build, 64)
    assert type(model.blocks[0].mlp.down).__name__ == "Fp8Linear"
    assert type(model.trunk.head).__name__ == "function"


def test_heads_without_a_kernel_are_refused_before_any_weight_is_read() -> None:
    with pytest.raises(BackendUnavailable, match="no kernel for head size 16"):
        check_heads(config_from_hf(CONFIG, "tiny"))
    check_heads(config_from_hf(WIDE, "wide"))


def test_a_process_is_bound_to_the_cpus_beside_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    node = tmp_path / "devices/system/node/node1"
    device.mkdir(parents=True)
    node.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    (node / "cpulist").write_text("0-1,8\n")
    bound: list[frozenset[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 8})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(frozenset(cpus)))
    assert placement.bind_to_socket("0000:3B:00.0", tmp_path) == {1, 8}
    assert bound == [frozenset({1, 8})]
    (device / "numa_node").write_text("-1\n")
    assert placement.bind_to_socket("0000:3b:00.0", tmp_path) == frozenset()
    assert placement.bind_to_socket("0000:00:00.0", tmp_path) == frozenset()


def test_the_allocator_grows_in_place_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(placement.ALLOCATOR, raising=False)
    placement.set_allocator()
    assert os.environ[placement.ALLOCATOR] == "expandable_segments:True"
    monkeypatch.setenv(placement.ALLOCATOR, "max_split_size_mb:64")
    placement.set_allocator()
    assert os.environ[placement.ALLOCATOR] == "max_split_size_mb:64"


def gpu_config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder), load_format="dummy", page_size=4, max_running=6, max_step_tokens=64,
        **{"kv_pool_tokens": 240, "context_length": 256, **options},
    )  # fmt: skip


def load(folder: Path, gpu: FakeGpu, **options: Any) -> CudaRunner:
    return load_cuda_runner(gpu_config(folder, **options), folder, fake_choice(), gpu.torch_device, gpu)


def test_the_pool_is_what_the_weights_a_step_and_its_graph_leave(folder: Path) -> None:
    """Nine tenths of what is free after a trial of the largest step; graphs are captured with the pool in place."""
    runner = load(folder, FakeGpu(free_bytes=1 << 30, peak_bytes=100 << 20), kv_pool_tokens=None)
    page_bytes = runner.spec.kv_bytes_per_token * 4
    assert runner.n_pages == int(((1 << 30) - (100 << 20) - MARGIN_BYTES) * 0.9) // page_bytes
    assert runner.graphs is not None
    assert runner.graphs.sizes == [1, 2, 4, 6]
    assert runner.graphs.n_captured == 4
    assert "torch for the small operations; bfloat16 over bfloat16 KV" in runner.spec.why
    assert runner.spec.why.endswith("free); 4 decode graphs take 0.00 GiB")
    runner.close()


def test_graphs_are_captured_when_first_needed_or_never(folder: Path) -> None:
    lazy = load(folder, FakeGpu(), cuda_graphs="lazy")
    assert lazy.graphs is not None
    assert lazy.graphs.n_captured == 0
    lazy.launch(blank_plan(3, lazy.n_pages, 4)).result()
    assert lazy.graphs.n_captured == 1
    assert load(folder, FakeGpu(), cuda_graphs="off").graphs is None


def test_warming_up_captures_the_largest_first_and_leaves_real_pages_alone(folder: Path) -> None:
    runner = load(folder, FakeGpu(), cuda_graphs="lazy")
    seen: list[int] = []
    launch = runner.launch
    runner.launch = lambda plan: seen.append(plan.n_rows) or launch(plan)  # type: ignore[method-assign,func-returns-value]
    runner.warm_up()
    assert seen == [6, 4, 2, 1]
    assert not runner._kv.k[0][:-1].any()


def test_what_does_not_fit_is_said_with_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError, match=r"weights of model .* take 0\.0 GiB; 0\.0 of 8\.0 GiB are free on Fake"):
        load(folder, FakeGpu(free_bytes=1000))
    with pytest.raises(ModelLoadError, match=r"A KV pool of 1000000000 tokens takes .* GiB; .* GiB are free"):
        load(folder, FakeGpu(), kv_pool_tokens=1_000_000_000)
    with pytest.raises(ModelLoadError, match="there is no room for a KV pool"):
        load(folder, FakeGpu(free_bytes=500 << 20), kv_pool_tokens=None)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("runtime.execute.cuda_loader.build_model", full)
    with pytest.raises(ModelLoadError, match=r"does not fit on Fake H100: memory ran out with .* --quantization fp8"):
        load(folder, FakeGpu())


def test_fa3_is_chosen_by_an_option_and_refused_where_it_cannot_run(folder: Path) -> None:
    runner = load(folder, FakeGpu(), prefill_kernels="fa3")
    assert runner._model.blocks[0].attention.ops.options.prefill == "fa3"  # type: ignore[attr-defined]
    for choice, options, message in (
        (fake_choice((8, 9)), {}, r"Hopper .* this GPU has 8\.9\. Use fa2\."),
        (fake_choice((9, 0)), {"kv_dtype": "fp8"}, "no code for float8_e4m3fn KV"),
    ):
        wanted = gpu_config(folder, prefill_kernels="fa3", **options)
        with pytest.raises(BackendUnavailable, match=message):
            load_cuda_runner(wanted, folder, choice, torch.device("cpu"), FakeGpu())


def test_long_rows_are_replayed_with_more_chunks(folder: Path) -> None:
    """Rows over several chunks take a graph of four times as many, and give the tokens of the eager steps."""
    answers, sizes = [], []
    for mode in ("lazy", "off"):
        runner = load(folder, FakeGpu(), cuda_graphs=mode, dtype="bfloat16")
        ops: Any = runner._model.blocks[0].attention.ops
        ops.configure(Shapes(torch.bfloat16, torch.bfloat16, 256, 6), replace(ops.options, split_tokens=8))
        pages = [list(range(10 * i, 10 * i + 10)) for i in range(2)]
        seqs = [Seq(list(range(3, 3 + n)), pages[i], table_row=i + 1) for i, n in enumerate([30, 4])]
        said = [runner.launch(make_plan([Row(seq, 0, len(seq.tokens)) for seq in seqs], 4)).result(30).tokens.tolist()]
        for step in range(4):
            rows = [Row(seq, len(seq.tokens) + step, len(seq.tokens) + step + 1) for seq in seqs]
            said.append(runner.launch(make_plan(rows, 4)).result(30).tokens.tolist())
        answers.append(said)
        sizes.append(list(runner.graphs._captured) if runner.graphs is not None else [])
    assert answers[0] == answers[1]
    assert sizes == [[GraphSize(2, 8)], []]


def test_bus_ids_and_memory_are_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0}
    asked = SimpleNamespace(name="H200", major=9, minor=0, total_memory=1 << 40, **address)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: asked)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (5, 10))
    gpu = CudaGpu(torch.device("cuda", 0))
    assert (gpu.name, gpu.capability, gpu.bus_id(), gpu.free_bytes()) == ("H200", (9, 0), "0000:3b:00.0", 5)


def test_a_moment_in_which_two_kernels_run_counts_once() -> None:
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (5.5, 5.6)]) == 4.0
    assert covered([]) == 0.0
