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

from kernels import flashinfer
from kernels.base import AttnMeta, KVStore, LayerSpec
from kernels.flashinfer import FlashInferOps, load_package, store
from kernels.flashinfer_plan import Fenced, FlashInferOptions, Shapes, check_shape, wants_tensor_cores
from kernels.ragged import MetaError, check_meta, split_shared
from kernels.reference import ReferenceOps
from kernels.select import BackendError, select_ops
from tests.kernels.attention_cases import Problem, make_problem, oracle
from tests.kernels.fake_flashinfer import FakePackage

CPU = torch.device("cpu")
MIXED = [(1, 1), (1, 33), (1, 16), (5, 5), (13, 90), (1, 64)]
DECODE = [(1, 1), (1, 33), (1, 16), (1, 70)]


def make(options: FlashInferOptions | None = None) -> tuple[FlashInferOps, FakePackage]:
    package = FakePackage()
    small = replace(options or FlashInferOptions(), workspace_bytes=16)
    ops = FlashInferOps(CPU, package, options=small)
    ops.configure(Shapes(torch.float32, torch.float32, max_context=128))
    return ops, package


def attend(ops: FlashInferOps, problem: Problem, spec: LayerSpec) -> torch.Tensor:
    ops.plan(problem.meta, spec)
    return ops.attend(0, problem.q, problem.k, problem.v, problem.kv, problem.meta, spec)


def agrees(ours: torch.Tensor, problem: Problem, spec: LayerSpec) -> bool:
    return torch.allclose(ours.double(), oracle(problem, spec), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("invariant", [True, False], ids=["fixed split", "free split"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("lens", [DECODE, MIXED, [(9, 9), (40, 77)]], ids=["decode", "mixed", "prefill"])
def test_oracle_from_the_wrappers_arrays(
    lens: list[tuple[int, int]], group: int, page_size: int, invariant: bool
) -> None:
    spec = LayerSpec(2 * group, 2, 64, 0.125)
    problem = make_problem(spec, lens, page_size)
    ops, _ = make(FlashInferOptions(batch_invariant=invariant))
    assert agrees(attend(ops, problem, spec), problem, spec)


@pytest.mark.parametrize("spec", [LayerSpec(4, 2, 64, 0.1, window=9), LayerSpec(4, 2, 64, 1.0, soft_cap=3.0)], ids=str)
def test_windows_and_soft_caps_reach_the_wrappers(spec: LayerSpec) -> None:
    problem = make_problem(spec, MIXED, 4)
    ops, _ = make()
    assert agrees(attend(ops, problem, spec), problem, spec)


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


def test_a_fixed_split_is_counted_in_pages() -> None:
    spec = LayerSpec(4, 2, 64, 0.125)
    ops, package = make(FlashInferOptions(split_tokens=64))
    attend(ops, make_problem(spec, MIXED, 16), spec)
    assert {wrapper.plans[0].options["fixed_split_size"] for wrapper in package.made} == {4}
    assert package.made[0].options["use_tensor_cores"]


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
    store(kv, 0, problem.k, problem.v, meta)
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


def test_norms_gate_and_rope_are_the_references() -> None:
    ops, plain = make()[0], ReferenceOps()
    generator = torch.Generator().manual_seed(0)
    x, y, weight = (torch.randn(shape, generator=generator) for shape in ((5, 64), (5, 64), (64,)))
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5))
    expected = plain.add_rms_norm(x, y, weight, 1e-5)
    for ours, theirs in zip(ops.add_rms_norm(x.clone(), y.clone(), weight, 1e-5), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ops.silu_mul(x), plain.silu_mul(x))
    qkv = torch.randn(5, 6 * 16, generator=generator)
    q, k = qkv[:, :64].unflatten(-1, (4, 16)), qkv[:, 64:].unflatten(-1, (2, 16))
    table = torch.randn(9, 16, generator=generator)
    positions = torch.tensor([0, 8, 3, 3, 1])
    for ours, theirs in zip(ops.rope(q, k, positions, table), plain.rope(q, k, positions, table), strict=True):
        torch.testing.assert_close(ours, theirs)


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
