"""Typed errors. Each knows its HTTP status, so both doors (server and engine) answer alike."""

from __future__ import annotations


class RametError(Exception):
    """Base of every error a user of Ramet can meet."""

    status = 500
    kind = "internal_error"
    param: str | None = None
    code: str | None = None


class InvalidRequest(RametError):
    """Something the user sent is wrong. `param` names it, the message says which limit it broke."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves no room for an answer inside the context."""

    def __init__(self, n_prompt: int, limit: int, *, param: str = "messages") -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. "
            f"However, your prompt has {n_prompt} tokens. Please shorten it.",
            param=param,
            code="context_length_exceeded",
        )
        self.n_prompt = n_prompt
        self.limit = limit


class NotFound(RametError):
    """An unknown model, path or id."""

    status = 404
    kind = "not_found_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFull(RametError):
    """The waiting queue is at its limit; try again after `retry_after_s`."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(RametError):
    """The scheduler is loading, draining, stalled or dead."""

    status = 503
    kind = "overloaded_error"
    code = "unavailable"


class QueueTimeout(Unavailable):
    """The request waited longer than the server lets requests wait; try again after `retry_after_s`."""

    code = "queue_timeout"
    param = "max_queue_time_s"


class RequestFailed(RametError):
    """This one request could not be finished (a failed step, an all-masked row); the loop goes on."""


class RequestTimeout(RametError):
    """The request's own time limit ran out before it finished."""

    status = 408
    kind = "timeout_error"
    param = "timeout_s"
    code = "timeout"


class RequestAborted(RametError):
    """The request was cancelled before it finished."""

    status = 499
    kind = "request_aborted"


class ModelLoadError(RametError):
    """A model that cannot be loaded: one clear sentence, exit status 2."""


class BackendUnavailable(RametError):
    """A kernel backend that this machine or installation cannot run, and why."""
