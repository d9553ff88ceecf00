"""What must be right on a GPU before it may be fast: kernels, captured decode, the engine end to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.gpu_engine import Load, drive, make_scheduler, prompts, with_runner
from bench.gpu_machine import Machine, SteadyOps
from kernels.base import AttnMeta, KVStore, LayerSpec
from kernels.flashinfer_plan import FlashInferOptions
from kernels.fused import Pools, TorchFused, fused_for
from kernels.sampling import noise_keys
from runtime.execute.cuda import CudaRunner
from runtime.execute.graphs import DecodeGraphs, EagerCapture
from tests.kernels.attention_cases import Problem, make_problem, oracle
from tests.runtime.step_plans import Row as PlanRow
from tests.runtime.step_plans import Seq, make_plan

if TYPE_CHECKING:
    from bench.gpu import Row

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TOLERANCE = {BF16: 2e-2, FP8: 6e-2}
FIXED, FREE = FlashInferOptions(), FlashInferOptions(batch_invariant=False)
SMALL_CHUNKS = FlashInferOptions(split_tokens=128)


def parity(machine: Machine) -> list[Row]:
    """Attention against the float64 oracle, every slot that no row owns poisoned with NaN."""
    d, mixed, rows = machine.scale.head_dim, machine.scale.mixed, []
    for page_size in machine.scale.pages:
        for group in machine.scale.groups:
            spec = LayerSpec(2 * group, 2, d, d**-0.5)
            for kv_dtype in (BF16, FP8):
                rows += [_parity(machine, spec, page_size, kv_dtype, options, mixed) for options in (FIXED, FREE)]
            rows.append(_parity(machine, spec, page_size, BF16, SMALL_CHUNKS, mixed))
    for window in (0, 100):
        rows.append(_parity(machine, LayerSpec(8, 2, d, d**-0.5, window=window), 16, BF16, FIXED, mixed))
    rows.append(_parity(machine, LayerSpec(8, 2, d, d**-0.5, soft_cap=20.0), 16, BF16, FIXED, mixed))
    rows.append(_shared_parity(machine))
    rows.append(_invariance(machine))
    return rows


def _parity(
    machine: Machine,
    spec: LayerSpec,
    page_size: int,
    kv_dtype: torch.dtype,
    options: FlashInferOptions,
    lens: Sequence[tuple[int, int]],
) -> Row:
    failed = ""
    try:
        error = _error(machine, make_problem(spec, list(lens), page_size, dtype=BF16), spec, kv_dtype, options)
    except Exception as why:  # a module that was not carried along, say: the other cases still tell something
        error, failed = float("inf"), f"{type(why).__name__}: {why}".split("\n")[0][:100]
    return {
        "page": page_size,
        "group": spec.n_heads // spec.n_kv_heads,
        "kv": str(kv_dtype).removeprefix("torch."),
        "window": spec.window,
        "cap": spec.soft_cap,
        "split": str(options.split_tokens) if options.batch_invariant else "free",
        "error": error,
        "ok": error < TOLERANCE[kv_dtype],
        **({"failed": failed} if failed else {}),
    }


def _error(
    machine: Machine, problem: Problem, spec: LayerSpec, kv_dtype: torch.dtype, options: FlashInferOptions
) -> float:
    """Largest difference to the oracle; infinite if a poisoned slot was read."""
    if kv_dtype != BF16:  # the oracle sees what the pool can hold
        for parts in (problem.keys, problem.values):
            parts[:] = [part.to(kv_dtype).to(BF16) for part in parts]
    out = attend(machine, problem, spec, kv_dtype, options)
    error = (out.double().cpu() - oracle(problem, spec)).abs().max().item()
    return error if error == error else float("inf")


def attend(
    machine: Machine, problem: Problem, spec: LayerSpec, kv_dtype: torch.dtype, options: FlashInferOptions
) -> Tensor:
    """The problem on the machine's device, through the backend."""
    ops, meta, device = machine.attention(kv_dtype, options), on_device(problem.meta, machine.device), machine.device
    kv = KVStore(1, problem.kv.k[0].shape[0], meta.page_size, spec.n_kv_heads, spec.head_dim, kv_dtype, device)
    kv.k[0], kv.v[0] = (pool[0].to(device).to(kv_dtype) for pool in (problem.kv.k, problem.kv.v))
    ops.plan(meta, spec)
    q, k, v = (part.to(device) for part in (problem.q, problem.k, problem.v))
    return ops.attend(0, q, k, v, kv, meta, spec)


def on_device(meta: AttnMeta, device: torch.device) -> AttnMeta:
    """Row borders stay on the host."""
    moved = ("kv_indices", "positions", "slots", "copy_src", "copy_dst")
    return replace(meta, **{f.name: getattr(meta, f.name).to(device) for f in fields(meta) if f.name in moved})


def _shared_parity(machine: Machine) -> Row:
    """Rows under one shared prefix, as a cascade."""
    d, (length, n_shared) = machine.scale.head_dim, machine.scale.shared_rows
    spec = LayerSpec(32, 8, d, d**-0.5)
    problem = make_problem(spec, [(1, length)] * 8, 16, dtype=BF16)
    indices, starts = problem.meta.kv_indices.clone(), problem.meta.kv_indptr.tolist()
    for row in range(1, 8):
        indices[starts[row] : starts[row] + n_shared] = indices[:n_shared]
        problem.keys[row][: n_shared * 16] = problem.keys[0][: n_shared * 16]
        problem.values[row][: n_shared * 16] = problem.values[0][: n_shared * 16]
    i32 = lambda values: torch.tensor(values, dtype=torch.int32)
    problem.meta = replace(problem.meta, kv_indices=indices, share_indptr=i32([0, 8]), share_n_pages=i32([n_shared]))
    error = _error(machine, problem, spec, BF16, FREE)
    return {"page": 16, "group": 4, "kv": "bfloat16", "split": "cascade", "error": error, "ok": error < 2e-2}


def _invariance(machine: Machine) -> Row:
    """A decode row's attention, alone and in a crowd: the same bits where cuts are fixed."""
    d, lengths = machine.scale.head_dim, machine.scale.crowd
    spec, length = LayerSpec(32, 8, d, d**-0.5), lengths[0]
    crowd = make_problem(spec, [(1, one) for one in lengths], 16, dtype=BF16)
    alone = make_problem(spec, [(1, length)], 16, dtype=BF16)
    alone.q, alone.k, alone.v = crowd.q[:1], crowd.k[:1], crowd.v[:1]
    slots = alone.meta.kv_indices.long().repeat_interleave(16) * 16 + torch.arange(len(alone.meta.kv_indices) * 16) % 16
    alone.kv.store(0, crowd.keys[0], crowd.values[0], slots[:length])
    outs = [attend(machine, problem, spec, BF16, FIXED)[0] for problem in (crowd, alone)]
    return {"page": 16, "group": 4, "kv": "bfloat16", "split": "alone = crowd", "ok": torch.equal(*outs)}


def fused(machine: Machine) -> list[Row]:
    """The small operations against torch's, at an 8B model's sizes; time of both."""
    device, plain, ours = machine.device, TorchFused(), fused_for(machine.device)
    generator = torch.Generator(device).manual_seed(0)
    randn = lambda *shape: torch.randn(shape, generator=generator, device=device, dtype=BF16)
    x, residual, weight, wide = randn(256, 4096), randn(256, 4096), randn(4096), randn(256, 2048)
    qkv = randn(256, 48 * 128).split([32 * 128, 8 * 128, 8 * 128], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, 128)) for part in qkv)
    positions = torch.arange(256, device=device)
    table = torch.randn(256, 128, generator=generator, device=device)
    pools = {kv: Pools(*(torch.zeros(16, 16, 8, 128, dtype=kv, device=device) for _ in range(2))) for kv in (BF16, FP8)}
    weights = torch.rand(64, machine.scale.tiny["vocab_size"], generator=generator, device=device)
    keys = noise_keys(torch.arange(64), torch.arange(64)).to(device)
    parts, lse = randn(40, 32, 128), torch.randn(40, 32, generator=generator, device=device)
    indptr = torch.tensor([0, 3, 4, 40], dtype=torch.int32, device=device)

    def rotated(one: Any, pool: Pools) -> tuple[Tensor, ...]:
        turned = one.rope_store(q, k, v, positions, table, pool, positions)
        return turned, pool.k.float(), pool.v.float()

    def merged(one: Any) -> Tensor:
        out = torch.empty(3, 32, 128, dtype=BF16, device=device)
        one.merge_chunks(parts, lse, indptr, out)
        return out

    cases: dict[str, Callable[[Any], Any]] = {
        "rms_norm": lambda one: one.rms_norm(x, weight, 1e-5),
        "add_rms_norm": lambda one: one.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5),
        "silu_mul": lambda one: one.silu_mul(wide),
        "rope + store": lambda one: rotated(one, pools[BF16]),
        "rope + store fp8": lambda one: rotated(one, pools[FP8]),
        "quantize_rows": lambda one: tuple(part.float() for part in one.quantize_rows(x)),
        "merge_chunks": merged,
        "race": lambda one: one.race(weights, keys),
    }
    return [_fused_row(machine, name, case, ours, plain) for name, case in cases.items()]


def _fused_row(machine: Machine, name: str, case: Callable[[Any], Any], ours: Any, plain: Any) -> Row:
    as_tuple = lambda value: value if isinstance(value, tuple) else (value,)
    error = max(
        (a.double() - b.double()).abs().max().item() / max(1.0, b.double().abs().max().item())
        for a, b in zip(as_tuple(case(ours)), as_tuple(case(plain)), strict=True)
    )
    times = [machine.fastest(lambda one=one: case(one)) * 1e6 for one in (ours, plain)]  # type: ignore[misc]
    return {
        "operation": name,
        "by": ours.name,
        "error": error,
        "us": times[0],
        "torch us": times[1],
        "ok": error < 2e-2,
    }


def graphs(machine: Machine) -> list[Row]:
    """Decode steps, two in flight, captured and replanned each time, against the same steps run one at a time."""
    n_steps = machine.scale.replans
    load = Load(machine.scale.tiny, max_running=16, pool_tokens=machine.scale.pool_tokens, kernels=SteadyOps)

    def captured(runner: CudaRunner) -> tuple[list[list[int]], int, float]:
        tokens = decode_steps(runner, n_steps=n_steps, in_flight=2)
        assert runner.graphs is not None
        return tokens, runner.graphs.n_captured, runner.graphs.bytes / 2**20

    def eager(runner: CudaRunner) -> list[list[int]]:
        run_eagerly(runner)
        return decode_steps(runner, n_steps=n_steps, in_flight=1)

    tokens, n_captured, mib = with_runner(machine, load, captured)
    same = sum(a == b for a, b in zip(tokens, with_runner(machine, load, eager), strict=True))
    return [{"steps": n_steps, "equal to eager": same, "graphs": n_captured, "graphs MiB": mib, "ok": same == n_steps}]


def run_eagerly(runner: CudaRunner) -> None:
    """The same padded steps without capture."""
    held = runner.graphs
    assert held is not None
    runner.graphs = DecodeGraphs(
        held._model, held._kv, held._ops, held._specs, EagerCapture(), sizes=held.sizes, max_rows=held.sizes[-1]
    )


def decode_steps(runner: CudaRunner, *, n_steps: int, in_flight: int) -> list[list[int]]:
    """Tokens of every step of 5 to 16 rows; rows leave as the steps go on, so several graphs are replayed."""
    n_pages = 4 + -(-(n_steps + 4) // runner.page_size)
    seqs = [Seq([i + 3, 7, 11], list(range(n_pages * i, n_pages * (i + 1))), table_row=i + 1) for i in range(16)]
    pending = [runner.launch(make_plan([PlanRow(seq, 0, 3) for seq in seqs], runner.page_size))]
    tokens: list[list[int]] = []
    for step in range(n_steps - 1):
        rows = [PlanRow(seq, 3 + step, 4 + step) for seq in seqs[: 16 - 11 * step // n_steps]]
        pending.append(runner.launch(make_plan(rows, runner.page_size)))
        while len(pending) > in_flight:
            tokens.append(pending.pop(0).result(60).tokens.tolist())
    return tokens + [step.result(60).tokens.tolist() for step in pending]


def engine(machine: Machine) -> list[Row]:
    """The scheduler over the GPU: overlap and graphs against plain steps; the pages' audit is on in both."""
    scale = machine.scale
    load = Load(scale.tiny, max_running=16, pool_tokens=scale.pool_tokens, kernels=SteadyOps)

    def answers(runner: CudaRunner, overlap: bool) -> tuple[dict[str, list[int]], int]:
        if not overlap:
            runner.graphs = None
        bench = make_scheduler(runner, overlap=overlap, audit=True)
        asked = prompts(scale.engine_requests, scale.engine_prompt, shared=scale.engine_prompt // 2)
        said = drive(bench.inner, asked, max_tokens=scale.engine_tokens)
        stats = bench.inner.stats()
        return said.tokens, int(stats["audit_failures"]) + int(stats["steps_failed"])

    overlapped, n_failures = with_runner(machine, load, lambda runner: answers(runner, True))
    plain, n_more = with_runner(machine, load, lambda runner: answers(runner, False))
    same, n_failures = sum(overlapped[rid] == tokens for rid, tokens in plain.items()), n_failures + n_more
    ok = same == scale.engine_requests and n_failures == 0
    return [{"requests": scale.engine_requests, "equal to plain": same, "audit or step failures": n_failures, "ok": ok}]
