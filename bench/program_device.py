"""A server without a model, over a device whose every step takes the same time, as a fast accelerator's do.

What remains is what ways of asking differ in: steps, round trips, and the work of clients, server and scheduler.

    RAMET_BENCH_STEP_MS=8 python -m bench.program_device [options of ramet serve]
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

import numpy as np

from runtime.build import Parts, assemble
from runtime.cli import build_parser, configs_of
from runtime.config import EngineConfig
from runtime.execute.fake import FakeRunner, fake_spec
from runtime.execute.fake_step import Forward
from runtime.pull import embedded_path
from runtime.server import run_server
from runtime.step import ModelSpec, Pending, StepPlan, StepResult
from runtime.text.tokenizer import Tokenizer

STEP_MS = "RAMET_BENCH_STEP_MS"  # how the bench tells the server's processes
TAIL = -8.0  # the logit below which all but the best few lie
N_BEST = 16


class SteadyRunner(FakeRunner):
    """Every step ends `step_s` after it could begin: when it was launched, or when the one before it ended.

    What it costs to fake one is part of that time, and is little: log-probabilities come from closed forms.
    """

    def __init__(self, spec: ModelSpec, *, step_s: float, n_pages: int, page_size: int, max_running: int) -> None:
        super().__init__(spec, n_pages=n_pages, page_size=page_size, max_running=max_running, check=False)
        self._step_s = step_s
        self._launched: dict[int, float] = {}
        self._free_at = 0.0
        self._base = TAIL - np.arange(spec.vocab_size, dtype=np.float64) / spec.vocab_size
        self._tail_mass = float(np.exp(self._base).sum())

    def launch(self, plan: StepPlan) -> Pending:
        self._launched[plan.step] = time.monotonic()
        return super().launch(plan)

    def _finish(self, plan: StepPlan, forward: Forward) -> StepResult:
        began = max(self._launched.pop(plan.step), self._free_at)
        result = forward.result(self._step_s, began, began + self._step_s)
        time.sleep(max(0.0, began + self._step_s - time.monotonic()))
        self._free_at = began + self._step_s
        return result

    def logits(self, digest: int) -> np.ndarray:
        values = self._base.copy()
        for token, value in self._best(digest).items():
            values[token] = value
        return values

    def logprob(self, digest: int, token: int) -> float:
        best = self._best(digest)
        mass = self._tail_mass + sum(np.exp(value) - np.exp(self._base[one]) for one, value in best.items())
        return float(best.get(token, self._base[token]) - np.log(mass))

    def tops(self, digest: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        best = self._best(digest)
        ids = sorted(best, key=lambda token: -best[token])[:n]
        ids += [token for token in range(n + N_BEST) if token not in best][: n - len(ids)]
        return np.array(ids), np.array([self.logprob(digest, token) for token in ids])

    def _best(self, digest: int) -> dict[int, float]:
        return {self.candidate(digest, rank): 4.0 - 0.5 * rank for rank in reversed(range(N_BEST))}


def parts(config: EngineConfig) -> Parts:
    """The embedded model's tokenizer over the device. Called in the server's processes."""
    path = str(embedded_path(config.model))
    tokenizer = Tokenizer.from_model(path)
    spec = replace(fake_spec(tokenizer.vocab_size, 8192, tokenizer.eos_ids), path=path)
    step_s = float(os.environ[STEP_MS]) / 1000
    n_pages = (config.kv_pool_tokens or 8192 * 16) // config.page_size
    runner = SteadyRunner(spec, step_s=step_s, n_pages=n_pages, page_size=config.page_size, max_running=256)
    return assemble(config, runner, tokenizer)


def main() -> None:
    """`ramet serve` over the device."""
    engine, server = configs_of(build_parser().parse_args(["serve", *sys.argv[1:]]))
    sys.exit(run_server(engine, server, parts="bench.program_device:parts"))


if __name__ == "__main__":
    main()
