"""What the forms of weights and cached KV cost in quality, as measured: printed when a model is loaded.

NLL per token over float32 weights, activations and KV on agent text, SmolLM2-135M (`python -m bench.quality`). Other
models will differ; larger ones usually lose less.
"""

from __future__ import annotations

ALLOWED = 0.01  # what a default may cost
FILE_BLOCKS = 0.0036
INT8, Q4 = 0.0037, 0.162  # of weights that were never quantised before (`--dither`)


def weights_clause(*, quantization: str, kept_blocks: bool) -> str:
    """One clause on how weights are kept and its measured cost; empty where they are as exact as their type."""
    if quantization == "int8":
        return _clause("weights made int8 in groups of 32", INT8)
    if quantization == "q4":
        return _clause("weights made 4-bit in groups of 32, head int8", Q4)
    if kept_blocks:
        return _clause("weights in the file's blocks, activations int8", FILE_BLOCKS)
    return ""


def _clause(what: str, cost: float) -> str:
    beyond = f", more than the {ALLOWED} a default may cost" if cost > ALLOWED else ""
    return f"{what} ({cost:+.4f} NLL a token over float32 as measured on SmolLM2-135M{beyond})"
