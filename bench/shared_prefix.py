"""Decode over a shared prefix, end to end with the real model: grouped against ungrouped, alternating in one run.

    python -m bench.shared_prefix [--rows 8] [--prefix 2048] [--steps 24] [--threads 2]

Both run whole decode steps (embedding, all layers, head, greedy choice) of the same rows over the same pages; the one
difference is whether the step says that the rows share their first pages. The tokens must be the same.
With one thread its CPU time counts, so that a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace

import torch
from torch import Tensor

from bench.kernels import machine
from kernels.base import AttnMeta
from kernels.cpu import NativeOps
from runtime.config import EngineConfig
from runtime.execute.runner import ModelRunner
from runtime.models.loader import load_runner

PAGE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kv-dtype", default="auto")
    asked = parser.parse_args()
    config = EngineConfig(
        backend="native", threads=asked.threads, kv_dtype=asked.kv_dtype, page_size=PAGE,
        kv_pool_tokens=asked.prefix + asked.rows * (asked.steps + 2 * PAGE),
    )  # fmt: skip
    runner = load_runner(config)
    assert isinstance(runner, ModelRunner)
    try:
        print(machine(NativeOps(), asked.threads))
        print(runner._device.call(lambda: compare(runner, asked.rows, asked.prefix, asked.steps)))
    finally:
        runner.close()


def compare(runner: ModelRunner, rows: int, prefix: int, steps: int) -> str:
    n_shared, own = prefix // PAGE, -(-steps // PAGE) + 1
    tables = [torch.cat([torch.arange(n_shared), n_shared + r * own + torch.arange(own)]).int() for r in range(rows)]
    model, kv = runner._model, runner._kv
    for begin in range(0, prefix, 256):
        part = prompt(prefix)[begin : begin + 256]
        meta = meta_of([tables[0]], [(len(part), begin + len(part))], 0)
        model.forward(part, meta.positions.long(), meta, kv)
    ops = model.trunk.ops  # type: ignore[attr-defined]
    spec = model.blocks[0].attention.spec
    times: dict[str, list[float]] = {"apart": [], "together": []}
    tokens = torch.arange(rows) + 100
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for step in range(steps):
        together = meta_of(tables, [(1, prefix + step + 1)] * rows, n_shared)
        apart = replace(together, share_indptr=together.share_indptr[:1], share_n_pages=together.share_n_pages[:0])
        drawn = {}
        for name, meta in (("apart", apart), ("together", together)):
            begin_s = clock()
            hidden = model.forward(tokens, meta.positions.long(), meta, kv)
            drawn[name] = model.logits(hidden).argmax(-1)
            times[name].append(clock() - begin_s)
        assert torch.equal(drawn["apart"], drawn["together"])
        tokens = drawn["together"]
    read = {name: len(model.blocks) * ops.kv_bytes_read(meta, spec, kv) / 1e6
            for name, meta in (("apart", apart), ("together", together))}  # fmt: skip
    slow, fast = (statistics.median(times[name]) * 1e3 for name in ("apart", "together"))
    return (
        f"{rows} rows over {prefix} shared tokens, KV {str(kv.k[0].dtype)[6:]}, whole decode steps:\n"
        f"apart {slow:.1f} ms reading {read['apart']:.0f} MB of KV; together {fast:.1f} ms reading "
        f"{read['together']:.0f} MB ({read['together'] / read['apart']:.0%}); {slow / fast:.2f} x as fast, same tokens"
    )


def prompt(n: int) -> Tensor:
    return torch.randint(1000, 40000, (n,), generator=torch.Generator().manual_seed(1))


def meta_of(tables: list[Tensor], lens: list[tuple[int, int]], n_shared: int) -> AttnMeta:
    i32 = lambda values: torch.tensor(values, dtype=torch.int32)
    used = [table[: -(-kv_len // PAGE)] for table, (_, kv_len) in zip(tables, lens, strict=True)]
    positions = [p for q_len, kv_len in lens for p in range(kv_len - q_len, kv_len)]
    row_of = [row for row, (q_len, _) in enumerate(lens) for _ in range(q_len)]
    slots = [int(used[row][p // PAGE]) * PAGE + p % PAGE for row, p in zip(row_of, positions, strict=True)]
    bounds = lambda counts: i32([sum(counts[:i]) for i in range(len(counts) + 1)])
    none = torch.zeros(0, dtype=torch.long)
    return AttnMeta(
        page_size=PAGE,
        qo_indptr=bounds([q_len for q_len, _ in lens]),
        kv_indptr=bounds([len(table) for table in used]),
        kv_indices=torch.cat(used),
        last_page_len=i32([kv_len - (len(table) - 1) * PAGE for table, (_, kv_len) in zip(used, lens, strict=True)]),
        kv_lens=i32([kv_len for _, kv_len in lens]),
        positions=i32(positions),
        slots=torch.tensor(slots),
        copy_src=none,
        copy_dst=none,
        share_indptr=i32([0, len(lens)] if n_shared else [0]),
        share_n_pages=i32([n_shared] if n_shared else []),
    )


if __name__ == "__main__":
    main()
