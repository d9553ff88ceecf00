"""Native paged attention: right against float64, and each query's bits its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.base import AttnMeta, KVStore, LayerSpec
from kernels.cpu import NativeOps
from tests.kernels.attention_cases import Problem, make_problem, oracle
from tests.kernels.cpu_cases import VARIANTS

PLAIN = LayerSpec(6, 2, 16, 16**-0.5)
SPECS = {
    "plain": PLAIN,
    "one head a group": LayerSpec(4, 4, 32, 32**-0.5),
    "group of 9": LayerSpec(9, 1, 64, 0.125),
    "odd head size": LayerSpec(4, 2, 36, 36**-0.5),
    "head size 256": LayerSpec(2, 1, 256, 1 / 16),
    "window": LayerSpec(6, 2, 16, 0.25, window=9),
    "window of itself only": LayerSpec(6, 2, 16, 0.25, window=0),
    "window over splits": LayerSpec(2, 1, 16, 0.25, window=600),
    "soft cap": LayerSpec(6, 2, 16, 1.0, soft_cap=5.0),
}
MIXED = [(1, 1), (1, 70), (5, 5), (13, 90), (1, 64), (3, 65), (130, 130), (1, 1200), (20, 1100)]


def attend(problem: Problem, spec: LayerSpec, ops: NativeOps | None = None) -> Tensor:
    ops = ops or NativeOps(threads=2)
    ops.plan(problem.meta, spec)
    return ops.attend(0, problem.q, problem.k, problem.v, problem.kv, problem.meta, spec)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("name", SPECS)
def test_attention_is_the_oracles(name: str, page_size: int, variant: str) -> None:
    problem = make_problem(SPECS[name], MIXED, page_size)  # slots that no row owns hold NaN
    ours = attend(problem, SPECS[name], NativeOps(variant=variant, threads=2))
    torch.testing.assert_close(ours.double(), oracle(problem, SPECS[name]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_keys_cost_only_the_outputs_rounding(dtype: torch.dtype) -> None:
    problem = make_problem(PLAIN, MIXED, 16, dtype=dtype)
    ours = attend(problem, PLAIN)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), oracle(problem, PLAIN), atol=5e-3, rtol=1e-2)


@settings(max_examples=25, deadline=None)
@given(
    lens=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([0, 1, 30, 31, 32, 33, 500, 512, 1030])).map(
            lambda pair: (pair[0], pair[0] + pair[1])
        ),
        min_size=1,
        max_size=5,
    ),
    page_size=st.sampled_from([1, 3, 16]),
    window=st.sampled_from([-1, 6, 550]),
    threads=st.integers(1, 3),
)
def test_a_query_is_the_same_alone_and_token_by_token(
    lens: list[tuple[int, int]], page_size: int, window: int, threads: int
) -> None:
    spec = replace(PLAIN, window=window)
    problem = make_problem(spec, lens, page_size)
    together = attend(problem, spec, NativeOps(threads=threads))
    ops = NativeOps(threads=1)
    for row, (q_len, kv_len) in enumerate(lens):
        first = int(problem.meta.qo_indptr[row])
        for i in {0, q_len // 2, q_len - 1}:
            token = first + i
            alone = one_token(problem, row, token, kv_len - q_len + i + 1)
            assert torch.equal(attend(alone, spec, ops)[0], together[token])


def one_token(problem: Problem, row: int, token: int, kv_len: int) -> Problem:
    """The decode step of one query token: only its row, only the keys up to it."""
    meta, page = problem.meta, problem.meta.page_size
    start, n_pages = int(meta.kv_indptr[row]), -(-kv_len // page)
    i32 = lambda *values: torch.tensor(values, dtype=torch.int32)
    part = slice(token, token + 1)
    alone = replace(
        meta,
        qo_indptr=i32(0, 1),
        kv_indptr=i32(0, n_pages),
        kv_indices=meta.kv_indices[start : start + n_pages].clone(),
        last_page_len=i32(kv_len - (n_pages - 1) * page),
        kv_lens=i32(kv_len),
        positions=meta.positions[part],
        slots=meta.slots[part],
    )
    return Problem(alone, problem.kv, problem.q[part], problem.k[part], problem.v[part], [], [])


def shared_problem(lens: list[tuple[int, int]], n_shared: int, page_size: int = 16) -> Problem:
    """Rows whose first `n_shared` pages are the same pages."""
    problem = make_problem(PLAIN, lens, page_size)
    meta, kv_indices = problem.meta, problem.meta.kv_indices.clone()
    for row in range(1, len(lens)):
        at = int(meta.kv_indptr[row])
        kv_indices[at : at + n_shared] = kv_indices[:n_shared]
    i32 = lambda *values: torch.tensor(values, dtype=torch.int32)
    return replace_meta(problem, kv_indices=kv_indices, share_indptr=i32(0, len(lens)), share_n_pages=i32(n_shared))


def replace_meta(problem: Problem, **changes: Tensor) -> Problem:
    return replace(problem, meta=replace(problem.meta, **changes))


def ungrouped(problem: Problem) -> Problem:
    i32 = lambda *values: torch.tensor(values, dtype=torch.int32)
    return replace_meta(problem, share_indptr=i32(0), share_n_pages=i32())


@pytest.mark.parametrize("n_shared", [1, 2, 3, 40, 65])
@pytest.mark.parametrize("window", [-1, 100, 700])
def test_sharing_changes_no_bit(n_shared: int, window: int) -> None:
    lens = [(1, 1100), (1, 1056), (7, 1210), (1, 1077), (300, 1600), (1, 1300), (2, 1400)]
    spec = replace(PLAIN, window=window)
    problem = shared_problem(lens, n_shared)
    assert torch.equal(attend(problem, spec), attend(ungrouped(problem), spec))


def test_shared_pages_are_read_once_for_the_group() -> None:
    problem = shared_problem([(1, 2048 + 10)] * 8, 128)
    ops, alone = NativeOps(threads=1), ungrouped(problem)
    apart = ops.kv_bytes_read(alone.meta, PLAIN, alone.kv)
    together = ops.kv_bytes_read(problem.meta, PLAIN, problem.kv)
    per_key = 2 * PLAIN.n_kv_heads * PLAIN.head_dim * 4
    assert apart == 8 * 2058 * per_key
    assert together == (2048 + 8 * 10) * per_key
    assert together < 0.3 * apart


def test_copies_run_after_the_store_and_before_attention() -> None:
    kv = KVStore(1, 4, 4, 1, 8, torch.float32)
    i32 = lambda *values: torch.tensor(values, dtype=torch.int32)
    i64 = lambda *values: torch.tensor(values, dtype=torch.long)
    meta = AttnMeta(
        4, i32(0, 1, 2), i32(0, 1, 2), i32(2, 3), i32(1, 2), i32(1, 2), i32(0, 1), i64(8, 13), i64(8), i64(12),
        i32(0), i32(),
    )  # fmt: skip
    spec = LayerSpec(1, 1, 8, 1.0)
    k, v = torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    NativeOps(threads=2).attend(0, torch.randn(2, 1, 8), k, v, kv, meta, spec)
    assert torch.equal(kv.k[0].flatten(0, 1)[[8, 12, 13]], k[[0, 0, 1]])
    assert torch.equal(kv.v[0].flatten(0, 1)[[8, 12, 13]], v[[0, 0, 1]])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poison_stays_in_the_queries_that_see_it(poison: float) -> None:
    problem = make_problem(PLAIN, [(4, 40), (1, 90)], 16)
    clean = attend(problem, PLAIN)
    problem.v[1] = poison  # the first row's second new token: its queries 1, 2 and 3 see it
    dirty = attend(problem, PLAIN)
    assert not dirty[1:4].isfinite().any()
    assert torch.equal(dirty[[0, 4]], clean[[0, 4]])


def test_wrong_page_tables_are_refused() -> None:
    problem = make_problem(PLAIN, [(1, 20)], 16)
    bad = replace_meta(problem, kv_indices=problem.meta.kv_indices + 10_000)
    with pytest.raises(RuntimeError, match="page table names page"):
        attend(bad, PLAIN)
    with pytest.raises(RuntimeError, match="20 keys"):
        attend(replace_meta(problem, kv_indptr=torch.tensor([0, 1], dtype=torch.int32)), PLAIN)
