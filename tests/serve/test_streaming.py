"""Streams: framing byte by byte, stops, half characters, usage, errors before and after the first byte."""

from __future__ import annotations

import json

import pytest

from runtime.messages import Finish
from tests.serve.scripted import Served, data_events, serve

USER = [{"role": "user", "content": "hi"}]
EMOJI = "😀".encode()


async def chat(served: Served, **body) -> dict:
    async with served.http() as http:
        response = await http.post("/v1/chat/completions", json={"messages": USER, **body})
        assert response.status_code == 200, response.text
        return response.json()


async def stream(served: Served, path: str = "/v1/chat/completions", **body) -> list[dict]:
    """The chunks of a stream that ended with [DONE]."""
    base = {"messages": USER} if "chat" in path else {"prompt": "hi", "max_tokens": 100}
    async with served.http() as http:
        response = await http.post(path, json={**base, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = data_events(response.text)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def text_of(chunks: list[dict], index: int = 0) -> str:
    parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in parts)


@pytest.mark.parametrize("k", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("stop", "pieces", "text", "matched"),
    [
        (["\nUser:"], ["hi", "\nUs", "er", ":", "x"], "hi", "\nUser:"),
        (["\nUser:"], ["a", "\n", "b"], "a\nb", None),
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["END", "ENDING"], ["the ", "ENDI", "NG"], "the ", "END"),
        (["five"], ["four, ", "five", ", six"], "four, ", "five"),
    ],
)
async def test_a_stop_string_never_leaks_and_both_modes_agree(k, stop, pieces, text, matched):
    served = serve(pieces, k=k)
    whole = await chat(served, stop=stop)
    chunks = await stream(served, stop=stop)
    assert whole["choices"][0]["message"]["content"] == text_of(chunks) == text
    assert whole["choices"][0]["matched_stop"] == chunks[-1]["choices"][0]["matched_stop"] == matched
    native = await native_stream(served, stop)
    assert native[-1]["text"] == text
    assert all(text.startswith(step["text"]) for step in native)


async def native_stream(served: Served, stop: list[str]) -> list[dict]:
    async with served.http() as http:
        response = await http.post(
            "/generate", json={"text": "hi", "stream": True, "sampling_params": {"stop": stop, "max_new_tokens": 50}}
        )
    return [json.loads(chunk) for chunk in data_events(response.text)[:-1]]


async def test_the_stop_is_shown_when_asked_for():
    whole = await chat(serve(["xa", "by"], k=2), stop=["ab"], include_stop_str_in_output=True)
    assert whole["choices"][0]["message"]["content"] == "xab"
    assert whole["choices"][0]["matched_stop"] == "ab"


async def test_the_end_of_sequence_is_no_matched_stop():
    assert (await chat(serve(["x"])))["choices"][0]["matched_stop"] is None


async def test_no_delta_holds_half_a_character():
    chunks = await stream(serve([bytes([b]) for b in EMOJI]))
    assert text_of(chunks) == "😀"
    assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)


@pytest.mark.parametrize("n_bytes", [1, 2, 3])
async def test_a_character_cut_off_by_the_limit_is_one_replacement_in_both_modes(n_bytes):
    served = serve([bytes([b]) for b in EMOJI])
    assert (await chat(served, max_tokens=n_bytes))["choices"][0]["message"]["content"] == "\ufffd"
    assert text_of(await stream(served, max_tokens=n_bytes)) == "\ufffd"


async def test_a_prompt_that_ends_inside_a_character_is_not_replayed():
    served = serve([bytes([0xAC]), "!"])
    prompt = [*b"Hello ", 0xE2, 0x82]
    assert text_of(await stream(served, "/v1/completions", prompt=prompt)) == "€!"


async def test_the_role_comes_once_with_the_first_token_and_the_finish_once():
    chunks = await stream(serve(["a", "b"]))
    roles = [c["choices"][0]["delta"].get("role") for c in chunks]
    assert roles == ["assistant"] + [None] * (len(chunks) - 1)
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert {(c["id"], c["created"], c["model"], c["object"]) for c in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "fake", "chat.completion.chunk")
    }


async def test_several_answers_come_under_their_own_index():
    served = serve(["a", "b"])
    chunks = await stream(served, n=3, stream_options={"include_usage": True})
    assert [c["choices"][0]["index"] for c in chunks[:3]] == [0, 1, 2]
    assert all(c["choices"][0]["delta"].get("role") == "assistant" for c in chunks[:3])
    assert [text_of(chunks[:-1], i) for i in range(3)] == ["ab"] * 3
    assert sum(c["choices"][0]["finish_reason"] is not None for c in chunks[:-1]) == 3
    assert chunks[-1]["choices"] == []
    whole = await chat(served, n=3)
    assert whole["usage"] == chunks[-1]["usage"]
    assert whole["usage"]["prompt_tokens"] == (await chat(served))["usage"]["prompt_tokens"]


async def test_usage_comes_last_if_and_only_if_asked_for():
    served = serve(["a"])
    assert all(chunk["choices"] for chunk in await stream(served))
    *rest, last = await stream(served, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert all("usage" not in chunk for chunk in rest)
    always = await stream(served, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert all(isinstance(chunk["usage"]["completion_tokens"], int) for chunk in always)


async def test_stream_options_without_a_stream_are_refused():
    async with serve().http() as http:
        body = {"messages": USER, "stream_options": {"include_usage": True}}
        response = await http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


async def test_logprobs_with_tools_and_zero_alternatives_are_exact_bytes():
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    served = serve([bytes([b]) for b in EMOJI])
    for body in ({"logprobs": True, "top_logprobs": 0, "tools": [tool]}, {"logprobs": True}):
        entries = (await chat(served, **body))["choices"][0]["logprobs"]["content"]
        assert [e["bytes"] for e in entries[:4]] == [[b] for b in EMOJI]
        assert all(e["top_logprobs"] == [] and isinstance(e["logprob"], float) for e in entries)
        chunks = await stream(served, **body)
        streamed = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {}).get("content", [])]
        assert streamed == entries


async def test_zero_logprobs_of_text_completions_still_give_the_chosen_token():
    async with serve(["ab"]).http() as http:
        body = {"prompt": "hi", "logprobs": 0, "echo": True, "max_tokens": 2}
        logprobs = (await http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "i", "a", "b"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert len({len(v) for v in logprobs.values()}) == 1


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses", "/v1/messages"]
)
async def test_an_error_before_the_first_byte_is_a_status(path):
    served = serve(error=Finish(reason="error", status=400, message="no such grammar", param="response_format"))
    body = {
        "messages": USER,
        "prompt": "x",
        "text": "x",
        "input": "x",
        "model": "fake",
        "max_tokens": 5,
        "stream": True,
    }
    if path == "/v1/responses":
        del body["text"]
    async with served.http() as http:
        response = await http.post(path, json=body)
    assert response.status_code == 400
    assert "no such grammar" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/chat/completions", "data: [DONE]"),
        ("/v1/completions", "data: [DONE]"),
        ("/generate", "data: [DONE]"),
        ("/v1/responses", "event: response.failed"),
        ("/v1/messages", "event: error"),
    ],
)
async def test_an_error_after_the_first_byte_is_an_event_and_then_the_end(path, last):
    served = serve(["a", "b", "c"], fail_at=2)
    body = {
        "messages": USER,
        "prompt": "x",
        "text": "x",
        "input": "x",
        "model": "fake",
        "max_tokens": 9,
        "stream": True,
    }
    if path == "/v1/responses":
        del body["text"]
    async with served.http() as http:
        response = await http.post(path, json=body)
    assert response.status_code == 200
    *_, end = response.text.rstrip("\n").split("\n\n")
    assert end.startswith(last)
    assert "the step failed" in response.text


async def test_whole_answers_with_a_failed_step_are_a_5xx():
    async with serve(["a", "b"], fail_at=1).http() as http:
        response = await http.post("/v1/chat/completions", json={"messages": USER})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the step failed"


async def test_bad_counts_are_refused_before_a_stream_begins():
    async with serve().http() as http:
        response = await http.post("/v1/chat/completions", json={"messages": USER, "stream": True, "n": 0})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
