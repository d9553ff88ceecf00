"""Real servers for tests: a scripted app behind uvicorn in a thread, and `ramet serve` itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import httpx
import uvicorn

from tests.serve.scripted import Served

START_S = 280.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextlib.contextmanager
def running(served: Served) -> Iterator[str]:
    """The app's base URL while it runs on a free port of this machine."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(served.app, log_config=None, access_log=False, http="httptools", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        wait_until(lambda: server.started, 20.0)
        yield url
    finally:
        server.should_exit = True
        thread.join(20)
        sock.close()


def wait_until(condition, seconds: float) -> None:
    """Poll until `condition()`; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.01)


@contextlib.contextmanager
def ramet_serve(*flags: str) -> Iterator[str]:
    """`ramet serve` with SmolLM2 in processes of its own, as users start it."""
    port = free_port()
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    code = "import ramet, sys; sys.exit(ramet.main())"
    command = [sys.executable, "-c", code, "serve", "--port", str(port), *flags]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=env, stderr=log)
        try:
            wait_until(lambda: _answers(url) or process.poll() is not None, START_S)
            log.seek(0)
            assert process.poll() is None, log.read()
            yield url
        finally:
            process.terminate()
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
