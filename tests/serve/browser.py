"""A headless Chromium, driven over WebDriver (Debian: chromium, chromium-driver)."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.serve.running import CHROMIUM, free_port, wait_until

DRIVER = shutil.which("chromedriver")
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1300"]


class Browser:
    """One window."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http = http
        self._base = f"/session/{session}"

    def open(self, url: str) -> None:
        self._do("POST", "/url", url=url)

    def script(self, source: str) -> Any:
        """What a JavaScript function body returns."""
        return self._do("POST", "/execute/sync", script=source, args=[])

    def wait(self, condition: str, seconds: float) -> None:
        wait_until(lambda: self.script(f"return Boolean({condition})"), seconds)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._do("GET", "/screenshot")))

    def _do(self, method: str, path: str, **body: Any) -> Any:
        response = self._http.request(method, self._base + path, json=body if method == "POST" else None)
        assert response.status_code == 200, response.text
        return response.json()["value"]


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with its profile in `folder`."""
    port = free_port()
    assert DRIVER is not None
    with subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                wait_until(lambda: _listens(http), 30)
                options = {"args": [*FLAGS, f"--user-data-dir={folder}"], "binary": CHROMIUM}
                wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
                session = http.post("/session", json=wanted).json()["value"]["sessionId"]
                yield Browser(http, session)
                http.delete(f"/session/{session}")
        finally:
            driver.terminate()


def _listens(http: httpx.Client) -> bool:
    try:
        return bool(http.get("/status").json()["value"]["ready"])
    except httpx.HTTPError:
        return False
