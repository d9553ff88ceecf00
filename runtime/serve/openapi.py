"""GET /openapi.json: the request bodies as they are really read, generated from the same structs."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from runtime.serve.admin import ABSENT, MAX_WAIT_S, AbortRequest, PauseRequest
from runtime.serve.anthropic import MessagesRequest
from runtime.serve.anthropic_input import AnthropicBody
from runtime.serve.chat import ChatRequest
from runtime.serve.completions import CompletionRequest
from runtime.serve.context import Serving
from runtime.serve.errors import speaks_anthropic, speaks_ollama
from runtime.serve.health import READY
from runtime.serve.native_request import GenerateRequest
from runtime.serve.ollama import LINES, OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from runtime.serve.responses import ResponsesRequest
from runtime.serve.tokenization import DetokenizeRequest, TokenizeRequest
from runtime.serve.wire import json_response

BODIES: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("post", "/v1/chat/completions"): ChatRequest,
    ("post", "/v1/completions"): CompletionRequest,
    ("post", "/v1/responses"): ResponsesRequest,
    ("post", "/v1/messages"): MessagesRequest,
    ("post", "/v1/messages/count_tokens"): AnthropicBody,
    ("post", "/generate"): GenerateRequest,
    ("put", "/generate"): GenerateRequest,
    ("post", "/tokenize"): TokenizeRequest,
    ("post", "/detokenize"): DetokenizeRequest,
    ("post", "/v1/tokenize"): TokenizeRequest,
    ("post", "/v1/detokenize"): DetokenizeRequest,
    ("post", "/abort_request"): AbortRequest,
    ("post", "/api/chat"): OllamaChatRequest,
    ("post", "/api/generate"): OllamaGenerateRequest,
    ("post", "/api/show"): OllamaShowRequest,
    ("post", "/pause_generation"): PauseRequest,
}
_ERRORS = {
    "400": "A bad parameter; the error names it.",
    "401": "No API key, or a wrong one.",
    "404": "Unknown model, path or id.",
    "413": "The body is too large.",
    "429": "The queue is full.",
    "500": "The request failed; the server goes on.",
    "503": "Loading, draining or stalled.",
}
_JSON, _TEXT, _HTML, _EVENTS = "application/json", "text/plain", "text/html", "text/event-stream"
_PLAIN = ("/flush_cache", "/reset_prefix_cache", "/start_profile", "/stop_profile", "/metrics")
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate")
_EMPTY = (*READY, "/live", "/concate_and_append_request")


def routes(serving: Serving) -> list[BaseRoute]:
    """The description, made once when it is first asked for."""
    made: dict[str, Any] = {}

    async def openapi(request: Request) -> Response:
        if not made:
            made.update(describe(request.app.routes))
        return json_response(made)

    return [Route("/openapi.json", openapi, methods=["GET"])]


def describe(all_routes: list[BaseRoute]) -> dict[str, Any]:
    """OpenAPI 3.1 of every route."""
    kinds = list(dict.fromkeys(BODIES.values()))
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    by_kind = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in all_routes:
        if not isinstance(route, Route):
            continue
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            key = (method.lower(), path)
            paths.setdefault(path, {})[key[0]] = _operation(route, path, by_kind.get(BODIES.get(key)))  # type: ignore[arg-type]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Ramet",
            "version": version("ramet"),
            "description": "Radix-tree prefix-caching LLM runtime.",
        },
        "paths": paths,
        "components": {
            "schemas": {
                **components,
                "Error": _ERROR,
                "AnthropicError": _ANTHROPIC_ERROR,
                "OllamaError": _OLLAMA_ERROR,
            },
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def _operation(route: Route, path: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{route.name}_{path.strip('/').replace('/', '_') or 'root'}",
        "responses": _responses(path),
    }
    parameters = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for part in path.split("/")
        if part.startswith("{")
    ]
    if path in ("/flush_cache", "/reset_prefix_cache"):
        seconds = {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S}
        parameters.append({"name": "timeout", "in": "query", "required": False, "schema": seconds})
    if parameters:
        operation["parameters"] = parameters
    if schema is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return operation


def _responses(path: str) -> dict[str, Any]:
    """What a path may answer: its success, and errors in its own dialect."""
    if path in ABSENT:
        return {status: _error(path, text) for status, text in {**_ERRORS, "501": "Not implemented here."}.items()}
    success: dict[str, Any] = {"description": "The answer, or with stream=true its events."}
    if path not in _EMPTY:
        success["content"] = {kind: {} for kind in _content_types(path)}
    errors = {status: _error(path, text) for status, text in _ERRORS.items()}
    if path in _EMPTY:  # probes say in plain words what is wrong
        errors["503"] = {"description": _ERRORS["503"], "content": {_TEXT: {}}}
    return {"200": success, **errors}


def _content_types(path: str) -> tuple[str, ...]:
    if path in ("/api/chat", "/api/generate"):
        return (_JSON, LINES)
    if path in _STREAMED:
        return (_JSON, _EVENTS)
    if path == "/":
        return (_HTML,)
    return (_TEXT,) if path in _PLAIN else (_JSON,)


def _error(path: str, text: str) -> dict[str, Any]:
    name = "AnthropicError" if speaks_anthropic(path) else "OllamaError" if speaks_ollama(path) else "Error"
    return {"description": text, "content": {_JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}}
