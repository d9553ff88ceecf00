"""What hurt users of such servers, as they met it: each test is one report, with the input that showed it."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import time

import httpx
import pytest

from runtime.config import ServerConfig
from runtime.errors import RametError
from runtime.serve.zmq_client import AsyncZmqClient
from tests.lang.engines import toy_engine, toy_server
from tests.serve.running import running
from tests.serve.scripted import CHATML, THINKING, Hold, serve
from tests.serve.test_door import test_one_bad_value_is_refused_by_name_and_harms_nobody as door_test
from tests.serve.test_streaming import chat, text_of
from tests.serve.test_streaming import stream as raw_stream
from tests.serve.test_tools import NOW, USER, WEATHER, choice, post, stream
from tests.serve.test_zmq import door_of

MISTRAL = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if tools %}[TOOL_CALLS]{% endif %}")


class TestTextThatWasHeldBack:
    @pytest.mark.parametrize("k", [1, 2, 3])
    async def test_half_a_marker_at_the_end_is_text_in_both_modes(self, k):
        for template, body in ((CHATML, {"tools": [NOW]}), (THINKING, {})):
            for tail in ("<tool_ca", "<thi", "a < b"):
                served = serve(["4", "2 ", *tail], k=k, template=template)
                whole = await choice(served, **body)
                chunks = await stream(served, **body)
                streamed = "".join(c["delta"].get("content") or "" for c in chunks)
                assert whole["message"]["content"] == streamed == f"42 {tail}"

    async def test_nothing_comes_after_a_stop_with_parsers_on(self):
        served = serve(["four, ", "five", ", six"], k=3, template=THINKING)
        chunks = await raw_stream(served, stop=["five"], tools=[NOW])
        assert text_of(chunks) in ("four, ", "four,")
        assert chunks[-1]["choices"][0]["matched_stop"] == "five"

    async def test_logprobs_stay_where_thoughts_are_split_off(self):
        served = serve(["<think>", "h", "</think>", "42"], template=THINKING)
        whole = (await chat(served, logprobs=True))["choices"][0]
        assert whole["message"]["reasoning_content"] == "h"
        entries = whole["logprobs"]["content"]
        assert b"".join(bytes(e["bytes"]) for e in entries).startswith(b"<think>h</think>42")
        chunks = await raw_stream(served, logprobs=True)
        assert [e for c in chunks for e in (c["choices"][0]["logprobs"] or {}).get("content", [])] == entries


class TestReasoningIsCounted:
    @pytest.mark.parametrize(
        ("pieces", "n"), [(["<think>", "ab", "</think>", "42"], 17), (["42"], 0), (["<think>", "abc"], 11)]
    )
    async def test_tokens_up_to_the_closing_tag(self, pieces, n):
        served = serve(pieces, template=THINKING)
        assert (await chat(served))["usage"]["completion_tokens_details"]["reasoning_tokens"] == n
        async with served.http() as http:
            response = (await http.post("/v1/responses", json={"input": "hi"})).json()
            native = (await http.post("/generate", json={"text": "hi"})).json()
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == n
        assert native["meta_info"]["reasoning_tokens"] == n


class TestCalls:
    async def test_required_says_tool_calls_if_and_only_if_there_are_some_streamed_too(self):
        chunks = await stream(serve(['[{"name":"now",', '"arguments":{}}]']), tools=[NOW], tool_choice="required")
        calls = [c for x in chunks for c in x["delta"].get("tool_calls", [])]
        assert calls[0]["function"]["name"] == "now"
        assert chunks[-1]["finish_reason"] == "tool_calls"

    async def test_a_required_call_cut_off_by_the_limit_is_a_length_finish(self):
        served = serve(list('[{"name":"get_weather","arguments":{"city":"Rome"}}]'))
        body = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 45}
        whole, chunks = await choice(served, **body), await stream(served, **body)
        assert whole["finish_reason"] == chunks[-1]["finish_reason"] == "length"
        streamed = "".join(c["function"]["arguments"] for x in chunks for c in x["delta"].get("tool_calls", []))
        assert whole["message"]["tool_calls"][0]["function"]["arguments"] == streamed == '{"city":"R'

    async def test_short_ids_round_trip_on_the_second_turn(self):
        served = serve(['[TOOL_CALLS][{"name": "add", "arguments": {"a":3}}]'], template=MISTRAL)
        message = (await choice(served, tools=[WEATHER]))["message"]
        [call] = message["tool_calls"]
        assert (len(call["id"]), call["id"].isalnum()) == (9, True)
        assert json.loads(call["function"]["arguments"]) == {"a": 3}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        assert (await post(served, messages=[*USER, message, result], tools=[WEATHER])).status_code == 200

    @pytest.mark.parametrize("arguments", ["{city: Rome}", '{"a":}', "[1]", "{,}", '{"a" 1}'])
    async def test_arguments_that_are_no_json_are_never_a_500_nor_a_tool_use_block(self, arguments):
        served = serve([f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'])
        assert (await post(served, tools=[NOW])).status_code == 200
        tool = {"name": "now", "input_schema": {"type": "object"}}
        body = {"model": "fake", "max_tokens": 200, "messages": USER, "tools": [tool]}
        async with served.http() as http:
            whole = (await http.post("/v1/messages", json=body)).json()
            assert (await http.post("/v1/messages", json={**body, "stream": True})).status_code == 200
            assert (
                await http.post("/v1/responses", json={"input": "x", "tools": [NOW["function"]]})
            ).status_code == 200
        assert whole["stop_reason"] == "end_turn"
        assert [block["type"] for block in whole["content"]] == ["text"]


[bad_values] = [mark.args[1] for mark in door_test.pytestmark if mark.name == "parametrize"]


@pytest.mark.parametrize(("body", "param"), bad_values)
async def test_a_bad_value_over_zmq_is_an_error_reply_that_names_it(body, param):
    served = serve()
    async with door_of(served) as endpoint, AsyncZmqClient(endpoint) as client:
        with pytest.raises(RametError) as caught:
            await client.chat(**{"messages": USER, **body})
        assert caught.value.param == param
        assert not served.client.submits
        assert (await client.chat(USER))["choices"][0]["message"]["content"] == "ok"


class TestTemplateVariables:
    @pytest.mark.parametrize("value", [{"tools": []}, {"messages": []}, {"bos_token": "x"}, {"eos_token": 1}])
    async def test_what_the_request_has_fields_for_may_not_be_set(self, value):
        response = await post(serve(), chat_template_kwargs=value)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs")


class TestLeaving:
    async def test_two_ghosts_do_not_block_a_server_of_two_rows(self):
        with toy_engine(latency_s=0.005, max_running=2) as engine, toy_server(engine) as url:
            long = {"messages": USER, "max_tokens": 10_000, "ignore_eos": True}
            for stream_it in (True, True):
                with httpx.stream("POST", f"{url}/v1/chat/completions", json={**long, "stream": stream_it}) as r:
                    lines = r.iter_lines()
                    for _ in range(3):
                        next(lines)
            for _ in range(2):
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(f"{url}/v1/chat/completions", json=long, timeout=0.2)
            started = time.monotonic()
            short = {"messages": USER, "max_tokens": 4, "ignore_eos": True}
            assert httpx.post(f"{url}/v1/chat/completions", json=short, timeout=30).status_code == 200
            assert time.monotonic() - started < 5
            assert httpx.post(f"{url}/flush_cache?timeout=5", timeout=30).status_code == 200
            numbers = httpx.get(f"{url}/server_info").json()["internal_states"][0]
            assert (numbers["running"], numbers["waiting"], numbers["used_tokens"]) == (0, 0, 0)
            assert "ramet_aborted_total" in (page := httpx.get(f"{url}/metrics").text)
            assert float(page.split("ramet_aborted_total{")[1].split("} ")[1].split("\n")[0]) == 4

    async def test_who_waits_in_the_queue_may_leave_too(self):
        with toy_engine(latency_s=0.01, max_running=1) as engine, toy_server(engine) as url:
            body = {"text": "x", "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}}
            async with httpx.AsyncClient(base_url=url, timeout=30) as http:
                running_one = asyncio.create_task(http.post("/generate", json={**body, "rid": "first"}))
                while not engine.stats()["running"]:
                    await asyncio.sleep(0.01)
                with pytest.raises(httpx.ReadTimeout):
                    await http.post("/generate", json=body, timeout=0.2)
                await http.post("/abort_request", json={"rid": "first"})
                assert (await running_one).json()["meta_info"]["finish_reason"]["type"] == "abort"
                assert (await http.post("/flush_cache?timeout=5")).status_code == 200


@pytest.mark.parametrize(
    "junk", [pickle.dumps({"op": "ping"}), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00" * 200, b"GET"]
)
def test_junk_on_the_http_port_is_refused_and_harms_nobody(junk):
    with running(serve()) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            sock.sendall(junk)
            sock.shutdown(socket.SHUT_WR)
            assert b" 200 " not in sock.recv(1000)
        assert httpx.post(f"{url}/v1/chat/completions", json={"messages": USER}).status_code == 200


@pytest.mark.soak
class TestCrowds:
    def test_a_thousand_normal_streams_abort_nobody(self):
        served = serve(["a", "b"])
        with running(served) as url, httpx.Client(base_url=url) as http:
            for _ in range(1000):
                assert http.post("/v1/completions", json={"prompt": "x", "stream": True}).status_code == 200
        assert served.client.aborts == []

    async def test_five_hundred_streams_survive_a_loop_that_stands_still(self):
        served = serve(["a"] * 10, hold=Hold())
        with running(served) as url:
            limits = httpx.Limits(max_connections=500)
            async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
                body = {"prompt": "x", "stream": True, "max_tokens": 10}
                tasks = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(500)]
                while not served.client._tasks:
                    await asyncio.sleep(0.01)
                loop = next(iter(served.client._tasks.values())).get_loop()
                loop.call_soon_threadsafe(time.sleep, 2)
                answers = await asyncio.gather(*tasks)
        assert {a.status_code for a in answers} == {200}
        assert all(a.text.endswith("data: [DONE]\n\n") for a in answers)
        assert served.client.aborts == []

    async def test_slow_readers_of_thirty_two_streams_get_every_word(self):
        words = [f"w{i} " for i in range(150)]
        with running(serve(words)) as url:
            async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=32)) as http:

                async def slow() -> str:
                    text = ""
                    body = {"prompt": "x", "stream": True, "max_tokens": 1000}
                    async with http.stream("POST", "/v1/completions", json=body) as r:
                        async for line in r.aiter_lines():
                            if line.startswith("data: {"):
                                text += json.loads(line[6:])["choices"][0]["text"]
                                await asyncio.sleep(0.05)
                    return text

                assert set(await asyncio.gather(*(slow() for _ in range(32)))) == {"".join(words)}


async def test_each_key_is_a_tenant_of_its_own():
    served = serve(["x"], server=ServerConfig(api_key="one,two"))
    async with served.http() as http:
        for key in ("one", "two"):
            await http.post("/v1/completions", json={"prompt": "x"}, headers={"authorization": f"Bearer {key}"})
    one, two = (submit.namespace.salt for submit in served.client.submits)
    assert one != two
    assert "one" not in one


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("trim", [True, False])
async def test_an_expression_stops_a_native_answer_where_a_string_would(k, trim):
    served = serve(["order ", "4", "2", "!"], k=k)
    sampling = {"stop_regex": ["[0-9]{2}", "zz+"], "stop": "never", "max_new_tokens": 50, "no_stop_trim": not trim}
    async with served.http() as http:
        whole = (await http.post("/generate", json={"text": "x", "sampling_params": sampling})).json()
        refused = await http.post("/generate", json={"text": "x", "sampling_params": {"stop_regex": "("}})
    assert whole["text"] == ("order " if trim else "order 42")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop_regex")
