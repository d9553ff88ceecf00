"""How fast, beside what the card could do: decode against its memory, prefill against its products."""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING

import numpy as np

from bench.gpu_engine import Bench, Load, Said, drive, make_scheduler, prompts, run_until, submit, with_runner
from bench.gpu_machine import Card, Machine, Scale
from runtime.execute.cuda import CudaRunner
from runtime.execute.gpu import Gpu
from runtime.execute.graphs import DecodeGraphs

if TYPE_CHECKING:
    from bench.gpu import Row


def speed(machine: Machine, card: Card) -> list[Row]:
    """One row a model and type of weights."""
    scale, rows = machine.scale, []
    for name in scale.models:
        for quantization in ("none", "fp8"):
            if machine.late:
                rows.append({"model": name, "weights": quantization, "note": "no time left"})
                continue
            load = Load(scale.models[name], quantization=quantization, pool_tokens=scale.pool_tokens)
            row: Row = {"model": name, "weights": "bf16" if quantization == "none" else quantization}
            try:
                row |= with_runner(machine, load, lambda runner: _measures(make_scheduler(runner), machine, card))
            except Exception as error:  # one model's failure must not cost the others their time on the GPU
                traceback.print_exc()
                row |= {"failed": f"{type(error).__name__}: {error}".split("\n")[0][:100], "ok": False}
            rows.append(row)
            print(row, flush=True)
    return rows


def _measures(bench: Bench, machine: Machine, card: Card) -> Row:
    row: Row = {}
    scale, gpu = machine.scale, machine.gpu
    for n in scale.rows:
        rate = decode_rate(bench, n, scale)
        row[f"tok/s at {n}"] = rate
        row[f"of roofline at {n}"] = rate / roofline(bench, n, scale, card.read_gb_s)
    row |= prefill(bench, scale, card)
    row |= prefix_hit(bench, scale)
    row |= interference(bench, scale)
    row["idle share"] = idle_share(bench, scale, gpu)
    row["graphs MiB"] = bench.runner.graphs.bytes / 2**20 if bench.runner.graphs is not None else 0.0
    return row


def decode_rate(bench: Bench, n_rows: int, scale: Scale) -> float:
    """Tokens a second of `n_rows` streams over `scale.context` tokens each, once all of them decode."""
    said = Said()
    for i, prompt in enumerate(prompts(n_rows, scale.context, seed=n_rows)):
        submit(bench.inner, said, f"d{n_rows}.{i}", prompt, scale.steps + scale.settle)
    run_until(bench.inner, said, lambda: said.least(n_rows) >= scale.settle // 4)
    begin, before = time.monotonic(), said.n_tokens
    run_until(bench.inner, said, lambda: said.n_tokens - before >= n_rows * scale.steps)
    rate = (said.n_tokens - before) / (time.monotonic() - begin)
    run_until(bench.inner, said, lambda: len(said.finished) == n_rows)
    return rate


def roofline(bench: Bench, n_rows: int, scale: Scale, read_gb_s: float) -> float:
    """Tokens a second if a step only read the weights and the keys once, at the measured rate."""
    spec = bench.runner.spec
    step_bytes = spec.weight_bytes + n_rows * scale.context * spec.kv_bytes_per_token
    return n_rows / (step_bytes / (read_gb_s * 1e9))


def n_weights(bench: Bench) -> int:
    """Weights of the layers and the head: what every token is multiplied with."""
    model = bench.runner._model.config
    attention = (2 * model.n_heads + 2 * model.n_kv_heads) * model.head_dim * model.hidden_size
    return model.n_layers * (attention + 3 * model.hidden_size * model.intermediate_size)


def prefill(bench: Bench, scale: Scale, card: Card) -> Row:
    """TFLOP/s of the layers' products over fresh prompts, and their share of what one large bf16 product reaches."""
    n, length = scale.prefill
    begin = time.monotonic()
    drive(bench.inner, prompts(n, length, seed=int(begin * 1e3)), max_tokens=1)
    rate = 2 * n_weights(bench) * n * length / (time.monotonic() - begin) / 1e12
    return {"prefill TFLOP/s": rate, "of bf16 peak": rate / card.bf16_tflops}


def prefix_hit(bench: Bench, scale: Scale) -> Row:
    """Time of 8 prompts over a long shared prefix: the prefix known, against never seen."""
    length, seed = scale.prefix + 64, int(time.monotonic() * 1e3)
    asked = prompts(9, length, shared=scale.prefix, seed=seed)
    drive(bench.inner, asked[:1], max_tokens=1)
    seconds = []
    for batch in (asked[1:], prompts(8, length, seed=seed + 1)):
        begin = time.monotonic()
        drive(bench.inner, batch, max_tokens=1)
        seconds.append(time.monotonic() - begin)
    return {"2k prefix speed-up": seconds[1] / seconds[0]}


def interference(bench: Bench, scale: Scale) -> Row:
    """How much a burst of long prompts stretches the 99th percentile of the running streams' token gaps."""
    quiet, loud = (_gaps(bench, scale, burst=burst) for burst in (False, True))
    return {"ITL p99 inflation": float(np.percentile(loud, 99) / np.percentile(quiet, 99))}


def _gaps(bench: Bench, scale: Scale, *, burst: bool) -> np.ndarray:
    one = make_scheduler(bench.runner, max_itl_inflation=1.5)
    said, n = Said(), scale.streams
    for i, prompt in enumerate(prompts(n, scale.context // 2, seed=7)):
        submit(one.inner, said, f"g{i}", prompt, scale.talk)
    run_until(one.inner, said, lambda: said.least(n) >= scale.settle)
    if burst:
        for i, prompt in enumerate(prompts(*scale.burst, seed=8)):
            submit(one.inner, said, f"burst{i}", prompt, 1)
    run_until(one.inner, said, lambda: len(said.finished) == n + burst * scale.burst[0])
    return np.concatenate([np.diff(times[scale.settle :]) for rid, times in said.times.items() if rid.startswith("g")])


def idle_share(bench: Bench, scale: Scale, gpu: Gpu) -> float:
    """Share of the wall time of decoding streams in which no kernel and no copy ran."""
    said, n = Said(), scale.streams
    for i, prompt in enumerate(prompts(n, 64, seed=9)):
        submit(bench.inner, said, f"i{i}", prompt, scale.talk)
    run_until(bench.inner, said, lambda: said.least(n) >= scale.settle // 4)
    enough = said.n_tokens + n * scale.talk // 2
    busy, wall = gpu.busy_of(lambda: run_until(bench.inner, said, lambda: said.n_tokens >= enough))
    run_until(bench.inner, said, lambda: len(said.finished) == n)
    return max(0.0, 1 - busy / wall)


def concurrent(machine: Machine, card: Card) -> list[Row]:
    """Many requests at once over the 8B model: tokens a second from the first to the last."""
    scale = machine.scale
    load = Load(scale.models["llama-3.1-8b"], max_running=scale.concurrent, pool_tokens=2 * scale.pool_tokens)

    def rate(runner: CudaRunner) -> float:
        bench = make_scheduler(runner)
        runner.warm_up()  # rows leave one by one, so most sizes are replayed
        drive(bench.inner, prompts(scale.concurrent, 32, seed=1), max_tokens=4)
        return _rate(bench, prompts(scale.concurrent, scale.context, seed=2), 2 * scale.steps)

    row = {"requests": scale.concurrent, "prompt": scale.context, "answer": 2 * scale.steps}
    return [row | {"tok/s": with_runner(machine, load, rate)}]


def _rate(bench: Bench, asked: list[np.ndarray], max_tokens: int) -> float:
    """Tokens a second from the first prompt to the last answer."""
    begin = time.monotonic()
    return drive(bench.inner, asked, max_tokens=max_tokens).n_tokens / (time.monotonic() - begin)


def force_cascade(graphs: DecodeGraphs, *, wanted: bool) -> None:
    """Run steps with shared pages eagerly, which is where a cascade is possible, or never."""
    graphs.eager_if = lambda plan: wanted and len(plan.share_n_pages) > 0


def cascade(machine: Machine, card: Card) -> list[Row]:
    """Streams over one long shared prefix: shared pages read once a stream, or once a step. A cascade is not captured,
    so it is forced here; see `CASCADE_TOKENS` for when it is taken."""
    scale, rows = machine.scale, []
    answer = scale.steps
    for name, invariant in (("flat, fixed cuts", True), ("flat, free splits", False), ("cascade", False)):
        if machine.late:
            rows.append({"attention": name, "note": "no time left"})
            continue
        pool = scale.shared + scale.streams * (answer + 128) + 1024
        load = Load(
            scale.models["llama-3.1-8b"], max_running=scale.streams, pool_tokens=pool, batch_invariant=invariant
        )
        asked = prompts(scale.streams, scale.shared + 32, shared=scale.shared)

        def rate(runner: CudaRunner, asked: list[np.ndarray] = asked, forced: bool = name == "cascade") -> float:
            bench = make_scheduler(runner)
            drive(bench.inner, asked, max_tokens=4)  # the prefix is known, graphs are captured
            assert runner.graphs is not None
            force_cascade(runner.graphs, wanted=forced)
            return _rate(bench, asked, answer)

        rows.append({"attention": name, "tok/s": with_runner(machine, load, rate)})
    return rows
