"""KV events over ZMQ, in the frames that SGLang's, vLLM's and routers' subscribers read.

PUB: topic · sequence (8 bytes, big-endian, from 0) · msgpack `[ts, [event, …], rank]`. A ROUTER replays what is
still buffered. The scheduler's thread only appends to a queue; when that is full, batches are dropped and the
gap in the sequence tells the readers.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from radix.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from runtime.errors import InvalidRequest
from runtime.serve.kv_config import KvEventsConfig

log = logging.getLogger("ramet.kv_events")

MEDIUM = "GPU"  # what subscribers call the tier that answers come from
QUEUE_BATCHES = 8192
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_POLL_MS = 200
_encode = msgspec.msgpack.Encoder().encode


def event_map(event: KvEvent) -> dict[str, Any]:
    """An event as both servers' decoders take it: every field they declare is there."""
    match event:
        case BlockStored():
            return {
                "type": "BlockStored",
                "block_hashes": event.block_hashes,
                "parent_block_hash": event.parent_block_hash,
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": event.namespace.adapter or None,
                "medium": MEDIUM,
                "lora_name": None,
            }
        case BlockRemoved():
            return {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": MEDIUM}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


class KvPublisher:
    """An EventSink that publishes. Never blocks its caller; `close` sends what is queued."""

    def __init__(self, config: KvEventsConfig) -> None:
        """Binds at once. Raises InvalidRequest when an address cannot be had."""
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        self._queue: queue.Queue[tuple[float, Sequence[KvEvent]] | None] = queue.Queue(QUEUE_BATCHES)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._lock = threading.Lock()
        self._closing = False
        self.n_dropped = 0
        self._pub = self._bound(zmq.PUB, config.endpoint, config.hwm)
        self._replay = self._bound(zmq.ROUTER, config.replay_endpoint, 0) if config.replay_endpoint else None
        self._threads = [threading.Thread(target=self._publish, name="ramet-kv-events", daemon=True)]
        if self._replay is not None:
            self._threads.append(threading.Thread(target=self._answer, name="ramet-kv-replay", daemon=True))
        for thread in self._threads:
            thread.start()

    def __call__(self, events: Sequence[KvEvent]) -> None:
        try:
            self._queue.put_nowait((time.time(), events))
        except queue.Full:
            self.n_dropped += 1
            if self.n_dropped == 1:
                log.warning("KV events come faster than they can be sent; batches are dropped")

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._queue.put(None)
        for thread in self._threads:
            thread.join(5)
        self._context.destroy(linger=200)

    def _bound(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, hwm)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidRequest(
                f"KV events cannot be published on {endpoint}: {error.strerror}.", param="kv_events_config"
            ) from error
        return socket

    def _publish(self) -> None:
        sequence = 0
        while (item := self._queue.get()) is not None:
            when, events = item
            payload = _encode([when, [event_map(event) for event in events], None])
            with self._lock:
                self._kept.append((sequence, payload))
            self._pub.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])
            sequence += 1

    def _answer(self) -> None:
        """Replay from a given sequence number on: `[id, b"", start]` -> one message a batch, then the end mark."""
        assert self._replay is not None
        while not self._closing:
            if not self._replay.poll(_POLL_MS):
                continue
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            reader, start = frames[0], int.from_bytes(frames[2], "big")
            with self._lock:
                kept = [item for item in self._kept if item[0] >= start]
            for sequence, payload in kept:
                self._replay.send_multipart([reader, b"", self._topic, sequence.to_bytes(8, "big"), payload])
            self._replay.send_multipart([reader, b"", b"", END_OF_REPLAY, b""])
