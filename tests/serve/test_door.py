"""What every request meets first: keys, ids, size limits, CORS, unknown paths, health, bad bodies."""

from __future__ import annotations

import json
import logging

import pytest

from runtime.config import ServerConfig
from tests.serve.scripted import CHATML, Served, serve

USER = [{"role": "user", "content": "hi"}]


async def chat(served: Served, headers=None, **body):
    async with served.http() as http:
        return await http.post("/v1/chat/completions", json={"messages": USER, **body}, headers=headers)


async def alive(served: Served) -> bool:
    return (await chat(served)).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1e300}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 1000000}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop_token_ids": [None]}, "stop_token_ids[0]"),
        ({"temperature": "NaN"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"seed": 1e40}, "seed"),
        ({"n": 100000}, "n"),
        ({"n": 0}, "n"),
        ({"stop": ["x"] * 500_000}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"a": 1}] * 12_000}]}, "messages[0].content[0]"),
        ({"model": "zork"}, "model"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
    ],
)
async def test_one_bad_value_is_refused_by_name_and_harms_nobody(body, param):
    served = serve()
    response = await chat(served, **body)
    assert response.status_code == (404 if param == "model" else 400), response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert len(response.content) < 4096
    assert not served.client.submits
    assert await alive(served)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"messages":NaN}', b"[" * 200_000])
async def test_a_body_that_is_no_request_is_a_400(body):
    served = serve()
    async with served.http() as http:
        for path in (
            "/v1/chat/completions",
            "/v1/completions",
            "/generate",
            "/v1/messages",
            "/v1/responses",
            "/tokenize",
        ):
            response = await http.post(path, content=body)
            assert response.status_code == 400, (path, response.text)
            assert response.json()["error"]["message"]
    assert await alive(served)


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", 3], [1, "a"], 3, None, [-1], [10**9], [[1], "x"]])
async def test_prompts_that_are_none_are_refused(prompt):
    async with serve().http() as http:
        response = await http.post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")


async def test_nothing_generated_still_scores_the_prompt():
    async with serve().http() as http:
        body = {"prompt": "xy", "echo": True, "logprobs": 1, "max_tokens": 0}
        choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["text"] == "xy"
    assert choice["logprobs"]["tokens"] == ["x", "y"]
    assert choice["finish_reason"] == "length"


async def test_null_means_unset_and_unknown_fields_are_ignored():
    fields = "temperature top_p n stop seed max_tokens logit_bias logprobs top_logprobs tools tool_choice"
    nulls = dict.fromkeys([*fields.split(), "stream_options", "regex", "response_format", "user", "rid"])
    extra = {"store": False, "metadata": {}, "service_tier": "auto", "whatever": {"deep": [1]}, "stream": False}
    assert (await chat(serve(), **nulls, **extra)).status_code == 200


async def test_the_newer_limit_wins():
    response = await chat(serve(["a"] * 9), max_tokens=5, max_completion_tokens=2)
    assert response.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(("length", "status"), [(4040, 200), (4095, 200), (4096, 400), (4097, 400), (9000, 400)])
async def test_a_prompt_beyond_the_context_names_both_numbers(length, status):
    served = serve(context=4096)
    async with served.http() as http:
        for stream in (False, True):
            response = await http.post("/v1/completions", json={"prompt": "x" * length, "stream": stream})
            assert response.status_code == status
            if status == 400:
                error = response.json()["error"]
                assert error["code"] == "context_length_exceeded"
                assert f"maximum context length is 4096 tokens. However, your prompt has {length}" in error["message"]


async def test_bodies_above_the_limit_are_cut_off():
    served = serve(server=ServerConfig(max_body_bytes=2000))
    big = json.dumps({"messages": [{"role": "user", "content": "x" * 3000}]}).encode()

    async def in_pieces():
        for i in range(0, len(big), 500):
            yield big[i : i + 500]

    async with served.http() as http:
        assert (await http.post("/v1/chat/completions", content=big)).status_code == 413
        assert (await http.post("/v1/chat/completions", content=in_pieces())).status_code == 413
    assert await alive(served)


STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


async def test_the_templates_own_refusal_is_the_message():
    served = serve(template=STRICT)
    refused = await chat(served, messages=[{"role": "system", "content": "s"}, *USER])
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "Conversation roles must alternate"
    assert (await chat(served, messages=[*USER, *USER])).status_code == 200  # turns of one role are joined


async def test_a_template_that_cannot_be_run_is_a_400():
    assert (await chat(serve(template="{{ messages[0].content.nothing.at_all }}"))).status_code == 400


async def test_a_parser_that_does_not_fit_the_template_is_warned_of(caplog):
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if tools %}<|python_tag|>{% endif %}")
    serve(template=template, server=ServerConfig(tool_call_parser="pythonic"))
    assert "llama3_json" in caplog.text


class TestKeys:
    SERVER = ServerConfig(api_key="one,two")

    async def test_probes_need_none_everything_else_does(self):
        served = serve(server=self.SERVER)
        async with served.http() as http:
            for path in ("/health", "/ready", "/ping", "/health_generate", "/metrics"):
                assert (await http.get(path)).status_code == 200
            for path in ("/v1/models", "/server_info", "/flush_cache", "/ui/live", "/openapi.json"):
                assert (await http.get(path)).status_code == 401
            assert (await http.get("/v1/models", headers={"authorization": "bearer one"})).status_code == 200
            assert (await http.get("/v1/models", headers={"x-api-key": "two"})).status_code == 200
            wrong = await http.get("/v1/models", headers={"authorization": "Bearer öne".encode()})
        assert wrong.status_code == 401
        assert wrong.headers["www-authenticate"] == "Bearer"

    async def test_keys_do_not_share_cached_prefixes(self):
        served = serve(server=self.SERVER)
        for key in ("one", "two", "one"):
            await chat(served, {"x-api-key": key})
        salts = [submit.namespace.salt for submit in served.client.submits]
        assert salts[0] == salts[2] != salts[1]
        assert "one" not in salts[0]

    async def test_a_salt_divides_further(self):
        served = serve()
        await chat(served)
        await chat(served, cache_salt="a")
        assert [submit.namespace.salt for submit in served.client.submits] == ["", "/a"]


class TestCors:
    PREFLIGHT = {
        "origin": "http://else",
        "access-control-request-method": "POST",
        "access-control-request-headers": "x",
    }

    async def test_a_preflight_needs_no_key(self):
        async with serve(server=ServerConfig(api_key="k")).http() as http:
            response = await http.options("/v1/chat/completions", headers=self.PREFLIGHT)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in response.headers

    async def test_named_origins_only(self):
        async with serve(server=ServerConfig(cors_origins="http://ours")).http() as http:
            refused = await http.options("/v1/chat/completions", headers=self.PREFLIGHT)
            headers = {**self.PREFLIGHT, "origin": "http://ours"}
            allowed = await http.options("/v1/chat/completions", headers=headers)
        assert refused.status_code == 400
        assert allowed.headers["access-control-allow-origin"] == "http://ours"


class TestRoutes:
    async def test_unknown_paths_and_methods_answer_in_json(self):
        async with serve().http() as http:
            missing, wrong = await http.get("/zork"), await http.get("/v1/chat/completions")
            dialect = await http.get("/v1/messages")
        assert (missing.status_code, wrong.status_code) == (404, 405)
        assert missing.json()["error"]["message"]
        assert dialect.json()["type"] == "error"

    async def test_what_is_not_here_is_a_501_not_a_500(self):
        async with serve().http() as http:
            for path in ("/v1/embeddings", "/load_lora_adapter", "/update_weights_from_disk", "/v1/rerank"):
                response = await http.post(path, json={})
                assert (response.status_code, response.json()["error"]["code"]) == (501, "not_implemented")

    async def test_the_description_is_the_routes(self):
        served = serve()
        async with served.http() as http:
            described = (await http.get("/openapi.json")).json()
            chat = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
            assert chat["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
            assert described["components"]["schemas"]["ChatRequest"]["required"] == ["messages"]
            for path, methods in described["paths"].items():
                for method in methods:
                    if path == "/lang/submit" or "{" in path:
                        continue
                    response = await http.request(method, path, content=b"" if method != "get" else None)
                    assert response.status_code not in (404, 405, 500), (method, path, response.text)

    async def test_the_model_card_has_what_tools_read(self):
        async with serve().http() as http:
            [card] = (await http.get("/v1/models")).json()["data"]
            assert {"id", "object", "created", "owned_by", "root", "max_model_len"} <= card.keys()
            assert (await http.get("/v1/models/org/zork")).status_code == 404
            for path in ("/model_info", "/get_model_info"):
                assert "model_path" in (await http.get(path)).json()

    async def test_the_page_loads_nothing_from_elsewhere(self):
        async with serve().http() as http:
            page = await http.get("/")
            assert (await http.head("/")).status_code == 200
        assert page.status_code == 200
        assert "https://" not in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]


class TestHealth:
    async def test_ready_is_down_while_nothing_can_be_answered(self):
        served = serve(ready=False)
        async with served.http() as http:
            for path in ("/health", "/ready", "/ping", "/health_generate"):
                assert (await http.get(path)).status_code == 503
            assert (await http.get("/live")).status_code == 200
            response = await http.post("/v1/chat/completions", json={"messages": USER})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["type"] == "overloaded_error"

    async def test_draining_refuses_new_requests(self):
        served = serve()
        served.generator.begin_drain()
        async with served.http() as http:
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/live")).status_code == 200
        assert (await chat(served)).status_code == 503


class TestRequestIds:
    async def test_the_clients_id_comes_back_and_is_logged_with_the_timing(self, caplog):
        served = serve(["a", "b"])
        with caplog.at_level(logging.INFO, "ramet.access"):
            response = await chat(served, {"x-request-id": "trace-1"})
        assert response.headers["x-request-id"] == "trace-1"
        [fields] = [record.fields for record in caplog.records if record.name == "ramet.access"]
        assert fields["id"] == "trace-1"
        assert fields["status"] == 200
        assert fields["completion_tokens"] == 3
        assert {"ttft_s", "queue_s", "total_s", "cached_tokens", "finish"} <= fields.keys()

    @pytest.mark.parametrize("given", ["", "x" * 300, "a\tb"])
    async def test_an_unfit_id_is_replaced(self, given):
        response = await chat(serve(), {"x-request-id": given})
        assert response.headers["x-request-id"].startswith("req-")
