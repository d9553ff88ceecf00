"""`ramet bench load`: what a client of any OpenAI-compatible server sees, measures and reports."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from runtime.bench.measure import alternate
from runtime.bench.remote import RemoteServer
from runtime.bench.workloads import WORKLOADS
from runtime.cli import run
from runtime.errors import RametError


class Handler(BaseHTTPRequestHandler):
    """Streams as many words as were asked for; a schema gets an object."""

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "toy"}]}).encode(), "application/json")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path.startswith("/refuses"):
            self.send_error(503)
            return
        n, chat = min(asked["max_tokens"], 5), self.path.endswith("/chat/completions")
        choice: dict[str, Any] = {"delta": {"content": "{}"}} if chat else {"text": " word"}
        events: list[dict[str, Any]] = [{"choices": [choice | {"finish_reason": None}]}] * n
        events.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": n}})
        self._answer(b"".join(b"data: %s\n\n" % json.dumps(e).encode() for e in events) + b"data: [DONE]\n\n", "text")

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def toy_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_reply_counts_what_the_server_counted() -> None:
    with toy_server() as url:
        target = RemoteServer("toy", url)
        assert target.model == "toy"
        reply = target.complete("Hello", 3)
        assert (reply.text, reply.tokens, reply.prompt_tokens) == (" word word word", 3, 7)
        assert len(reply.gaps) == 2
        assert target.object("Hello", {"type": "object"}, 1).text == "{}"


def test_every_workload_runs_against_any_server() -> None:
    with toy_server() as url:
        figures = alternate([RemoteServer("toy", url)], list(WORKLOADS.values()), 1, Console(quiet=True))
    assert len(figures) == 9
    assert all(row["toy"] > 0 for row in figures.values())


def test_a_target_that_fails_is_left_out_and_the_others_go_on() -> None:
    with toy_server() as url:
        good, bad = RemoteServer("good", url), RemoteServer("bad", f"{url}/refuses", model="m")
        works = [WORKLOADS["prefill"], WORKLOADS["unshared"]]
        figures = alternate([bad, good], works, 2, Console(quiet=True))
    assert [set(row) for row in figures.values()] == [{"good"}, {"good"}]


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with toy_server() as url:
        assert run(["bench", "load", "--url", url, "--workload", "prefill"]) == 0
    printed = capsys.readouterr()
    assert "prefill of 500 tokens" in printed.out
    assert "tok/s" in printed.out


def test_what_is_no_server_is_said_in_a_sentence() -> None:
    with pytest.raises(RametError, match="does not answer"):
        RemoteServer("nobody", "http://127.0.0.1:9")
    with pytest.raises(RametError, match="no http"):
        RemoteServer("ftp", "ftp://127.0.0.1")
