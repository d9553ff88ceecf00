"""The reference kernels: right against float64, and each row's bits its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.base import LayerSpec
from kernels.reference import ReferenceOps, RowSafeLinear
from tests.kernels.attention_cases import Problem, make_problem, oracle

PLAIN = LayerSpec(6, 2, 16, 16**-0.5)
SPECS = {
    "plain": PLAIN,
    "one head a group": LayerSpec(4, 4, 32, 32**-0.5),
    "group of 7": LayerSpec(7, 1, 64, 64**-0.5),
    "window": LayerSpec(6, 2, 16, 0.25, window=9),
    "window of itself only": LayerSpec(6, 2, 16, 0.25, window=0),
    "soft cap": LayerSpec(6, 2, 16, 1.0, soft_cap=5.0),
}
MIXED = [(1, 1), (1, 70), (5, 5), (13, 90), (1, 64), (3, 65), (130, 130)]


def attend(problem: Problem, spec: LayerSpec) -> Tensor:
    ops = ReferenceOps()
    ops.plan(problem.meta, spec)
    return ops.attend(0, problem.q, problem.k, problem.v, problem.kv, problem.meta, spec)


def agree(ours: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", SPECS)
def test_attention_is_the_oracles(name: str, page_size: int) -> None:
    problem = make_problem(SPECS[name], MIXED, page_size)
    torch.testing.assert_close(
        attend(problem, SPECS[name]).double(), oracle(problem, SPECS[name]), atol=1e-5, rtol=1e-5
    )


@settings(max_examples=25, deadline=None)
@given(
    lens=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 80)).map(lambda pair: (pair[0], pair[0] + pair[1])),
        min_size=1,
        max_size=5,
    ),
    page_size=st.sampled_from([1, 3, 16]),
    window=st.sampled_from([-1, 6]),
    seed=st.integers(0, 1000),
)
def test_attention_of_a_row_is_the_same_alone_and_token_by_token(
    lens: list[tuple[int, int]], page_size: int, window: int, seed: int
) -> None:
    spec = LayerSpec(6, 2, 16, 0.25, window=window)
    problem = make_problem(spec, lens, page_size, seed=seed)
    together = attend(problem, spec)
    agree(together, oracle(problem, spec))
    bounds = problem.meta.qo_indptr.tolist()
    for row, (q_len, kv_len) in enumerate(lens):
        for j in range(q_len):
            token = slice(bounds[row] + j, bounds[row] + j + 1)
            assert torch.equal(one_token(problem, spec, row, kv_len - q_len + j, token), together[token])


def one_token(problem: Problem, spec: LayerSpec, row: int, position: int, token: slice) -> Tensor:
    """The same query as a decode row of its own, over fresh pages of another size."""
    alone = make_problem(spec, [(1, position + 1)], 2)
    keys, values = problem.keys[row][: position + 1], problem.values[row][: position + 1]
    slots = alone.meta.kv_indices.long().repeat_interleave(2) * 2 + torch.arange(len(alone.meta.kv_indices) * 2) % 2
    alone.kv.store(0, keys, values, slots[: position + 1])
    alone.q, alone.k, alone.v = problem.q[token], keys[-1:], values[-1:]
    return attend(alone, spec)


def test_copies_run_between_store_and_attention() -> None:
    """Row 1 reads, through a copy, keys that row 0 stores in this very step."""
    problem = make_problem(PLAIN, [(3, 3), (1, 4)], 4)
    first, second = (problem.meta.kv_indices.long() * 4).tolist()
    problem.keys[1][:3], problem.values[1][:3] = problem.keys[0], problem.values[0]
    source, target = (torch.arange(start, start + 3) for start in (first, second))
    problem.meta = replace(problem.meta, copy_src=source, copy_dst=target)
    problem.kv.k[0].fill_(torch.nan)
    problem.kv.v[0].fill_(torch.nan)
    agree(attend(problem, PLAIN), oracle(problem, PLAIN))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(576, 960), (1536, 576), (48, 97), (37, 53), (64, 4096)], ids=str)
def test_linear_rows_do_not_see_each_other(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    n_in, n_out = shape
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(n_out, n_in, generator=generator).to(dtype)
        bias = torch.randn(n_out, generator=generator).to(dtype)
        layer = ReferenceOps().linear(weight, bias)
        x = torch.randn(300, n_in, generator=generator).to(dtype)
        whole = layer(x)
        exact = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(
            whole.double(), exact, atol=0.02 * n_in**0.5 if dtype != torch.float32 else 1e-3, rtol=1e-2
        )
        for start, stop in ((0, 1), (7, 8), (299, 300), (3, 5), (100, 117), (1, 33), (40, 104), (0, 255), (11, 300)):
            assert torch.equal(layer(x[start:stop]), whole[start:stop])
    finally:
        torch.set_num_threads(before)


def test_where_blas_varies_tiles_of_one_size_keep_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without oneDNN's packed product the plain one is used, whose bits change with the number of rows."""
    monkeypatch.setattr(reference, "_pack", lambda weight: None)
    weight = torch.randn(192, 96, generator=torch.Generator().manual_seed(0))
    layer = RowSafeLinear(weight, None)
    layer.tiled = True
    x = torch.randn(100, 96, generator=torch.Generator().manual_seed(1))
    whole = layer(x)
    torch.testing.assert_close(whole, x @ weight.T, atol=1e-4, rtol=1e-4)
    for start, stop in ((0, 1), (50, 53), (1, 18), (13, 100)):
        assert torch.equal(layer(x[start:stop]), whole[start:stop])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [7, 64, 97, 576, 40_000])
def test_elementwise_steps_and_norms_keep_rows_apart(width: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ops = ReferenceOps()
        x = torch.randn(24, 2 * width, generator=torch.Generator().manual_seed(0)) * 4
        weight = torch.rand(2 * width, generator=torch.Generator().manual_seed(1))
        for step in (ops.silu_mul, lambda rows: ops.rms_norm(rows, weight, 1e-6)):
            whole = step(x)
            for start, stop in ((0, 1), (5, 6), (23, 24), (2, 5), (3, 20)):
                assert torch.equal(step(x[start:stop].contiguous()), whole[start:stop])
    finally:
        torch.set_num_threads(before)


def test_rope_turns_by_position() -> None:
    ops = ReferenceOps()
    angles = torch.arange(10)[:, None] * torch.tensor([0.5, 0.1])
    table = torch.cat((angles.cos(), angles.sin()), -1)
    q = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    turned, _ = ops.rope(q, q, torch.tensor([0, 4, 9]), table)
    as_complex = torch.complex(q[..., :2], q[..., 2:]) * torch.polar(torch.ones(3, 1, 2), angles[[0, 4, 9]][:, None])
    torch.testing.assert_close(turned, torch.cat((as_complex.real, as_complex.imag), -1))


def test_norm_and_gate_are_their_formulas() -> None:
    ops = ReferenceOps()
    x, y = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    weight = torch.arange(8.0)
    normed, total = ops.add_rms_norm(x, y, weight, 1e-5)
    assert torch.equal(total, x + y)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x + y, (8,), weight, 1e-5))
    torch.testing.assert_close(ops.silu_mul(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])
