"""Prompts as text or token ids, one or many, for the completions and the native door."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import InvalidRequest
from runtime.messages import pack_ids
from runtime.text.tokenizer import Tokenizer

MAX_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt's ids, and its text where the client sent text."""

    ids: tuple[int, ...]
    text: str | None = None

    @property
    def packed(self) -> bytes:
        return pack_ids(self.ids)

    def shown(self, tokenizer: Tokenizer) -> str:
        """The prompt as text, for echo."""
        return self.text if self.text is not None else tokenizer.decode(self.ids, skip_special=False)


def read_prompts(value: Any, tokenizer: Tokenizer, param: str) -> tuple[list[Prompt], bool]:
    """The prompts, and whether the client sent a list of them. Raises InvalidRequest naming `param`."""
    if isinstance(value, str):
        return [_text(value, tokenizer, param)], False
    if not isinstance(value, list):
        raise InvalidRequest(f"{param} must be text, token ids, or a list of either.", param=param)
    if not value:
        raise InvalidRequest(f"{param} is empty.", param=param)
    if isinstance(value[0], str):
        return _texts(value, tokenizer, param), True
    if isinstance(value[0], list):
        return [_ids(item, f"{param}[{i}]") for i, item in enumerate(value)], True
    return [_ids(value, param)], False


def _text(value: Any, tokenizer: Tokenizer, param: str) -> Prompt:
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} mixes text with other types.", param=param)
    return _checked(Prompt(tuple(tokenizer.encode(value)), value), param)


def _texts(values: Sequence[Any], tokenizer: Tokenizer, param: str) -> list[Prompt]:
    if not all(isinstance(value, str) for value in values):
        raise InvalidRequest(f"{param} mixes text with other types.", param=param)
    encoded = tokenizer.encode_batch(values)
    pairs = enumerate(zip(encoded, values, strict=True))
    return [_checked(Prompt(tuple(ids), text), f"{param}[{i}]") for i, (ids, text) in pairs]


def _ids(value: Any, param: str) -> Prompt:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token <= MAX_ID for token in value):
        raise InvalidRequest(f"{param} must hold token ids: integers from 0 on.", param=param)
    return _checked(Prompt(tuple(value)), param)


def _checked(prompt: Prompt, param: str) -> Prompt:
    if not prompt.ids:
        raise InvalidRequest(f"{param} is empty.", param=param)
    return prompt
