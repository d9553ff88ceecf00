"""Is it alive, can it answer: for probes, which bring no key and must never wait."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from runtime.serve.context import Serving

READY = ("/health", "/health_generate", "/ready", "/ping")


def routes(serving: Serving) -> list[BaseRoute]:
    """`/health` and kin: 200 when new requests will be answered. `/live`: 503 only when the scheduler is dead."""

    async def ready(request: Request) -> Response:
        health = serving.generator.health()
        return Response(status_code=200) if health.ready else _unavailable(health.reason)

    async def live(request: Request) -> Response:
        health = serving.generator.health()
        return Response(status_code=200) if health.live else _unavailable(health.reason)

    return [
        *(Route(path, ready, methods=["GET", "POST"]) for path in READY),
        Route("/live", live, methods=["GET"]),
    ]


def _unavailable(reason: str) -> Response:
    return Response(reason, 503, {"retry-after": "1"}, "text/plain")
