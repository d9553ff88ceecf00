"""Programs on any OpenAI-compatible URL: text only, so a "token" here is one character.

Chat programs become /v1/chat/completions, text becomes /v1/completions. What the API cannot express (select in a
chat, text after a chat's last message, grammars the server does not know) raises a clear error.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx

from frontend_lang.backend import Abilities, Piece
from frontend_lang.errors import Unsupported
from runtime.errors import RametError, Unavailable
from runtime.generate import error_of
from runtime.messages import Finish, GrammarSpec, Submit, TokenLogprob, Usage, unpack_ids
from runtime.params import SamplingParams

CONNECT_S = 10.0
_MARKS = {"system": 0x10FFF0, "user": 0x10FFF1, "assistant": 0x10FFF2, "tool": 0x10FFF3}  # private code points
_END = 0x10FFFD
_ROLES = {chr(code): role for role, code in _MARKS.items()}
_STOP = 0x10FFFC


class OpenAIBackend:
    """An OpenAI-compatible server at `url` (with or without `/v1`). `model` None takes the first it lists."""

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, timeout_s: float | None = None
    ) -> None:
        base = url.rstrip("/")
        self._url = base if base.endswith("/v1") else f"{base}/v1"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]
        self._clients = weakref.WeakKeyDictionary()
        self.name = "openai"
        self.model = model or self._first_model()
        self.able = Abilities(segments=False, scoring=False, prefetch=False)
        self.specials: Mapping[str, int] = {chr(code): code for code in (*_MARKS.values(), _END)}
        self.stop_ids = frozenset({_STOP})
        self.bos_ids: tuple[int, ...] = ()

    def _first_model(self) -> str:
        try:
            reply = httpx.get(f"{self._url}/models", headers=self._headers, timeout=CONNECT_S)
            reply.raise_for_status()
            return str(reply.json()["data"][0]["id"])
        except httpx.HTTPStatusError as error:
            raise _refusal(error.response.status_code, error.response.content) from error
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise Unavailable(f"No OpenAI-compatible server answers at {self._url}: {error}") from error

    # ---- the Backend protocol -----------------------------------------------------------------------------

    def submit(self, requests: Sequence[Submit]) -> list[AsyncIterator[Piece]]:
        return [self._stream(request) for request in requests]

    async def encode(self, text: str) -> Sequence[int]:
        return [ord(char) for char in text]

    def token_bytes(self, token: int) -> bytes:
        return b"" if token >= _MARKS["system"] else chr(token).encode("utf-8", "replace")

    async def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        text = "".join(f"{chr(_MARKS[m['role']])}{m['content']}{chr(_END)}" for m in messages)
        return text + (chr(_MARKS["assistant"]) if add_generation_prompt else "")

    # ---- one request --------------------------------------------------------------------------------------

    async def _stream(self, request: Submit) -> AsyncIterator[Piece]:
        path, body, n_prompt = self._body(request)
        client = self._client()
        try:
            async with client.stream("POST", path, json=body) as reply:
                if reply.status_code != 200:
                    raise _refusal(reply.status_code, await reply.aread())
                async for piece in _read(reply, n_prompt):
                    yield piece
        except httpx.HTTPError as error:
            raise Unavailable(f"The server at {self._url} is gone: {error or type(error).__name__}") from error

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = httpx.AsyncClient(
                base_url=self._url, headers=self._headers, timeout=self._timeout, verify=self._url.startswith("https:")
            )
        return self._clients[loop]

    def _body(self, request: Submit) -> tuple[str, dict[str, Any], int]:
        text = "".join(map(chr, unpack_ids(request.tokens)))
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        body.update(_sampling(request.params))
        body.update(_grammar(request.grammar))
        if not any(mark in text for mark in _ROLES):
            if request.params.logprobs:
                body["logprobs"] = request.params.top_logprobs
            return "/completions", {**body, "prompt": text}, len(text)
        if request.params.logprobs:
            body.update(logprobs=True, top_logprobs=request.params.top_logprobs)
        messages = _messages(text)
        if messages[-1]["role"] != "assistant":
            raise Unsupported("An OpenAI chat can only generate the assistant's message: open it with s.assistant.")
        begun = messages.pop()["content"]
        if begun:  # the assistant's message goes on from a beginning the program wrote
            messages.append({"role": "assistant", "content": begun})
            body.update(continue_final_message=True, add_generation_prompt=False)
        return "/chat/completions", {**body, "messages": messages}, len(text)


def _messages(text: str) -> list[dict[str, str]]:
    """Marked text as chat messages. Raises Unsupported for text outside them."""
    messages: list[dict[str, str]] = []
    inside = False
    for char in text:
        if char in _ROLES:
            messages.append({"role": _ROLES[char], "content": ""})
            inside = True
        elif char == chr(_END):
            inside = False
        elif not inside:
            raise Unsupported("An OpenAI chat has no place for text outside its messages.")
        else:
            messages[-1]["content"] += char
    if not inside:
        raise Unsupported("An OpenAI chat can only generate inside a message: use s.assistant(rt.gen(...)).")
    return messages


def _sampling(params: SamplingParams) -> dict[str, Any]:
    if params.max_tokens == 0:
        raise Unsupported("An OpenAI-compatible server cannot be asked to generate nothing.")
    body: dict[str, Any] = {"max_tokens": params.max_tokens, "temperature": params.temperature, "seed": params.seed}
    if params.seed is not None:
        body["seed"] = params.seed % 2**31
    if params.stop:
        body["stop"] = list(params.stop)
    for name, default in (("top_p", 1.0), ("frequency_penalty", 0.0), ("presence_penalty", 0.0)):
        if getattr(params, name) != default:
            body[name] = getattr(params, name)
    for name, off in (("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0), ("min_tokens", 0)):
        if getattr(params, name) != off:  # not in OpenAI's API, but in most servers'
            body[name] = getattr(params, name)
    return body


def _grammar(grammar: GrammarSpec | None) -> dict[str, Any]:
    if grammar is None:
        return {}
    if grammar.kind == "json_schema":
        schema = {"name": "answer", "strict": True, "schema": json.loads(grammar.spec)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if grammar.kind == "regex":  # every server has a name of its own, and ignores the others'
        return {
            "regex": grammar.spec,
            "guided_regex": grammar.spec,
            "structured_outputs": {"regex": grammar.spec},
        }
    if grammar.kind == "choices":
        choices = json.loads(grammar.spec)
        return {"guided_choice": choices, "structured_outputs": {"choice": choices}}
    raise Unsupported(f"An OpenAI-compatible server knows no grammar of kind {grammar.kind!r}.")


async def _read(reply: httpx.Response, n_prompt: int) -> AsyncIterator[Piece]:
    """The server-sent events of one completion, chat or text."""
    reason, usage = "", Usage(prompt_tokens=n_prompt)
    async for line in reply.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            raise _refusal(int(event["error"].get("code") or 500), data.encode())
        if event.get("usage"):
            usage = _usage(event["usage"])
        for choice in event.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            logprobs = _logprobs(choice)
            reason = choice.get("finish_reason") or reason
            if text or logprobs:  # a token may show nothing: half a character, an end of turn
                yield Piece(text=text, token_ids=tuple(map(ord, text)), logprobs=logprobs)
    if not reason:
        raise Unavailable("The server closed the stream before its end.")
    yield Piece(finish=Finish(reason="length" if reason == "length" else "stop"), usage=usage)


def _usage(usage: Mapping[str, Any]) -> Usage:
    prompt = int(usage.get("prompt_tokens") or 0)
    cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=int(usage.get("completion_tokens") or 0),
        cached_tokens=cached,
        prefilled_tokens=max(0, prompt - cached),  # a server may count more than the prompt as cached
    )


class TextLogprob(TokenLogprob, frozen=True, array_like=True):
    """A token's log-probability where only its text is known: the ids are -1, `top_texts` goes with `top_logprobs`."""

    text: str = ""
    top_texts: tuple[str, ...] = ()


def _logprobs(choice: Mapping[str, Any]) -> tuple[TextLogprob, ...]:
    """Log-probabilities of the server's tokens, as a chat or a text completion tells them."""
    found = choice.get("logprobs") or {}
    if found.get("content"):
        return tuple(
            _logprob(
                item["token"], item["logprob"], [(t["token"], t["logprob"]) for t in item.get("top_logprobs") or ()]
            )
            for item in found["content"]
        )
    texts, numbers = found.get("tokens") or (), found.get("token_logprobs") or ()
    tops = found.get("top_logprobs") or [None] * len(texts)
    return tuple(
        _logprob(text, number, list((top or {}).items()))
        for text, number, top in zip(texts, numbers, tops, strict=True)
    )


def _logprob(text: str, number: float | None, tops: Sequence[tuple[str, float]]) -> TextLogprob:
    return TextLogprob(
        token=-1,
        logprob=number,
        top_ids=(-1,) * len(tops),
        top_logprobs=tuple(number for _, number in tops),
        text=text,
        top_texts=tuple(text for text, _ in tops),
    )


def _refusal(status: int, body: bytes) -> RametError:
    try:
        problem = json.loads(body)
        problem = problem.get("error", problem)
        text, param = str(problem["message"]), problem.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        text, param = f"The server answered {status}: {body[:200]!r}", None
    return error_of(Finish(reason="error", message=text, status=status, param=param))
