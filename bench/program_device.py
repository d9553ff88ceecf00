"""A server without a model, over a device whose every step takes the same time, as a fast accelerator's do.

What remains is what ways of asking differ in: steps, round trips, and the work of clients, server and scheduler.
"""

from __future__ import annotations

import os
from dataclasses import replace

from runtime.build import Parts, assemble
from runtime.config import EngineConfig
from runtime.execute.fake import FakeRunner, fake_spec
from runtime.pull import embedded_path
from runtime.text.tokenizer import Tokenizer

STEP_MS = "RAMET_BENCH_STEP_MS"  # how the bench tells the server's processes


def parts(config: EngineConfig) -> Parts:
    """The embedded model's tokenizer over the device. Called in the server's processes."""
    path = str(embedded_path(config.model))
    tokenizer = Tokenizer.from_model(path)
    spec = replace(fake_spec(tokenizer.vocab_size, 8192, tokenizer.eos_ids), path=path)
    latency_s = float(os.environ[STEP_MS]) / 1000
    runner = FakeRunner(spec, n_pages=8192, page_size=16, max_running=256, latency_s=latency_s, check=False)
    return assemble(config, runner, tokenizer)


def server_code(model: str, port: int, *, cache: bool) -> str:
    """What a Python process runs to be such a server."""
    return (
        "import sys\n"
        "from runtime.config import EngineConfig, ServerConfig\n"
        "from runtime.server import run_server\n"
        f"engine = EngineConfig(model={model!r}, max_running=256, prefix_cache={cache})\n"
        f"sys.exit(run_server(engine, ServerConfig(port={port}), parts='bench.program_device:parts'))\n"
    )
