"""Attention alone: what cuts at fixed places cost in decode, and fa2 against fa3 in prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.gpu_checks import on_device
from bench.gpu_machine import Card, Machine
from kernels.base import AttnMeta, KVStore, LayerSpec
from kernels.flashinfer_plan import FlashInferOptions
from tests.kernels.attention_cases import make_meta

if TYPE_CHECKING:
    from bench.gpu import Row

PAGE = 16


def split(machine: Machine, card: Card) -> list[Row]:
    """Microseconds of one layer's decode attention: keys cut every 2048, against FlashInfer's own split."""
    rows = []
    for n_rows, length in machine.scale.split:
        row: Row = {"rows": n_rows, "keys": length}
        for name, invariant in (("fixed us", True), ("free us", False)):
            row[name] = _time(machine, [(1, length)] * n_rows, FlashInferOptions(batch_invariant=invariant)) * 1e6
        row["cost"] = row["fixed us"] / row["free us"]
        spec = _spec(machine)
        n_bytes = n_rows * length * spec.n_kv_heads * spec.head_dim * 2 * 2
        row["GB/s"] = n_bytes / row["fixed us"] / 1e3
        rows.append(row)
    return rows


def prefill_kernels(machine: Machine, card: Card) -> list[Row]:
    """Milliseconds of one layer's prefill attention by fa2 and fa3; a short turn over a long prefix too."""
    length = machine.scale.prefill[1]
    cases = {"fresh": [(length, length)], "turn": [(min(64, length), 2 * length)] * 4}
    rows = []
    for kernels in ("fa2", "fa3"):
        row: Row = {"kernels": kernels}
        for name, lens in cases.items():
            row[f"{name} ms"] = _or_why(
                lambda lens=lens, kernels=kernels: 1e3 * _time(machine, lens, FlashInferOptions(prefill=kernels))  # type: ignore[misc]
            )
        rows.append(row)
    return rows


def _or_why(work: Callable[[], float]) -> Any:
    """The number; or, where the kernels are not built or do not run here, why not."""
    try:
        return work()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}".split("\n")[0][:80]


def _spec(machine: Machine) -> LayerSpec:
    return LayerSpec(32, 8, machine.scale.head_dim, machine.scale.head_dim**-0.5)


def _time(machine: Machine, lens: list[tuple[int, int]], options: FlashInferOptions) -> float:
    """Seconds of attention alone over random keys; planning is not counted."""
    spec, device, dtype = _spec(machine), machine.device, torch.bfloat16
    meta, n_pages = on_device(_meta(lens), device), sum(-(-kv // PAGE) for _, kv in lens)
    kv = KVStore(1, n_pages, PAGE, spec.n_kv_heads, spec.head_dim, dtype, device)
    kv.k[0].normal_()
    kv.v[0].normal_()
    n_tokens = sum(q for q, _ in lens)
    q = torch.randn(n_tokens, spec.n_heads, spec.head_dim, device=device, dtype=dtype)
    k, v = (torch.randn(n_tokens, spec.n_kv_heads, spec.head_dim, device=device, dtype=dtype) for _ in range(2))
    ops = machine.attention(dtype, options)
    ops.plan(meta, spec)
    return machine.fastest(lambda: ops.attend(0, q, k, v, kv, meta, spec))


def _meta(lens: list[tuple[int, int]]) -> AttnMeta:
    """Rows whose pages lie one after the other."""
    n_pages = [-(-kv // PAGE) for _, kv in lens]
    starts = np.cumsum([0, *n_pages])[:-1]
    slots = [start * PAGE + np.arange(kv - q, kv, dtype=np.int64) for (q, kv), start in zip(lens, starts, strict=True)]
    return make_meta(lens, PAGE, n_pages, list(range(sum(n_pages))), torch.from_numpy(np.concatenate(slots)))
