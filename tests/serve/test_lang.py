"""The door of DSL programs: sequences by handle, one line a piece, refusals with their place."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from runtime.messages import Segment, pack_ids
from runtime.params import SamplingParams
from runtime.serve.lang import Handles
from runtime.trail import Trail
from tests.lang.engines import toy_engine, toy_server


def ids(*values: int) -> Any:
    return np.asarray(values, np.int32)


def test_handles_belong_to_their_owner_and_go_oldest_first() -> None:
    handles = Handles(max_tokens=10)
    handles.put("a", "me", ids(1, 2, 3, 4))
    handles.put("b", "me", ids(5, 6, 7, 8))
    assert handles.get("a", "you") is None
    assert handles.get("a", "me").tolist() == [1, 2, 3, 4]  # and now the younger
    handles.put("c", "me", ids(9, 9, 9))
    assert handles.get("b", "me") is None
    assert len(handles) == 2


def test_a_lease_ends() -> None:
    handles = Handles(lease_s=-1.0)
    handles.put("a", "me", ids(1))
    assert handles.get("a", "me") is None


def test_a_trail_drops_the_stop_id_before_a_segment() -> None:
    segment = Segment(tokens=pack_ids([7, 8]), params=SamplingParams())
    trail = Trail(ids(1, 2), (segment,), stop_ids={0})
    trail.add(0, (3,))
    trail.add(0, (4, 0))
    trail.add(1, (5, 0))
    assert trail.ids().tolist() == [1, 2, 3, 4, 7, 8, 5, 0]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with toy_engine() as engine, toy_server(engine) as url:
        yield url


def submit(url: str, *requests: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/lang/submit", json={"requests": requests}, timeout=30)


def request(rid: str, values: list[int], **more: Any) -> dict[str, Any]:
    suffix = base64.b64encode(pack_ids(values)).decode()
    return {"rid": rid, "suffix": suffix, "params": {"max_tokens": 3, "temperature": 0, "ignore_eos": True}, **more}


def lines(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def test_a_continuation_sends_its_suffix_only(url: str) -> None:
    whole = list(range(40, 80))
    first, *news = lines(submit(url, request("a", whole)))
    made = [token for line in news for token in line["token_ids"]]
    more = request("b", [65, 66], parent=first["handles"][0], keep=len(whole) + len(made))
    by_handle = lines(submit(url, more))[1:]
    by_ids = lines(submit(url, request("c", [*whole, *made, 65, 66])))[1:]
    tokens = [[token for line in found for token in line["token_ids"]] for found in (by_handle, by_ids)]
    assert tokens[0] == tokens[1]
    assert by_handle[-1]["usage"]["prompt_tokens"] == len(whole) + len(made) + 2


def test_a_lost_handle_is_a_409_that_names_its_requests(url: str) -> None:
    reply = submit(url, request("d", [65]), request("e", [65], parent="gone", keep=1))
    assert reply.status_code == 409
    assert reply.json() == {"lost": [1]}


def test_bad_bodies(url: str) -> None:
    assert submit(url).status_code == 400
    assert httpx.post(f"{url}/lang/submit", content=b"{", timeout=30).status_code == 400
    odd = {**request("f", []), "suffix": base64.b64encode(b"abc").decode()}
    assert "suffix" in submit(url, odd).json()["error"]["param"]
    empty = submit(url, request("g", []))
    assert empty.status_code == 400


def test_one_refused_request_is_a_line_of_its_own(url: str) -> None:
    found = lines(submit(url, request("h", [65, 66]), request("i", [])))
    assert [line["i"] for line in found if "error" in line] == [1]
    assert any(line.get("usage") for line in found)


def test_the_tokenizer_travels_whole(url: str) -> None:
    from runtime.text.tokenizer import Tokenizer

    about = httpx.get(f"{url}/lang/tokenizer", timeout=30).json()
    tokenizer = Tokenizer.from_json(about["tokenizer"], eos_ids=about["eos_ids"])
    assert tokenizer.encode("hé <|im_end|>") == [*("hé ".encode()), about["eos_ids"][0]]


def test_aborting_nothing(url: str) -> None:
    reply = httpx.post(f"{url}/lang/abort", json={"rids": ["nobody"]}, timeout=30)
    assert reply.json() == {"aborted": 0}
