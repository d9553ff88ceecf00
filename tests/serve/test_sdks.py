"""The OpenAI and Anthropic SDKs, unmodified, against a scripted server; shapes by their own strict types."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import anthropic
import openai
import pytest
from anthropic.types import Message
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from runtime.config import ServerConfig
from runtime.messages import unpack_ids
from tests.serve.running import running
from tests.serve.scripted import Served, data_events, serve

USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
CALL = '<tool_call>{"name":"get_weather","arguments":{"city":"Rome"}}</tool_call>'
TWO_CALLS = ["Look. ", *CALL, *CALL.replace("Rome", "Oslo")]


@contextlib.asynccontextmanager
async def openai_of(served: Served, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    """The SDK over a real socket."""
    with running(served) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            yield client


@contextlib.asynccontextmanager
async def anthropic_of(served: Served, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The SDK over a real socket."""
    with running(served) as url:
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
            yield client


class TestOpenAI:
    async def test_every_shape_is_valid_by_the_strict_types(self):
        served = serve(TWO_CALLS)
        async with served.http() as http:
            body = {"messages": USER, "tools": [WEATHER], "logprobs": True, "top_logprobs": 2}
            ChatCompletion.model_validate((await http.post("/v1/chat/completions", json=body)).json(), strict=True)
            text = (await http.post("/v1/chat/completions", json={**body, "stream": True})).text
            for event in data_events(text)[:-1]:
                ChatCompletionChunk.model_validate(json.loads(event), strict=True)
            done = await http.post("/v1/completions", json={"prompt": "x", "logprobs": 1})
            Completion.model_validate(done.json(), strict=True)
            Model.model_validate((await http.get("/v1/models/fake")).json(), strict=True)
            response = (await http.post("/v1/responses", json={"input": "hi"})).json()
            Response.model_validate(response)

    async def test_chat_streams_through_the_accumulating_helper(self):
        async with (
            openai_of(serve(TWO_CALLS)) as client,
            client.chat.completions.stream(model="fake", messages=USER, tools=[WEATHER]) as stream,
        ):
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert message.role == "assistant"
        assert message.content == "Look."
        assert [json.loads(c.function.arguments)["city"] for c in message.tool_calls] == ["Rome", "Oslo"]
        assert final.choices[0].finish_reason == "tool_calls"

    async def test_usage_and_logprobs_arrive(self):
        async with openai_of(serve(["ab"])) as client:
            stream = await client.chat.completions.create(
                model="fake", messages=USER, stream=True, stream_options={"include_usage": True}, logprobs=True
            )
            chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
        tokens = [entry.token for c in chunks for x in c.choices if x.logprobs for entry in x.logprobs.content]
        assert tokens == ["a", "b", "<|im_end|>"]

    async def test_text_completions_take_ids_and_lists(self):
        async with openai_of(serve(["ok"])) as client:
            for prompt in ("x", ["x", "y"], [1, 2], [[1, 2], [3]]):
                answer = await client.completions.create(model="fake", prompt=prompt, n=2)
                n = 2 * (len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1)
                assert [c.index for c in answer.choices] == list(range(n))

    @pytest.mark.parametrize(
        ("body", "error", "code"),
        [
            ({"temperature": -1}, openai.BadRequestError, None),
            ({"model": "zork"}, openai.NotFoundError, "model_not_found"),
            (
                {"messages": [{"role": "user", "content": "x" * 9999}]},
                openai.BadRequestError,
                "context_length_exceeded",
            ),
        ],
    )
    async def test_errors_have_their_class_and_code(self, body, error, code):
        async with openai_of(serve()) as client:
            with pytest.raises(error) as caught:
                await client.chat.completions.create(**{"model": "fake", "messages": USER, **body})
        assert caught.value.code == code
        assert caught.value.body["message"]

    async def test_a_wrong_key_is_an_authentication_error(self):
        served = serve(server=ServerConfig(api_key="good"))
        async with openai_of(served, "bad") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with openai_of(served, "good") as client:
            assert [m.id async for m in client.models.list()] == ["fake"]

    async def test_an_error_in_a_stream_is_raised(self):
        async with openai_of(serve(["a", "b"], fail_at=1)) as client:
            stream = await client.chat.completions.create(model="fake", messages=USER, stream=True)
            with pytest.raises(openai.APIError, match="the step failed"):
                async for _ in stream:
                    pass


class TestResponses:
    async def test_the_stream_helper_rebuilds_text_and_calls(self):
        tool = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}
        async with (
            openai_of(serve(TWO_CALLS)) as client,
            client.responses.stream(model="fake", input="hi", tools=[tool]) as stream,
        ):
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert [e.sequence_number for e in events] == sorted(e.sequence_number for e in events)
        assert final.output_text == "Look."
        calls = [item for item in final.output if item.type == "function_call"]
        assert [json.loads(c.arguments)["city"] for c in calls] == ["Rome", "Oslo"]
        assert final.usage.total_tokens == final.usage.input_tokens + final.usage.output_tokens

    async def test_events_come_in_the_promised_order(self):
        async with serve(["a", "b"]).http() as http:
            text = (await http.post("/v1/responses", json={"input": "hi", "stream": True})).text
        events = [json.loads(block.split("\ndata: ")[1]) for block in text.strip().split("\n\n")]
        names = [block.split("\n")[0].removeprefix("event: ") for block in text.strip().split("\n\n")]
        assert names == [event["type"] for event in events]
        kinds = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
        assert kinds == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[0]["response"]["output"] == []

    async def test_a_conversation_goes_on_from_a_stored_response(self):
        served = serve(["one"])
        async with openai_of(served) as client:
            first = await client.responses.create(model="fake", input="first", instructions="be brief")
            assert (await client.responses.retrieve(first.id)).output_text == "one"
            await client.responses.create(model="fake", input="second", previous_response_id=first.id)
            prompt = served.client.tokenizer.decode(unpack_ids(served.client.submits[-1].tokens).tolist())
            assert prompt.index("first") < prompt.index("one") < prompt.index("second")
            assert "be brief" not in prompt
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(model="fake", input="x", previous_response_id="resp_nope")
            await client.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(first.id)

    async def test_store_false_keeps_nothing_and_truncation_is_incomplete(self):
        async with openai_of(serve(["one two"])) as client:
            answer = await client.responses.create(model="fake", input="x", store=False, max_output_tokens=2)
            assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(answer.id)

    async def test_calls_and_results_come_back_as_items(self):
        served = serve(["ok"])
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "w?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city":"Rome"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "18C"},
        ]
        async with openai_of(served) as client:
            assert (await client.responses.create(model="fake", input=items)).output_text == "ok"


class TestAnthropic:
    TOOL = {"name": "get_weather", "input_schema": {"$schema": "x", **PARAMETERS}}

    async def test_messages_are_valid_by_the_strict_types(self):
        served = serve(TWO_CALLS)
        body = {"model": "fake", "max_tokens": 400, "messages": USER, "tools": [self.TOOL]}
        async with served.http() as http:
            message = Message.model_validate((await http.post("/v1/messages?beta=true", json=body)).json())
        assert message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
        assert message.content[1].input == {"city": "Rome"}

    async def test_the_stream_helper_rebuilds_the_message(self):
        async with (
            anthropic_of(serve(TWO_CALLS)) as client,
            client.messages.stream(model="fake", max_tokens=400, messages=USER, tools=[self.TOOL]) as stream,
        ):
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == "Look."
        assert [block.input for block in final.content[1:]] == [{"city": "Rome"}, {"city": "Oslo"}]
        assert final.stop_reason == "tool_use"
        assert final.usage.output_tokens > 0

    async def test_which_stop_sequence_matched_is_told(self):
        async with anthropic_of(serve(["a", "EN", "D", "b"])) as client:
            message = await client.messages.create(model="fake", max_tokens=9, messages=USER, stop_sequences=["END"])
        assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "END", "a")

    async def test_counting_agrees_with_usage(self):
        body = {
            "model": "fake",
            "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
            "messages": [*USER, {"role": "user", "content": [{"type": "text", "text": "again"}]}],
            "tools": [self.TOOL],
        }
        async with anthropic_of(serve(["x"])) as client:
            counted = await client.messages.count_tokens(**body)
            usage = (await client.messages.create(max_tokens=5, **body)).usage
        assert (
            counted.input_tokens
            == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        )

    async def test_tool_results_and_thinking_come_back_as_blocks(self):
        served = serve(["ok"])
        messages = [
            *USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "h", "signature": ""},
                    {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "18C"}]},
                    {"type": "text", "text": "so?"},
                ],
            },
        ]
        async with anthropic_of(served) as client:
            answer = await client.messages.create(model="fake", max_tokens=5, messages=messages, tools=[self.TOOL])
        assert answer.content[0].text == "ok"

    @pytest.mark.parametrize(
        ("body", "error", "kind"),
        [
            ({"model": "zork"}, anthropic.NotFoundError, "not_found_error"),
            ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
            ({"extra_body": {"temperature": -2}}, anthropic.BadRequestError, "invalid_request_error"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
                anthropic.BadRequestError,
                "invalid_request_error",
            ),
        ],
    )
    async def test_errors_are_in_anthropics_envelope(self, body, error, kind):
        async with anthropic_of(serve()) as client:
            with pytest.raises(error) as caught:
                await client.messages.create(**{"model": "fake", "max_tokens": 5, "messages": USER, **body})
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"]["type"] == kind

    async def test_max_tokens_is_required(self):
        async with serve().http() as http:
            response = await http.post("/v1/messages", json={"model": "fake", "messages": USER})
        assert response.status_code == 400
        assert "max_tokens" in response.json()["error"]["message"]

    async def test_either_header_bears_the_key(self):
        async with serve(server=ServerConfig(api_key="good")).http() as http:
            body = {"model": "fake", "max_tokens": 5, "messages": USER}
            for headers in ({"x-api-key": "good"}, {"authorization": "Bearer good"}):
                assert (await http.post("/v1/messages", json=body, headers=headers)).status_code == 200
            refused = await http.post("/v1/messages", json=body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
