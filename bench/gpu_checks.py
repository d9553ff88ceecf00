"""What must be right on a GPU before it may be fast: kernels, captured decode, the engine end to end."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.gpu_engine import MODELS, Load, make_runner, prompts
from kernels.base import AttnMeta, KVStore, LayerSpec
from kernels.flashinfer import FlashInferOps, load_package
from kernels.flashinfer_plan import FlashInferOptions, Shapes
from runtime.execute.cuda import CudaRunner
from tests.kernels.attention_cases import Problem, make_problem, oracle
from tests.runtime.step_plans import Row as PlanRow
from tests.runtime.step_plans import Seq, make_plan

if TYPE_CHECKING:
    from bench.gpu import Card, Row

MIXED = [(1, 1), (1, 33), (1, 700), (1, 2049), (5, 5), (130, 900)]
DECODE = [(1, 1), (1, 33), (1, 700), (1, 4100)]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float8_e4m3fn: 6e-2}


def parity(card: Card, device: torch.device) -> list[Row]:
    """Attention against the float64 oracle, every slot that no row owns poisoned with NaN."""
    rows = []
    for page_size in (1, 16):
        for group in (1, 3, 4, 7, 8):
            for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
                for options in (FlashInferOptions(), FlashInferOptions(batch_invariant=False)):
                    spec = LayerSpec(2 * group, 2, 128, 128**-0.5)
                    rows.append(_parity(spec, page_size, kv_dtype, options, MIXED, device))
    for window in (0, 100):
        spec = LayerSpec(8, 2, 128, 128**-0.5, window=window)
        rows.append(_parity(spec, 16, torch.bfloat16, FlashInferOptions(), MIXED, device))
    capped = LayerSpec(8, 2, 128, 128**-0.5, soft_cap=20.0)
    rows.append(_parity(capped, 16, torch.bfloat16, FlashInferOptions(), MIXED, device))
    rows.append(_shared_parity(device))
    rows.append(_invariance(device))
    return rows


def _ops(device: torch.device, kv_dtype: torch.dtype, options: FlashInferOptions) -> FlashInferOps:
    ops = FlashInferOps(device, load_package(), options=options)
    ops.configure(Shapes(torch.bfloat16, kv_dtype, 8192))
    return ops


def _parity(
    spec: LayerSpec,
    page_size: int,
    kv_dtype: torch.dtype,
    options: FlashInferOptions,
    lens: list[tuple[int, int]],
    device: torch.device,
) -> Row:
    problem = make_problem(spec, lens, page_size, dtype=torch.bfloat16)
    error = _error(problem, spec, kv_dtype, options, device)
    return {
        "page": page_size,
        "group": spec.n_heads // spec.n_kv_heads,
        "kv": str(kv_dtype).removeprefix("torch."),
        "window": spec.window,
        "cap": spec.soft_cap,
        "split": "fixed" if options.batch_invariant else "free",
        "error": error,
        "ok": error < TOLERANCE[kv_dtype],
    }


def _error(
    problem: Problem, spec: LayerSpec, kv_dtype: torch.dtype, options: FlashInferOptions, device: torch.device
) -> float:
    """Largest difference to the oracle; infinite if a poisoned slot was read."""
    if kv_dtype != torch.bfloat16:  # the oracle sees what the pool can hold
        for parts in (problem.keys, problem.values):
            parts[:] = [part.to(kv_dtype).to(torch.bfloat16) for part in parts]
    out = attend(problem, spec, kv_dtype, options, device)
    error = (out.double().cpu() - oracle(problem, spec)).abs().max().item()
    return error if error == error else float("inf")


def attend(
    problem: Problem, spec: LayerSpec, kv_dtype: torch.dtype, options: FlashInferOptions, device: torch.device
) -> Tensor:
    ops, meta = _ops(device, kv_dtype, options), on_device(problem.meta, device)
    kv = KVStore(1, problem.kv.k[0].shape[0], meta.page_size, spec.n_kv_heads, spec.head_dim, kv_dtype, device)
    kv.k[0], kv.v[0] = (pool[0].to(device).to(kv_dtype) for pool in (problem.kv.k, problem.kv.v))
    ops.plan(meta, spec)
    q, k, v = (part.to(device) for part in (problem.q, problem.k, problem.v))
    return ops.attend(0, q, k, v, kv, meta, spec)


def on_device(meta: AttnMeta, device: torch.device) -> AttnMeta:
    """Row borders stay on the host."""
    moved = ("kv_indices", "positions", "slots", "copy_src", "copy_dst")
    return replace(meta, **{f.name: getattr(meta, f.name).to(device) for f in fields(meta) if f.name in moved})


def _shared_parity(device: torch.device) -> Row:
    """Rows under one shared prefix, as a cascade."""
    spec, n_shared = LayerSpec(32, 8, 128, 128**-0.5), 32
    problem = make_problem(spec, [(1, 600)] * 8, 16, dtype=torch.bfloat16)
    indices, starts = problem.meta.kv_indices.clone(), problem.meta.kv_indptr.tolist()
    for row in range(1, 8):
        indices[starts[row] : starts[row] + n_shared] = indices[:n_shared]
        problem.keys[row][: n_shared * 16] = problem.keys[0][: n_shared * 16]
        problem.values[row][: n_shared * 16] = problem.values[0][: n_shared * 16]
    i32 = lambda values: torch.tensor(values, dtype=torch.int32)
    problem.meta = replace(problem.meta, kv_indices=indices, share_indptr=i32([0, 8]), share_n_pages=i32([n_shared]))
    error = _error(problem, spec, torch.bfloat16, FlashInferOptions(batch_invariant=False), device)
    return {"page": 16, "group": 4, "kv": "bfloat16", "split": "cascade", "error": error, "ok": error < 2e-2}


def _invariance(device: torch.device) -> Row:
    """A decode row's attention, alone and in a crowd: the same bits with a fixed split."""
    spec = LayerSpec(32, 8, 128, 128**-0.5)
    crowd = make_problem(spec, [(1, 3000), (1, 5000), *[(1, 100 + i) for i in range(30)]], 16, dtype=torch.bfloat16)
    alone = make_problem(spec, [(1, 3000)], 16, dtype=torch.bfloat16)
    alone.q, alone.k, alone.v = crowd.q[:1], crowd.k[:1], crowd.v[:1]
    slots = alone.meta.kv_indices.long().repeat_interleave(16) * 16 + torch.arange(188 * 16) % 16
    alone.kv.store(0, crowd.keys[0], crowd.values[0], slots[:3000])
    outs = [attend(p, spec, torch.bfloat16, FlashInferOptions(), device)[0] for p in (crowd, alone)]
    return {"page": 16, "group": 4, "kv": "bfloat16", "split": "alone = crowd", "ok": torch.equal(*outs)}


def graphs(card: Card, device: torch.device) -> list[Row]:
    """200 decode steps, two in flight, captured and replanned each time, against eager steps one at a time."""
    tokens: dict[str, list[list[int]]] = {}
    captured_mib = 0.0
    for name in ("captured", "eager"):
        runner = make_runner(Load(MODELS["tiny"], max_running=16))
        if name == "eager":
            runner._graphs = None
        tokens[name] = _decode(runner, n_steps=200, in_flight=2 if name == "captured" else 1)
        if runner._graphs is not None:
            captured_mib = getattr(runner._graphs._capture, "bytes", 0) / 2**20
        runner.close()
    same = sum(a == b for a, b in zip(tokens["captured"], tokens["eager"], strict=True))
    return [{"steps": 200, "equal to eager": same, "graphs MiB": captured_mib, "ok": same == 200}]


def _decode(runner: CudaRunner, *, n_steps: int, in_flight: int) -> list[list[int]]:
    """Tokens of every step of 5 to 16 rows; rows leave as the steps go on, so several graphs are replayed."""
    seqs = [Seq([i + 3, 7, 11], list(range(20 * i, 20 * i + 20)), table_row=i + 1) for i in range(16)]
    pending = [runner.launch(make_plan([PlanRow(seq, 0, 3) for seq in seqs], runner.page_size))]
    tokens: list[list[int]] = []
    for step in range(n_steps - 1):
        rows = [PlanRow(seq, 3 + step, 4 + step) for seq in seqs[: 16 - step // 18]]
        pending.append(runner.launch(make_plan(rows, runner.page_size)))
        while len(pending) > in_flight:
            tokens.append(pending.pop(0).result(60).tokens.tolist())
    return tokens + [step.result(60).tokens.tolist() for step in pending]


def engine(card: Card, device: torch.device) -> list[Row]:
    """The scheduler over the GPU: overlap and graphs against plain steps; the pages' audit is on in both."""
    from bench.gpu_engine import drive, make_scheduler

    said: dict[str, Any] = {}
    for name, overlap in (("overlapped", True), ("plain", False)):
        scheduler = make_scheduler(make_runner(Load(MODELS["tiny"], max_running=16)), overlap=overlap, audit=True)
        if not overlap:
            scheduler.runner._graphs = None
        said[name] = drive(scheduler.inner, prompts(40, 300, shared=128), max_tokens=24)
        scheduler.runner.close()
    same = sum(said["overlapped"].tokens[rid] == said["plain"].tokens[rid] for rid in said["plain"].tokens)
    return [{"requests": 40, "equal to plain": same, "ok": same == 40}]
