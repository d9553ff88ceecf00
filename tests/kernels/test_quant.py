"""Online FP8 linear layers against exact arithmetic on the quantised values."""

from __future__ import annotations

import pytest
import torch

from kernels.quant import FP8_MAX, Fp8Online, Unquantized, make_method, quantize_rows


def test_fp8_products_are_exact_on_the_quantised_values() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in ((7, 64), (48, 64), (48,)))
    (xq, xs), (wq, ws) = quantize_rows(x), quantize_rows(weight)
    exact = (xq.double() * xs) @ (wq.double() * ws).T + bias.double()
    out = Fp8Online().pack(weight, bias)(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, atol=0.05, rtol=0.01)
    torch.testing.assert_close(out.float(), (x.float() @ weight.float().T + bias.float()), atol=1.0, rtol=0.1)


def test_a_tokens_scale_is_its_own() -> None:
    layer = Fp8Online().pack(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).bfloat16(), None)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    louder = x.clone()
    louder[1:] *= 1000
    assert torch.equal(layer(x)[0], layer(louder)[0])


def test_zero_and_huge_rows_stay_finite() -> None:
    values, scale = quantize_rows(torch.tensor([[0.0, 0.0], [3e38, -3e38], [1e-30, 0.0]]))
    assert torch.isfinite(scale).all()
    assert values.float().tolist()[0] == [0, 0]
    assert values.float().tolist()[1] == [FP8_MAX, -FP8_MAX]


def test_shapes_that_the_product_cannot_take_stay_as_they_are() -> None:
    weight, x = torch.randn(40, 30), torch.randn(3, 30)
    assert torch.equal(Fp8Online().pack(weight, None)(x), Unquantized().pack(weight, None)(x))


def test_methods_are_found_by_name() -> None:
    assert make_method("none").name == "none"
    assert make_method("fp8").name == "fp8"
    with pytest.raises(ValueError, match="none and fp8, not 'q4'"):
        make_method("q4")
