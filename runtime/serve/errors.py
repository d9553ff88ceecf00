"""Errors as each API spells them. Known errors keep their status; anything else is a logged 500."""

from __future__ import annotations

import logging
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import InvalidRequest, NotFound, QueueFull, RametError, RequestAborted

log = logging.getLogger("ramet.serve")

MAX_MESSAGE_CHARS = 2048  # a message quotes what the client sent; it must not send megabytes back
_RETRY_STATUSES = (429, 503)

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_OPENAI_KINDS = {401: "authentication_error", 404: "not_found_error"}


class Unauthorized(RametError):
    """No key, or a wrong one."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class BodyTooLarge(RametError):
    """A body above the configured limit."""

    status = 413
    kind = "invalid_request_error"
    code = "request_too_large"


class NotImplementedYet(RametError):
    """A known route of other servers that this one does not have."""

    status = 501
    kind = "not_implemented_error"
    code = "not_implemented"


def as_ramet_error(error: Exception) -> RametError:
    """A typed error for whatever was raised; an unknown one is logged with its traceback and becomes a 500."""
    if isinstance(error, RametError):
        return error
    if isinstance(error, HTTPException):
        return _from_http(error)
    if isinstance(error, RecursionError):
        return InvalidRequest("The body is nested too deeply.")
    log.error("unexpected error", exc_info=error)
    return RametError("The server failed to answer this request.")


def _from_http(error: HTTPException) -> RametError:
    if error.status_code == 404:
        return NotFound("There is no such path here.")
    wrapped = InvalidRequest(str(error.detail))
    wrapped.status = error.status_code
    return wrapped


def openai_body(error: RametError) -> dict[str, Any]:
    """The nested error object of the OpenAI API; the native API reads the same."""
    return {
        "error": {
            "message": message_of(error),
            "type": _OPENAI_KINDS.get(error.status, error.kind),
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_body(error: RametError) -> dict[str, Any]:
    """The error envelope of the Anthropic API."""
    return {
        "type": "error",
        "error": {"type": _ANTHROPIC_KINDS.get(error.status, "api_error"), "message": message_of(error)},
    }


def message_of(error: RametError) -> str:
    """What went wrong, cut to a sane length."""
    text = str(error) or error.kind
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"


def error_response(error: RametError, path: str) -> Response:
    """The error in the dialect of the route it happened on."""
    body = anthropic_body(error) if speaks_anthropic(path) else openai_body(error)
    if speaks_ollama(path):
        body = {"error": message_of(error)}
    headers: dict[str, str] = {}
    if error.status in _RETRY_STATUSES:
        headers["retry-after"] = str(max(1, round(error.retry_after_s))) if isinstance(error, QueueFull) else "1"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(orjson.dumps(body), error.status, headers, "application/json")


def speaks_anthropic(path: str) -> bool:
    """Whether a path belongs to the Anthropic API."""
    return "/v1/messages" in path


def speaks_ollama(path: str) -> bool:
    """Whether a path belongs to the Ollama API."""
    return path.startswith("/api/")


async def handle_error(request: Request, error: Exception) -> Response:
    """The app's exception handler."""
    trace = request.scope.get("ramet.trace")
    typed = as_ramet_error(error if trace is None else trace.told(error))
    if isinstance(typed, RequestAborted):  # the client left; nobody reads this
        return Response(status_code=499)
    response = error_response(typed, request.url.path)
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response
