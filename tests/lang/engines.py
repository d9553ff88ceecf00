"""Real engines for programs without a real model: scheduler, cache and text are ours, only the runner is a fake."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from frontend_lang.http import HttpBackend
from runtime.build import assemble
from runtime.config import EngineConfig, ServerConfig
from runtime.engine import Engine
from runtime.execute.fake import FakeRunner, fake_spec
from runtime.serve.app import create_app
from tests.serve.running import running
from tests.serve.scripted import EOS, byte_tokenizer


def toy_engine(*, n_pages: int = 1024, page_size: int = 16, latency_s: float = 0.0, **options: Any) -> Engine:
    """An Engine over bytes. Answers are noise that depends on the whole sequence, so any wrong page shows."""
    tokenizer = byte_tokenizer()
    spec = fake_spec(tokenizer.vocab_size, 16384, (EOS,))
    runner = FakeRunner(spec, n_pages=n_pages, page_size=page_size, max_running=256, latency_s=latency_s)
    config = EngineConfig(page_size=page_size, **options)
    return Engine.from_parts(assemble(config, runner, tokenizer))


@dataclass
class _Pool:
    n_pages: int
    page_size: int


@dataclass
class _Served:
    app: Any


@contextlib.contextmanager
def toy_server(engine: Engine, **options: Any) -> Iterator[str]:
    """The URL of a server around the engine's own generator."""
    app = create_app(engine.generator, engine.config, ServerConfig(**options), pool=_Pool(1024, 16))
    with running(_Served(app)) as url:  # type: ignore[arg-type]
        yield url


@contextlib.contextmanager
def target_of(kind: str, engine: Engine) -> Iterator[Engine | HttpBackend]:
    """The engine itself, or for "http" a backend on a server around it."""
    if kind != "http":
        yield engine
        return
    with toy_server(engine) as url:
        yield HttpBackend(url)
