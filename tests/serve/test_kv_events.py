"""KV events on the wire: three frames, big-endian sequence, maps that foreign decoders take, replay."""

from __future__ import annotations

import socket

import msgspec
import pytest
import zmq

from radix.events import AllBlocksCleared, BlockRemoved, BlockStored
from radix.tree import Namespace
from runtime.errors import InvalidRequest
from runtime.serve.kv_config import KvEventsConfig, check_page_size, kv_events_block, read_kv_config
from runtime.serve.kv_events import KvPublisher

STORED = BlockStored((-5, 7), None, tuple(range(32)), 16, Namespace())


class ForeignStored(msgspec.Struct, tag="BlockStored", tag_field="type", forbid_unknown_fields=True):
    """As strict as a subscriber can be: every field declared, none defaulted."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class ForeignRemoved(msgspec.Struct, tag="BlockRemoved", tag_field="type"):
    block_hashes: list[int]
    medium: str | None


class ForeignCleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


class ForeignBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[ForeignStored | ForeignRemoved | ForeignCleared]
    attn_dp_rank: int | None


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture
def endpoints():
    return f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def replay(context, endpoint: str, start: int) -> list[list[bytes]]:
    """Ask for everything from `start` on, as subscribers do."""
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    dealer.send_multipart([b"", start.to_bytes(8, "big")])
    answers = []
    while True:
        assert dealer.poll(5000)
        frames = dealer.recv_multipart()
        if frames[2] == (-1).to_bytes(8, "big", signed=True):
            return answers
        answers.append(frames)


def test_batches_are_three_frames_that_strict_decoders_read(context, endpoints):
    publisher = KvPublisher(KvEventsConfig(endpoint=endpoints[0], replay_endpoint=endpoints[1], topic="kv"))
    reader = context.socket(zmq.SUB)
    reader.connect(endpoints[0])
    reader.setsockopt(zmq.SUBSCRIBE, b"kv")
    while not reader.poll(50):  # a subscription takes a moment to arrive
        publisher([STORED])
    topic, sequence, payload = reader.recv_multipart()
    assert topic == b"kv"
    first = int.from_bytes(sequence, "big")
    publisher([BlockRemoved((7,)), AllBlocksCleared()])
    while True:
        topic, sequence, payload = reader.recv_multipart()
        batch = msgspec.msgpack.decode(payload, type=ForeignBatch)
        if isinstance(batch.events[0], ForeignRemoved):
            break
        assert batch.events == [ForeignStored([-5, 7], None, list(range(32)), 16, None, "GPU", None)]
    assert int.from_bytes(sequence, "big") > first
    assert batch.events == [ForeignRemoved([7], "GPU"), ForeignCleared()]
    publisher.close()


def test_what_was_missed_can_be_replayed(context, endpoints):
    publisher = KvPublisher(KvEventsConfig(endpoint=endpoints[0], replay_endpoint=endpoints[1], buffer_steps=3))
    for i in range(5):
        publisher([BlockRemoved((i,))])
    while len(replay(context, endpoints[1], 4)) < 1:
        pass
    answers = replay(context, endpoints[1], 0)
    assert [int.from_bytes(frames[2], "big") for frames in answers] == [2, 3, 4]
    assert msgspec.msgpack.decode(answers[0][3])[1] == [{"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"}]
    publisher.close()


def test_an_address_in_use_is_one_sentence(endpoints):
    publisher = KvPublisher(KvEventsConfig(endpoint=endpoints[0]))
    with pytest.raises(InvalidRequest, match="cannot be published"):
        KvPublisher(KvEventsConfig(endpoint=endpoints[0]))
    publisher.close()


@pytest.mark.parametrize("text", ["{", '{"publisher":"kafka"}', '{"buffer_steps":"x"}'])
def test_a_broken_configuration_is_refused(text):
    with pytest.raises(InvalidRequest) as error:
        read_kv_config(text)
    assert error.value.param == "kv_events_config"


def test_server_info_tells_where_events_are():
    text = '{"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558","topic":"t"}'
    assert kv_events_block(text, 16) == {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "t",
        "block_size": 16,
        "dp_size": 1,
        "replay_endpoint_port_base": 5558,
    }
    assert kv_events_block(None, 16) is None


def test_small_pages_are_refused():
    with pytest.raises(InvalidRequest, match="page size"):
        check_page_size(KvEventsConfig(), 8)
