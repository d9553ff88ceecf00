"""A client of any OpenAI-compatible server: threads and plain sockets, cheap beside the server it measures."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from runtime.errors import RametError

TIMEOUT_S = 900.0


@dataclass(slots=True)
class Reply:
    """One answer: when it was asked for, when each piece of text came, and how many tokens it took."""

    asked: float
    text: str = ""
    times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring pieces."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def first_s(self) -> float:
        return self.times[0] - self.asked

    @property
    def tokens_per_s(self) -> float:
        """The rate after the first piece."""
        return (self.tokens - 1) / (self.times[-1] - self.times[0]) if len(self.times) > 1 else 0.0


class Target(Protocol):
    """What a workload is run against."""

    name: str

    def complete(self, prompt: str, max_tokens: int) -> Reply:
        """Exactly `max_tokens` tokens that continue `prompt`, greedily."""
        ...

    def object(self, prompt: str, schema: Mapping[str, Any], max_tokens: int) -> Reply:
        """A JSON object that fits `schema`, cut at `max_tokens`."""
        ...


class RemoteServer:
    """A server with OpenAI's completions and chat completions. Raises RametError where it does not answer as one."""

    def __init__(self, name: str, url: str, *, model: str = "", api_key: str = "") -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RametError(f"{url!r} is no http or https address.")
        self.name = name
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._address = (parts.hostname, parts.port)
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1") else f"{path}/v1"
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self.model = model or self._first_model()

    def complete(self, prompt: str, max_tokens: int) -> Reply:
        return self._stream("/completions", {"prompt": prompt, "ignore_eos": True, "max_tokens": max_tokens})

    def object(self, prompt: str, schema: Mapping[str, Any], max_tokens: int) -> Reply:
        asked = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
        messages = [{"role": "user", "content": prompt}]
        body = {"messages": messages, "response_format": asked, "max_tokens": max_tokens}
        return self._stream("/chat/completions", body)

    def _stream(self, path: str, body: dict[str, Any]) -> Reply:
        common = {"model": self.model, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        reply = Reply(time.perf_counter())
        connection, response = self._open("POST", path, json.dumps(common | body))
        try:
            while line := response.readline():
                if line.startswith(b"data: {"):
                    _take(reply, json.loads(line[6:]), self.name)
        finally:
            connection.close()
        reply.tokens = reply.tokens or len(reply.times)
        if not reply.times:
            raise RametError(f"{self.name} streamed no text.")
        return reply

    def _first_model(self) -> str:
        connection, response = self._open("GET", "/models", None)
        try:
            return str(json.loads(response.read())["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise RametError(f"{self.name} lists no models at {self._path}/models; name one.") from None
        finally:
            connection.close()

    def _open(
        self, method: str, path: str, body: str | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._kind(*self._address, timeout=TIMEOUT_S)
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
        except OSError as error:
            connection.close()
            raise RametError(f"{self.name} does not answer: {error}.") from None
        if response.status != 200:
            text = response.read(400).decode("utf-8", "replace")
            connection.close()
            raise RametError(f"{self.name} answered {response.status} to {self._path}{path}: {text}")
        return connection, response


def _take(reply: Reply, event: dict[str, Any], name: str) -> None:
    if "error" in event:
        raise RametError(f"{name} failed in the middle of an answer: {event['error']}")
    if usage := event.get("usage"):
        reply.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        reply.tokens = int(usage.get("completion_tokens") or 0)
    for choice in event.get("choices") or ():
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        if text or (choice.get("finish_reason") is None and "text" in choice):
            reply.text += text
            reply.times.append(time.perf_counter())
