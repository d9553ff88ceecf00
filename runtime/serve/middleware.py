"""What wraps every request: id, key, size limit, access log. Plain ASGI, so streams pass untouched."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.serve.context import Caller
from runtime.serve.errors import BodyTooLarge, Unauthorized, as_ramet_error, error_response
from runtime.serve.metrics import Metrics
from runtime.serve.trace import Trace

log = logging.getLogger("ramet.access")

Asked = Mapping[bytes, bytes]  # the request's headers
_OPEN_PATHS = ("/health", "/health_generate", "/ready", "/ping", "/metrics", "/live", "/")
_GOOD_ID = re.compile(r"[\w.:/=+@-]{1,200}")


class KeyRing:
    """The keys that open this server; none configured: open to all."""

    def __init__(self, keys: str | None) -> None:
        found = (key.strip() for key in (keys or "").split(","))
        self._callers = {key: Caller.of_key(key) for key in found if key}

    def caller(self, offered: str | None) -> Caller:
        """Who bears this key. Raises Unauthorized. Compares in constant time."""
        if not self._callers:
            return Caller()
        for key, caller in self._callers.items():
            if offered is not None and hmac.compare_digest(key.encode(), offered.encode("utf-8", "replace")):
                return caller
        raise Unauthorized("A valid API key is needed: Authorization: Bearer <key>, or x-api-key.")


class Gate:
    """Outermost: gives the request its id and trace, checks key and size, logs the end."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing, metrics: Metrics, max_body: int, access_log: bool) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._max_body = max_body
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = dict(scope["headers"])  # names come in lower case
        trace = Trace(_request_id(asked), self._metrics)
        scope["ramet.trace"] = trace
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", trace.id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            self._admit(scope, asked, trace)
            await self._app(scope, _limited(receive, self._max_body), send_with_id)
        except Exception as error:
            if status:  # the answer has begun; all that is left is to cut it off
                raise
            await error_response(as_ramet_error(error), scope["path"])(scope, receive, send_with_id)
        finally:
            self._ended(scope["path"], status, trace)

    def _admit(self, scope: Scope, headers: Asked, trace: Trace) -> None:
        if scope["path"] not in _OPEN_PATHS and scope["method"] != "OPTIONS":
            trace.caller = self._keys.caller(_offered_key(headers))
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_body:
            raise _too_large(self._max_body)

    def _ended(self, path: str, status: int, trace: Trace) -> None:
        trace.aborted |= status == 499
        if trace.aborted:
            self._metrics.aborted()
        elif status >= 400 or status == 0:
            self._metrics.failed(status)
        if self._access_log and path not in _OPEN_PATHS:
            log.info("request", extra={"fields": trace.fields(path, status)})


def _limited(receive: Receive, limit: int) -> Receive:
    """`receive` that counts the body, for clients that do not tell its length."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise _too_large(limit)
        return message

    return counted


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than this server's limit of {limit} bytes.")


def _request_id(headers: Asked) -> str:
    """The client's own id if it is harmless in a header and a log line, else a new one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _GOOD_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


def _offered_key(headers: Asked) -> str | None:
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    key = headers.get(b"x-api-key")
    return None if key is None else key.decode("latin-1")
