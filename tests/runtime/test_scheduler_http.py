"""Limits, hang-ups and stalls seen from outside: HTTP before the real scheduler and cache over a fake device."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from runtime.config import ServerConfig
from runtime.engine import Engine
from runtime.messages import Abort
from runtime.scheduler import Scheduler
from runtime.serve.app import create_app
from tests.lang.engines import toy_engine
from tests.serve.running import running, wait_until

ENDLESS = {"prompt": "x", "max_tokens": 15_000, "ignore_eos": True}


class Pool:
    n_pages, page_size = 1024, 16


class Served:
    """The app behind a switch: GET /block holds the event loop itself up."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.inner = create_app(engine.generator, engine.config, ServerConfig(), pool=Pool())
        self.app = self
        self.block_s = 0.0
        self.live_in_block = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/block":
            self.live_in_block = self.engine.generator.n_live
            time.sleep(self.block_s)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        await self.inner(scope, receive, send)


def scheduler_of(engine: Engine) -> Scheduler:
    return engine._parts.scheduler


@contextlib.contextmanager
def served(**options: Any) -> Iterator[tuple[str, Served, Scheduler]]:
    with toy_engine(**options) as engine:
        one = Served(engine)
        with running(one) as url:  # type: ignore[arg-type]
            yield url, one, scheduler_of(engine)


# -- the edge of the context ---------------------------------------------------------------------------------------


def test_prompts_at_the_edge_of_the_context_are_answered_or_refused_with_both_numbers() -> None:
    """4094 to 4097 tokens in a context of 4096, each way of asking for an answer, streamed and not."""
    with (
        served(context_length=4096, n_pages=1024, max_step_tokens=4096, chunk_tokens=4096) as (url, _, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        for n in (4094, 4095, 4096, 4097):
            for max_tokens in (None, 1, 2, 10_000):
                for stream in (False, True):
                    body = {"prompt": [97 + i % 20 for i in range(n)], "stream": stream, "ignore_eos": True}
                    if stream:
                        body["stream_options"] = {"include_usage": True}
                    if max_tokens is not None:
                        body["max_tokens"] = max_tokens
                    answer = http.post("/v1/completions", json=body)
                    if n >= 4096:
                        error = answer.json()["error"]
                        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
                        assert "4096" in error["message"]
                        assert str(n) in error["message"]
                        continue
                    assert answer.status_code == 200, (n, max_tokens, answer.text)
                    said, reason = said_in(answer, stream)
                    assert said == min(4096 - n, max_tokens or 4096)
                    assert reason == "length"
        assert http.post("/v1/completions", json={"prompt": "alive", "max_tokens": 1}).status_code == 200


def said_in(answer: httpx.Response, stream: bool) -> tuple[int, str]:
    """(tokens, finish reason) of one completion."""
    if not stream:
        got = answer.json()
        return got["usage"]["completion_tokens"], got["choices"][0]["finish_reason"]
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"] and c["choices"][0]["finish_reason"]]
    with_usage = [c["usage"] for c in chunks if c.get("usage")]
    return (with_usage[-1]["completion_tokens"] if with_usage else -1), reasons[-1]


def test_a_chat_that_would_never_end_stops_at_a_context_of_256() -> None:
    with served(context_length=256) as (url, _, _):
        body = {"messages": [{"role": "user", "content": "count up forever"}], "max_tokens": 1000, "ignore_eos": True}
        got = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert got["choices"][0]["finish_reason"] == "length"
        assert got["usage"]["total_tokens"] == 256


# -- clients that hang up ------------------------------------------------------------------------------------------


def hang_up(url: str, body: dict[str, Any], ready: Callable[[], bool], n_chunks: int = 0) -> None:
    """Send a request, wait until `ready()` and for so many chunks, then close the socket."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        data = json.dumps(body).encode()
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(ready, 10)
        seen = b""
        while seen.count(b"data: {") < n_chunks:
            seen += sock.recv(4096)


@pytest.mark.parametrize("where", ["streaming", "waiting for the whole", "queued", "compiling"])
def test_who_hangs_up_is_gone_within_a_second_wherever_it_was(where: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        served(max_running=2, latency_s=0.002) as (url, _, scheduler),
        caplog.at_level(logging.INFO),
        contextlib.ExitStack() as others,
    ):
        stats = scheduler.stats
        body = dict(ENDLESS, stream=where == "streaming")
        if where == "queued":
            for _ in range(2):
                http = others.enter_context(httpx.Client(timeout=60))
                others.enter_context(http.stream("POST", f"{url}/v1/completions", json=dict(ENDLESS, stream=True)))
            wait_until(lambda: stats()["running"] == 2, 10)
        if where == "compiling":
            scheduler.state.grammar.compile_async = lambda spec: Future()  # type: ignore[union-attr, method-assign]
            body["regex"] = "[0-9]{3}"
        before = stats()["aborted"]
        ready = {
            "streaming": lambda: True,
            "waiting for the whole": lambda: stats()["running"] > 0,
            "queued": lambda: stats()["waiting"] > 0,
            "compiling": lambda: stats()["received"] > 0,
        }[where]
        for _ in range(2):
            hang_up(url, body, ready, n_chunks=3 if where == "streaming" else 0)
        wait_until(lambda: stats()["aborted"] == before + 2, 1)
        if where != "queued":
            wait_until(lambda: stats()["running"] == 0, 1)
            assert stats()["cache"]["request"] == 0
            third = httpx.post(f"{url}/v1/completions", json={"prompt": "y", "max_tokens": 1}, timeout=10)
            assert third.status_code == 200
        metrics = httpx.get(f"{url}/metrics", timeout=10).text
        assert 'ramet_aborted_total{model_name="fake"} 2.0' in metrics
        told = [getattr(r, "fields", {}) for r in caplog.records if r.name == "ramet.access"]
        assert sum(bool(fields.get("aborted") or fields.get("status") == 499) for fields in told) == 2
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("ramet")]) == 0


def count_aborts(scheduler: Scheduler) -> list[Abort]:
    """Every abort that reaches the scheduler."""
    seen: list[Abort] = []
    receive = scheduler.receive

    def spy(message: Any, sink: Any) -> None:
        if isinstance(message, Abort):
            seen.append(message)
        receive(message, sink)

    scheduler.receive = spy  # type: ignore[method-assign]
    return seen


async def read_streams(url: str, n: int, max_tokens: int, at_once: int) -> list[bool]:
    """Run `n` streams over sockets of their own; True for each that came to its proper end."""
    host, port = url.removeprefix("http://").split(":")
    gate = asyncio.Semaphore(at_once)
    data = json.dumps({"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"

    async def one() -> bool:
        async with gate:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + data)
            answer = await reader.read(-1)
            writer.close()
            return answer.startswith(b"HTTP/1.1 200") and b"[DONE]" in answer and b'"error"' not in answer

    return await asyncio.gather(*(one() for _ in range(n)))


@pytest.mark.parametrize("n", [60, pytest.param(500, marks=pytest.mark.soak)])
def test_an_event_loop_held_up_for_two_seconds_under_many_streams_aborts_nobody(n: int) -> None:
    with served(n_pages=8192, latency_s=0.02, max_queue=1000) as (url, app, scheduler):
        aborts = count_aborts(scheduler)
        app.block_s = 2.0

        async def both() -> list[bool]:
            async with httpx.AsyncClient(timeout=60) as http:
                streams = asyncio.ensure_future(read_streams(url, n, 2000 // n + 40, at_once=n))
                while scheduler.stats()["received"] < n:
                    await asyncio.sleep(0.02)
                assert (await http.get(f"{url}/block")).status_code == 200
            return await streams

        assert asyncio.run(both()) == [True] * n
        assert app.live_in_block > n // 2  # the loop was held up while they ran
        assert aborts == []
        assert scheduler.stats()["aborted"] == 0


@pytest.mark.parametrize("n", [100, pytest.param(1000, marks=pytest.mark.soak)])
def test_normal_streams_send_no_abort(n: int) -> None:
    with served(n_pages=8192, max_queue=1000) as (url, _, scheduler):
        aborts = count_aborts(scheduler)
        assert asyncio.run(read_streams(url, n, 2, at_once=100)) == [True] * n
        assert aborts == []
        stats = scheduler.stats()
        assert (stats["aborted"], stats["finished"]) == (0, n)


# -- stalls ----------------------------------------------------------------------------------------------------------


def test_a_step_that_does_not_return_turns_health_to_503_with_its_rows() -> None:
    with served(stall_s=0.5) as (url, app, scheduler):
        runner: Any = app.engine._parts.runner
        assert httpx.get(f"{url}/health", timeout=10).status_code == 200
        runner.stuck_at.update(range(2, 50))
        with (
            httpx.Client(timeout=60) as http,
            http.stream(
                "POST",
                f"{url}/v1/completions",
                json={"prompt": "x", "max_tokens": 9, "ignore_eos": True, "stream": True},
            ) as stream,
        ):
            wait_until(lambda: "has not returned" in httpx.get(f"{url}/health", timeout=10).text, 20)
            health = httpx.get(f"{url}/health", timeout=10)
            assert health.status_code == 503
            assert "1 decode" in health.text
            assert scheduler.stats()["stalls"] == 1
            runner.stuck_at.clear()
            assert "[DONE]" in stream.read().decode()
        wait_until(lambda: httpx.get(f"{url}/health", timeout=10).status_code == 200, 10)


def test_who_waits_too_long_gets_503_and_is_told_when_to_try_again() -> None:
    with (
        served(max_running=1, latency_s=0.002, max_queue_time_s=0.2) as (url, _, scheduler),
        httpx.Client(timeout=60) as hold,
        hold.stream("POST", f"{url}/v1/completions", json=dict(ENDLESS, stream=True)),
    ):
        wait_until(lambda: scheduler.stats()["running"] == 1, 10)
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "y", "max_tokens": 1}, timeout=30)
        assert answer.status_code == 503
        assert answer.json()["error"]["param"] == "max_queue_time_s"
        assert answer.json()["error"]["code"] == "queue_timeout"
        assert "retry-after" in answer.headers


# -- counters --------------------------------------------------------------------------------------------------------


def test_what_the_scheduler_counts_is_in_the_stats_and_in_the_metrics() -> None:
    with served(latency_s=0.001) as (url, app, _):
        for _ in range(2):
            httpx.post(
                f"{url}/v1/completions", json={"prompt": "x" * 100, "max_tokens": 8, "ignore_eos": True}, timeout=30
            )
        stats = app.engine.stats()
        for name in ("plan_s", "launch_s", "wait_s", "commit_s", "queue_s", "step_tokens", "step_rows", "device_s"):
            assert set(stats[name]) == {"mean", "p50", "p99", "max", "total"}
            assert stats[name]["total"] > 0 or name == "queue_s"
        assert 0.0 < stats["gil_free_share"] <= 1.0
        assert 0.0 <= stats["device_idle_share"] < 1.0
        assert (stats["prefilled"], stats["reused"], stats["generated"]) == (101, 99, 16)
        assert stats["steps"] == stats["steps_decode"] + stats["steps_prefill"] + stats["steps_mixed"]
        metrics = httpx.get(f"{url}/metrics", timeout=10).text
        names = {line.split("{")[0] for line in metrics.splitlines() if not line.startswith("#")}
        wanted = ["running", "waiting", "prefilled", "reused", "copied", "retracted_tokens", "preemptions", "evicted"]
        wanted += ["plan_s", "launch_s", "wait_s", "commit_s", "queue_s", "gil_free_share", "steps_mixed"]
        missing = [name for name in wanted if not any(name in known for known in names)]
        assert not missing, sorted(names)


# -- hints and deadlines of a request ----------------------------------------------------------------------------------

SAID_BY_AGENTS = {"program_id": "p", "expect_return_s": 9, "retain": {"ttl_s": 60, "priority": 2}, "expected_fanout": 2}
DOORS = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 1}},
}


def test_hints_come_in_by_every_door_and_the_reply_says_which_were_honoured() -> None:
    with served(eviction_policy="hints") as (url, _, _), httpx.Client(base_url=url, timeout=30) as http:
        wanted = {"program_id", "expect_return_s", "retain", "expected_fanout"}
        for path, body in DOORS.items():
            got = http.post(path, json={**body, "hints": SAID_BY_AGENTS}).json()
            if path == "/v1/responses":
                assert got["status"] in ("completed", "incomplete")
                continue
            assert set((got["usage"] if "usage" in got else got["meta_info"])["hints_honoured"]) == wanted
            plain = http.post(path, json=body).json()
            assert "hints_honoured" not in (plain["usage"] if "usage" in plain else plain["meta_info"])
            steps = http.post(path, json={**body, "hints": {"depth": 3}}).json()
            assert (steps["usage"] if "usage" in steps else steps["meta_info"])["hints_honoured"] == ["depth"]
            refused = http.post(path, json={**body, "hints": {"depth": 4097}})
            assert (refused.status_code, "depth must be" in refused.text) == (400, True)
            for wrong in (
                {"depth": -1},
                {"depth": 1.5},
                {"expect_return_s": -1},
                {"expected_fanout": 10**6},
                {"final": "yes"},
                7,
            ):
                assert http.post(path, json={**body, "hints": wrong}).status_code == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_deadline_ends_a_request_with_408(path: str) -> None:
    with served(latency_s=0.002) as (url, _, scheduler):
        body = {**ENDLESS, "text": "x", "sampling_params": {"max_new_tokens": 15_000, "ignore_eos": True}}
        answer = httpx.post(f"{url}{path}", json={**body, "timeout_s": 0.1}, timeout=30)
        assert answer.status_code == 408
        assert answer.json()["error"]["param"] == "timeout_s"
        assert scheduler.stats()["running"] == 0
