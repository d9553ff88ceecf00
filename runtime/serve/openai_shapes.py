"""Pieces that the OpenAI-like answers share: usage, log-probabilities, error events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from runtime.messages import Finish, TokenLogprob, Usage
from runtime.text.tokenizer import Tokenizer


def usage_object(usage: Usage) -> dict[str, Any]:
    """Usage of chat and text completions; cached tokens are always told."""
    honoured = {"hints_honoured": usage.hints_honoured} if usage.hints_honoured else {}
    return {
        **honoured,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "forced_tokens": usage.forced_tokens,
        },
    }


def add_usage(usages: Iterable[Usage]) -> Usage:
    """The usage of several prompts together."""
    prompt = completion = cached = forced = 0
    honoured: dict[str, None] = {}
    for usage in usages:
        prompt += usage.prompt_tokens
        completion += usage.completion_tokens
        cached += usage.cached_tokens
        forced += usage.forced_tokens
        honoured |= dict.fromkeys(usage.hints_honoured)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        forced_tokens=forced,
        hints_honoured=tuple(honoured),
    )


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """One entry a token; `top_logprobs` is empty when none were asked for."""
    return {"content": [_chat_entry(tokenizer, one) for one in logprobs], "refusal": None}


def _chat_entry(tokenizer: Tokenizer, one: TokenLogprob) -> dict[str, Any]:
    top = zip(one.top_ids, one.top_logprobs, strict=True)
    return {**_token(tokenizer, one.token, one.logprob), "top_logprobs": [_token(tokenizer, t, lp) for t, lp in top]}


def _token(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    data = tokenizer.token_bytes[token] if token < tokenizer.vocab_size else b""
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def finish_reason(finish: Finish | None) -> str | None:
    """The OpenAI word for an ending without tool calls. Whatever was cut off says "length"."""
    if finish is None:
        return None
    return "stop" if finish.reason == "stop" else "length"


class CompletionLogprobs:
    """The parallel arrays of text completions, filled as tokens come and taken chunk by chunk.

    `text_offset` counts characters from the beginning of the text, echoed prompt included.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._entries: list[TokenLogprob] = []
        self._bytes = b""
        self._before = 0  # characters of text before `_bytes`

    @property
    def pending(self) -> bool:
        return bool(self._entries)

    def add(self, entries: Sequence[TokenLogprob]) -> None:
        self._entries += entries

    def take(self) -> dict[str, Any]:
        """Arrays of everything since the last call."""
        entries, self._entries = self._entries, []
        return {
            "tokens": [self._piece(one.token) for one in entries],
            "token_logprobs": [one.logprob for one in entries],
            "top_logprobs": [self._top(one) for one in entries],
            "text_offset": [self._offset(one.token) for one in entries],
        }

    def _top(self, one: TokenLogprob) -> dict[str, float] | None:
        if one.logprob is None:
            return None
        best = {self._piece(token): value for token, value in zip(one.top_ids, one.top_logprobs, strict=True)}
        return {**best, self._piece(one.token): one.logprob}

    def _offset(self, token: int) -> int:
        """Where the token begins; a token inside a character counts from that character."""
        text = self._bytes.decode("utf-8", "ignore")
        offset = self._before + len(text)
        self._bytes += self._tokenizer.decode_bytes([token], skip_special=False)
        if len(self._bytes) > 64:
            whole = self._bytes[:-4].decode("utf-8", "ignore")
            self._before += len(whole)
            self._bytes = self._bytes[len(whole.encode()) :]
        return offset

    def _piece(self, token: int) -> str:
        """A token's text; bytes that are no text are spelled `bytes:\\xe2`."""
        data = self._tokenizer.decode_bytes([token], skip_special=False)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
