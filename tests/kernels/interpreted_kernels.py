"""The Triton kernels in Triton's interpreter, against the same operations in torch. Run by test_triton_kernels.

Collected by name only: the interpreter must be switched on before Triton is imported.
"""

from __future__ import annotations

import pytest
import torch

from kernels.fused import Pools, TorchFused, TritonFused
from kernels.quant import FP8
from kernels.sampling import SamplingRows, draw, noise_keys

PLAIN, OURS = TorchFused(), TritonFused()


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Equal up to the last bit of a short type. Where FP8 rounds up to a power of two the interpreter forgets the
    carry, so those values are left out."""
    ulp = {torch.float32: 1e-5, torch.bfloat16: 2**-7, FP8: 2**-3}[theirs.dtype]
    power = lambda x: torch.frexp(x.float()).exponent
    counts = power(theirs) == power(exact.clamp(-448, 448)) if theirs.dtype == FP8 else torch.ones_like(exact).bool()
    assert counts.float().mean() > 0.9
    torch.testing.assert_close(ours.float()[counts], theirs.float()[counts], rtol=ulp, atol=1e-5)


@pytest.mark.parametrize("n", [64, 100, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(n: int, dtype: torch.dtype) -> None:
    x, residual, weight = randn(5, n, dtype=dtype), randn(5, n, seed=1, dtype=dtype), randn(n, seed=2, dtype=dtype)
    near = (
        {"rtol": 0.02, "atol": 1e-3} if dtype == torch.bfloat16 else {}
    )  # the interpreter rounds to bfloat16 its own way
    torch.testing.assert_close(OURS.rms_norm(x, weight, 1e-5), PLAIN.rms_norm(x, weight, 1e-5), **near)
    expected = PLAIN.add_rms_norm(x, residual, weight, 1e-5)
    for ours, theirs in zip(OURS.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **near)


def test_norms_of_heads_that_lie_in_a_wider_row() -> None:
    x, weight = randn(4, 6 * 64)[:, 64:192].unflatten(-1, (2, 64)), randn(64, seed=1)
    torch.testing.assert_close(OURS.rms_norm(x, weight, 1e-6), PLAIN.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("n", [96, 1500])
def test_gate(n: int) -> None:
    torch.testing.assert_close(OURS.silu_mul(randn(3, 2 * n)), PLAIN.silu_mul(randn(3, 2 * n)))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize(("n_heads", "n_kv_heads", "d"), [(9, 3, 64), (4, 1, 128), (14, 2, 64)])
def test_rotation_and_store(n_heads: int, n_kv_heads: int, d: int, kv_dtype: torch.dtype) -> None:
    """q, k, v are views of one product, as in the models; values beyond FP8's range saturate."""
    sizes = [n * d for n in (n_heads, n_kv_heads, n_kv_heads)]
    qkv = randn(5, sum(sizes)) * (300 if kv_dtype == FP8 else 1)
    q, k, v = (part.unflatten(-1, (-1, d)) for part in qkv.split(sizes, dim=-1))
    positions, slots = torch.tensor([0, 8, 3, 3, 1]), torch.tensor([4, 0, 9, 11, 6])
    table = randn(9, d, seed=3)
    empty = lambda dtype: Pools(*(torch.zeros(6, 2, n_kv_heads, d, dtype=dtype) for _ in range(2)))
    pools, exact = [empty(kv_dtype), empty(kv_dtype)], empty(torch.float32)
    turned = [
        fused.rope_store(q, k, v, positions, table, pool, slots)
        for fused, pool in zip((OURS, PLAIN, PLAIN), (*pools, exact), strict=True)
    ]
    torch.testing.assert_close(turned[0], turned[1])
    assert turned[0].is_contiguous()
    for ours, theirs, whole in ((pools[0].k, pools[1].k, exact.k), (pools[0].v, pools[1].v, exact.v)):
        assert_near(ours, theirs, whole)
        assert theirs.float().abs().max() > 0
        assert torch.isfinite(ours.float()).all()


@pytest.mark.parametrize("n", [64, 200])
def test_fp8_rows(n: int) -> None:
    x = randn(4, n)
    x[1] *= 1e6
    x[2] = 0
    ours, theirs = OURS.quantize_rows(x), PLAIN.quantize_rows(x)
    torch.testing.assert_close(ours[1], theirs[1])
    assert_near(ours[0], theirs[0], x / theirs[1])


def test_chunks_are_merged_and_one_chunk_is_copied() -> None:
    parts, lse = randn(6, 9, 64, dtype=torch.bfloat16), randn(6, 9, seed=1) * 20
    indptr = torch.tensor([0, 1, 4, 5], dtype=torch.int32)  # the sixth chunk is padding
    ours, theirs = (torch.full((3, 9, 64), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    OURS.merge_chunks(parts, lse, indptr, ours)
    PLAIN.merge_chunks(parts, lse, indptr, theirs)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours[[0, 2]], parts[[0, 4]])


@pytest.mark.parametrize("vocab", [50, 1100])
def test_the_race_has_the_same_winners(vocab: int) -> None:
    weights = torch.rand(12, vocab, generator=torch.Generator().manual_seed(0))
    weights[3] = 0
    weights[3, 7] = 1e-30
    keys = noise_keys(torch.arange(12) * 12345678901, torch.arange(12))
    assert torch.equal(OURS.race(weights, keys), PLAIN.race(weights, keys))
    assert OURS.race(weights, keys)[3] == 7


def test_a_seed_means_the_same_token_with_every_filter() -> None:
    n = 8
    rows = SamplingRows(
        temperature=torch.full((n,), 0.8),
        top_k=torch.tensor([0, 5, 40, 0] * 2),
        top_p=torch.tensor([1.0, 1.0, 0.9, 0.5] * 2),
        min_p=torch.tensor([0.0, 0.1, 0.0, 0.0] * 2),
        seed=torch.arange(n) - 5,
        counter=torch.arange(n) * 3,
    )
    logits = randn(n, 400) * 3
    assert torch.equal(draw(logits, rows, race_with=OURS.race), draw(logits, rows))
