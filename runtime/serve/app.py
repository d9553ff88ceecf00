"""The HTTP app: one module an endpoint family, put together here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from runtime.config import EngineConfig, ServerConfig
from runtime.errors import RametError
from runtime.generate import Generator
from runtime.serve import (
    admin,
    anthropic,
    chat,
    completions,
    health,
    lang,
    metrics_page,
    models,
    native,
    ollama,
    openapi,
    page,
    responses,
    tokenization,
)
from runtime.serve.context import Pool, Serving, make_serving
from runtime.serve.errors import handle_error
from runtime.serve.middleware import Gate, KeyRing
from runtime.serve.streams import ROUND_KEY, Round
from runtime.serve.wire import SEND_KEY
from runtime.serve.zmq_door import ZmqDoor

FAMILIES: tuple[Callable[[Serving], list[BaseRoute]], ...] = (  # the busiest first: routes are tried in order
    chat.routes,
    completions.routes,
    native.routes,
    responses.routes,
    anthropic.routes,
    health.routes,
    models.routes,
    ollama.routes,
    lang.routes,
    tokenization.routes,
    admin.routes,
    metrics_page.routes,
    page.routes,
    openapi.routes,
)


def create_app(generator: Generator, engine: EngineConfig, server: ServerConfig, *, pool: Pool) -> FastAPI:
    """Everything HTTP around a generator. Starts nothing; sockets beside HTTP live in the app's lifespan.

    `generator.tokenizer` must be a runtime.text.Tokenizer. Raises InvalidRequest for parsers or templates
    that do not exist.
    """
    serving = make_serving(generator, engine, server, pool)
    app = _App(
        title="Ramet",
        version=version("ramet"),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        middleware=_middleware(serving),
        lifespan=_lifespan(serving),
        exception_handlers={RametError: handle_error, HTTPException: handle_error},
    )
    for family in FAMILIES:
        app.router.routes.extend(family(serving))
    return app


class _App(FastAPI):
    """Notes the server's own `send`: no middleware of ours looks at the pieces of an answer, so streams skip them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._round = Round()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SEND_KEY], scope[ROUND_KEY] = send, self._round
        await super().__call__(scope, receive, send)


def _lifespan(serving: Serving) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """The sockets beside HTTP, open while the app runs."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        endpoint = serving.server.zmq_endpoint
        door = ZmqDoor(serving, endpoint) if endpoint else None
        app.state.zmq_door = door
        yield
        if door is not None:
            await door.close()

    return lifespan


def _middleware(serving: Serving) -> list[Middleware]:
    server = serving.server
    origins = [origin.strip() for origin in server.cors_origins.split(",") if origin.strip()]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id"],
        allow_credentials="*" not in origins,
    )
    gate = Middleware(
        Gate,
        keys=KeyRing(server.api_key),
        metrics=serving.metrics,
        max_body=server.max_body_bytes,
        access_log=server.access_log,
    )
    return [cors, gate]
