"""Float weights in ggml blocks: the bytes mean, to ggml's own reader, what was meant."""

from __future__ import annotations

import gguf
import pytest
import torch

from kernels.blocks import GgmlBlocks, quantize_blocks
from kernels.cpu import NativeLinear, NativeOps


@pytest.mark.parametrize(("qtype", "levels"), [("Q8_0", 254), ("Q4_1", 15)])
def test_blocks_are_within_half_a_step(qtype: str, levels: int) -> None:
    weight = torch.randn(24, 96)
    weight[0, :32] = 0.0
    blocks = quantize_blocks(weight, qtype)
    meaning = torch.from_numpy(gguf.dequantize(blocks.data.numpy(), gguf.GGMLQuantizationType[qtype]))
    groups = weight.view(24, 3, 32)
    spread = 2 * groups.abs().amax(-1) if qtype == "Q8_0" else groups.amax(-1) - groups.amin(-1)
    error = (meaning - weight).abs().view(24, 3, 32).amax(-1)
    assert (error <= 0.51 * spread / levels + 4e-3 * groups.abs().amax(-1) * (qtype == "Q4_1") + 1e-6).all()
    assert torch.equal(meaning[0, :32], torch.zeros(32))


@pytest.mark.parametrize(("name", "close"), [("int8", 0.02), ("q4", 0.15)])
def test_the_method_packs_what_fits_and_leaves_the_rest(name: str, close: float) -> None:
    ops, weight, x = NativeOps(threads=1), torch.randn(40, 64), torch.randn(5, 64)
    layer = GgmlBlocks(ops, name).pack(weight, None)
    assert isinstance(layer, NativeLinear)
    assert layer.n_bytes < weight.numel() * 1.1
    exact = x @ weight.T
    assert (layer(x) - exact).norm() <= close * exact.norm()
    narrow = GgmlBlocks(ops, name).pack(weight[:, :48], None)
    torch.testing.assert_close(narrow(x[:, :48]), x[:, :48] @ weight[:, :48].T)
