"""The commands a newcomer types, on the real model: `ramet serve`, `ramet generate`, and their ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.servers import Server, gone

RAMET = [sys.executable, "-c", "from ramet import main; main()"]
SMALL = ["--threads", "1", "--max-total-tokens", "4096", "--max-running-requests", "4"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "server.log"
    server = Server(log, [*RAMET, "serve", "--model", "smollm2-135m", "--port", "0", "--audit", *SMALL])
    yield server.wait_ready(timeout_s=120)
    child = server.child
    server.signal(signal.SIGINT)
    assert server.exit_code(20) == 0
    assert gone(child)


def running(server: Server) -> int:
    text = httpx.get(server.url + "/metrics", timeout=10).text
    (line,) = [line for line in text.splitlines() if line.startswith("sglang:num_running_reqs{")]
    return int(float(line.rsplit(" ", 1)[1]))


def test_the_same_question_twice_is_answered_from_the_cache(server: Server) -> None:
    question = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8}
    first, second = (server.chat(**question, temperature=0).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    usage = second["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_a_stream_is_the_answer(server: Server) -> None:
    question = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 12, "temperature": 0}
    whole = server.chat(**question).json()["choices"][0]["message"]["content"]
    text = server.chat(**question, stream=True).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == whole


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "messages"),
        ({"model": "gpt-17"}, 404, "model"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"logit_bias": {"99999999": 1}}, 400, "logit_bias"),
        ({"n": 100_000}, 400, "n"),
        ({"stop": ["x"] * 500_000}, 400, "stop"),
    ],
)
def test_bad_input_is_named_and_the_server_goes_on(
    server: Server, body: dict[str, Any], status: int, param: str
) -> None:
    answer = server.chat(**{"max_tokens": 1, **body})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["param"] == param
    assert len(answer.content) < 4096
    assert server.chat(max_tokens=1).status_code == 200


def test_invalid_json_is_400(server: Server) -> None:
    answer = httpx.post(server.url + "/v1/chat/completions", content=b'{"messages": [', timeout=10)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_client_that_hangs_up_frees_its_place(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Count."}], "stream": True, "max_tokens": 3000, "ignore_eos": True}
    for _ in range(2):
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=30) as response:
            next(response.iter_lines())
    server.until(lambda: running(server) == 0, timeout_s=10)
    assert server.chat(max_tokens=2).status_code == 200


def test_more_requests_than_places_all_finish(server: Server) -> None:
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(server.chat(max_tokens=4).status_code)) for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 10


def test_generate_streams_to_the_terminal() -> None:
    command = [*RAMET, "generate", "--max-tokens", "6", *SMALL, "The capital of France is"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith(" Paris.")


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_model_that_is_none_is_one_sentence_and_2(command: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    words = [] if command == "serve" else ["hello"]
    port = ["--port", "0"] if command == "serve" else []
    out = subprocess.run(
        [*RAMET, command, "--model", str(tmp_path), *port, *words], capture_output=True, text=True, timeout=120
    )
    assert out.returncode == 2
    assert out.stderr.splitlines()[-1].startswith("ramet: ")
    assert "MambaForCausalLM" in out.stderr.splitlines()[-1]
    assert "Traceback" not in out.stderr
