"""/tokenize and /detokenize, in SGLang's and vLLM's words at once."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from runtime.errors import InvalidRequest
from runtime.serve.context import Serving
from runtime.serve.tools import read_tools
from runtime.serve.wire import json_response, read
from runtime.text.chat import template_variables


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`text` (SGLang), `prompt` (vLLM), or `messages` to be rendered by the chat template."""

    model: str | None = None
    text: str | list[str] | None = None
    prompt: str | list[str] | None = None
    messages: list[Any] | None = None
    tools: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids of one text, or of several."""

    tokens: Any
    model: str | None = None
    skip_special_tokens: bool | None = None


def routes(serving: Serving) -> list[BaseRoute]:
    """Both endpoints, with and without `/v1`."""

    async def tokenize(request: Request) -> Response:
        return json_response(tokenized(serving, await read(request, TokenizeRequest)))

    async def detokenize(request: Request) -> Response:
        return json_response(detokenized(serving, await read(request, DetokenizeRequest)))

    return [
        Route(prefix + path, endpoint, methods=["POST"])
        for prefix in ("", "/v1")
        for path, endpoint in (("/tokenize", tokenize), ("/detokenize", detokenize))
    ]


def tokenized(serving: Serving, body: TokenizeRequest) -> dict[str, Any]:
    """Ids and their number; lists for a list of texts."""
    serving.check_model(body.model)
    limit = serving.context_length
    if body.messages is not None:
        tools = [tool.for_template() for tool in read_tools(body.tools)] or None
        generate = body.add_generation_prompt is not False
        ids = serving.renderer.render(body.messages, tools, generate, **template_variables(body.chat_template_kwargs))
        return _answer(serving, body, ids, limit)
    text = body.text if body.text is not None else body.prompt
    if text is None:
        raise InvalidRequest("One of text, prompt and messages is needed.", param="text")
    add_special = body.add_special_tokens is not False
    if isinstance(text, str):
        return _answer(serving, body, serving.tokenizer.encode(text, add_special), limit)
    batch = serving.tokenizer.encode_batch(text, add_special)
    return {"tokens": batch, "count": [len(ids) for ids in batch], "max_model_len": limit}


def _answer(serving: Serving, body: TokenizeRequest, ids: list[int], limit: int) -> dict[str, Any]:
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": limit}
    if body.return_token_strs:
        answer["token_strs"] = [serving.tokenizer.piece(token) for token in ids]
    return answer


def detokenized(serving: Serving, body: DetokenizeRequest) -> dict[str, Any]:
    """The text, as `text` (SGLang) and as `prompt` (vLLM)."""
    serving.check_model(body.model)
    skip = body.skip_special_tokens is not False
    tokens = body.tokens
    if not isinstance(tokens, list):
        raise InvalidRequest("tokens must be a list of token ids.", param="tokens")
    text: str | list[str]
    if tokens and isinstance(tokens[0], list):
        text = [serving.tokenizer.decode(_checked(serving, ids), skip) for ids in tokens]
    else:
        text = serving.tokenizer.decode(_checked(serving, tokens), skip)
    return {"text": text, "prompt": text}


def _checked(serving: Serving, ids: Any) -> list[int]:
    size = serving.spec.vocab_size
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < size for token in ids):
        raise InvalidRequest(f"tokens must be ids from 0 to {size - 1}.", param="tokens")
    return ids
