"""Clients that leave, cancel or reuse ids: what runs stops, what ended is not aborted, and others go on."""

from __future__ import annotations

import asyncio
import socket
import threading

import httpx
import pytest

from tests.serve.running import running, wait_until
from tests.serve.scripted import Hold, Served, serve

USER = [{"role": "user", "content": "hi"}]
PATHS = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 10_000},
    "/v1/completions": {"prompt": "x", "max_tokens": 10_000},
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 10_000}},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"model": "fake", "max_tokens": 10_000, "messages": USER},
}


def endless(**options) -> Served:
    return serve(["word "] * 1000, hold=Hold(), **options)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_stops_its_request(path, stream):
    served = endless()
    with running(served) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            body = httpx.Request("POST", url + path, json={**PATHS[path], "stream": stream}).read()
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            wait_until(lambda: served.client.submits, 10)
            if stream:
                assert b"200 OK" in sock.recv(100)
        wait_until(lambda: served.client.aborts, 2)
        wait_until(lambda: not served.generator.n_live, 2)
        assert served.client.aborts == [served.client.submits[0].rid]
        metrics = httpx.get(f"{url}/metrics").text
        assert 'ramet_aborted_total{model_name="fake"} 1.0' in metrics


def test_normal_ends_send_no_abort():
    served = serve(["a", "b"])
    with running(served) as url, httpx.Client(base_url=url) as http:
        for i in range(30):
            for path, body in PATHS.items():
                assert http.post(path, json={**body, "stream": bool(i % 2)}).status_code == 200
    assert served.client.aborts == []
    assert served.generator.n_live == 0


def test_a_busy_event_loop_aborts_nobody():
    served = serve(["a"] * 20)
    with running(served) as url:
        loop_blocker = threading.Event()

        async def block() -> None:
            loop_blocker.wait(0.5)

        results: list[int] = []

        def one() -> None:
            results.append(httpx.post(f"{url}/v1/chat/completions", json={"messages": USER}, timeout=60).status_code)

        threads = [threading.Thread(target=one) for _ in range(40)]
        for thread in threads:
            thread.start()
        wait_until(lambda: served.client.submits, 10)
        loop = next(iter(served.client._tasks.values())).get_loop() if served.client._tasks else None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(block(), loop)
        for thread in threads:
            thread.join()
    assert results == [200] * 40
    assert served.client.aborts == []


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_a_request_is_cancelled_by_the_clients_id(path):
    served = endless()
    async with served.http() as http:
        body = {**PATHS[path], "rid": "mine"}
        running_one = asyncio.create_task(http.post(path, json=body))
        while not served.client.submits:
            await asyncio.sleep(0.01)
        assert (await http.post(path, json=body)).status_code == 400  # the id is in use
        for wrong in ("other", "min", "mine2"):
            assert (await http.post("/abort_request", json={"rid": wrong})).json() == {"aborted": 0}
        assert (await http.post("/abort_request", json={"rid": "mine"})).json() == {"aborted": 1}
        assert served.client.aborts == [served.client.submits[0].rid]
        running_one.cancel()


async def test_a_rid_may_be_used_again_after_the_end():
    served = serve(["a"])
    async with served.http() as http:
        for _ in range(2):
            answer = await http.post("/generate", json={"text": "x", "rid": "again"})
            assert answer.json()["meta_info"]["id"] == "again"
    assert len({submit.rid for submit in served.client.submits}) == 2


async def test_everything_is_cancelled_at_once():
    served = endless()
    async with served.http() as http:
        tasks = [asyncio.create_task(http.post("/generate", json=PATHS["/generate"])) for _ in range(3)]
        while len(served.client.submits) < 3:
            await asyncio.sleep(0.01)
        assert (await http.post("/abort_request", json={"abort_all": True})).json() == {"aborted": 3}
        for task in tasks:
            task.cancel()


async def test_flush_waits_for_idle_and_says_why_not():
    served = endless(replies={"flush": {"freed_pages": 3, "held_by_requests": 0}})
    async with served.http() as http:
        assert (await http.post("/flush_cache")).status_code == 200
        assert (await http.get("/flush_cache")).status_code == 200
        assert (await http.post("/reset_prefix_cache")).status_code == 200
        task = asyncio.create_task(http.post("/generate", json={**PATHS["/generate"], "rid": "a"}))
        while not served.client.submits:
            await asyncio.sleep(0.01)
        refused = await http.post("/flush_cache?timeout=0.05")
        assert refused.status_code == 400
        assert "1 requests are running" in refused.json()["error"]["message"]
        assert (await http.post("/flush_cache?timeout=x")).status_code == 400
        task.cancel()


@pytest.mark.parametrize("n", [1, 20])
async def test_slow_readers_lose_no_words(n):
    """Deltas may merge while a reader dawdles, but none is dropped."""
    served = serve([f"w{i} " for i in range(200)])
    with running(served) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:

            async def slow() -> str:
                text = ""
                async with http.stream(
                    "POST", "/v1/completions", json={**PATHS["/v1/completions"], "stream": True}
                ) as r:
                    async for line in r.aiter_lines():
                        if line.startswith("data: {"):
                            text += httpx.Response(200, content=line[6:]).json()["choices"][0]["text"]
                            await asyncio.sleep(0.001)
                return text

            texts = await asyncio.gather(*(slow() for _ in range(n)))
    assert set(texts) == {"".join(f"w{i} " for i in range(200))}
