"""Models without weights, runners and schedulers for the GPU's bench."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from runtime.config import EngineConfig
from runtime.execute.cuda import CudaRunner
from runtime.messages import FromScheduler, Outputs, Submit, pack_ids
from runtime.models.loader import load_runner
from runtime.params import SamplingParams
from runtime.scheduler import Scheduler

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "rope_theta": 500000.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": _LLAMA
    | {
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "llama-3.1-8b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen2.5-7b": _LLAMA
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
}


@dataclass(frozen=True, slots=True)
class Load:
    """What is loaded."""

    model: dict[str, Any]
    max_running: int = 256
    quantization: str = "none"
    pool_tokens: int | None = None
    batch_invariant: bool = True


def write_model(config: dict[str, Any]) -> Path:
    """A folder with nothing but a config.json."""
    folder = Path(tempfile.mkdtemp(prefix="ramet-bench-"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_runner(load: Load) -> CudaRunner:
    """A runner with random weights on the GPU."""
    config = EngineConfig(
        model=str(write_model(load.model)),
        load_format="dummy",
        device="cuda",
        quantization=load.quantization,
        kv_pool_tokens=load.pool_tokens,
        max_running=load.max_running,
        batch_invariant=load.batch_invariant,
        mem_fraction=0.85,
    )
    return cast(CudaRunner, load_runner(config))


@dataclass(frozen=True, slots=True)
class Bench:
    """A scheduler and the runner under it."""

    inner: Scheduler
    runner: CudaRunner


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

    def take(self, message: FromScheduler) -> None:
        assert isinstance(message, Outputs)
        now = time.monotonic()
        for output in message.items:
            self.tokens.setdefault(output.rid, []).extend(output.tokens)
            self.times.setdefault(output.rid, []).extend([now] * len(output.tokens))
            if output.finish is not None:
                assert output.finish.reason == "length", output.finish
                self.finished.add(output.rid)

    @property
    def n_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.tokens.values())


def submit(scheduler: Scheduler, said: Said, rid: str, prompt: np.ndarray, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    scheduler.receive(Submit(rid=rid, tokens=pack_ids(prompt), params=params), said.take)


def drive(scheduler: Scheduler, asked: list[np.ndarray], max_tokens: int) -> Said:
    """Submit all prompts at once and run to the end."""
    said = Said()
    for i, prompt in enumerate(asked):
        submit(scheduler, said, f"r{i}", prompt, max_tokens)
    while len(said.finished) < len(asked):
        scheduler.step()
    return said


def prompts(n: int, length: int, *, shared: int = 0, vocab: int = 4000, seed: int = 0) -> list[np.ndarray]:
    """Random prompts whose first `shared` tokens are the same."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(2, vocab, shared, dtype=np.int32)
    return [np.concatenate([trunk, rng.integers(2, vocab, length - shared, dtype=np.int32)]) for _ in range(n)]
