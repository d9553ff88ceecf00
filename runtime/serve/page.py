"""GET /: a page for people, with a chat box and a live picture of the radix tree. No file comes from elsewhere."""

from __future__ import annotations

import asyncio
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from runtime.serve.context import Serving
from runtime.serve.stats import scheduler_numbers
from runtime.serve.wire import json_response

MAX_NODES = 1500
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def routes(serving: Serving) -> list[BaseRoute]:
    """The page, and the data it polls."""
    html = files("runtime.serve").joinpath("page.html").read_text()

    async def page(request: Request) -> Response:
        return HTMLResponse(html, headers={"content-security-policy": _POLICY})

    async def live(request: Request) -> Response:
        return json_response(await live_data(serving))

    return [Route("/", page, methods=["GET"]), Route("/ui/live", live, methods=["GET"])]


async def live_data(serving: Serving) -> dict[str, Any]:
    """Tree, numbers and requests of this moment; the tree's edges with their text."""
    call = serving.generator.call
    tree, requests, numbers = await asyncio.gather(
        call("tree", max_nodes=MAX_NODES), call("requests"), scheduler_numbers(serving)
    )
    decode = serving.tokenizer.decode
    nodes = [
        {**node, "first": decode(node["first"], skip_special=False), "last": decode(node["last"], skip_special=False)}
        for node in tree.get("nodes", ())
    ]
    return {
        "model": serving.served_name,
        "tree": {**tree, "nodes": nodes},
        "requests": requests,
        "numbers": numbers,
    }
