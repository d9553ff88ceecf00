"""What is decided before a GPU is touched: types, quantisation, heads, placement; and the whole path on stand-ins."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from kernels.base import KVStore
from kernels.flashinfer import FlashInferOps
from kernels.flashinfer_plan import FlashInferOptions, Shapes
from runtime.config import EngineConfig
from runtime.errors import BackendUnavailable, InvalidRequest
from runtime.execute import placement
from runtime.execute.cuda import CudaRunner
from runtime.execute.cuda_loader import check_heads, gpu_method, gpu_types, saved_reads
from runtime.execute.graphs import DecodeGraphs, EagerCapture
from runtime.execute.runner import ModelRunner
from runtime.models.config import config_from_hf
from runtime.models.decoder import distinct_specs
from runtime.models.layers import Builder
from runtime.models.llama import Llama
from runtime.models.loader import load_runner, open_checkpoint
from tests.kernels.fake_flashinfer import FakePackage
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
