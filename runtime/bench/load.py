"""A load generator over bare sockets: cheap enough that a Python server, not the client, is the bottleneck."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Timing:
    """One request as its client saw it, in seconds."""

    first_s: float
    total_s: float
    n_events: int


class Connection:
    """One keep-alive HTTP/1.1 connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        return cls(*await asyncio.open_connection(host, port, limit=LIMIT))

    async def get(self, path: str) -> int:
        """Status of a GET; its body is read and dropped."""
        self._writer.write(f"GET {path} HTTP/1.1\r\nhost: bench\r\n\r\n".encode())
        status, headers = await self._head()
        await self._reader.readexactly(int(headers.get(b"content-length", b"0")))
        return status

    async def post(self, path: str, body: bytes) -> Timing:
        """A POST, streamed or whole. Raises RuntimeError for a status other than 200."""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        started = time.perf_counter()
        self._writer.write(head.encode() + body)
        status, headers = await self._head()
        if status != 200:
            raise RuntimeError(f"the server answered {status}")
        if b"chunked" in headers.get(b"transfer-encoding", b""):
            return await self._read_events(started)
        await self._reader.readexactly(int(headers[b"content-length"]))
        took = time.perf_counter() - started
        return Timing(took, took, 1)

    def close(self) -> None:
        self._writer.close()

    async def _head(self) -> tuple[int, dict[bytes, bytes]]:
        raw = await self._reader.readuntil(b"\r\n\r\n")
        lines = raw.split(b"\r\n")
        pairs = (line.split(b":", 1) for line in lines[1:] if b":" in line)
        return int(lines[0].split(b" ", 2)[1]), {key.lower(): value.strip() for key, value in pairs}

    async def _read_events(self, started: float) -> Timing:
        first, n_events = 0.0, 0
        while True:
            size = int(await self._reader.readuntil(b"\r\n"), 16)
            chunk = await self._reader.readexactly(size + 2)
            if size == 0:
                return Timing(first - started, time.perf_counter() - started, n_events)
            n_events += chunk.count(b"data: {")
            first = first or time.perf_counter()


def chat_body(prompt: str, n_tokens: int, *, stream: bool) -> bytes:
    """A greedy chat request for exactly `n_tokens`."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": n_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    return json.dumps(body).encode()


async def drive(host: str, port: int, bodies: Sequence[bytes], n_connections: int) -> tuple[list[Timing], float]:
    """Send `bodies` over `n_connections` at once; every timing, and the seconds all of it took."""
    todo = iter(bodies)
    timings: list[Timing] = []

    async def work(connection: Connection) -> None:
        for body in todo:
            timings.append(await connection.post("/v1/chat/completions", body))

    connections = [await Connection.open(host, port) for _ in range(min(n_connections, len(bodies)))]
    started = time.perf_counter()
    await asyncio.gather(*map(work, connections))
    took = time.perf_counter() - started
    for connection in connections:
        connection.close()
    return timings, took
