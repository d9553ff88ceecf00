"""GET /metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from runtime.errors import NotFound
from runtime.serve.context import Serving
from runtime.serve.metrics import CONTENT_TYPE
from runtime.serve.stats import scheduler_numbers


def routes(serving: Serving) -> list[BaseRoute]:
    """The page Prometheus scrapes; 404 where metrics are switched off."""

    async def metrics(request: Request) -> Response:
        if not serving.server.metrics:
            raise NotFound("Metrics are switched off on this server.")
        page = serving.metrics.render(await scheduler_numbers(serving))
        return Response(page, headers={"content-type": CONTENT_TYPE})

    return [Route("/metrics", metrics, methods=["GET"])]
