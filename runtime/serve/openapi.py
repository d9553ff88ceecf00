"""GET /openapi.json: the request bodies as they are really read, generated from the same structs."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from runtime.serve.admin import AbortRequest
from runtime.serve.anthropic import MessagesRequest
from runtime.serve.anthropic_input import AnthropicBody
from runtime.serve.chat import ChatRequest
from runtime.serve.completions import CompletionRequest
from runtime.serve.context import Serving
from runtime.serve.native_request import GenerateRequest
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
}
_ERRORS = {
    "400": "A bad parameter; the error names it.",
    "401": "No API key, or a wrong one.",
    "404": "Unknown model, path or id.",
    "413": "The body is too large.",
    "429": "The queue is full.",
    "503": "Loading, draining or stalled.",
}


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
            "schemas": {**components, "Error": _ERROR},
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


def _operation(route: Route, path: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{route.name}_{path.strip('/').replace('/', '_') or 'root'}",
        "responses": {"200": {"description": "The answer, or a stream of events."}, **_error_responses()},
    }
    if names := [part[1:-1] for part in path.split("/") if part.startswith("{")]:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if schema is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _error_responses() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": text, "content": content} for status, text in _ERRORS.items()}
