"""What is known of one HTTP request, for its log line and the metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from runtime.errors import RametError
from runtime.messages import Finish, Usage
from runtime.serve.context import Caller
from runtime.serve.metrics import Metrics
from runtime.serve.names import in_clients_words


@dataclass(slots=True)
class Trace:
    """Times are monotonic seconds since `started`. Made by the outermost middleware."""

    id: str
    metrics: Metrics
    caller: Caller = field(default_factory=Caller)
    started: float = field(default_factory=time.monotonic)
    ttft_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float = 0.0
    finish: str | None = None
    aborted: bool = False
    body: Any = None  # what the client sent, read
    _last: float = 0.0

    def told(self, error: Exception) -> Exception:
        """`error` in the client's own words."""
        return in_clients_words(error, self.body) if isinstance(error, RametError) else error

    def age(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.started

    def tokens(self, n: int) -> None:
        """`n` tokens arrived of an answer that somebody reads along."""
        now = time.monotonic()
        if self.ttft_s is None:
            self.ttft_s = now - self.started
            self.metrics.ttft.add(self.ttft_s)
        elif n:
            self.metrics.itl.add((now - self._last) / n)
        self._last = now

    def finished(self, finish: Finish, usage: Usage) -> None:
        """One answer ended. Of one that nobody read along, the scheduler knows when it began."""
        if self.ttft_s is None and usage.completion_tokens:
            self.ttft_s = usage.first_token_s or self.age()
            self.metrics.ttft.add(self.ttft_s)
            if usage.completion_tokens > 1:
                self.metrics.itl.add((usage.total_s - usage.first_token_s) / (usage.completion_tokens - 1))
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens
        self.queue_s = max(self.queue_s, usage.queue_s)
        self.finish = finish.reason
        self.metrics.finished(finish.reason, usage, time.monotonic() - self.started)

    def fields(self, path: str, status: int) -> dict[str, object]:
        """The members of the log line."""
        line: dict[str, object] = {
            "id": self.id,
            "path": path,
            "status": status,
            "total_s": round(time.monotonic() - self.started, 4),
        }
        if self.ttft_s is not None:
            line["ttft_s"] = round(self.ttft_s, 4)
            line["queue_s"] = round(self.queue_s, 4)
        if self.prompt_tokens:
            line["prompt_tokens"] = self.prompt_tokens
            line["cached_tokens"] = self.cached_tokens
            line["completion_tokens"] = self.completion_tokens
        if self.finish is not None:
            line["finish"] = self.finish
        if self.aborted:
            line["aborted"] = True
        return line


def trace_of(request: Request) -> Trace:
    """The request's trace."""
    trace = request.scope["ramet.trace"]
    assert isinstance(trace, Trace)
    return trace
