"""Runs inside a process whose CUDA runtime is a stub: our planning drives FlashInfer's real wrappers and C++ planner.

The tiles that the planner wrote are then executed in float64 and compared with the oracle. That shows the arrays,
types, borders, splits and workspaces are what FlashInfer wants. No kernel runs.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.base import AttnMeta, LayerSpec
from kernels.flashinfer_plan import Call, FlashInferOptions, Planner, Shapes
from tests.kernels.attention_cases import Problem, make_problem, oracle

HEAD_DIM = 128
CUT = 64  # keys of a chunk


@contextlib.contextmanager
def without_a_gpu() -> Iterator[Any]:
    """The package, with pinned memory and the card's generation answered for a machine that has none."""
    package = importlib.import_module("flashinfer")
    plain_empty = torch.empty
    torch.empty = lambda *args, pin_memory=False, **kw: plain_empty(*args, **kw)  # type: ignore[assignment]
    for name in ("decode", "prefill", "utils"):
        module = importlib.import_module(f"flashinfer.{name}")
        module.get_compute_capability = lambda device: (9, 0)
    core = importlib.import_module("flashinfer.jit.core")
    core.JitSpecNvcc.build = build_planner
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc]
    try:
        yield package
    finally:
        torch.empty = plain_empty


def build_planner(spec: Any) -> None:
    """In place of a module's whole build: what planning needs. Prefill's kernels (eight long compilations) stay
    unresolved and are never called; decode's planner asks for the occupancy of its kernels, so it needs them."""
    if spec.jit_library_path.exists():
        return
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    print("building", spec.name, flush=True)
    spec.write_ninja()
    targets = re.findall(r"^build (\S+\.o):", spec.ninja_path.read_text(), re.MULTILINE)
    is_decode = spec.name.startswith("batch_decode")
    objects = [path for path in targets if is_decode or "_kernel" not in Path(path).name.removeprefix(spec.name)]
    ninja = ["ninja", "-C", str(spec.build_dir), "-f", str(spec.ninja_path), *objects]
    subprocess.run(ninja, check=True, env=environment, stdout=subprocess.DEVNULL)
    libraries = f"{environment['CUDA_HOME']}/lib64"
    link = ["c++", *objects, "-shared", f"-L{libraries}", "-lcudart", f"-Wl,-rpath,{libraries}"]
    subprocess.run([*link, "-o", str(spec.jit_library_path)], check=True, env=environment)


def planner(package: Any, *, invariant: bool, workspace_mib: int = 64) -> Planner:
    options = FlashInferOptions(
        batch_invariant=invariant, split_tokens=CUT, workspace_bytes=workspace_mib << 20, split_bytes=8 << 20
    )
    return Planner(package, torch.device("cpu"), options, Shapes(max_context=4096))


def ints(inner: Any, offset: int, n: int) -> np.ndarray:
    return inner._int_workspace_buffer[offset : offset + 4 * n].view(torch.int32).numpy()


def decode_tiles(inner: Any) -> list[tuple[int, int, int]]:
    """(row, first key, one past the last key) of every tile of a CUDA-core decode plan."""
    info = list(inner._plan_info)
    padded, requests, tiles, mask, chunk, graph, split = (info[i] for i in (0, 3, 4, 6, 7, 8, 9))
    size = int(ints(inner, chunk, 1)[0]) if split else 1 << 30
    valid = inner._int_workspace_buffer[mask : mask + padded].numpy() if graph and split else np.ones(padded)
    rows, parts = ints(inner, requests, padded), ints(inner, tiles, padded)
    return [(int(rows[t]), int(parts[t]) * size, (int(parts[t]) + 1) * size) for t in range(padded) if valid[t]]


def prefill_tiles(inner: Any) -> list[tuple[int, int, int]]:
    """The same of a plan for the tensor-core kernels; tiles of one row's queries are joined."""
    info = list(inner._plan_info)
    padded, requests, parts, chunk, mask, graph, split = (info[i] for i in (0, 4, 6, 9, 12, 13, 14))
    size = int(ints(inner, chunk, 1)[0]) if split else 1 << 30
    valid = inner._int_workspace_buffer[mask : mask + padded].numpy() if graph and split else np.ones(padded)
    rows, kv = ints(inner, requests, padded), ints(inner, parts, padded)
    return sorted({(int(rows[t]), int(kv[t]) * size, (int(kv[t]) + 1) * size) for t in range(padded) if valid[t]})


def parts_of(problem: Problem, call: Call, first_row: int) -> list[tuple[int, int, int]]:
    """(row, first key, number of keys) of each row of the call's wrapper."""
    lengths = problem.meta.kv_lens.tolist()
    if call.chunks is None:
        n = len(call.wrapper._inner._paged_kv_last_page_len_buf)
        return [(row, 0, lengths[row]) for row in range(first_row, first_row + n)]
    parts, indptr = [], call.chunks.indptr.tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(indptr), start=first_row):
        parts += [(row, CUT * nth, min(CUT, lengths[row] - CUT * nth)) for nth in range(end - begin)]
    return parts


def execute(problem: Problem, spec: LayerSpec, call: Call, tiles: list[tuple[int, int, int]], first_row: int) -> Tensor:
    """Partial attention over each tile's keys, merged row by row."""
    group, bounds = spec.n_heads // spec.n_kv_heads, problem.meta.qo_indptr.tolist()
    n_tokens = call.tokens.stop - call.tokens.start
    mixed = torch.zeros(n_tokens, spec.n_heads, spec.head_dim, dtype=torch.float64)
    total = torch.zeros(n_tokens, spec.n_heads, dtype=torch.float64)
    for at, (row, first, n_keys) in enumerate(parts_of(problem, call, first_row)):
        tokens = slice(bounds[row] - call.tokens.start, bounds[row + 1] - call.tokens.start)
        q, n_seen = problem.q[bounds[row] : bounds[row + 1]].double(), torch.zeros(n_keys, dtype=torch.long)
        position = torch.arange(len(problem.keys[row]) - len(q), len(problem.keys[row]))[:, None, None]
        for _, start, stop in (tile for tile in tiles if tile[0] == at):
            begin, end = first + start, first + min(stop, n_keys)
            n_seen[start:stop] += 1
            rows_of = (problem.keys[row], problem.values[row])
            k, v = (part[begin:end].double().repeat_interleave(group, dim=1) for part in rows_of)
            weight = torch.exp(torch.einsum("qhd,khd->qhk", q, k) * spec.scale)
            weight = weight * (torch.arange(begin, end) <= position)
            mixed[tokens] += torch.einsum("qhk,khd->qhd", weight, v)
            total[tokens] += weight.sum(-1)
        assert (n_seen == 1).all(), f"row {row}: keys are covered {n_seen.unique().tolist()} times"
    return mixed / total.unsqueeze(-1)


def tiles_of(call: Call) -> list[tuple[int, int, int]]:
    inner: Any = call.wrapper._inner
    on_cores = type(inner).__name__.startswith("BatchDecode") and not inner.use_tensor_cores
    return (decode_tiles if on_cores else prefill_tiles)(inner)


def check(
    package: Any,
    group: int,
    page_size: int,
    *,
    invariant: bool,
    lens: list[tuple[int, int]],
    seed: int,
    workspace_mib: int = 64,
) -> int:
    """Plan a step, execute its tiles, compare. Returns the number of tiles."""
    spec = LayerSpec(2 * group, 2, HEAD_DIM, HEAD_DIM**-0.5)
    problem = make_problem(spec, lens, page_size, seed=seed)
    exact, n_tiles, row = oracle(problem, spec), 0, 0
    for call in planner(package, invariant=invariant, workspace_mib=workspace_mib).step(problem.meta, spec):
        tiles = tiles_of(call)
        torch.testing.assert_close(execute(problem, spec, call, tiles, row), exact[call.tokens], atol=1e-6, rtol=1e-6)
        n_tiles, row = n_tiles + len(tiles), parts_of(problem, call, row)[-1][0] + 1
    return n_tiles


def check_captured_cuts(package: Any) -> None:
    """A captured step of a fixed number of chunks: whatever the lengths, nothing is split and the tiles are right."""
    spec = LayerSpec(6, 2, HEAD_DIM, 0.1)
    plans, inner = planner(package, invariant=True), None
    for seed, lens in enumerate([[(1, 130), (1, 5)], [(1, 64), (1, 300)], [(1, 1), (1, 2)]]):
        problem = make_problem(spec, lens, 16, seed=seed)
        call = plans.graph(with_spare(plans, problem.meta, 8), spec)
        assert call.chunks is not None
        inner = inner or call.wrapper._inner
        assert call.wrapper._inner is inner
        assert inner._plan_info[14] == 0  # split_kv: frozen into the graph
        tiles = [tile for tile in tiles_of(call) if tile[0] < int(call.chunks.indptr[-1])]
        torch.testing.assert_close(execute(problem, spec, call, tiles, 0), oracle(problem, spec), atol=1e-6, rtol=1e-6)


def with_spare(plans: Planner, meta: AttnMeta, n_chunks: int) -> AttnMeta:
    """The step with scratch pages up to so many chunks."""
    spare = n_chunks - plans.chunks_of(meta.kv_indptr, meta.page_size, [LayerSpec(6, 2, HEAD_DIM, 0.1)])
    return replace(meta, kv_indices=torch.cat([meta.kv_indices, torch.zeros(spare, dtype=torch.int32)]))


def check_why_we_cut(package: Any) -> None:
    """FlashInfer's own fixed split does not hold in a captured step: long rows make more tiles than it has room for."""
    spec = LayerSpec(6, 2, HEAD_DIM, 0.1)
    plans = planner(package, invariant=True)
    inner: Any = plans.graph(make_problem(spec, [(1, 5)], 16).meta, spec).wrapper._inner
    meta = make_problem(spec, [(1, 3000)], 16).meta
    sizes = (spec.n_heads, spec.n_kv_heads, spec.head_dim, 16)
    fails(
        lambda: inner.plan(
            meta.kv_indptr, meta.kv_indices, meta.last_page_len, *sizes, fixed_split_size=1, q_data_type=torch.bfloat16
        ),
        "new batch size should not exceed padded batch size",
    )


def check_buffers(package: Any, invariant: bool) -> None:
    """The wrappers hold our arrays as they are; captured ones keep their buffers and refuse another size."""
    spec = LayerSpec(6, 2, HEAD_DIM, 0.1)
    problem = make_problem(spec, [(1, 5), (1, 40), (1, 16)], 16)
    plans = planner(package, invariant=invariant)
    inner: Any = plans.graph(problem.meta, spec).wrapper._inner
    n = len(problem.meta.kv_indices)
    assert torch.equal(inner._paged_kv_indptr_buf, problem.meta.kv_indptr)
    assert torch.equal(inner._paged_kv_indices_buf[:n], problem.meta.kv_indices)
    assert torch.equal(inner._paged_kv_last_page_len_buf, problem.meta.last_page_len)
    held = inner._paged_kv_indices_buf.data_ptr()
    again = make_problem(spec, [(1, 60), (1, 2), (1, 33)], 16, seed=1)
    assert plans.graph(again.meta, spec).wrapper._inner is inner
    assert inner._paged_kv_indices_buf.data_ptr() == held
    fails(lambda: inner.plan(torch.tensor([0, 1], dtype=torch.int32), *[torch.ones(1, dtype=torch.int32)] * 2,
                             6, 2, HEAD_DIM, 16), "batch size should be fixed")  # fmt: skip


def check_refusals(package: Any) -> None:
    """Planning errors of the C++ side arrive as exceptions, and a wrapper that failed does not run."""
    spec = LayerSpec(6, 2, HEAD_DIM, 0.1)
    problem = make_problem(spec, [(1, 3000)] * 4, 16)
    tiny = planner(package, invariant=False, workspace_mib=0)
    tiny._workspace = torch.zeros(4096, dtype=torch.uint8)
    fails(lambda: tiny.step(problem.meta, spec), "Buffer overflow")


def fails(work: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        work()


def random_lens(rng: np.random.Generator, *, decode: bool) -> list[tuple[int, int]]:
    rows = [(1, int(rng.integers(1, 900))) for _ in range(rng.integers(1, 7))]
    if not decode:
        rows += [(q, q + int(rng.integers(0, 300))) for q in rng.integers(2, 150, 2).tolist()]
    return rows


def main(part: str) -> None:
    rng = np.random.default_rng(0)
    with without_a_gpu() as package:
        if part == "decode":
            tiles = [
                check(package, group, page, invariant=False, lens=random_lens(rng, decode=True), seed=seed)
                for seed, (group, page) in enumerate([(1, 1), (1, 16), (2, 4), (3, 1), (3, 16)])
            ]
            assert max(tiles) > 6, "no plan was split, which shows too little"
            check_buffers(package, invariant=False)
            check_refusals(package)
        else:
            for seed, (group, page) in enumerate([(1, 16), (3, 1), (7, 16), (8, 4)]):
                check(package, group, page, invariant=True, lens=random_lens(rng, decode=False), seed=seed)
            many = [(q, 900 + q) for q in (60, 100, 7, 60, 100)]  # partial results that do not fit together
            assert check(package, 3, 16, invariant=True, lens=many, seed=9, workspace_mib=16) > 50
            check_buffers(package, invariant=True)
            check_captured_cuts(package)
            check_why_we_cut(package)
    print("ok", part)


if __name__ == "__main__":
    main(sys.argv[1])
