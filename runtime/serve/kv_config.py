"""`--kv-events-config`: the JSON that SGLang and vLLM take, checked."""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.errors import InvalidRequest

MIN_PAGE_SIZE = 16


class KvEventsConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Where KV events are published. `buffer_steps`: batches kept for replay; `hwm`: messages queued a reader."""

    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000


def read_kv_config(text: str | None) -> KvEventsConfig | None:
    """The configuration, None when events are off. Raises InvalidRequest."""
    if not text:
        return None
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"kv_events_config cannot be read: {error}.", param="kv_events_config") from None
    if config.publisher not in ("zmq", "null"):
        raise InvalidRequest(
            f"kv_events_config.publisher must be zmq or null; got {config.publisher!r:.40}.", param="kv_events_config"
        )
    return config if config.publisher == "zmq" else None


def check_page_size(config: KvEventsConfig | None, page_size: int) -> None:
    """Readers look up each block: with small pages they drown."""
    if config is not None and page_size < MIN_PAGE_SIZE:
        raise InvalidRequest(
            f"KV events need a page size of {MIN_PAGE_SIZE} or more; it is {page_size}.", param="kv_events_config"
        )


def kv_events_block(text: str | None, page_size: int) -> dict[str, Any] | None:
    """What /server_info tells subscribers; None when events are off."""
    config = read_kv_config(text)
    if config is None:
        return None
    block: dict[str, Any] = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": _port(config.endpoint),
        "topic": config.topic,
        "block_size": page_size,
        "dp_size": 1,
    }
    if config.replay_endpoint is not None:
        block["replay_endpoint_port_base"] = _port(config.replay_endpoint)
    return block


def _port(endpoint: str) -> int:
    port = endpoint.rpartition(":")[2]
    if not port.isdigit():
        raise InvalidRequest(
            f"kv_events_config: {endpoint!r:.80} does not end in a port number.", param="kv_events_config"
        )
    return int(port)
