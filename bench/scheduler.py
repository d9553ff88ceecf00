"""Measures of the scheduling loop, without a model: `python -m bench.scheduler`.

Plan and commit: this thread's CPU time of one step at 1 to 1024 decode rows, alone and with 10 000 requests
waiting; the fake device is not timed, the first steps warm up. Interference: what a burst of two 4k-token prompts
does to the inter-token latency of running streams, on a virtual clock with a linear device. Overlap (`--overlap`,
needs the embedded model): the real engine with and without it.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from runtime.config import EngineConfig
from runtime.execute.fake import FakeRunner, fake_spec
from runtime.messages import FromScheduler, Output, Outputs, Submit, pack_ids
from runtime.params import SamplingParams
from runtime.scheduler import Scheduler
from runtime.scheduler.stats import Recent
from runtime.step import Runner, StepPlan

PROMPT, PAGE = 500, 16
ROUNDS, STEPS, WARM_UP = 3, 300, 100


def submit(rid: str, tokens: Iterable[int], max_tokens: int) -> Submit:
    return Submit(
        rid=rid,
        tokens=pack_ids(list(tokens)),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


def prompt(rng: np.random.Generator, n: int, vocab: int = 1000) -> list[int]:
    return [int(t) for t in rng.integers(2, vocab, n)]


# -- plan and commit -------------------------------------------------------------------------------------------------


def decode_world(rows: int, waiting: int) -> Scheduler:
    """A scheduler with `rows` streams decoding and `waiting` requests queued behind a full batch.

    Its clock is this thread's CPU time, so its own counters are CPU time.
    """
    runner = FakeRunner(fake_spec(1000, 4096), n_pages=rows * 220 + 3000, page_size=PAGE, max_running=rows, check=False)
    config = EngineConfig(
        max_running=rows, max_queue=1 << 20, max_step_tokens=1 << 17, chunk_tokens=4096, max_itl_inflation=1e9
    )
    scheduler = Scheduler(config, runner, token_bytes=[b"x"] * 1000, clock=time.thread_time)
    rng = np.random.default_rng(0)
    for i in range(rows):
        scheduler.receive(submit(f"r{i}", prompt(rng, PROMPT), 3000), drop)
    while len(scheduler.state.decode) < rows:
        scheduler.step()
    for i in range(waiting):
        scheduler.receive(submit(f"w{i}", prompt(rng, 100), 3000), drop)
    for _ in range(WARM_UP):
        scheduler.step()
    return scheduler


def drop(message: FromScheduler) -> None:
    """A frontend that does not listen."""


def plan_and_commit(rows: int, waiting: int = 0) -> tuple[float, float]:
    """(median, best decile) CPU seconds of plan + commit of a decode step, in the best of ROUNDS rounds.

    CPU time too grows while others use the caches and the memory, hence the rounds.
    """
    scheduler = decode_world(rows, waiting)
    stats = scheduler.state.stats
    found = []
    gc.collect()
    gc.freeze()
    for _ in range(ROUNDS):
        sums = []
        for _ in range(STEPS):
            stats.plan_s, stats.commit_s = Recent(), Recent()
            scheduler.step()
            sums.append(stats.plan_s.total + stats.commit_s.total)
        sums.sort()
        found.append((sums[len(sums) // 2], sums[len(sums) // 10]))
    gc.unfreeze()
    return min(found)


def print_plan_and_commit() -> None:
    print("Plan + commit of one decode step (µs of CPU; target: 1000 at 256 rows, 50 at 1 row, flat in waiting)")
    print(f"{'rows':>6} {'waiting':>8} {'median':>9} {'p10':>9} {'per row':>9}")
    for rows, waiting in ((1, 0), (1, 10_000), (32, 0), (256, 0), (256, 10_000), (1024, 0)):
        median, best = plan_and_commit(rows, waiting)
        print(f"{rows:>6} {waiting:>8} {median * 1e6:>9.0f} {best * 1e6:>9.0f} {best / rows * 1e6:>9.2f}")


# -- interference ----------------------------------------------------------------------------------------------------


def linear_device(plan: StepPlan) -> float:
    """Seconds of a step on a device that streams its weights (10 ms), then pays per token and per KV token."""
    return 0.010 + 40e-6 * plan.n_tokens + 1e-7 * float(plan.kv_lens.sum())


class Arrivals:
    """Virtual arrival times of each request's tokens."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.times: dict[str, list[float]] = {}

    def __call__(self, message: FromScheduler) -> None:
        assert isinstance(message, Outputs)
        for output in message.items:
            self._note(output)

    def _note(self, output: Output) -> None:
        self.times.setdefault(output.rid, []).extend([self._clock()] * len(output.tokens))

    def gaps(self, prefix: str, after: float, before: float) -> list[float]:
        out: list[float] = []
        for rid, times in self.times.items():
            if rid.startswith(prefix):
                inside = [t for t in times if after <= t <= before]
                out += list(np.diff(inside))
        return sorted(out)


def burst(inflation: float, *, with_burst: bool) -> dict[str, float]:
    """Eight streams; after a while two 4k-token prompts arrive together."""
    runner = FakeRunner(
        fake_spec(1000, 8192), n_pages=4096, page_size=PAGE, max_running=32, check=False, cost=linear_device
    )
    config = EngineConfig(max_step_tokens=1024, chunk_tokens=512, max_itl_inflation=inflation)
    clock = lambda: runner.device_now
    scheduler = Scheduler(config, runner, token_bytes=[b"x"] * 1000, clock=clock)
    seen, rng = Arrivals(clock), np.random.default_rng(1)
    for i in range(8):
        scheduler.receive(submit(f"stream{i}", prompt(rng, 64), 1200), seen)
    warm = prompt(rng, 64)
    for _ in range(120):
        scheduler.step()
    start = clock()
    if with_burst:
        for i in range(2):
            scheduler.receive(submit(f"burst{i}", prompt(rng, 4096), 4), seen)
        scheduler.step()
        scheduler.receive(submit("short", warm, 4), seen)
        while not {"burst0", "burst1", "short"} <= set(seen.times):
            scheduler.step()
    else:
        for _ in range(200):
            scheduler.step()
    gaps = seen.gaps("stream", start, clock())
    ttft = max((seen.times[f"burst{i}"][0] - start for i in range(2)), default=0.0) if with_burst else 0.0
    short = seen.times["short"][0] - start if with_burst else 0.0
    return {
        "p50": gaps[len(gaps) // 2],
        "p99": gaps[int(len(gaps) * 0.99)],
        "max": gaps[-1],
        "ttft": ttft,
        "short": short,
    }


def print_interference() -> None:
    print("\nInterference: 8 streams, then 2 prompts of 4096 tokens and a short one (ms, virtual clock)")
    alone = burst(1.5, with_burst=False)
    print(f"{'':>22} {'ITL p50':>8} {'p99':>8} {'max':>8} {'p99 ratio':>10} {'TTFT 4k':>9} {'TTFT short':>11}")
    for name, result in (
        ("alone", alone),
        ("burst, inflation 1.5", burst(1.5, with_burst=True)),
        ("burst, inflation 3", burst(3.0, with_burst=True)),
        ("burst, not bounded", burst(1e9, with_burst=True)),
    ):
        ms = {k: v * 1e3 for k, v in result.items()}
        ratio = result["p99"] / alone["p99"]
        print(
            f"{name:>22} {ms['p50']:>8.1f} {ms['p99']:>8.1f} {ms['max']:>8.1f} {ratio:>10.2f} "
            f"{ms['ttft']:>9.0f} {ms['short']:>11.1f}"
        )
    full = 0.010 + 40e-6 * 1024 + 1e-7 * 20_000
    print(f"a full step of 1024 tokens takes about {full * 1e3:.0f} ms")


# -- overlap ---------------------------------------------------------------------------------------------------------


def serve(runner: Runner, overlap: bool, rows: int, n_new: int, trace: str | None) -> dict[str, Any]:
    """Decode `rows` streams to the end on the given runner; returns times and the scheduler's counters."""
    config = EngineConfig(overlap=overlap, max_running=rows, trace_steps=trace)
    scheduler = Scheduler(config, runner, token_bytes=[b"x"] * runner.spec.vocab_size)
    rng = np.random.default_rng(2)
    for i in range(rows):
        scheduler.receive(submit(f"s{i}", prompt(rng, 32), n_new), drop)
    begin = time.monotonic()
    while scheduler.busy:
        scheduler.step()
    seconds = time.monotonic() - begin
    scheduler.stop()
    scheduler.run()
    return {"seconds": seconds, "tokens": rows * n_new, **scheduler.stats()}


def print_overlap(model: str, rows: int, n_new: int, trace: str | None) -> None:
    from runtime.models.loader import load_runner  # brings torch

    print(f"\nOverlap: {model}, {rows} streams of {n_new} tokens, CPU executor")
    print(f"{'':>8} {'tokens/s':>9} {'device idle':>12} {'plan ms':>8} {'commit ms':>10} {'gil-free':>9}")
    runner = load_runner(EngineConfig(model=model, kv_pool_tokens=rows * (n_new + 64), max_running=rows))
    serve(runner, False, rows, 4, None)  # warm-up
    best: dict[bool, dict[str, Any]] = {}
    for overlap in (False, True) * ROUNDS:  # in turn, so that what else the machine does meets both
        got = serve(runner, overlap, rows, n_new, trace if overlap else None)
        if overlap not in best or got["seconds"] < best[overlap]["seconds"]:
            best[overlap] = got
    runner.close()
    for overlap, got in best.items():
        print(
            f"{'on' if overlap else 'off':>8} {got['tokens'] / got['seconds']:>9.1f} {got['device_idle_share']:>12.1%} "
            f"{got['plan_s']['p50'] * 1e3:>8.2f} {got['commit_s']['p50'] * 1e3:>10.2f} {got['gil_free_share']:>9.1%}"
        )
    print(f"on / off: {best[False]['seconds'] / best[True]['seconds']:.3f} (best of {ROUNDS} rounds each)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overlap", action="store_true", help="also compare overlap on and off on a real model")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--trace-steps", metavar="FILE", help="write the overlapped run's step timeline here")
    args = parser.parse_args()
    print_plan_and_commit()
    print_interference()
    if args.overlap:
        print_overlap(args.model, args.rows, args.tokens, args.trace_steps)


if __name__ == "__main__":
    main()
