"""Pieces are written where they arrive; what happens when the client's socket has no room, or no client."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from typing import Any

import pytest

from runtime.generate import Stream
from runtime.messages import Finish, Output, Outputs, Usage
from tests.serve.scripted import Served, data_events, post_scope, serve
from tests.serve.test_streaming_cost import PostedClient, posted, settle

TEXT = "/v1/completions"


class Socket:
    """One request on the app, and a socket that can be full. `written`: the body's pieces."""

    def __init__(self, served: Served, path: str = TEXT, **body: Any) -> None:
        self.written: list[bytes] = []
        self.status = 0
        self.broken = False
        self.room = asyncio.Event()
        self.room.set()
        self.left = asyncio.Event()
        self._body = json.dumps({"prompt": "hi", "stream": True, "max_tokens": 1000, **body}).encode()
        self._asked = False
        self.task = asyncio.create_task(served.app(post_scope(path), self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._asked:
            await self.left.wait()
            self.room.set()  # as servers do: nobody waits for a socket that is gone
            return {"type": "http.disconnect"}
        self._asked = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: Any) -> None:
        if self.broken:
            raise OSError("the socket broke")
        await self.room.wait()
        if self.left.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.written.append(message["body"])

    @property
    def texts(self) -> list[str]:
        events = [json.loads(one) for one in data_events(b"".join(self.written).decode()) if one != "[DONE]"]
        return [event["choices"][0]["text"] for event in events if "choices" in event]


async def begun(**body: Any) -> tuple[Socket, PostedClient, Served]:
    served, client = posted()
    socket = Socket(served, **body)
    await asyncio.sleep(0.05)
    client.post(ord("a"))
    await settle()
    assert (socket.status, socket.texts) == (200, ["a"])
    return socket, client, served


async def test_a_full_socket_holds_back_its_own_answer_alone_and_news_merge_meanwhile():
    slow, client, served = await begun()
    other = Socket(served)
    await asyncio.sleep(0.05)
    slow.room.clear()
    for byte in b"bcdef":
        client.post(byte)
        await settle()
    assert slow.texts == ["a"]
    assert other.texts == ["b", "c", "d", "e", "f"]
    slow.room.set()
    await settle()
    assert slow.texts == ["a", "b", "cdef"]
    client.post(ord("!"), last=True)
    await asyncio.gather(slow.task, other.task)
    assert "".join(slow.texts) == "abcdef!"
    assert slow.written[-2:] == [b"data: [DONE]\n\n", b""]


async def test_the_end_may_come_while_the_socket_is_full():
    slow, client, _ = await begun()
    slow.room.clear()
    client.post(ord("b"))
    client.post(ord("!"), last=True)
    await settle()
    assert not slow.task.done()
    slow.room.set()
    await slow.task
    assert "".join(slow.texts) == "ab!"


async def test_who_leaves_with_a_full_socket_is_aborted():
    slow, client, served = await begun()
    slow.room.clear()
    client.post(ord("b"))
    await settle()
    slow.left.set()
    await slow.task
    assert served.generator.n_live == 0
    client.post(ord("c"))  # nobody is there to be told
    await settle()
    assert slow.texts == ["a"]


async def test_a_failure_behind_a_full_socket_is_told_after_what_came_before_it():
    slow, client, served = await begun()
    slow.room.clear()
    client.post(ord("b"))
    finish = Finish(reason="error", status=500, message="the step failed")
    client.mail.deliver(Outputs(items=tuple(Output(rid=rid, finish=finish, usage=Usage()) for rid in client.rids)))
    await settle()
    slow.room.set()
    await slow.task
    assert slow.texts == ["a", "b"]
    assert b"the step failed" in slow.written[-2]
    assert slow.written[-2].endswith(b"data: [DONE]\n\n")
    assert served.generator.n_live == 0


async def test_a_socket_that_breaks_ends_its_own_answer_alone():
    bad, client, served = await begun()
    good = Socket(served)
    await asyncio.sleep(0.05)
    bad.broken = True
    for byte in b"bc":
        client.post(byte)
        await settle()
    assert good.texts == ["b", "c"]
    client.post(ord("!"), last=True)
    told = await asyncio.gather(bad.task, good.task, return_exceptions=True)
    assert isinstance(told[0], OSError)
    assert "".join(good.texts) == "bc!"
    assert served.generator.n_live == 0


DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/messages": {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/generate": {"text": "hi"},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_ended_is_freed_at_once_not_by_the_garbage_collector(monkeypatch, path, stream):
    made: list[weakref.ref[Stream]] = []
    begin = Stream.__init__

    def noted(self: Stream, *args: Any) -> None:
        begin(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Stream, "__init__", noted)
    served = serve(["a", "b", "c"])
    gc.disable()
    try:
        async with served.http() as http:
            for _ in range(3):
                assert (await http.post(path, json={**DOORS[path], "stream": stream})).status_code == 200
        await settle()
        assert [one() for one in made] == [None] * 3
    finally:
        gc.enable()
