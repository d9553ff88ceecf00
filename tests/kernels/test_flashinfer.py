"""The FlashInfer backend without a GPU: an oracle that reads only the wrappers' arrays, and mutation checks.

These tests show that the arrays are right. FlashInfer's planner is shown by test_flashinfer_planner, its kernels
only by bench/gpu.py on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import flashinfer, fused
from kernels.base import AttnMeta, KVStore, LayerSpec
from kernels.flashinfer import FlashInferOps, load_package
from kernels.flashinfer_plan import (
    Fenced,
    FlashInferOptions,
    Shapes,
    check_prefill,
    check_shape,
    wants_tensor_cores,
)
from kernels.fused import Pools, TorchFused, copy_slots, fused_for, store
from kernels.ragged import MetaError, all_rows, check_meta, cut_keys, split_shared
from kernels.select import BackendError, select_ops
from tests.kernels.attention_cases import Problem, make_problem, oracle
from tests.kernels.fake_flashinfer import FakePackage

CPU = torch.device("cpu")
MIXED = [(1, 1), (1, 33), (1, 16), (5, 5), (13, 90), (1, 64)]
DECODE = [(1, 1), (1, 33), (1, 16), (1, 70)]


def make(
    options: FlashInferOptions | None = None, capability: tuple[int, int] = (8, 0)
) -> tuple[FlashInferOps, FakePackage]:
    package = FakePackage()
    options = options or FlashInferOptions()
    small = replace(options, workspace_bytes=min(options.workspace_bytes, 1 << 20))
    ops = FlashInferOps(CPU, package, options=small, capability=capability)
    ops.configure(Shapes(torch.float32, torch.float32, max_context=128))
    return ops, package


def attend(ops: FlashInferOps, problem: Problem, spec: LayerSpec) -> torch.Tensor:
    ops.plan(problem.meta, spec)
    return ops.attend(0, problem.q, problem.k, problem.v, problem.kv, problem.meta, spec)


def agrees(ours: torch.Tensor, problem: Problem, spec: LayerSpec) -> bool:
    return torch.allclose(ours.double(), oracle(problem, spec), atol=1e-5, rtol=1e-5)


CUTS = {
    "whole": FlashInferOptions(),
    "cut": FlashInferOptions(split_tokens=16, workspace_bytes=1 << 20),
    "free": FlashInferOptions(batch_invariant=False),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("lens", [DECODE, MIXED, [(9, 9), (40, 77)]], ids=["decode", "mixed", "prefill"])
def test_oracle_from_the_wrappers_arrays(lens: list[tuple[int, int]], group: int, page_size: int, cut: str) -> None:
    spec = LayerSpec(2 * group, 2, 64, 0.125)
    problem = make_problem(spec, lens, page_size)
    ops, _ = make(CUTS[cut])
    assert agrees(attend(ops, problem, spec), problem, spec)


@pytest.mark.parametrize("spec", [LayerSpec(4, 2, 64, 0.1, window=9), LayerSpec(4, 2, 64, 1.0, soft_cap=3.0)], ids=str)
def test_windows_and_soft_caps_reach_the_wrappers(spec: LayerSpec) -> None:
    problem = make_problem(spec, MIXED, 4)
    for options in CUTS.values():
        assert agrees(attend(make(options)[0], problem, spec), problem, spec)


def shared_problem(spec: LayerSpec, page_size: int, lens: list[tuple[int, int]], n_shared: int) -> Problem:
    """Rows 1 to 3 hang under `n_shared` common pages."""
    problem = make_problem(spec, lens, page_size)
    meta = problem.meta
    indices, starts = meta.kv_indices.clone(), meta.kv_indptr.tolist()
    n_tokens = n_shared * page_size
    for row in (2, 3):
        indices[starts[row] : starts[row] + n_shared] = indices[starts[1] : starts[1] + n_shared]
        problem.keys[row][:n_tokens] = problem.keys[1][:n_tokens]
        problem.values[row][:n_tokens] = problem.values[1][:n_tokens]
    i32 = lambda values: torch.tensor(values, dtype=torch.int32)
    problem.meta = replace(meta, kv_indices=indices, share_indptr=i32([1, 4]), share_n_pages=i32([n_shared]))
    return problem


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("last", [(1, 50), (7, 55)], ids=["decode", "with a prefill row"])
def test_cascade_equals_flat_attention(page_size: int, last: tuple[int, int]) -> None:
    spec = LayerSpec(8, 2, 64, 0.125)
    problem = shared_problem(spec, page_size, [(1, 20), (1, 40), (1, 90), last, (3, 12)], n_shared=32 // page_size)
    flat, cascading = make(), make(FlashInferOptions(batch_invariant=False))
    assert agrees(attend(flat[0], problem, spec), problem, spec)
    assert agrees(attend(cascading[0], problem, spec), problem, spec)
    n_pages_read = lambda package: sum(len(wrapper.plans[-1].kv_indices) for wrapper in package.made)
    assert n_pages_read(flat[1]) - n_pages_read(cascading[1]) == 2 * 32 // page_size


def test_cascade_keeps_off_pages_that_the_step_writes_and_off_windows() -> None:
    spec = LayerSpec(8, 2, 64, 0.125)
    problem = shared_problem(spec, 4, [(1, 20), (1, 13), (1, 13), (1, 13), (1, 9)], n_shared=3)
    cascade = split_shared(problem.meta)
    assert cascade is not None
    assert [len(rows.kv_indices) for rows in cascade.shared] == [3]
    nearly = replace(problem.meta, share_n_pages=torch.tensor([4], dtype=torch.int32))
    assert torch.equal(split_shared(nearly).own.kv_indptr, cascade.own.kv_indptr)  # type: ignore[union-attr]
    ops, package = make(FlashInferOptions(batch_invariant=False))
    attend(ops, problem, replace(spec, window=30))
    assert [wrapper.plans[-1].causal for wrapper in package.made] == [True]


def test_decode_rows_never_share_a_kernel_with_prefill_rows() -> None:
    spec = LayerSpec(4, 2, 64, 0.125)
    ops, package = make()
    attend(ops, make_problem(spec, MIXED, 4), spec)
    decode, prefill = package.made
    assert len(decode.plans[0].last_page_len) == 3
    assert len(prefill.plans[0].last_page_len) == 3


def test_decode_rows_are_cut_at_fixed_places_and_never_split_by_the_kernel() -> None:
    spec = LayerSpec(4, 2, 64, 0.125)
    ops, package = make(FlashInferOptions(split_tokens=32))
    attend(ops, make_problem(spec, [(1, 1), (1, 33), (1, 100), (1, 64)], 16), spec)
    (plan,) = package.made[0].plans
    assert plan.kv_indptr.diff().tolist() == [1, 2, 1, 2, 2, 2, 1, 2, 2]  # pages a chunk
    assert plan.last_page_len.tolist() == [1, 16, 1, 16, 16, 16, 4, 16, 16]
    assert plan.options["disable_split_kv"]
    assert "fixed_split_size" not in plan.options
    assert package.made[0].options["use_tensor_cores"]


def test_a_rows_attention_has_the_same_bits_alone_and_in_a_crowd() -> None:
    spec = LayerSpec(4, 2, 64, 0.125)
    crowd = make_problem(spec, [(1, 90), (1, 7), (1, 300), (1, 64)], 4)
    ops, _ = make(FlashInferOptions(split_tokens=32))
    together = attend(ops, crowd, spec)
    for row in range(4):
        pages = crowd.meta.kv_indices[crowd.meta.kv_indptr[row] : crowd.meta.kv_indptr[row + 1]]
        i32 = lambda *values: torch.tensor(values, dtype=torch.int32)
        one = slice(row, row + 1)
        alone = replace(
            crowd.meta, qo_indptr=i32(0, 1), kv_indptr=i32(0, len(pages)), kv_indices=pages,
            last_page_len=crowd.meta.last_page_len[one], kv_lens=crowd.meta.kv_lens[one],
            positions=crowd.meta.positions[one], slots=crowd.meta.slots[one],
        )  # fmt: skip
        ops.plan(alone, spec)
        out = ops.attend(0, crowd.q[one], crowd.k[one], crowd.v[one], crowd.kv, alone, spec)
        assert torch.equal(out, together[one])


def test_layers_with_a_window_are_not_cut() -> None:
    spec = LayerSpec(4, 2, 64, 0.125, window=20)
    problem = make_problem(spec, MIXED, 4)
    ops, package = make(FlashInferOptions(split_tokens=16))
    assert agrees(attend(ops, problem, spec), problem, spec)
    assert [len(wrapper.plans[0].last_page_len) for wrapper in package.made] == [3, 3]
    assert all(wrapper.plans[0].options["disable_split_kv"] for wrapper in package.made)


def test_padding_chunks_hang_on_the_scratch_page_and_change_nothing() -> None:
    spec = LayerSpec(4, 2, 64, 0.125)
    problem = make_problem(spec, [(1, 90), (1, 7)], 4)
    rows = all_rows(replace(problem.meta, kv_indices=torch.cat([problem.meta.kv_indices, torch.zeros(3).int()])))
    cut = cut_keys(rows, 4, 8)
    assert cut.indptr.tolist() == [0, 3, 4]
    assert cut.row_of.tolist() == [0, 0, 0, 1, 0, 0, 0]
    assert cut.rows.kv_indptr.diff().tolist() == [8, 8, 7, 2, 1, 1, 1]
    assert cut.rows.last_page_len.tolist() == [4, 4, 2, 3, 1, 1, 1]


def test_prefill_rows_are_split_where_partial_results_fit() -> None:
    """Few query tokens over many keys are split, many are not, and what does not fit together runs in turn."""
    spec = LayerSpec(4, 2, 64, 0.125)
    lens = [(5, 200), (6, 300), (130, 400), (9, 12), (4, 250), (4, 250), (4, 250)]
    one = 13 * 2 * 128 * 65 * 4  # 200 keys in chunks of 16, 128 query rows of 2 KV heads each
    options = FlashInferOptions(split_tokens=16, split_bytes=2 * one, workspace_bytes=3 * one)
    problem = make_problem(spec, lens, 4)
    package = FakePackage()
    ops = FlashInferOps(CPU, package, options=options)
    ops.configure(Shapes(torch.float32, torch.float32, 512))
    assert agrees(attend(ops, problem, spec), problem, spec)
    plans = [wrapper.plans[0] for wrapper in package.made]
    assert [len(plan.last_page_len) for plan in plans] == [2, 2, 2, 1]
    assert [plan.options.get("fixed_split_size") for plan in plans] == [4, None, 4, 4]
    assert plans[1].options["disable_split_kv"]


def test_fa3_prefill_takes_no_split_and_leaves_decode_to_fa2() -> None:
    spec = LayerSpec(4, 2, 64, 0.125)
    problem = make_problem(spec, MIXED, 4)
    ops, package = make(FlashInferOptions(prefill="fa3", split_tokens=16), capability=(9, 0))
    assert agrees(attend(ops, problem, spec), problem, spec)
    decode, prefill = package.made
    assert (decode.backend, prefill.backend) == ("fa2", "fa3")
    assert not {"fixed_split_size", "disable_split_kv"} & set(prefill.plans[0].options)


def test_captured_decode_is_planned_anew_for_its_static_arrays() -> None:
    spec = LayerSpec(4, 2, 64, 0.125)
    ops, package = make()
    static: AttnMeta | None = None
    for seed, lens in enumerate([DECODE, [(1, 5), (1, 80), (1, 2), (1, 31)]]):
        problem = make_problem(spec, lens, 4, seed=seed)
        if static is None:
            static = replace(problem.meta, slots=problem.meta.slots.clone())
        static.slots.copy_(problem.meta.slots)
        ops.plan_graph(static, problem.meta, spec)
        ops.plan(static, spec)  # what the captured function calls: nothing new
        out = ops.attend(0, problem.q, problem.k, problem.v, problem.kv, static, spec)
        assert agrees(out, problem, spec)
    assert [len(wrapper.plans) for wrapper in package.made] == [2]
    assert package.made[0].options["use_cuda_graph"]


def test_captured_decode_of_long_rows_keeps_its_number_of_chunks() -> None:
    spec = LayerSpec(4, 2, 64, 0.125)
    ops, package = make(FlashInferOptions(split_tokens=32))
    static: AttnMeta | None = None
    for seed, (lens, n_spare) in enumerate([([(1, 90), (1, 7)], 4), ([(1, 33), (1, 127)], 2), ([(1, 5), (1, 6)], 6)]):
        problem = make_problem(spec, lens, 4, seed=seed)
        assert ops.chunks_of(problem.meta.kv_indptr, 4, [spec]) == 8 - n_spare
        owned = int(problem.meta.kv_indices[0])  # any page with finite keys in it
        spare = torch.full((n_spare,), owned, dtype=torch.int32)
        step = replace(problem.meta, kv_indices=torch.cat([problem.meta.kv_indices, spare]))
        static = static or replace(step, slots=step.slots.clone())
        static.slots.copy_(step.slots)
        ops.plan_graph(static, step, spec)
        out = ops.attend(0, problem.q, problem.k, problem.v, problem.kv, static, spec)
        assert agrees(out, problem, spec)
    assert [len(plan.last_page_len) for plan in package.made[0].plans] == [8, 8, 8]
    held = list(ops._planner._static_chunks.values())
    assert len(held) == 1
    assert held[0].indptr.tolist() == [0, 1, 2]


def one_page_more(meta: AttnMeta) -> AttnMeta:
    """The last row has a page beyond what its length needs."""
    indices = torch.cat([meta.kv_indices, meta.kv_indices[:1]])
    return replace(meta, kv_indices=indices, kv_indptr=torch.cat([meta.kv_indptr[:-1], meta.kv_indptr[-1:] + 1]))


MUTATIONS: dict[str, Callable[[AttnMeta], AttnMeta]] = {
    "last_page_len too long": lambda m: replace(m, last_page_len=m.last_page_len + 1),
    "last_page_len too short": lambda m: replace(m, last_page_len=(m.last_page_len - 1).clamp(min=1)),
    "pages of two rows swapped": lambda m: replace(m, kv_indices=m.kv_indices.flip(0)),
    "borders shifted": lambda m: replace(m, kv_indptr=m.kv_indptr.roll(1)),
    "a page dropped": lambda m: replace(m, kv_indices=m.kv_indices[:-1]),
    "a page too many": lambda m: one_page_more(m),
    "stale lengths": lambda m: replace(m, kv_lens=m.kv_lens - 1),
    "slots off by one": lambda m: replace(m, slots=m.slots + 1),
    "positions off by one": lambda m: replace(m, positions=m.positions + 1),
    "64-bit borders": lambda m: replace(m, qo_indptr=m.qo_indptr.long()),
    "a page outside the pool": lambda m: replace(m, kv_indices=m.kv_indices + 1000),
    "more queries than keys": lambda m: replace(m, qo_indptr=m.qo_indptr * 50),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_broken_arrays_are_caught(name: str) -> None:
    """A test of the tests: the contract's check sees every kind of damage, or the numbers do."""
    spec = LayerSpec(4, 2, 64, 0.125)
    problem = make_problem(spec, [(1, 30), (2, 13), (4, 21)], 4)
    check_meta(problem.meta, problem.kv.k[0].shape[0])
    with pytest.raises((MetaError, IndexError)):
        check_meta(MUTATIONS[name](problem.meta), problem.kv.k[0].shape[0])


def test_numbers_catch_pages_in_the_wrong_order() -> None:
    spec = LayerSpec(4, 2, 64, 0.125)
    problem = make_problem(spec, [(1, 30)], 4)
    problem.meta = replace(
        problem.meta, kv_indices=problem.meta.kv_indices[[1, 0, *range(2, 8)]], slots=problem.meta.slots
    )
    honest = make_problem(spec, [(1, 30)], 4)
    windowed = replace(spec, window=26)
    assert agrees(attend(make()[0], honest, windowed), honest, windowed)
    assert not agrees(attend(make()[0], problem, windowed), problem, windowed)


def test_a_stray_read_is_poison() -> None:
    """Slots that no row owns hold NaN, so reading one token too many shows."""
    spec = LayerSpec(4, 2, 64, 0.125)
    problem = make_problem(spec, [(1, 30)], 4)
    problem.meta = replace(problem.meta, last_page_len=problem.meta.last_page_len + 1)
    assert attend(make()[0], problem, spec).isnan().any()


def test_fp8_pools_are_quantised_before_the_store_and_saturate() -> None:
    spec = LayerSpec(2, 1, 64, 0.125)
    problem = make_problem(spec, [(2, 2)], 4)
    kv = KVStore(1, 2, 4, 1, 64, torch.float8_e4m3fn)
    problem.k[0, 0, 0], problem.k[1, 0, 0] = 1e6, -1e6
    meta = replace(problem.meta, slots=torch.tensor([1, 6]), copy_src=torch.tensor([6]), copy_dst=torch.tensor([3]))
    store(Pools(kv.k[0], kv.v[0]), problem.k, problem.v, meta.slots)
    copy_slots(Pools(kv.k[0], kv.v[0]), meta.copy_src, meta.copy_dst)
    assert kv.k[0].float()[0, 1, 0, 0] == 448
    assert kv.k[0].float()[1, 2, 0, 0] == kv.k[0].float()[0, 3, 0, 0] == -448
    torch.testing.assert_close(kv.v[0].float()[0, 1], problem.v[0], atol=0.2, rtol=0.07)


def test_tensor_cores_by_the_group_size_rule() -> None:
    free = FlashInferOptions(batch_invariant=False)
    uses = lambda group, kv=torch.bfloat16: wants_tensor_cores(LayerSpec(group, 1, 64, 1.0), kv, free)
    assert [uses(group) for group in (1, 2, 3, 4, 5, 7, 8)] == [False, False, False, True, True, True, True]
    assert uses(1, torch.float8_e4m3fn)
    assert wants_tensor_cores(LayerSpec(1, 1, 64, 1.0), torch.bfloat16, FlashInferOptions())


def test_a_plan_waits_for_the_last_plans_copy_and_a_failed_plan_cannot_run() -> None:
    log: list[str] = []
    inner: Any = SimpleNamespace(plan=lambda ok: log.append("plan") if ok else 1 / 0, run=lambda q, pools: "ran")
    event = SimpleNamespace(synchronize=lambda: log.append("wait"), record=lambda: log.append("record"))
    fenced = Fenced(inner, event)
    fenced.plan(True)
    assert log == ["wait", "plan", "record"]
    pools = (torch.zeros(1), torch.zeros(1))
    assert fenced.run(torch.zeros(1), pools) == "ran"
    with pytest.raises(ZeroDivisionError):
        fenced.plan(False)
    with pytest.raises(AssertionError, match="last plan failed"):
        fenced.run(torch.zeros(1), pools)


def test_rotating_on_the_way_to_the_pool_is_rope_then_attend() -> None:
    """q, k, v as the models hand them over: views of one product."""
    spec = LayerSpec(4, 2, 64, 0.125)
    problem = make_problem(spec, MIXED, 4)
    n = len(problem.q)
    qkv = torch.cat([part.flatten(1) for part in (problem.q, problem.k, problem.v)], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, 64)) for part in qkv.split([256, 128, 128], dim=-1))
    table = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    answers = []
    for in_one in (True, False):
        ops, _ = make()
        kv = KVStore(1, problem.kv.k[0].shape[0], 4, 2, 64, torch.float32)
        kv.k[0].copy_(problem.kv.k[0])
        kv.v[0].copy_(problem.kv.v[0])
        if in_one:
            out = ops.rope_attend(0, (q, k, v), problem.meta.positions, table, kv, problem.meta, spec)
        else:
            turned_q, turned_k = ops.rope(q, k, problem.meta.positions, table)
            out = ops.attend(0, turned_q, turned_k, v, kv, problem.meta, spec)
        answers.append(out)
    assert answers[0].shape == (n, 4, 64)
    assert torch.equal(*answers)


def test_triton_is_taken_on_a_gpu_and_torch_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused_for(CPU).name == "torch"
    monkeypatch.setattr(fused, "importlib", SimpleNamespace(import_module=lambda name: SimpleNamespace()))
    assert fused_for(torch.device("cuda", 0)).name == "triton"

    def absent(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(fused, "importlib", SimpleNamespace(import_module=absent))
    assert isinstance(fused_for(torch.device("cuda", 0)), TorchFused)


def test_the_wrong_card_package_or_shape_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="CUDA devices only, not on cpu"):
        select_ops("flashinfer", CPU)
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BackendError, match="this torch sees none"):
        select_ops("flashinfer", cuda)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    with pytest.raises(BackendError, match=r"Tesla T4 has compute capability 7\.5; bfloat16 needs 8\.0"):
        select_ops("flashinfer", cuda)

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(flashinfer, "importlib", SimpleNamespace(import_module=absent))
    with pytest.raises(ImportError, match=r"flashinfer is missing.*pip install 'ramet\[gpu\]'"):
        load_package()
    with pytest.raises(RuntimeError, match="no kernel for head size 48; it has 64, 128, 256"):
        check_shape(LayerSpec(4, 2, 48, 1.0))
    with pytest.raises(RuntimeError, match="7 heads are no whole groups over 2 KV heads"):
        check_shape(LayerSpec(7, 2, 64, 1.0))


def test_fa3_is_refused_in_words_where_it_cannot_run() -> None:
    bf16 = torch.bfloat16
    check_prefill("fa2", (8, 0), bf16, torch.float8_e4m3fn)
    check_prefill("fa3", (9, 0), bf16, bf16)
    with pytest.raises(RuntimeError, match=r"Hopper \(compute capability 9\.0\) only; this GPU has 8\.9\. Use fa2"):
        check_prefill("fa3", (8, 9), bf16, bf16)
    with pytest.raises(RuntimeError, match="no code for float8_e4m3fn KV under bfloat16 queries"):
        check_prefill("fa3", (9, 0), bf16, torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="Hopper"):
        make(FlashInferOptions(prefill="fa3"), capability=(10, 0))
