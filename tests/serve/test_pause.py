"""Pausing, flushing and going on, over a real scheduler and cache: nothing is lost, and a flush never dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.lang.engines import toy_engine, toy_server
from tests.serve.scripted import serve

N = 64


@contextlib.asynccontextmanager
async def server(**options) -> AsyncIterator[httpx.AsyncClient]:
    with toy_engine(**{"latency_s": 0.002, **options}) as engine, toy_server(engine) as url:
        limits = httpx.Limits(max_connections=N + 8)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
            yield http


async def answer(http: httpx.AsyncClient, i: int) -> str:
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    response = await http.post("/generate", json={"text": f"question number {i}: ", "sampling_params": sampling})
    assert response.status_code == 200, response.text
    assert response.json()["meta_info"]["completion_tokens"] == 24
    return response.json()["text"]


async def numbers(http: httpx.AsyncClient) -> dict:
    return (await http.get("/server_info")).json()["internal_states"][0]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_flush_between_pause_and_continue_loses_no_request(mode):
    async with server(max_running=8) as http:
        alone = [await answer(http, i) for i in range(0, N, 16)]
        tasks = [asyncio.create_task(answer(http, i)) for i in range(N)]
        while (await numbers(http))["waiting"] < N // 2:
            await asyncio.sleep(0.005)
        assert (await http.post("/pause_generation", json={"mode": mode})).json() == {"status": "paused"}
        flushed = await http.post("/flush_cache?timeout=20")
        assert flushed.status_code == 200, flushed.text
        held = await numbers(http)
        assert (held["running"], held["used_tokens"]) == (0, 0)
        assert held["waiting"] > 0
        assert (await http.post("/update_weights_from_disk", json={"model_path": "b"})).status_code == 501
        assert (await http.post("/continue_generation")).json() == {"status": "running"}
        assert (await asyncio.gather(*tasks))[::16] == alone
        assert (await http.post("/flush_cache")).status_code == 200
        assert (await numbers(http))["used_tokens"] == 0


async def test_an_aborting_pause_ends_what_runs_and_what_waits():
    async with server(max_running=2) as http:
        body = {"text": "x", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
        tasks = [asyncio.create_task(http.post("/generate", json=body)) for _ in range(6)]
        while (await numbers(http))["waiting"] < 4:
            await asyncio.sleep(0.005)
        await http.post("/pause_generation", json={"mode": "abort"})
        for done in await asyncio.gather(*tasks):
            assert done.json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await http.post("/flush_cache")).status_code == 200
        await http.post("/continue_generation")
        await answer(http, 1)
        assert (await http.post("/pause_generation", json={"mode": "zork"})).status_code == 400


async def test_a_flush_may_be_the_first_request_and_follow_each_answer_at_once():
    async with server(latency_s=0.0) as http:
        assert (await http.post("/flush_cache")).status_code == 200
        for i in range(100):
            await answer(http, i)
            assert (await http.post("/flush_cache")).status_code == 200


async def test_a_refused_flush_forgets_nothing():
    async with server() as http:
        await answer(http, 1)
        cached = (await numbers(http))["used_tokens"]
        body = {"text": "y", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}, "rid": "long"}
        task = asyncio.create_task(http.post("/generate", json=body))
        while not (await numbers(http))["running"]:
            await asyncio.sleep(0.005)
        refused = await http.post("/flush_cache")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "cache_in_use")
        assert (await numbers(http))["used_tokens"] >= cached
        await http.post("/abort_request", json={"rid": "long"})
        await task
        assert (await http.post("/flush_cache")).status_code == 200


async def test_a_prompt_that_diverges_is_told_where():
    async with server() as http:
        first = "A history that goes on and on and on and on, and then one thing"
        sampling = {"max_new_tokens": 1}
        await http.post("/generate", json={"text": first + " or another, at some length", "sampling_params": sampling})
        body = {"text": first + " and no other, at some length as well", "sampling_params": sampling}
        meta = (await http.post("/generate", json=body)).json()["meta_info"]
        assert meta["cached_tokens"] >= len(first)
        assert "diverges" in meta["cache_miss"]


@pytest.mark.parametrize("path", ["/pause_generation", "/continue_generation", "/flush_cache"])
async def test_a_frozen_scheduler_is_not_waited_for_for_ever(path, monkeypatch):
    async def frozen(op, **args):
        await asyncio.Event().wait()

    served = serve()
    monkeypatch.setattr(served.client, "call", frozen)
    monkeypatch.setattr("runtime.serve.admin.PATIENCE_S", 0.05)
    async with served.http() as http:
        response = await http.post(path, json={})
    assert response.status_code == 503
    assert "has not answered" in response.json()["error"]["message"]
