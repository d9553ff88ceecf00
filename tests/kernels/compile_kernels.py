"""Compile every Triton kernel for sm_90 with the types and sizes of an 8B model. Needs no GPU."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import triton_kernels as kernels

HOPPER = GPUTarget("cuda", 90, 32)
BF16, F32, F64, I64 = "*bf16", "*fp32", "*fp64", "*i64"
STRIDES = ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")


def compile_one(kernel: Any, sizes: dict[str, object], **types: str) -> None:
    signature = {name: types.get(name, "constexpr" if name in sizes else "i32") for name in kernel.arg_names}
    built = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=sizes), target=HOPPER)
    assert len(built.asm["cubin"]) > 0
    print(kernel.__name__)


def main() -> None:
    row = {"BLOCK": 4096}
    compile_one(kernels.rms_norm, row, x=BF16, weight=BF16, out=BF16, eps="fp32")
    compile_one(kernels.add_rms_norm, row, x=BF16, residual=BF16, weight=BF16, eps="fp32")
    compile_one(kernels.silu_mul, {"BLOCK": 1024}, gate_up=BF16, out=BF16)
    for pool in (BF16, "*fp8e4nv"):
        inputs = dict.fromkeys(("q", "k", "v", "q_out"), BF16)
        sizes = {"HALF": 64, "HEADS": 8, "FP8_MAX": 448.0}
        indices = {"positions": I64, "slots": I64, "cos_sin": F32}
        compile_one(kernels.rope_store, sizes, k_pool=pool, v_pool=pool, **inputs, **indices)
    limits = {"TINY": 1e-12, "FP8_MAX": 448.0, **row}
    compile_one(kernels.quantize_rows, limits, x=BF16, values="*fp8e4nv", scales=F32)
    compile_one(
        kernels.merge_chunks, {"HEAD_DIM": 128, "HEADS": 8}, parts=BF16, lse=F32, indptr="*i32", out=BF16
    )  # fmt: skip
    compile_one(kernels.race, {"BLOCK": 1024}, weights=F32, keys=I64, best=F64, place=I64)


if __name__ == "__main__":
    main()
