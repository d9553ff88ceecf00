"""`ramet serve` as an operator meets it: signals, drains, deaths, exit codes. (The model only echoes.)"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.servers import Reader, Server, gone


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(**options: Any) -> Server:
        servers.append(Server.echoing(tmp_path / f"server{len(servers)}.log", **options))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_idle_server_ends_at_once_with_0_and_leaves_nothing(start: Callable[..., Server], number: int) -> None:
    server = start().wait_ready()
    child = server.child
    assert server.chat().status_code == 200
    began = time.monotonic()
    server.signal(number)
    assert server.exit_code() == 0
    assert time.monotonic() - began < 6
    assert gone(child)


def test_sigterm_drains_readiness_down_nothing_new_streams_end(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    reader = Reader(server)
    server.signal(signal.SIGTERM)
    server.until(lambda: server.status() == 503)
    refused = server.chat()
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    assert reader.finished().is_whole
    assert server.exit_code() == 0


def test_a_second_signal_ends_now(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    reader = Reader(server)
    server.signal(signal.SIGTERM)
    server.until(lambda: server.status() == 503)
    server.signal(signal.SIGTERM)
    assert server.exit_code(5) == 0
    assert not reader.finished().is_whole


def test_what_does_not_finish_in_time_is_aborted(start: Callable[..., Server]) -> None:
    server = start(drain_timeout_s=0.3).wait_ready()
    reader = Reader(server)
    server.signal(signal.SIGTERM)
    assert server.exit_code(10) == 0
    assert not reader.finished().is_whole


@pytest.mark.parametrize("by", ["kill", "exception"])
def test_a_dead_scheduler_is_503_and_a_failing_exit_never_a_hang(start: Callable[..., Server], by: str) -> None:
    server = start().wait_ready()
    reader = Reader(server)
    if by == "kill":
        os.kill(server.child, signal.SIGKILL)
    else:
        assert server.chat(messages=[{"role": "user", "content": "!die"}]).status_code == 503
    reader.finished()
    assert any('"error"' in line and "died" in line for line in reader.lines)
    assert server.exit_code() == 1


def test_a_frozen_scheduler_is_not_ready(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    child = server.child
    os.kill(child, signal.SIGSTOP)
    server.until(lambda: server.status() == 503, timeout_s=8)
    assert server.chat().status_code == 503
    os.kill(child, signal.SIGCONT)
    server.until(lambda: server.status() == 200)
    os.kill(child, signal.SIGSTOP)
    server.signal(signal.SIGTERM)  # a frozen scheduler cannot end in order, and must not keep us
    assert server.exit_code(15) == 0
    assert gone(child)


def test_a_model_that_cannot_be_loaded_is_one_sentence_and_2(start: Callable[..., Server]) -> None:
    server = start(model="broken")
    assert server.exit_code(30) == 2
    assert server.text().splitlines()[-1] == "ramet: The shard model-00002.safetensors is cut short."


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_loading_ends_it(start: Callable[..., Server], number: int) -> None:
    server = start(model="slow")
    server.until(lambda: "Loading" in server.text() and bool(server.children))
    (child,) = server.children
    server.signal(number)
    assert server.exit_code() == 0
    assert gone(child)


def test_a_port_in_use_is_one_sentence_and_2(start: Callable[..., Server]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start(port=port)
        assert server.exit_code(30) == 2
    assert server.text().splitlines()[-1] == f"ramet: Cannot listen on 127.0.0.1:{port}: Address already in use."


def test_json_logs_are_json_from_the_first_line(start: Callable[..., Server]) -> None:
    server = start(log_format="json").wait_ready()
    server.chat()
    server.signal(signal.SIGTERM)
    server.exit_code()
    entries = [json.loads(line) for line in server.text().splitlines()]
    serving = next(entry for entry in entries if entry["message"] == "serving")
    assert serving["url"] == server.url
    assert {"model", "backend", "KV pool", "why"} <= set(serving)
    assert any(entry.get("path") == "/v1/chat/completions" and entry.get("status") == 200 for entry in entries)
