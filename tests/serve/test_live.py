"""The whole way on a real model: reuse over turns, exact scores, schemas kept, metrics that agree, events, ZMQ."""

from __future__ import annotations

import json
import uuid

import httpx
import msgspec
import openai
import pytest
import zmq

from runtime.serve.zmq_client import ZmqClient

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {**CITY, "additionalProperties": False}},
}


@pytest.fixture
def http(live):
    with httpx.Client(base_url=live, timeout=240) as client:
        yield client


def fresh(text: str) -> list[dict]:
    """A conversation that no other test has begun."""
    return [{"role": "system", "content": f"Run {uuid.uuid4()}."}, {"role": "user", "content": text}]


def chat(http, messages, **body) -> dict:
    response = http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_each_turn_reuses_all_of_the_one_before(http):
    messages = fresh("Name three colours.")
    before = 0
    for turn in ("And three animals?", "Which is the largest?", "Why?"):
        answer = chat(http, messages, max_tokens=8)
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= before - 1
        before = usage["prompt_tokens"] + usage["completion_tokens"] - 1  # the last token's KV is never computed
        messages += [answer["choices"][0]["message"], {"role": "user", "content": turn}]
    last = chat(http, messages, max_tokens=1)["usage"]
    assert last["prompt_tokens_details"]["cached_tokens"] >= before - 1


def test_streamed_and_whole_answers_agree_warm_and_cold(http):
    messages = fresh("Write a haiku about trees.")
    whole = chat(http, messages, max_tokens=8)
    body = {
        "messages": messages,
        "temperature": 0,
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    lines = http.post("/v1/chat/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_scores_of_a_choice_are_equal_cold_and_warm(http):
    prefix = f"{uuid.uuid4()} The capital of France is"
    start = http.post("/tokenize", json={"text": prefix}).json()["count"]

    def scores() -> list[list]:
        body = {
            "text": [f"{prefix} Paris", f"{prefix} Rome"],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "return_text_in_logprobs": True,
            "logprob_start_len": start - 2,
        }
        return [item["meta_info"]["input_token_logprobs"] for item in http.post("/generate", json=body).json()]

    cold, warm = scores(), scores()
    assert cold == warm
    assert [entry[2] for entry in cold[0]][-1] == " Paris"
    assert all(isinstance(entry[0], float) for item in cold for entry in item)
    assert sum(entry[0] for entry in cold[0]) > sum(entry[0] for entry in cold[1])


def test_required_calls_and_schemas_are_kept(http):
    answer = chat(
        http,
        fresh("Weather in Rome?"),
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=200,
        parallel_tool_calls=False,
    )
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert set(json.loads(call["function"]["arguments"])) == {"city"}
    shape = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
    content = chat(http, fresh("A city?"), response_format=shape, max_tokens=100)["choices"][0]["message"]["content"]
    assert set(json.loads(content)) == {"city"}


def test_a_grammar_that_cannot_be_built_is_a_400_that_names_it(http):
    for schema in ({"type": "not-a-type"}, {"type": "string", "pattern": "("}):
        shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        for stream in (False, True):
            body = {"messages": fresh("x"), "response_format": shape, "stream": stream}
            response = http.post("/v1/chat/completions", json=body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")
    assert chat(http, fresh("hi"), max_tokens=2)


def test_lm_eval_style_scoring_covers_prompt_and_answer(http):
    ids = http.post("/tokenize", json={"text": "One two three four"}).json()["tokens"]
    body = {"prompt": ids, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    first, second = (http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"] for _ in range(2))
    assert first == second
    assert len(first["token_logprobs"]) == len(ids) + 1
    assert first["token_logprobs"][0] is None
    best = max(first["top_logprobs"][-1].values())
    assert first["token_logprobs"][-1] == best


def test_flush_right_after_an_answer_succeeds(http):
    for _ in range(5):
        chat(http, fresh("hi"), max_tokens=2)
        assert http.post("/flush_cache").status_code == 200


def test_a_tool_with_a_long_bound_leaves_the_other_one_possible(http):
    bound = {"type": "object", "properties": {"c": {"type": "string", "maxLength": 10_000}}, "required": ["c"]}
    write = {"type": "function", "function": {"name": "write_file", "parameters": bound}}
    rome = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    get = {"type": "function", "function": {"name": "get_weather", "parameters": rome}}
    body = {"tools": [write, get], "tool_choice": "required", "parallel_tool_calls": False, "whitespace": "flexible"}
    for name in ("get_weather", "write_file"):
        ids = http.post("/tokenize", json={"prompt": name, "add_special_tokens": False}).json()["tokens"]
        answer = chat(http, fresh("What is the weather?"), **body, max_tokens=200, logit_bias={str(ids[0]): 90})
        [choice] = answer["choices"]
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == name
        assert 0 < answer["usage"]["completion_tokens_details"]["forced_tokens"] < answer["usage"]["completion_tokens"]
        if name == "get_weather":
            assert (choice["finish_reason"], json.loads(call["function"]["arguments"])) == (
                "tool_calls",
                {"city": "Rome"},
            )


def test_metrics_agree_with_usage(http):
    def counters() -> dict[str, float]:
        lines = (line for line in http.get("/metrics").text.splitlines() if line and line[0] != "#")
        return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}

    before = counters()
    messages = fresh("Count to three.")
    usages = [chat(http, messages, max_tokens=3)["usage"] for _ in range(4)]
    after = counters()

    def grown(name: str) -> float:
        return after[name] - before[name]

    prompt = sum(u["prompt_tokens"] for u in usages)
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    for family in ("ramet_", "sglang:", "vllm:"):
        assert grown(f"{family}prompt_tokens_total") == prompt
        assert grown(f"{family}generation_tokens_total") == sum(u["completion_tokens"] for u in usages)
        assert grown(f"{family}time_to_first_token_seconds_count") == 4
    assert grown("ramet_prefix_hit_tokens_total") == grown("vllm:prefix_cache_hits_total") == cached > 0
    assert grown("vllm:prefix_cache_queries_total") == prompt
    assert {
        "sglang:cache_hit_rate",
        "sglang:token_usage",
        "sglang:num_running_reqs",
        "sglang:max_total_num_tokens",
    } <= after.keys()


def test_the_page_shows_the_tree_with_text(http):
    chat(http, fresh("hello page"), max_tokens=2)
    data = http.get("/ui/live").json()
    assert any("Run " in node["first"] or "system" in node["first"] for node in data["tree"]["nodes"])
    assert data["numbers"]["pool_tokens"] == 8192


def test_kv_events_describe_the_pages_of_a_prompt(http, kv_ports):
    reader = zmq.Context.instance().socket(zmq.SUB)
    reader.setsockopt(zmq.LINGER, 0)
    reader.connect(f"tcp://127.0.0.1:{kv_ports[0]}")
    reader.setsockopt(zmq.SUBSCRIBE, b"")
    block = http.get("/server_info").json()["kv_events"]
    assert (block["endpoint_port_base"], block["block_size"]) == (kv_ports[0], 16)
    ids: list[int] = []
    while not reader.poll(300):  # a subscription takes a moment to arrive
        ids = http.post("/tokenize", json={"text": f"{uuid.uuid4()} " * 3}).json()["tokens"]
        http.post("/generate", json={"input_ids": ids, "sampling_params": {"max_new_tokens": 0}})
    events = msgspec.msgpack.decode(reader.recv_multipart()[2])[1]
    stored = [event for event in events if event["type"] == "BlockStored"]
    assert stored[0]["parent_block_hash"] is None or isinstance(stored[0]["parent_block_hash"], int)
    assert len(stored[0]["token_ids"]) == len(stored[0]["block_hashes"]) * 16
    assert all(-(2**63) <= h < 2**63 for h in stored[0]["block_hashes"])
    text = http.post("/detokenize", json={"tokens": stored[0]["token_ids"], "skip_special_tokens": False}).json()[
        "text"
    ]
    assert isinstance(text, str)
    reader.close()


def test_the_zmq_door_serves_the_same_model(live, kv_ports):
    with ZmqClient(f"tcp://127.0.0.1:{kv_ports[1]}", timeout_s=120) as client:
        answer = client.chat(fresh("hi"), max_tokens=3, temperature=0)
        assert answer["usage"]["completion_tokens"] == 3
        *_, last = client.stream("Once upon a time", max_new_tokens=4)
        assert last["meta_info"]["completion_tokens"] == 4


def test_hang_ups_give_all_pages_back(http, live):
    def free() -> float:
        return http.get("/server_info").json()["internal_states"][0]["running"]

    for _ in range(3):
        body = {"messages": fresh("Tell me everything."), "stream": True, "max_tokens": 2000, "ignore_eos": True}
        with (
            httpx.Client(base_url=live, timeout=60) as leaver,
            leaver.stream("POST", "/v1/chat/completions", json=body) as r,
        ):
            next(r.iter_lines())
    for _ in range(200):
        if not free():
            break
    assert free() == 0
    assert http.post("/flush_cache?timeout=10").status_code == 200
    numbers = http.get("/server_info").json()["internal_states"][0]
    assert numbers["used_tokens"] == 0


def test_the_openai_sdk_parses_structured_output(live):
    from pydantic import BaseModel, Field

    class City(BaseModel):
        city: str = Field(min_length=1, max_length=20)  # a small model may not find the end by itself

    with openai.OpenAI(base_url=f"{live}/v1", api_key="x") as client:
        models = client.models.list()
        done = client.chat.completions.parse(
            model=models.data[0].id,
            messages=fresh("A city in Italy?"),
            response_format=City,
            max_tokens=200,
            temperature=0,
        )
    assert done.choices[0].message.parsed.city
