"""A server in a process of its own, and clients of it, for tests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

SLOW = "~ " * 150  # about 300 tokens, 20 ms each
MESSAGE = {"messages": [{"role": "user", "content": SLOW}], "stream": True}


class Server:
    """A server in a process of its own, its standard error in `log`."""

    def __init__(self, log: Path, command: list[str]) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stderr=out, stdin=subprocess.DEVNULL)
        self.url = ""

    @classmethod
    def echoing(cls, log: Path, *, model: str = "echo", parts: str = "echo_words", **server: Any) -> Server:
        """`run_server` over a scheduler that only echoes."""
        code = (
            "import sys\n"
            "from runtime.config import EngineConfig, ServerConfig\n"
            "from runtime.server import run_server\n"
            f"server = ServerConfig(**{ {'port': 0, **server}!r})\n"
            f"sys.exit(run_server(EngineConfig(model={model!r}), server, parts='tests.runtime.toys:{parts}'))\n"
        )
        return cls(log, [sys.executable, "-c", code])

    def wait_ready(self, timeout_s: float = 30.0) -> Server:
        address = re.compile(r"http://127\.0\.0\.1:\d+")
        self.until(lambda: bool(address.search(self.text())) or self.process.poll() is not None, timeout_s)
        match = address.search(self.text())
        assert match, self.text()
        self.url = match.group()
        return self

    def text(self) -> str:
        return self.log.read_text()

    def until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.01)

    @property
    def children(self) -> list[int]:
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]

    @property
    def child(self) -> int:
        """The scheduler process."""
        (child,) = self.children
        return child

    def status(self, path: str = "/health") -> int:
        return httpx.get(self.url + path, timeout=5).status_code

    def chat(self, **more: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "hi"}], **more}
        return httpx.post(self.url + "/v1/chat/completions", json=body, timeout=10)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_code(self, timeout_s: float = 10) -> int:
        return self.process.wait(timeout_s)


class Reader:
    """A client that reads one stream to its end, in a thread."""

    def __init__(self, server: Server) -> None:
        self.lines: list[str] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(server.url,))
        self._thread.start()
        server.until(lambda: len(self.lines) > 3)

    def _read(self, url: str) -> None:
        try:
            with httpx.stream("POST", url + "/v1/chat/completions", json=MESSAGE, timeout=30) as response:
                for line in response.iter_lines():
                    self.lines += [line] if line else []
        except httpx.HTTPError as err:
            self.error = err

    def finished(self) -> Reader:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line[6:]) for line in self.lines if line.startswith("data: {")]

    @property
    def is_whole(self) -> bool:
        """The answer came to its own end: everything echoed, a finish reason, [DONE]."""
        choices = [choice for event in self.events for choice in event.get("choices", [])]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        return SLOW.strip() in text and bool(choices[-1]["finish_reason"]) and self.lines[-1] == "data: [DONE]"


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True
