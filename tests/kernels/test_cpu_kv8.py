"""8-bit keys and values: stored alike by every backend, read alike, and a query's bits its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.base import KVStore, LayerSpec
from kernels.cpu import NativeOps
from kernels.kv8 import FP8, narrow, stored_dim, widen
from kernels.reference import ReferenceOps
from tests.kernels.attention_cases import Problem, make_problem, oracle
from tests.kernels.cpu_cases import VARIANTS

KINDS = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
SPECS = [
    LayerSpec(6, 2, 16, 0.25),
    LayerSpec(4, 2, 36, 36**-0.5, window=40),
    LayerSpec(2, 1, 256, 1 / 16, soft_cap=9.0),
]
LENS = [(1, 1), (1, 70), (13, 90), (1, 600), (20, 530)]


def narrowed(problem: Problem, spec: LayerSpec, kind: torch.dtype) -> Problem:
    """The problem with its pool in `kind`; slots that no row owns are poisoned; keys and values as they read back."""
    pool = problem.kv.k[0]
    kv = KVStore(1, pool.shape[0], pool.shape[1], spec.n_kv_heads, spec.head_dim, kind)
    kv.k[0], kv.v[0] = narrow(pool, kind), narrow(problem.kv.v[0], kind)
    seen = lambda parts: [widen(narrow(part, kind), spec.head_dim) for part in parts]
    return replace(problem, kv=kv, keys=seen(problem.keys), values=seen(problem.values))


def attend(problem: Problem, spec: LayerSpec, ops: NativeOps | ReferenceOps) -> Tensor:
    ops.plan(problem.meta, spec)
    return ops.attend(0, problem.q, problem.k, problem.v, problem.kv, problem.meta, spec)


def stored(problem: Problem) -> tuple[Tensor, Tensor]:
    return problem.kv.k[0].view(torch.uint8).clone(), problem.kv.v[0].view(torch.uint8).clone()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_both_backends_store_the_same_bytes_and_attend_as_the_oracle(
    spec: LayerSpec, kind: torch.dtype, variant: str
) -> None:
    plain = make_problem(spec, LENS, 16)
    native, reference = narrowed(plain, spec, kind), narrowed(plain, spec, kind)
    ours = attend(native, spec, NativeOps(variant=variant, threads=2))
    theirs = attend(reference, spec, ReferenceOps())
    assert all(map(torch.equal, stored(native), stored(reference)))
    exact = oracle(native, spec)  # over what the pool holds
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(theirs.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_is_the_same_alone_as_in_the_batch(kind: torch.dtype) -> None:
    spec = SPECS[0]
    problem = narrowed(make_problem(spec, LENS, 16), spec, kind)
    together = attend(problem, spec, NativeOps(threads=2))
    for row in range(len(LENS)):
        first, last = problem.meta.qo_indptr[row : row + 2].tolist()
        pages = slice(*problem.meta.kv_indptr[row : row + 2].tolist())
        i32 = lambda *values: torch.tensor(values, dtype=torch.int32)
        meta = replace(
            problem.meta,
            qo_indptr=i32(0, last - first),
            kv_indptr=i32(0, pages.stop - pages.start),
            kv_indices=problem.meta.kv_indices[pages].clone(),
            last_page_len=problem.meta.last_page_len[row : row + 1],
            kv_lens=problem.meta.kv_lens[row : row + 1],
            positions=problem.meta.positions[first:last],
            slots=problem.meta.slots[first:last],
        )
        parts = (part[first:last] for part in (problem.q, problem.k, problem.v))
        alone = attend(Problem(meta, problem.kv, *parts, [], []), spec, NativeOps(threads=1))
        assert torch.equal(alone, together[first:last])


EDGES = torch.tensor(
    [0.0, -0.0, 1e-8, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-7, 0.0156, 447.9, 449.0, -1e6, 1.0625, 57000]
)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_floats_round_as_torch_rounds(kind: torch.dtype, variant: str) -> None:
    spec = LayerSpec(1, 1, 64, 1.0)
    values = torch.cat([EDGES, torch.randn(4096 - len(EDGES)) * torch.logspace(-6, 4, 4096 - len(EDGES))])
    problem = make_problem(spec, [(64, 64)], 16)
    problem = replace(narrowed(problem, spec, kind), k=values.view(64, 1, 64), v=values.flip(0).view(64, 1, 64))
    attend(problem, spec, NativeOps(variant=variant, threads=2))
    held = problem.kv.k[0].view(torch.uint8).flatten(0, 1)[problem.meta.slots].flatten()
    wanted = values.clamp(-FP8[kind], FP8[kind]).to(kind).view(torch.uint8)
    assert torch.equal(held, wanted)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_finite_byte_reads_as_its_value(kind: torch.dtype, variant: str) -> None:
    spec, bytes_of = LayerSpec(1, 1, 64, 1.0), torch.arange(256, dtype=torch.uint8)
    meaning = bytes_of.view(kind).float()
    finite = torch.where(meaning.isfinite(), bytes_of, 0)
    kv = KVStore(1, 8, 1, 1, 64, kind)
    kv.v[0].view(torch.uint8)[:4] = finite.view(4, 1, 1, 64)
    problem = make_problem(spec, [(1, 1)], 1)
    for page in range(4):  # one key alone: attention gives its value
        meta = replace(problem.meta, kv_indices=torch.tensor([page], dtype=torch.int32), slots=torch.tensor([7]))
        out = NativeOps(variant=variant, threads=1).attend(0, problem.q, problem.k, problem.v, kv, meta, spec)
        assert torch.equal(out.flatten(), torch.where(meaning.isfinite(), meaning, 0.0)[page * 64 : page * 64 + 64])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_poison_is_kept_or_cut_but_never_spread(kind: torch.dtype, poison: float) -> None:
    spec = SPECS[0]
    problem = narrowed(make_problem(spec, [(4, 40), (1, 90)], 16), spec, kind)
    clean = attend(problem, spec, NativeOps(threads=2))
    problem.v[1, 0, 3] = poison
    dirty = attend(problem, spec, NativeOps(threads=2))
    assert torch.equal(dirty[[0, 4]], clean[[0, 4]])
    if poison != poison or kind == torch.int8:
        assert dirty[1:4, :3].isnan().any(-1).all()


def test_int8_takes_four_bytes_more_a_head() -> None:
    kv = KVStore(2, 3, 16, 2, 64, torch.int8)
    assert kv.k[0].shape == (3, 16, 2, stored_dim(64, torch.int8)) == (3, 16, 2, 68)
    x = torch.randn(5, 2, 64)
    kv.store(1, x, -x, torch.arange(5))
    kv.copy(1, torch.tensor([0, 1]), torch.tensor([20, 21]))
    assert torch.equal(kv.k[1].flatten(0, 1)[20:22], kv.k[1].flatten(0, 1)[:2])
    error = (widen(kv.k[1].flatten(0, 1)[:5], 64) - x).abs().amax(-1)
    assert (error <= x.abs().amax(-1) / 127 / 2 * 1.001).all()
