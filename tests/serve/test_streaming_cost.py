"""What one streamed token costs: an event of its own, by a way so short that its calls can be counted."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import pytest

import runtime
from runtime.client import Mailroom
from runtime.messages import Finish, Output, Outputs, Submit, SubmitMany, Usage
from runtime.serve.wire import around, event
from runtime.text.tokenizer import Tokenizer
from tests.serve.scripted import ScriptedClient, Served, data_events, post_scope, serve

MOST_CALLS = 12  # entries of our own Python functions on the way of one token
OURS = str(Path(runtime.__path__[0]).resolve())

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
DOORS = [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi"})]
SHORT = [*DOORS, ("/v1/messages", {"model": "fake", **CHAT})]


class PostedClient(ScriptedClient):
    """Sends what a test posts, the way of a scheduler process's messages."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.mail = Mailroom()
        self.rids: list[str] = []

    def submit(self, item: Submit | SubmitMany, on_output: Any) -> None:
        self.mail.expect(item, on_output)
        self.rids += [one.rid for one in (item.items if isinstance(item, SubmitMany) else (item,))]

    def post(self, byte: int, last: bool = False) -> None:
        finish, usage = (Finish(reason="length"), Usage(prompt_tokens=1)) if last else (None, None)
        outputs = [Output(rid=rid, tokens=(byte,), finish=finish, usage=usage) for rid in self.rids]
        self.mail.deliver(Outputs(items=tuple(outputs)))


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def streamed(served: Served, path: str, body: dict[str, Any], pieces: list[bytes]) -> asyncio.Task[None]:
    """A stream in progress, straight on the app: each body message's bytes go to `pieces`."""
    data = json.dumps({**body, "stream": True, "max_tokens": 1000}).encode()
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:
            await asyncio.Event().wait()
        asked = True
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            pieces.append(message["body"])

    return asyncio.create_task(served.app(post_scope(path), receive, send))


def posted() -> tuple[Served, PostedClient]:
    served = serve()
    client = PostedClient(served.client.tokenizer)
    served.generator.client = client
    return served, client


@pytest.mark.parametrize(("path", "body"), DOORS)
async def test_each_token_is_an_event_and_a_write_of_its_own(path, body):
    served, client = posted()
    pieces: list[bytes] = []
    task = await streamed(served, path, body, pieces)
    await asyncio.sleep(0.05)
    for byte in b"radix":
        client.post(byte)
        await settle()
    client.post(ord("!"), last=True)
    await task
    told = [piece for piece in pieces if b'"content":"' in piece or b'"text":"' in piece]
    assert [len(data_events(piece.decode())) for piece in told[-6:]] == [1] * 6
    assert pieces[-2:] == [b"data: [DONE]\n\n", b""]


@pytest.mark.parametrize(("path", "body"), SHORT)
async def test_a_token_takes_few_calls_from_the_message_to_the_write(path, body):
    served, client = posted()
    pieces: list[bytes] = []
    tasks = [await streamed(served, path, body, pieces) for _ in range(20)]
    await asyncio.sleep(0.1)
    client.post(ord("a"))
    await settle()
    before = len(pieces)
    async with calls() as n:
        for _ in range(10):
            client.post(ord("b"))
            await settle()
    assert len(pieces) - before == 200
    client.post(ord("!"), last=True)
    await asyncio.gather(*tasks)
    assert n[0] / 200 <= MOST_CALLS


@asynccontextmanager
async def calls() -> AsyncIterator[list[int]]:
    """How often our own functions are entered (or resumed) inside."""
    n = [0]

    def count(frame: FrameType, what: str, arg: object) -> None:
        n[0] += what == "call" and frame.f_code.co_filename.startswith(OURS)

    profiler = sys.getprofile()
    sys.setprofile(count)
    try:
        yield n
    finally:
        sys.setprofile(profiler)


@pytest.mark.parametrize("text", ["", "a", '"\\', "\n\t\x00\x1f", "é€😀", "\u2028</script>", "data: [DONE]"])
@pytest.mark.parametrize("name", ["m", "\0", '"\\u0000"', "\0\0"])
def test_an_event_put_together_from_its_frame_is_the_event_itself(text, name):
    def whole(content: str) -> dict[str, Any]:
        return {"model": name, "choices": [{"delta": {"content": content}, "logprobs": None}]}

    before, after = around(event(whole("\0")), "\0")
    assert before + orjson.dumps(text) + after == event(whole(text))
