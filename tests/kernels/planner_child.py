"""Runs inside a process whose CUDA runtime is a stub: our planning drives FlashInfer's real wrappers and C++ planner.

The tiles that the planner wrote are then executed in float64 and compared with the oracle. That shows the arrays,
types, borders, splits and workspaces are what FlashInfer wants. No kernel runs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.base import LayerSpec
from kernels.flashinfer_plan import Call, FlashInferOptions, Planner, Shapes
from tests.kernels.attention_cases import Problem, make_problem, oracle

HEAD_DIM = 128


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
    options = FlashInferOptions(batch_invariant=invariant, split_tokens=64, workspace_bytes=workspace_mib << 20)
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


def execute(problem: Problem, spec: LayerSpec, call: Call, tiles: list[tuple[int, int, int]], first_row: int) -> Tensor:
    """Partial attention over each tile's keys, merged row by row."""
    group = spec.n_heads // spec.n_kv_heads
    bounds = problem.meta.qo_indptr.tolist()
    outs = torch.full((call.tokens.stop - call.tokens.start, spec.n_heads, spec.head_dim), torch.nan).double()
    for row in sorted({row for row, _, _ in tiles}):
        begin, end = bounds[first_row + row], bounds[first_row + row + 1]
        q = problem.q[begin:end].double()
        keys, values = problem.keys[first_row + row].double(), problem.values[first_row + row].double()
        value, total = torch.zeros_like(q), torch.zeros(q.shape[:2], dtype=torch.float64)
        seen = torch.zeros(len(keys), dtype=torch.long)
        for _, start, stop in (tile for tile in tiles if tile[0] == row):
            seen[start:stop] += 1
            k, v = (part[start:stop].repeat_interleave(group, dim=1) for part in (keys, values))
            weight = torch.exp(torch.einsum("qhd,khd->qhk", q, k) * spec.scale)
            position = torch.arange(len(keys) - len(q), len(keys))[:, None, None]
            weight = weight * (torch.arange(start, start + len(k)) <= position)
            value += torch.einsum("qhk,khd->qhd", weight, v)
            total += weight.sum(-1)
        assert (seen == 1).all(), f"row {row}: keys are covered {seen.unique().tolist()} times"
        outs[begin - call.tokens.start : end - call.tokens.start] = value / total.unsqueeze(-1)
    return outs


def check(package: Any, group: int, page_size: int, *, invariant: bool, lens: list[tuple[int, int]], seed: int) -> int:
    """Plan a step, execute its tiles, compare. Returns the number of tiles."""
    spec = LayerSpec(2 * group, 2, HEAD_DIM, HEAD_DIM**-0.5)
    problem = make_problem(spec, lens, page_size, seed=seed)
    exact, n_tiles, row = oracle(problem, spec), 0, 0
    for call in planner(package, invariant=invariant).step(problem.meta, spec):
        inner: Any = call.wrapper._inner
        on_cores = type(inner).__name__.startswith("BatchDecode") and not inner.use_tensor_cores
        tiles = (decode_tiles if on_cores else prefill_tiles)(inner)
        torch.testing.assert_close(execute(problem, spec, call, tiles, row), exact[call.tokens], atol=1e-6, rtol=1e-6)
        n_tiles, row = n_tiles + len(tiles), row + len(inner._paged_kv_last_page_len_buf)
    return n_tiles


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
    again = make_problem(spec, [(1, 70), (1, 2), (1, 33)], 16, seed=1)
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
            check_buffers(package, invariant=True)
    print("ok", part)


if __name__ == "__main__":
    main(sys.argv[1])
