"""Put an engine's parts together: runner, tokenizer, grammar service, scheduler."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from runtime.config import EngineConfig
from runtime.scheduler import Scheduler
from runtime.step import Runner


@dataclass(frozen=True, slots=True)
class Parts:
    """What an Engine, or a scheduler process, runs."""

    config: EngineConfig
    runner: Runner
    tokenizer: Any
    scheduler: Scheduler
    grammar: Any = None

    def close(self) -> None:
        """Free the device and the compile threads; the scheduler has stopped."""
        if self.grammar is not None:
            self.grammar.close()
        self.runner.close()
