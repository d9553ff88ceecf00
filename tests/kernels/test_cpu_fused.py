"""Norms, rotation, activation, and whole layers: right against torch, and the same as operation by operation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.base import DecoderLayer, KVStore, LayerSpec, Linear
from kernels.build import load_extension
from kernels.cpu import NativeOps
from kernels.reference import ReferenceOps
from tests.kernels.attention_cases import make_problem
from tests.kernels.cpu_cases import VARIANTS, quantized

SIZES = [1, 7, 64, 576, 1000]


@pytest.fixture(params=VARIANTS)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(variant=request.param, threads=2)


@pytest.mark.parametrize("n", SIZES)
def test_norms(ops: NativeOps, n: int) -> None:
    x, residual, weight = torch.randn(11, n) * 3, torch.randn(11, n), torch.rand(n) + 0.5
    exact = lambda t: t * torch.rsqrt((t * t).mean(-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5).double(), exact(x.double()), atol=1e-6, rtol=3e-6)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed.double(), exact(total.double()), atol=1e-6, rtol=3e-6)
    assert torch.equal(ops.rms_norm(x[4:5], weight, 1e-5)[0], ops.rms_norm(x, weight, 1e-5)[4])


@pytest.mark.parametrize("n", SIZES)
def test_silu_mul(ops: NativeOps, n: int) -> None:
    x = torch.randn(11, 2 * n) * 20
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(ops.silu_mul(x).double(), F.silu(gate) * up, atol=1e-6, rtol=2e-6)
    extreme = torch.tensor([[torch.nan, torch.inf, 1e30, -1e30, 1.0, 1.0, 1.0, 1.0]])
    out = ops.silu_mul(extreme)[0]
    assert out[0].isnan()
    assert out[1:3].tolist() == [torch.inf, pytest.approx(1e30)]


@pytest.mark.parametrize("dim", [4, 36, 64, 256])
def test_rope(ops: NativeOps, dim: int) -> None:
    q, k = torch.randn(9, 6, dim), torch.randn(9, 2, dim)
    cos_sin, positions = torch.randn(50, dim), torch.randint(0, 50, (9,))
    for ours, exact in zip(
        ops.rope(q, k, positions, cos_sin), ReferenceOps().rope(q, k, positions, cos_sin), strict=True
    ):
        torch.testing.assert_close(ours, exact, atol=1e-6, rtol=1e-6)
    with pytest.raises(RuntimeError, match="positions"):
        ops.rope(q, k, positions + 50, cos_sin)


SPEC = LayerSpec(6, 2, 32, 32**-0.5)
HIDDEN, WIDE = 96, 160
LENS = [(1, 40), (9, 9), (1, 600), (30, 77)]


def make_layers(ops: NativeOps, *, qk_norm: bool, qtype: str | None) -> list[DecoderLayer]:
    generator = torch.Generator().manual_seed(3)

    def linear(n_out: int, n_in: int) -> Linear:
        weight = torch.randn(n_out, n_in, generator=generator) * n_in**-0.5
        layer = ops.linear(weight) if qtype is None else ops.quantized_linear(quantized(weight, qtype)[0])
        assert layer is not None
        return layer

    norm = lambda n: torch.rand(n, generator=generator) + 0.5
    heads = (SPEC.n_heads + 2 * SPEC.n_kv_heads) * SPEC.head_dim
    return [
        DecoderLayer(
            norm(HIDDEN), linear(heads, HIDDEN), norm(SPEC.head_dim) if qk_norm else None,
            norm(SPEC.head_dim) if qk_norm else None, linear(HIDDEN, SPEC.n_heads * SPEC.head_dim),
            norm(HIDDEN), linear(2 * WIDE, HIDDEN), linear(HIDDEN, WIDE), replace(SPEC, window=window),
        )
        for window in (-1, 20)
    ]  # fmt: skip


def one_by_one(ops: NativeOps, layers: list[DecoderLayer], x: Tensor, cos_sin: Tensor, kv: KVStore, meta) -> Tensor:  # type: ignore[no-untyped-def]
    sizes = [SPEC.n_heads * SPEC.head_dim, SPEC.n_kv_heads * SPEC.head_dim, SPEC.n_kv_heads * SPEC.head_dim]
    for i, layer in enumerate(layers):
        q, k, v = layer.qkv(ops.rms_norm(x, layer.norm_before_attention, 1e-5)).split(sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, SPEC.head_dim)) for part in (q, k, v))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = ops.rms_norm(q, layer.q_norm, 1e-5), ops.rms_norm(k, layer.k_norm, 1e-5)
        q, k = ops.rope(q, k, meta.positions, cos_sin)
        x = x + layer.out(ops.attend(i, q, k, v, kv, meta, layer.spec).flatten(1))
        x = x + layer.down(ops.silu_mul(layer.gate_up(ops.rms_norm(x, layer.norm_before_mlp, 1e-5))))
    return x


@pytest.mark.parametrize("qtype", [None, "Q4_1", "Q8_0"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_whole_layers_are_the_operations_one_by_one(ops: NativeOps, qk_norm: bool, qtype: str | None) -> None:
    layers = make_layers(ops, qk_norm=qk_norm, qtype=qtype)
    problem = make_problem(SPEC, LENS, 16)
    pools = [KVStore(2, problem.kv.k[0].shape[0], 16, 2, 32, torch.float32) for _ in range(2)]
    for pool in pools:
        for layer in range(2):
            pool.k[layer].copy_(problem.kv.k[0].nan_to_num())
            pool.v[layer].copy_(problem.kv.v[0].nan_to_num())
    x, cos_sin = torch.randn(len(problem.q), HIDDEN), torch.randn(700, SPEC.head_dim)
    decoder = ops.decoder(layers, 1e-5, cos_sin)
    assert decoder is not None
    fused = decoder(x, problem.meta, pools[0])
    assert torch.equal(fused, one_by_one(ops, layers, x, cos_sin, pools[1], problem.meta))
    assert all(torch.equal(a, b) for a, b in zip(pools[0].k + pools[0].v, pools[1].k + pools[1].v, strict=True))


def test_a_foreign_linear_is_not_fused(ops: NativeOps) -> None:
    layers = make_layers(ops, qk_norm=False, qtype=None)
    foreign = replace(layers[0], down=lambda x: x)
    assert ops.decoder([foreign], 1e-5, torch.zeros(1, SPEC.head_dim)) is None


def test_tokens_of_a_row_keep_their_bits_whatever_the_chunks() -> None:
    ops = NativeOps(threads=2)
    layers = make_layers(ops, qk_norm=True, qtype="Q4_1")
    cos_sin, x = torch.randn(100, SPEC.head_dim), torch.randn(70, HIDDEN)
    decoder = ops.decoder(layers, 1e-5, cos_sin)
    assert decoder is not None

    def run(borders: list[int]) -> Tensor:
        kv = KVStore(2, 5, 16, 2, 32, torch.bfloat16)
        parts = []
        for begin, end in pairwise(borders):
            meta = make_problem(SPEC, [(end - begin, end)], 16).meta
            pages = torch.arange(len(meta.kv_indices), dtype=torch.int32)
            positions = meta.positions.long()
            parts.append(decoder(x[begin:end], replace(meta, kv_indices=pages, slots=positions), kv))
        return torch.cat(parts)

    whole = run([0, 70])
    assert torch.equal(run([0, 1, 2, 33, 64, 70]), whole)
    assert torch.equal(run(list(range(71))), whole)


def test_outputs_are_poisoned_before_a_kernel_writes_them() -> None:
    assert torch.empty(64).isnan().all()
    assert NativeOps(threads=1).rms_norm(torch.ones(1, 64), torch.ones(64), 0.0).isfinite().all()


def test_a_team_that_waits_more_than_it_works_is_halved_for_a_while() -> None:
    team, ms = load_extension().TeamSize(4), 1_000_000
    assert team.next(0) == 4
    team.note(10 * ms, 10 * ms, 14 * ms)  # three may wait at a time: less than half of 30 ms
    assert team.next(10 * ms) == 4
    team.note(20 * ms, 10 * ms, 16 * ms)
    assert [team.next(t * ms) for t in (20, 119, 120)] == [2, 2, 4]
    team.note(130 * ms, 10 * ms, 16 * ms)
    assert team.next(130 * ms) == 2
    team.note(140 * ms, 10 * ms, 6 * ms)
    assert [team.next(t * ms) for t in (140, 539, 540)] == [1, 1, 4]  # losses in a row are remembered for longer
    team.note(550 * ms, 10 * ms, 0)
    team.note(560 * ms, 10 * ms, 16 * ms)
    assert [team.next(t * ms) for t in (560, 659, 660)] == [2, 2, 4]
