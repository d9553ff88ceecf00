"""Many at once, and something goes wrong for all: the server ends, the queue is full, readers stop reading."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import Counter
from pathlib import Path

import httpx
import zmq
import zmq.asyncio

from runtime.serve.zmq_client import AsyncZmqClient
from runtime.serve.zmq_frames import ZmqReply, ZmqRequest, pack, unpack_reply
from tests.lang.engines import toy_engine, toy_server
from tests.runtime.servers import Server
from tests.serve.scripted import Hold, serve
from tests.serve.test_zmq import door_of

USER = [{"role": "user", "content": "a few words to echo"}]


class Client:
    """Asks again and again, in a thread, until the server takes no more."""

    def __init__(self, url: str, *, stream: bool) -> None:
        self.url, self.stream = url, stream
        self.whole = 0
        self.cut: list[str] = []
        self.last = ""
        self.thread = threading.Thread(target=self._ask)
        self.thread.start()

    def _ask(self) -> None:
        with httpx.Client(base_url=self.url, timeout=30) as http:
            while True:
                status, text = 0, ""
                try:
                    body = {"messages": USER, "stream": self.stream}
                    with http.stream("POST", "/v1/chat/completions", json=body) as response:
                        status = response.status_code
                        text = response.read().decode()
                except httpx.HTTPError as error:
                    self.last = type(error).__name__
                    if status == 200:
                        self.cut.append(text)
                    return
                if status != 200:
                    self.last = f"{status}"
                    return
                complete = (
                    text.endswith("data: [DONE]\n\n") if self.stream else text.endswith("}") and '"usage"' in text
                )
                self.whole += complete
                self.cut += [] if complete else [text]


def test_sigterm_under_load_lets_every_begun_answer_end(tmp_path: Path) -> None:
    server = Server.echoing(tmp_path / "log").wait_ready()
    try:
        clients = [Client(server.url, stream=bool(i % 2)) for i in range(16)]
        server.until(lambda: sum(client.whole for client in clients) > 16)
        server.signal(signal.SIGTERM)
        for client in clients:
            client.thread.join(30)
        assert server.exit_code(20) == 0
    finally:
        server.process.kill()
        server.process.wait()
    assert [text for client in clients for text in client.cut] == []
    assert "503" in {client.last for client in clients}
    assert {client.last for client in clients} <= {"503", "ConnectError", "ReadError", "RemoteProtocolError"}


async def test_who_waits_too_long_in_a_crowd_is_told_before_any_byte_and_the_rest_are_served() -> None:
    engine = toy_engine(latency_s=0.01, max_running=2, max_queue_time_s=0.25, max_queue=24)
    with engine, toy_server(engine) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=64)) as http:

            async def ask(i: int) -> httpx.Response:
                sampling = {"max_new_tokens": 12, "ignore_eos": True}
                return await http.post(
                    "/generate", json={"text": f"{i}", "sampling_params": sampling, "stream": i % 2 == 0}
                )

            answers = await asyncio.gather(*(ask(i) for i in range(40)))
            assert (await http.post("/flush_cache?timeout=5")).status_code == 200
        numbers = engine.stats()
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429, 503}
    for answer in answers:
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "queue_timeout"
        if answer.status_code != 200:
            assert int(answer.headers["retry-after"]) >= 1
    assert (numbers["running"], numbers["waiting"], numbers["used_tokens"]) == (0, 0, 0)


async def test_readers_that_stop_reading_are_dropped_with_an_error_and_nobody_waits_for_them(tmp_path: Path) -> None:
    served = serve(["x" * 300] * 5000, hold=Hold())
    address = f"ipc://{tmp_path}/door"  # local sockets buffer little
    async with door_of(served, endpoint=address, patience_s=1.0, queued=2) as endpoint, asyncio.timeout(60):
        context = zmq.asyncio.Context()
        try:
            lazy = [context.socket(zmq.DEALER) for _ in range(8)]
            for i, socket in enumerate(lazy):
                socket.setsockopt(zmq.RCVHWM, 1)
                socket.connect(endpoint)
                body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 10**7}}
                await socket.send_multipart(pack(b"msgpack", ZmqRequest(id=i, op="generate", body=body)))
            async with AsyncZmqClient(endpoint) as client:
                pings = 0
                while len(set(served.client.aborts)) < len(lazy):
                    assert await client.call("ping") == "pong"
                    pings += 1
                    await asyncio.sleep(0.02)
                assert pings > 5  # in the second for which the others were waited for
            for i, socket in enumerate(lazy):
                await _reads_on_to_its_error(socket, i)
        finally:
            context.destroy(linger=0)
    assert served.generator.n_live == 0


async def _reads_on_to_its_error(socket: zmq.asyncio.Socket, number: int) -> None:
    """Everything that was sent, in order, then why there is no more."""
    seen: list[ZmqReply] = []
    while not seen or seen[-1].event == "data":
        seen.append(unpack_reply(await socket.recv_multipart())[1])
    assert [reply.seq for reply in seen] == list(range(len(seen)))
    assert {reply.id for reply in seen} == {number}
    assert (seen[-1].event, seen[-1].data["code"]) == ("error", "slow_reader")
