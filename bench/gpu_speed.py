"""How fast, beside what the card could do: decode against its memory, prefill against its products."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from bench.gpu_engine import MODELS, Bench, Load, Said, drive, make_runner, make_scheduler, prompts, submit
from runtime.step import Pending, StepPlan

if TYPE_CHECKING:
    from bench.gpu import Card, Row

CONTEXT = 1024
ROWS = (1, 32, 128, 256)
STEPS = 60


def speed(card: Card, device: torch.device) -> list[Row]:
    """One row a model and type of weights."""
    rows = []
    for name in ("llama-3.1-8b", "qwen2.5-7b"):
        for quantization in ("none", "fp8"):
            runner = make_runner(Load(MODELS[name], quantization=quantization, pool_tokens=400_000))
            bench = make_scheduler(runner)
            row: Row = {"model": name, "weights": "bf16" if quantization == "none" else quantization}
            for n in ROWS:
                rate = decode_rate(bench, n)
                row[f"tok/s at {n}"] = rate
                row[f"of roofline at {n}"] = rate / roofline(bench, n, card.read_gb_s)
            row |= prefill(bench)
            row |= prefix_hit(bench)
            row |= interference(bench)
            row["idle share"] = idle_share(bench)
            rows.append(row)
            print(row, flush=True)
            runner.close()
            del runner, bench
            torch.cuda.empty_cache()
    return rows


def decode_rate(bench: Bench, n_rows: int) -> float:
    """Tokens a second of `n_rows` streams with CONTEXT tokens each, once all of them decode."""
    said = Said()
    for i, prompt in enumerate(prompts(n_rows, CONTEXT)):
        submit(bench.inner, said, f"d{n_rows}.{i}", prompt, STEPS + 40)
    while len(said.tokens) < n_rows or min(len(tokens) for tokens in said.tokens.values()) < 8:
        bench.inner.step()
    begin, before = time.monotonic(), said.n_tokens
    while said.n_tokens - before < n_rows * STEPS // 2:
        bench.inner.step()
    rate = (said.n_tokens - before) / (time.monotonic() - begin)
    while len(said.finished) < n_rows:
        bench.inner.step()
    return rate


def roofline(bench: Bench, n_rows: int, read_gb_s: float) -> float:
    """Tokens a second if a step only read the weights and the keys once, at the measured rate."""
    spec = bench.runner.spec
    step_bytes = spec.weight_bytes + n_rows * CONTEXT * spec.kv_bytes_per_token
    return n_rows / (step_bytes / (read_gb_s * 1e9))


def prefill(bench: Bench) -> Row:
    """TFLOP/s of the linear layers over 8 fresh prompts of 4k tokens."""
    begin = time.monotonic()
    drive(bench.inner, prompts(8, 4096, seed=int(begin)), max_tokens=1)
    seconds = time.monotonic() - begin
    n_weights = bench.runner.spec.weight_bytes / (2 if bench.runner.spec.dtype == "bfloat16" else 1)
    return {"prefill TFLOP/s": 2 * n_weights * 8 * 4096 / seconds / 1e12}


def prefix_hit(bench: Bench) -> Row:
    """Time to the first token of 16 prompts over 2k shared tokens: the prefix known against never seen."""
    seconds = []
    for seed in (101, 102):
        asked = prompts(17, 2048 + 64, shared=2048, seed=seed)
        cold = prompts(16, 2048 + 64, seed=seed + 10)
        drive(bench.inner, asked[:1], max_tokens=1)
        for batch in (asked[1:], cold):
            begin = time.monotonic()
            drive(bench.inner, batch, max_tokens=1)
            seconds.append(time.monotonic() - begin)
    return {"2k prefix speed-up": (seconds[1] + seconds[3]) / (seconds[0] + seconds[2])}


def interference(bench: Bench) -> Row:
    """How much a burst of 4k prompts stretches the 99th percentile of 32 running streams' token gaps."""
    quiet, loud = (_gaps(bench, burst=burst) for burst in (False, True))
    return {"ITL p99 inflation": float(np.percentile(loud, 99) / np.percentile(quiet, 99))}


def _gaps(bench: Bench, *, burst: bool) -> np.ndarray:
    config = make_scheduler(bench.runner, max_itl_inflation=1.5)
    said, name = Said(), f"g{time.monotonic()}"
    for i, prompt in enumerate(prompts(32, 256, seed=7)):
        submit(config.inner, said, f"{name}.{i}", prompt, 160)
    while len(said.tokens) < 32 or min(len(tokens) for tokens in said.tokens.values()) < 40:
        config.inner.step()
    if burst:
        for i, prompt in enumerate(prompts(4, 4096, seed=8)):
            submit(config.inner, said, f"{name}.burst{i}", prompt, 1)
    while sum(".burst" not in rid for rid in said.finished) < 32:
        config.inner.step()
    streams = [times for rid, times in said.times.items() if ".burst" not in rid]
    return np.concatenate([np.diff(times[40:]) for times in streams])


def idle_share(bench: Bench) -> float:
    """Share of the wall time of 32 decoding streams in which the device had nothing to do."""
    launch, steps = bench.runner.launch, list[Pending]()

    def counting(plan: StepPlan) -> Pending:
        steps.append(launch(plan))
        return steps[-1]

    bench.runner.launch = counting  # type: ignore[method-assign]
    begin = time.monotonic()
    drive(bench.inner, prompts(32, 64, seed=9), max_tokens=100)
    wall = time.monotonic() - begin
    bench.runner.launch = launch  # type: ignore[method-assign]
    busy = sum(step.result().device_s for step in steps)
    return max(0.0, 1 - busy / wall)


def cascade(card: Card, device: torch.device) -> list[Row]:
    """32 streams over 8k shared tokens: shared pages read once a step, or once a stream."""
    rows = []
    for name, invariant in (("flat, fixed split", True), ("cascade", False)):
        runner = make_runner(
            Load(MODELS["llama-3.1-8b"], max_running=64, pool_tokens=60_000, batch_invariant=invariant)
        )
        bench = make_scheduler(runner)
        asked = prompts(32, 8192 + 32, shared=8192)
        drive(bench.inner, asked[:1], max_tokens=1)
        begin = time.monotonic()
        said = drive(bench.inner, asked, max_tokens=64)
        rows.append({"attention": name, "tok/s": said.n_tokens / (time.monotonic() - begin)})
        runner.close()
        del runner, bench
        torch.cuda.empty_cache()
    return rows
