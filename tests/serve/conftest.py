"""One real server with SmolLM2 for all tests of this folder that want one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.browser import DRIVER
from tests.serve.running import CHROMIUM, free_port, ramet_serve

collect_ignore = [] if CHROMIUM and DRIVER else ["test_page.py"]


@pytest.fixture(scope="session")
def kv_ports() -> tuple[int, int]:
    """Ports of the live server's KV events and of its ZMQ door."""
    return free_port(), free_port()


@pytest.fixture(scope="session")
def live(kv_ports: tuple[int, int]) -> Iterator[str]:
    """The base URL of `ramet serve` with SmolLM2."""
    events, door = kv_ports
    with ramet_serve(
        "--threads=1",
        "--max-total-tokens=8192",
        "--log-format=json",
        f"--zmq-endpoint=tcp://127.0.0.1:{door}",
        f'--kv-events-config={{"endpoint":"tcp://127.0.0.1:{events}"}}',
    ) as url:
        yield url
