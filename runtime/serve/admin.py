"""Operators' endpoints: flush, abort, load, server data, profile; and the clean refusals of what is not here."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from importlib.metadata import version
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from runtime.errors import InvalidRequest, Unavailable
from runtime.serve.context import Caller, Serving
from runtime.serve.errors import NotImplementedYet
from runtime.serve.kv_config import kv_events_block
from runtime.serve.models import info
from runtime.serve.stats import scheduler_numbers
from runtime.serve.trace import trace_of
from runtime.serve.wire import json_response, read

PATIENCE_S = 30.0  # a step may be long, but a frozen scheduler never answers
SETTLE_S = 2.0  # the scheduler may still be clearing up after the last answer
MAX_WAIT_S = 600.0
ABSENT = (  # known elsewhere, answered with 501
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/init_weights_update_group",
    "/get_weights_by_name",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/open_session",
    "/close_session",
    "/set_internal_state",
    "/v1/embeddings",
    "/encode",
    "/v1/score",
    "/v1/rerank",
    "/rerank",
    "/classify",
)


class AbortRequest(msgspec.Struct, kw_only=True):
    """Which requests to cancel: one by the client's own id, or all of this caller's."""

    rid: str | None = None
    abort_all: bool | None = None


class PauseRequest(msgspec.Struct, kw_only=True):
    """What becomes of requests that run: they go on, go back to the queue and are computed again, or end."""

    mode: Literal["in_place", "retract", "abort"] = "in_place"


def routes(serving: Serving) -> list[BaseRoute]:
    """All of them, bound to one served model."""

    async def flush(request: Request) -> Response:
        await flush_cache(serving, _timeout(request))
        return PlainTextResponse("Cache flushed.\n")

    async def abort(request: Request) -> Response:
        body = await read(request, AbortRequest)
        return json_response({"aborted": abort_requests(serving, body, trace_of(request).caller)})

    async def server_info(request: Request) -> Response:
        return json_response(await server_data(serving))

    async def get_load(request: Request) -> Response:
        return json_response([await _load(serving)])

    async def loads(request: Request) -> Response:
        entry = await _load(serving)
        return json_response(
            {"timestamp": time.time(), "version": version("ramet"), "dp_rank_count": 1, "loads": [entry]}
        )

    async def server_load(request: Request) -> Response:
        return json_response({"server_load": serving.generator.n_live})

    async def server_version(request: Request) -> Response:
        return json_response({"version": version("ramet")})

    async def profile(request: Request) -> Response:
        return PlainTextResponse("Profiles are taken with --trace-steps; nothing was started or stopped.\n")

    async def pause(request: Request) -> Response:
        body = await read(request, PauseRequest)
        if body.mode == "abort":
            serving.generator.abort_all()
        return json_response({"status": await _call(serving, "pause", retract=body.mode == "retract")})

    async def resume(request: Request) -> Response:
        return json_response({"status": await _call(serving, "resume")})

    async def nothing_to_do(request: Request) -> Response:
        return Response(status_code=200)

    async def absent(request: Request) -> Response:
        raise NotImplementedYet(f"{request.url.path} is not implemented by this server.")

    both = ["GET", "POST"]
    return [
        Route("/flush_cache", flush, methods=both),
        Route("/reset_prefix_cache", flush, methods=both),
        Route("/abort_request", abort, methods=["POST"]),
        Route("/server_info", server_info, methods=["GET"]),
        Route("/get_server_info", server_info, methods=["GET"]),
        Route("/get_load", get_load, methods=["GET"]),
        Route("/v1/loads", loads, methods=["GET"]),
        Route("/load", server_load, methods=["GET"]),
        Route("/version", server_version, methods=["GET"]),
        Route("/start_profile", profile, methods=both),
        Route("/stop_profile", profile, methods=both),
        Route("/pause_generation", pause, methods=["POST"]),
        Route("/continue_generation", resume, methods=["POST"]),
        Route("/concate_and_append_request", nothing_to_do, methods=["POST"]),
        *(Route(path, absent, methods=both) for path in ABSENT),
    ]


def _timeout(request: Request) -> float:
    text = request.query_params.get("timeout", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= MAX_WAIT_S:
        raise InvalidRequest(f"timeout must be from 0 to {MAX_WAIT_S:g} seconds; got {text!r:.40}.", param="timeout")
    return seconds


async def flush_cache(serving: Serving, timeout_s: float = 0.0) -> dict[str, Any]:
    """Forget all cached prefixes. Waits for idle up to `timeout_s`; raises InvalidRequest while requests run.

    Requests that a pause holds in the queue hold no KV, so they do not stand in the way.
    """
    started = time.monotonic()
    while True:
        done: dict[str, Any] = await _call(serving, "flush", idle_only=True)
        held, live = done.get("held_by_requests", 0), serving.generator.n_live
        if not held and (not live or done.get("paused")):
            return done
        patience = timeout_s if live else max(timeout_s, SETTLE_S)
        if time.monotonic() >= started + patience:
            raise InvalidRequest(
                f"{live or held} requests are running; the cache was not flushed.", code="cache_in_use"
            )
        await asyncio.sleep(0.01)


async def _call(serving: Serving, op: str, **args: Any) -> Any:
    """A control call whose answer is not waited for for ever. Raises Unavailable."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await serving.generator.call(op, **args)
    except TimeoutError:
        raise Unavailable(f"The scheduler has not answered for {PATIENCE_S:g} s; it may still {op} later.") from None


def abort_requests(serving: Serving, body: AbortRequest, caller: Caller) -> int:
    """How many running requests were cancelled; an unknown id cancels none. A caller reaches only its own."""
    generator = serving.generator
    if body.abort_all:
        return generator.abort_group(caller.digest) if caller.digest else generator.abort_all()
    if body.rid is None:
        raise InvalidRequest("One of rid and abort_all is needed.", param="rid")
    return sum(generator.abort(rid) for rid in serving.live.find(caller.digest, body.rid))


async def server_data(serving: Serving) -> dict[str, Any]:
    """Options, model, scheduler's numbers, and where KV events are to be had."""
    numbers = await scheduler_numbers(serving)
    shown = dataclasses.asdict(serving.server)
    for secret in ("api_key",):
        shown.pop(secret, None)
    data: dict[str, Any] = {
        **shown,
        **dataclasses.asdict(serving.engine),
        **info(serving),
        "version": version("ramet"),
        "max_total_num_tokens": serving.pool.n_pages * serving.pool.page_size,
        "page_size": serving.pool.page_size,
        "tp_size": 1,
        "dp_size": 1,
        "internal_states": [numbers],
    }
    block = kv_events_block(serving.engine.kv_events_config, serving.pool.page_size)
    return data if block is None else {**data, "kv_events": block}


async def _load(serving: Serving) -> dict[str, Any]:
    numbers = await scheduler_numbers(serving)
    return {
        "dp_rank": 0,
        "num_reqs": int(numbers.get("running", 0)) + int(numbers.get("waiting", 0)),
        "num_waiting_reqs": int(numbers.get("waiting", 0)),
        "num_tokens": int(numbers.get("used_tokens", 0)),
    }
