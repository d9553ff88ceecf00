"""Put an engine's parts together: runner, tokenizer, grammar service, scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime.client import SchedulerLoop
from runtime.config import EngineConfig
from runtime.step import Runner

if TYPE_CHECKING:
    from runtime.serve.kv_events import KvPublisher


@dataclass(frozen=True, slots=True)
class Parts:
    """What an Engine, or a scheduler process, runs."""

    config: EngineConfig
    runner: Runner
    tokenizer: Any  # a Tokenizer, or what tests put in its place
    scheduler: SchedulerLoop
    grammar: Any = None  # a GrammarService
    events: KvPublisher | None = None

    def close(self) -> None:
        """Free the device and the compile threads; the scheduler has stopped."""
        if self.grammar is not None:
            self.grammar.close()
        self.runner.close()
        if self.events is not None:
            self.events.close()


def build(config: EngineConfig) -> Parts:
    """Load what `config` names. Raises ModelLoadError, NotFound, BackendUnavailable or InvalidRequest."""
    from runtime.models.loader import load_runner  # brings torch
    from runtime.text.tokenizer import Tokenizer

    runner = load_runner(config)
    try:
        return assemble(config, runner, Tokenizer.from_model(runner.spec.path))
    except BaseException:
        runner.close()
        raise


def assemble(config: EngineConfig, runner: Runner, tokenizer: Any) -> Parts:
    """Parts around a loaded runner (or a fake one)."""
    from runtime.scheduler import Scheduler

    eos_ids = sorted({*runner.spec.eos_ids, *tokenizer.eos_ids})
    grammar = _grammar_service(config, runner.spec.vocab_size, tokenizer, eos_ids)
    events = _kv_publisher(config, runner.page_size)
    scheduler = Scheduler(
        config,
        runner,
        token_bytes=tokenizer.token_bytes,
        special_ids=tokenizer.special_ids,
        eos_ids=eos_ids,
        grammar=grammar,
        events=events,
    )
    if grammar is not None:
        grammar.spare(lambda: scheduler.computing_here)
    return Parts(config, runner, tokenizer, scheduler, grammar, events)


def _kv_publisher(config: EngineConfig, page_size: int) -> KvPublisher | None:
    """Tells routers what the cache holds, where that is asked for."""
    if config.kv_events_config is None:
        return None
    from runtime.serve.kv_config import check_page_size, read_kv_config
    from runtime.serve.kv_events import KvPublisher

    settings = read_kv_config(config.kv_events_config)
    check_page_size(settings, page_size)
    return None if settings is None else KvPublisher(settings)


def _grammar_service(config: EngineConfig, vocab_size: int, tokenizer: Any, eos_ids: list[int]) -> Any:
    """Compiles grammars on threads of its own; None for a model that never ends a turn (nothing could end one)."""
    from runtime.grammar.service import CompileService, vocabulary

    if not eos_ids:
        return None
    vocab = vocabulary(tokenizer.token_bytes, vocab_size, tokenizer.special_ids, eos_ids)
    return CompileService(vocab, config.grammar_backend)  # type: ignore[arg-type]
