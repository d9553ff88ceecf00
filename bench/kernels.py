"""The native CPU kernels alone: achieved bandwidth, arithmetic rate, and what shared-prefix attention saves.

    python -m bench.kernels [--threads N] [--out bench/results/kernels.md]

Layer sizes are SmolLM2-135M's, 30 layers of distinct weights, so one pass reads what one decode step reads. torch's
own products run beside ours on the same shapes, alternating.
"""

from __future__ import annotations

import argparse
import mmap
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from bench.torch_products import PRODUCTS
from kernels.base import AttnMeta, KVStore, LayerSpec, Linear
from kernels.blocks import quantize_blocks
from kernels.cpu import NativeOps

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS, ROUNDS = 30, 2
ROWS = (1, 4, 16, 64, 256)
SLOW_S = 1.0  # a product that takes longer than this is run once
SPEC = LayerSpec(9, 3, 64, 0.125)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=None)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    ops = NativeOps(threads=asked.threads)
    print(machine(ops, asked.threads))
    lines = [machine(ops, asked.threads)]
    for table in (linear_table, shared_table, prefill_table):
        lines += table(ops)
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text("\n".join(lines) + "\n")


def machine(ops: NativeOps, threads: int) -> str:
    """One line on where this ran, and how busy it was: a number without that means nothing."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    model = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    load = os.getloadavg()[0]
    where = f"{model or platform.processor()}, {threads} threads, variant {ops.variant}"
    return f"{where}, torch {torch.__version__}, load {load:.1f}\n"


def best(work: Callable[[], object], rounds: int = ROUNDS, *, warm: bool = True) -> float:
    """Seconds of the fastest run; one more run goes first to warm up."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    if warm:
        work()
    times = []
    for _ in range(rounds):
        begin = clock()
        work()
        times.append(clock() - begin)
    return min(times)


def read_bandwidth() -> float:
    """Bytes a second of plain sums over more memory than any cache holds, in huge pages as the weights are."""
    threads, size = torch.get_num_threads(), 256 << 20
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    values = np.frombuffer(memory, np.int64)
    values[:] = 1
    if threads == 1:
        return size / best(values.sum, 5)
    parts = np.array_split(values, threads)
    with ThreadPoolExecutor(threads) as pool:
        return size / best(lambda: list(pool.map(np.sum, parts)), 5)


def linear_table(ops: NativeOps) -> list[str]:
    bandwidth = read_bandwidth()
    lines = [
        f"All linear layers of one step ({LAYERS} layers); read bandwidth {bandwidth / 1e9:.1f} GB/s",
        "",
        "| weights | MB | "
        + " | ".join(f"{rows} rows, ms" for rows in ROWS)
        + " | 1 row, of read | 256 rows, GFLOP/s |",
        "|---|---|" + "---|" * (len(ROWS) + 2),
    ]
    for name in ("float32", "bfloat16", "Q8_0", "Q4_1"):
        layers = [(shape, native(ops, name, shape)) for _ in range(LAYERS) for shape in SHAPES]
        n_bytes = sum(layer.n_bytes for _, layer in layers)  # type: ignore[attr-defined]
        lines.append(row(f"Ramet {name}", layers, n_bytes, bandwidth))
    for name, (make, n_bytes) in PRODUCTS.items():
        size = int(n_bytes * LAYERS * sum(n * k for n, k in SHAPES))
        weights = [(shape, make(torch.randn(shape) * 0.02)) for _ in range(LAYERS) for shape in SHAPES]
        lines.append(row(name, weights, size, bandwidth))
    return [*lines, ""]


def native(ops: NativeOps, name: str, shape: tuple[int, int]) -> Linear:
    weight = torch.randn(shape) * 0.02
    if name in ("float32", "bfloat16"):
        return ops.linear(weight.to(getattr(torch, name)))
    layer = ops.quantized_linear(quantize_blocks(weight, name))
    assert layer is not None
    return layer


def row(name: str, layers: list[tuple[tuple[int, int], Linear]], n_bytes: int, bandwidth: float) -> str:
    seconds: dict[int, float] = {}
    for rows in ROWS:
        inputs = {k: torch.randn(rows, k) for _, k in SHAPES}
        work = lambda inputs=inputs: [layer(inputs[shape[1]]) for shape, layer in layers]
        slow = rows > ROWS[0] and seconds[ROWS[ROWS.index(rows) - 1]] * 4 > SLOW_S
        seconds[rows] = best(work, 1, warm=not slow) if slow else best(work)
    flops = 2 * ROWS[-1] * LAYERS * sum(n * k for n, k in SHAPES) / seconds[ROWS[-1]]
    cells = " | ".join(f"{seconds[rows] * 1e3:.1f}" for rows in ROWS)
    line = f"| {name} | {n_bytes / 1e6:.0f} | {cells} | {n_bytes / seconds[1] / bandwidth:.0%} | {flops / 1e9:.0f} |"
    print(line, flush=True)
    return line


def shared_table(ops: NativeOps, rows: int = 8, prefix: int = 2048, own: int = 32, page: int = 16) -> list[str]:
    """Decode of `rows` streams that have `prefix` tokens in common, with and without the group."""
    lines = [
        f"Decode attention of {LAYERS} layers, {rows} streams over a shared prefix of {prefix} tokens",
        "",
        "| KV | apart: MB read | together | bytes | apart, ms | together | speed |",
        "|---|---|---|---|---|---|---|",
    ]
    for dtype in (torch.float32, torch.float16):
        together = shared_meta(rows, prefix, own, page)
        i32 = lambda *values: torch.tensor(values, dtype=torch.int32)
        apart = AttnMeta(
            **{name: getattr(together, name) for name in AttnMeta.__slots__ if not name.startswith("share")},
            share_indptr=i32(0),
            share_n_pages=i32(),
        )
        kv = KVStore(LAYERS, int(together.kv_indices.max()) + 1, page, SPEC.n_kv_heads, SPEC.head_dim, dtype)
        for pool in (*kv.k, *kv.v):
            pool.normal_()
        q, k, v = (torch.randn(rows, heads, SPEC.head_dim) for heads in (9, 3, 3))
        run = lambda meta, q=q, k=k, v=v, kv=kv: [ops.attend(i, q, k, v, kv, meta, SPEC) for i in range(LAYERS)]
        size = {meta is apart: LAYERS * ops.kv_bytes_read(meta, SPEC, kv) / 1e6 for meta in (apart, together)}
        slow, fast = best(lambda: run(apart)), best(lambda: run(together))  # noqa: B023
        lines.append(
            f"| {str(dtype)[6:]} | {size[True]:.0f} | {size[False]:.0f} | {size[False] / size[True]:.0%} "
            f"| {slow * 1e3:.1f} | {fast * 1e3:.1f} | {slow / fast:.2f} × |"
        )
        print(lines[-1], flush=True)
    return [*lines, ""]


def shared_meta(rows: int, prefix: int, own: int, page: int) -> AttnMeta:
    shared, extra = prefix // page, own // page
    pages = torch.randperm(shared + rows * extra, generator=torch.Generator().manual_seed(0)).int()
    tables = [torch.cat([pages[:shared], pages[shared + r * extra : shared + (r + 1) * extra]]) for r in range(rows)]
    i32 = lambda values: torch.tensor(values, dtype=torch.int32)
    kv_len = prefix + own
    return AttnMeta(
        page_size=page,
        qo_indptr=i32(list(range(rows + 1))),
        kv_indptr=i32([r * (shared + extra) for r in range(rows + 1)]),
        kv_indices=torch.cat(tables),
        last_page_len=i32([page] * rows),
        kv_lens=i32([kv_len] * rows),
        positions=i32([kv_len - 1] * rows),
        slots=torch.stack([table[-1].long() * page + page - 1 for table in tables]),
        copy_src=torch.zeros(0, dtype=torch.long),
        copy_dst=torch.zeros(0, dtype=torch.long),
        share_indptr=i32([0, rows]),
        share_n_pages=i32([shared]),
    )


def prefill_table(ops: NativeOps) -> list[str]:
    lines = ["Prefill attention, one layer", "", "| new tokens | keys | ms | GFLOP/s |", "|---|---|---|---|"]
    for n, total in ((256, 256), (256, 2048)):
        pages, i32 = -(-total // 16), lambda *values: torch.tensor(values, dtype=torch.int32)
        positions, none = torch.arange(total - n, total, dtype=torch.int32), torch.zeros(0, dtype=torch.long)
        meta = AttnMeta(
            16, i32(0, n), i32(0, pages), torch.arange(pages, dtype=torch.int32), i32(16), i32(total), positions,
            positions.long(), none, none, i32(0), i32(),
        )  # fmt: skip
        kv = KVStore(1, pages, 16, SPEC.n_kv_heads, SPEC.head_dim, torch.float32)
        q, k, v = (torch.randn(n, heads, SPEC.head_dim) for heads in (9, 3, 3))
        seconds = best(lambda: ops.attend(0, q, k, v, kv, meta, SPEC))  # noqa: B023
        flops = 4 * SPEC.n_heads * SPEC.head_dim * n * (2 * total - n + 1) / 2
        lines.append(f"| {n} | {total} | {seconds * 1e3:.2f} | {flops / seconds / 1e9:.0f} |")
        print(lines[-1], flush=True)
    return [*lines, ""]


if __name__ == "__main__":
    main()
