"""Models without weights, runners and schedulers for the GPU's bench."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bench.gpu_machine import Machine
from kernels.flashinfer import FlashInferOps
from kernels.select import Choice
from runtime.config import EngineConfig
from runtime.execute.cuda import CudaRunner
from runtime.execute.cuda_loader import load_cuda_runner
from runtime.messages import FromScheduler, Outputs, Submit, pack_ids
from runtime.params import SamplingParams
from runtime.scheduler import Scheduler

PATIENCE_S = 60.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """What is loaded."""

    model: dict[str, Any]
    max_running: int = 256
    quantization: str = "none"
    pool_tokens: int | None = None
    batch_invariant: bool = True
    kernels: type[FlashInferOps] = FlashInferOps
    max_step_tokens: int = 8192


def make_runner(machine: Machine, load: Load) -> CudaRunner:
    """A runner with random weights; graphs are captured when first needed."""
    with tempfile.TemporaryDirectory(prefix="ramet-bench-") as folder:  # a config.json is all it holds
        (Path(folder) / "config.json").write_text(json.dumps(load.model))
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            quantization=load.quantization,
            kv_pool_tokens=load.pool_tokens,
            max_running=load.max_running,
            max_step_tokens=load.max_step_tokens,
            batch_invariant=load.batch_invariant,
            cuda_graphs="lazy",
        )
        choice = Choice(machine.ops(load.kernels), "the bench")
        return load_cuda_runner(config, Path(folder), choice, machine.device, machine.gpu)


@dataclass(frozen=True, slots=True)
class Bench:
    """A scheduler and the runner under it."""

    inner: Scheduler
    runner: CudaRunner


def with_runner(machine: Machine, load: Load, work: Callable[[CudaRunner], T]) -> T:
    """What `work` says of a runner that nobody holds on to: its memory is free again afterwards."""
    runner = make_runner(machine, load)
    try:
        return work(runner)
    finally:
        runner.close()
        del runner
        machine.gpu.tidy()


def make_scheduler(runner: CudaRunner, *, overlap: bool = True, audit: bool = False, **options: Any) -> Bench:
    config = EngineConfig(
        max_running=runner.max_running,
        overlap=overlap,
        audit=audit,
        **{"max_step_tokens": 8192, "chunk_tokens": 4096, "max_itl_inflation": 1e9, **options},
    )
    scheduler = Scheduler(config, runner, token_bytes=[b"x"] * runner.spec.vocab_size, special_ids=frozenset())
    return Bench(scheduler, runner)


@dataclass
class Said:
    """What a scheduler answered, and when."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    failed: str = ""

    def take(self, message: FromScheduler) -> None:
        assert isinstance(message, Outputs)
        now = time.monotonic()
        for output in message.items:
            self.tokens.setdefault(output.rid, []).extend(output.tokens)
            self.times.setdefault(output.rid, []).extend([now] * len(output.tokens))
            if output.finish is not None:
                self.finished.add(output.rid)
                if output.finish.reason != "length":
                    self.failed = f"{output.rid}: {output.finish.reason} {output.finish.message}"

    @property
    def n_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.tokens.values())

    def least(self, n: int) -> int:
        """Tokens of the request that has said least, 0 until `n` requests have spoken."""
        return 0 if len(self.tokens) < n else min(len(tokens) for tokens in self.tokens.values())


def submit(scheduler: Scheduler, said: Said, rid: str, prompt: np.ndarray, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    scheduler.receive(Submit(rid=rid, tokens=pack_ids(prompt), params=params), said.take)


def drive(scheduler: Scheduler, asked: list[np.ndarray], max_tokens: int) -> Said:
    """Submit all prompts at once and run to the end."""
    said = Said()
    for i, prompt in enumerate(asked):
        submit(scheduler, said, f"r{i}", prompt, max_tokens)
    run_until(scheduler, said, lambda: len(said.finished) == len(asked))
    return said


def run_until(scheduler: Scheduler, said: Said, done: Callable[[], bool]) -> None:
    """Turn the loop. Raises RuntimeError if a request failed, or nothing was said for long: a GPU's time is short."""
    heard, spoke = said.n_tokens, time.monotonic()
    while not done():
        if said.failed:
            raise RuntimeError(f"a request failed: {said.failed}")
        scheduler.step()
        if said.n_tokens != heard:
            heard, spoke = said.n_tokens, time.monotonic()
        elif time.monotonic() - spoke > PATIENCE_S:
            raise RuntimeError(f"nothing was generated for {PATIENCE_S:.0f} s")


def prompts(n: int, length: int, *, shared: int = 0, vocab: int = 250, seed: int = 0) -> list[np.ndarray]:
    """Random prompts whose first `shared` tokens are the same."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(2, vocab, shared, dtype=np.int32)
    return [np.concatenate([trunk, rng.integers(2, vocab, length - shared, dtype=np.int32)]) for _ in range(n)]
