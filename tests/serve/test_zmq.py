"""The ZMQ door: both codecs, streams in order, the same validation and keys as HTTP, garbage, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import msgspec
import pytest
import zmq
import zmq.asyncio

from runtime.config import ServerConfig
from runtime.errors import InvalidRequest, NotFound, RequestFailed
from runtime.serve.context import make_serving
from runtime.serve.zmq_client import AsyncZmqClient, ZmqClient
from runtime.serve.zmq_door import ZmqDoor, check_endpoint
from runtime.serve.zmq_frames import ZmqRequest, pack, unpack_reply
from tests.serve.scripted import Hold, Pool, Served, serve

ANY_PORT = "tcp://127.0.0.1:*"
USER = [{"role": "user", "content": "hi"}]


@contextlib.asynccontextmanager
async def door_of(
    served: Served, *, api_key: str | None = None, endpoint: str = ANY_PORT, **options
) -> AsyncIterator[str]:
    serving = make_serving(served.generator, served.generator.config, ServerConfig(api_key=api_key), Pool())
    door = ZmqDoor(serving, endpoint, **options)
    try:
        yield door.endpoint
    finally:
        await door.close()


@pytest.mark.parametrize("codec", ["msgpack", "json"])
async def test_chat_and_generate_answer_as_over_http(codec):
    async with door_of(serve(["Hel", "lo"])) as endpoint, AsyncZmqClient(endpoint, codec=codec) as client:
        answer = await client.generate("abc", max_new_tokens=50)
        assert answer["text"] == "Hello"
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        chat = await client.chat(USER)
        assert chat["choices"][0]["message"]["content"] == "Hello"
        chunks = [chunk async for chunk in client.stream_chat(USER)]
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello"
        assert await client.call("ping") == "pong"
        assert (await client.call("tokenize", text="ab"))["tokens"] == [97, 98]
        assert (await client.call("detokenize", tokens=[97, 98]))["text"] == "ab"
        assert (await client.call("models"))[0]["id"] == "fake"
        assert isinstance(await client.call("stats"), dict)


async def test_the_sync_client_works_from_a_thread():
    async with door_of(serve(["a", "b", "c"])) as endpoint:

        def program() -> list[str]:
            with ZmqClient(endpoint, timeout_s=10) as client:
                first, second = client.stream("x", max_new_tokens=9), client.stream("y", max_new_tokens=9)
                texts = [next(first)["text"], next(second)["text"]]  # two streams read in turns
                return [*texts, [*first][-1]["text"], [*second][-1]["text"]]

        texts = await asyncio.to_thread(program)
    assert all(texts[:2])
    assert texts[2:] == ["abc", "abc"]


async def test_replies_are_numbered_from_zero_and_the_last_says_end():
    async with door_of(serve(["a", "b", "c"])) as endpoint:
        replies = await raw(endpoint, ZmqRequest(id="q", op="chat", body={"messages": USER, "stream": True}))
    assert [r.seq for r in replies] == list(range(len(replies)))
    assert [r.event for r in replies] == ["data"] * (len(replies) - 1) + ["end"]
    assert {r.id for r in replies} == {"q"}


async def raw(endpoint: str, request: ZmqRequest | list[bytes]):
    """Replies to hand-made frames."""
    with sockets() as context:
        socket = context.socket(zmq.DEALER)
        socket.connect(endpoint)
        await socket.send_multipart(request if isinstance(request, list) else pack(b"json", request))
        replies = []
        while not replies or replies[-1].event == "data":
            assert await socket.poll(10_000)
            replies.append(unpack_reply(await socket.recv_multipart())[1])
        return replies


@contextlib.contextmanager
def sockets():
    """A context that ends with the test, also when it fails: left to the collector, it would wait for its sockets."""
    context = zmq.asyncio.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": USER, "temperature": -1}, "temperature"),
        ({"messages": USER, "temperature": "NaN"}, "temperature"),
        ({"messages": USER, "logit_bias": {"99999": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": USER, "n": 100000}, "n"),
        ({}, "messages"),
    ],
)
async def test_bad_requests_are_refused_with_the_parameter(body, param):
    async with door_of(serve()) as endpoint, AsyncZmqClient(endpoint) as client:
        with pytest.raises(InvalidRequest) as error:
            await client.call("chat", **body)
        assert error.value.param == param
        assert (await client.chat(USER))["choices"]


async def test_unknown_models_and_operations_have_their_own_errors():
    async with door_of(serve()) as endpoint, AsyncZmqClient(endpoint) as client:
        with pytest.raises(NotFound):
            await client.chat(USER, model="zork")
        with pytest.raises(InvalidRequest, match="Unknown op"):
            await client.call("zork")


async def test_a_failed_request_is_an_error_reply():
    async with door_of(serve(["a", "b"], fail_at=1)) as endpoint, AsyncZmqClient(endpoint) as client:
        with pytest.raises(RequestFailed, match="the step failed"):
            await client.chat(USER)


GARBAGE = [
    [b"pickle", pickle.dumps({"op": "chat"})],
    [pickle.dumps(print)],
    [b"json", b"{"],
    [b"json", b"[]"],
    [b"msgpack", b"\xc1"],
    [b"json", b'{"op":"chat"}'],
    [b"json", b"[" * 100_000],
    [b"", b"", b"", b""],
]


@pytest.mark.parametrize("frames", GARBAGE, ids=range(len(GARBAGE)))
async def test_garbage_gets_an_error_reply_and_harms_nobody(frames):
    async with door_of(serve()) as endpoint:
        [reply] = await raw(endpoint, frames)
        assert (reply.event, reply.id, reply.data["status"]) == ("error", None, 400)
        async with AsyncZmqClient(endpoint) as client:
            assert await client.call("ping") == "pong"


STRANGE = [b"\xff", msgspec.msgpack.Ext(5, b"a"), datetime.now(UTC), {b"key": 1}, {datetime.now(UTC): 1}]


@pytest.mark.parametrize("strange", STRANGE, ids=["bytes", "extension", "time", "bytes key", "time key"])
async def test_a_value_that_json_has_not_is_refused_by_its_place(strange):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"default": strange}}}}}
    async with door_of(serve(["ok"])) as endpoint:
        body = {"messages": USER, "tools": [tool]}
        (reply,) = await raw(endpoint, pack(b"msgpack", ZmqRequest(id="q", op="chat", body=body)))
        assert (reply.event, reply.id, reply.data["status"]) == ("error", "q", 400)
        assert reply.data["param"] == "tools[0].function.parameters.properties.a.default"
        fine = {"messages": USER, "max_tokens": 2**40, "logit_bias": {5: 1.0}}  # their own checks see these
        (reply,) = await raw(endpoint, pack(b"msgpack", ZmqRequest(id="q", op="chat", body=fine)))
        assert reply.data["param"] == "logit_bias"


async def test_the_key_is_checked():
    async with door_of(serve(), api_key="secret") as endpoint:
        async with AsyncZmqClient(endpoint, key="secret") as client:
            assert await client.call("ping") == "pong"
        async with AsyncZmqClient(endpoint) as client:
            with pytest.raises(InvalidRequest, match="API key"):
                await client.call("ping")


async def test_a_request_is_aborted_by_the_clients_own_id():
    hold = asyncio.Event()
    served = serve(["a", "b"], hold=hold)
    async with door_of(served) as endpoint, AsyncZmqClient(endpoint) as client:
        running = asyncio.create_task(client.call("generate", text="x", rid="mine"))
        while not served.client.submits:
            await asyncio.sleep(0.01)
        assert await client.call("abort", rid="other") == {"aborted": 0}
        assert await client.call("abort", rid="mine") == {"aborted": 1}
        assert served.client.aborts == [served.client.submits[0].rid]
        running.cancel()


async def test_a_client_that_does_not_read_is_dropped_and_others_go_on(tmp_path):
    served = serve(["x" * 300] * 2000, hold=Hold())
    address = f"ipc://{tmp_path}/door"  # local sockets buffer little
    async with door_of(served, endpoint=address, patience_s=0.2, queued=2) as endpoint, asyncio.timeout(60):
        with sockets() as context:
            lazy = context.socket(zmq.DEALER)
            lazy.setsockopt(zmq.RCVHWM, 1)
            lazy.connect(endpoint)
            body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 10**7}}
            await lazy.send_multipart(pack(b"msgpack", ZmqRequest(id=1, op="generate", body=body)))
            async with AsyncZmqClient(endpoint) as client:
                while not served.client.aborts:
                    assert await client.call("ping") == "pong"
                    await asyncio.sleep(0.05)
            assert served.client.aborts == [served.client.submits[0].rid]


async def test_a_client_that_leaves_is_aborted():
    hold = asyncio.Event()
    served = serve(["a"] * 50, hold=hold)
    async with door_of(served) as endpoint:
        with sockets() as context:
            socket = context.socket(zmq.DEALER)
            socket.connect(endpoint)
            body = {"messages": USER, "stream": True}
            await socket.send_multipart(pack(b"json", ZmqRequest(id=1, op="chat", body=body)))
            while not served.client.submits:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        hold.set()
        async with asyncio.timeout(10):
            while not served.client.aborts:
                await asyncio.sleep(0.01)


def test_an_open_endpoint_needs_a_key():
    check_endpoint("tcp://127.0.0.1:1", has_key=False)
    check_endpoint("ipc:///tmp/x", has_key=False)
    check_endpoint("tcp://0.0.0.0:1", has_key=True)
    for endpoint in ("tcp://0.0.0.0:1", "tcp://*:1", "tcp://10.0.0.1:1"):
        with pytest.raises(InvalidRequest, match="api-key"):
            check_endpoint(endpoint, has_key=False)
    with pytest.raises(InvalidRequest, match="must be tcp"):
        check_endpoint("udp://127.0.0.1:1", has_key=False)


async def test_an_address_in_use_is_one_sentence():
    served = serve()
    async with door_of(served) as endpoint:
        serving = make_serving(served.generator, served.generator.config, ServerConfig(), Pool())
        with pytest.raises(InvalidRequest, match="Cannot listen"):
            ZmqDoor(serving, endpoint)
