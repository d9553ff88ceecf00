"""Native linear layers: right against exact dequantisation in float64, and each row's bits its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.base import QuantizedWeight
from kernels.cpu import NativeOps
from tests.kernels.cpu_cases import BF16_DOTS, VARIANTS, int8_groups, quantized

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
BLOCKS = ["Q4_0", "Q4_1", "Q8_0"]
SHAPES = [(960, 576), (100, 64), (7, 96), (1, 32)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_float_weights(shape: tuple[int, int], dtype: torch.dtype, variant: str) -> None:
    weight, bias, x = torch.randn(shape).to(dtype), torch.randn(shape[0]), torch.randn(13, shape[1])
    y = NativeOps(variant=variant, threads=2).linear(weight, bias)(x)
    if dtype == torch.bfloat16 and variant in BF16_DOTS:
        x = x.bfloat16()
    exact = x.double() @ weight.double().T + bias
    assert (y - exact).abs().max() <= 2e-6 * exact.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("qtype", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantised_weights_are_their_exact_meaning(shape: tuple[int, int], qtype: str, variant: str) -> None:
    blocks, meaning = quantized(torch.randn(shape), qtype)
    bias, x = torch.randn(shape[0]), torch.randn(13, shape[1])
    layer = NativeOps(variant=variant, threads=2).quantized_linear(blocks, bias)
    assert layer is not None
    exact = int8_groups(x).double() @ meaning.double().T + bias
    assert (layer(x) - exact).abs().max() <= 2e-6 * exact.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_activations_are_rounded_to_the_level_that_the_oracle_says(variant: str) -> None:
    rows = torch.zeros(96, 3, 34, dtype=torch.uint8)  # the unit matrix in Q8_0: each output is one activation
    rows[..., :2] = torch.ones(1, dtype=torch.float16).view(torch.uint8)
    rows[torch.arange(96), torch.arange(96) // 32, 2 + torch.arange(96) % 32] = 1
    layer = NativeOps(variant=variant, threads=1).quantized_linear(QuantizedWeight(rows.view(96, -1), "Q8_0", (96, 96)))
    assert layer is not None
    x = torch.randn(3000, 96)
    middles = (x[:500] * 40).round() + 0.5  # as many as can be lie between two levels
    middles[:, ::32] = 127.0
    for activations in (x, middles, x * torch.logspace(-20, 20, 3000)[:, None]):
        assert torch.equal(layer(activations), int8_groups(activations))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("qtype", BLOCKS)
def test_extreme_quants_do_not_saturate(qtype: str, variant: str) -> None:
    n_bytes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[qtype]
    n_scales = 2 if qtype == "Q4_1" else 1
    ones = torch.ones(n_scales, dtype=torch.float16).view(torch.uint8)
    for fill in (0x80, 0x7F, 0xFF, 0x00):  # -128 (never written by a converter) and every nibble extreme
        rows = torch.full((16, n_bytes), fill, dtype=torch.uint8)
        rows[:, : 2 * n_scales] = ones
        layer = NativeOps(variant=variant, threads=1).quantized_linear(QuantizedWeight(rows, qtype, (16, 32)))
        x = torch.full((5, 32), 127.0)
        x[1], x[2, ::2], x[3, :16] = -127.0, -127.0, 0.0
        if qtype == "Q8_0":
            values = rows[:, 2:].view(torch.int8).double()
        else:
            nibbles = rows[:, 2 * n_scales :]
            values = torch.cat([nibbles & 15, nibbles >> 4], dim=1).double() + (1.0 if n_scales == 2 else -8.0)
        assert layer is not None
        assert torch.equal(layer(x).double(), x.double() @ values.T)


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 70), k=st.sampled_from([32, 64, 416]), m=st.integers(2, 40), threads=st.integers(1, 3))
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(n: int, k: int, m: int, threads: int) -> None:
    ops, one = NativeOps(threads=threads), NativeOps(threads=1)
    weight, x = torch.randn(n, k), torch.randn(m, k)
    for dtype in FLOATS:
        whole = ops.linear(weight.to(dtype))(x)
        assert all(torch.equal(one.linear(weight.to(dtype))(x[i : i + 1])[0], whole[i]) for i in (0, m // 2, m - 1))
        assert torch.equal(ops.linear(weight.to(dtype))(x[1:]), whole[1:])
    for qtype in BLOCKS:
        blocks, _ = quantized(weight, qtype)
        layer, alone = ops.quantized_linear(blocks), one.quantized_linear(blocks)
        assert layer is not None
        assert alone is not None
        assert all(torch.equal(alone(x[i : i + 1])[0], layer(x)[i]) for i in range(m))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("qtype", ["float", *BLOCKS])
def test_poison_stays_in_its_row(qtype: str, poison: float) -> None:
    ops, weight, x = NativeOps(threads=2), torch.randn(40, 64), torch.randn(9, 64)
    layer = ops.linear(weight) if qtype == "float" else ops.quantized_linear(quantized(weight, qtype)[0])
    assert layer is not None
    clean = layer(x)
    x[4, 17] = poison
    dirty = layer(x)
    assert not dirty[4].isfinite().any()
    dirty[4] = clean[4]
    assert torch.equal(dirty, clean)


def test_tiny_and_zero_activations_quantise_to_zero() -> None:
    blocks, _ = quantized(torch.randn(8, 32), "Q4_1")
    layer = NativeOps(threads=1).quantized_linear(blocks)
    assert layer is not None
    assert torch.equal(layer(torch.zeros(1, 32)), torch.zeros(1, 8))
    assert layer(torch.full((1, 32), 1e-38)).abs().max() <= 1e-30


def test_what_it_does_not_know_is_left_to_the_caller() -> None:
    ops = NativeOps(threads=1)
    assert ops.quantized_linear(QuantizedWeight(torch.zeros(4, 144, dtype=torch.uint8), "Q4_K", (4, 256))) is None
    with pytest.raises(RuntimeError, match="expected x"):
        ops.linear(torch.zeros(4, 8))(torch.zeros(1, 9))
    with pytest.raises(RuntimeError, match="expected float32"):
        ops.linear(torch.zeros(4, 8, dtype=torch.float64))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", [*FLOATS, *BLOCKS])
def test_an_embedding_is_the_packed_weights_rows(kind: torch.dtype | str, variant: str) -> None:
    ops, weight = NativeOps(variant=variant, threads=2), torch.randn(70, 96)
    if isinstance(kind, str):
        blocks, meaning = quantized(weight, kind)
        layer = ops.quantized_linear(blocks)
    else:
        layer, meaning = ops.linear(weight.to(kind)), weight.to(kind).float()
    assert layer is not None
    read = ops.embedding_of(layer)
    assert read is not None
    ids = torch.tensor([69, 0, 3, 3, 40] * 5)
    assert torch.equal(read(ids), meaning[ids])
    with pytest.raises(RuntimeError, match="token 70 of a vocabulary of 70"):
        read(torch.tensor([70]))


@pytest.mark.parametrize("m", [1, 3, 15, 16, 17, 40])
@pytest.mark.parametrize("kind", [torch.bfloat16, *BLOCKS])
def test_whole_and_partial_tiles_give_a_row_the_same_bits(kind: torch.dtype | str, m: int) -> None:
    ops, weight, x = NativeOps(threads=2), torch.randn(50, 96), torch.randn(m, 96)
    layer = ops.quantized_linear(quantized(weight, kind)[0]) if isinstance(kind, str) else ops.linear(weight.to(kind))
    assert layer is not None
    whole = layer(x)
    for i in (0, m // 2, m - 1):
        assert torch.equal(layer(x[i : i + 1])[0], whole[i])
