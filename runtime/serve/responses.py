"""/v1/responses: create, retrieve, cancel, delete, over a bounded store."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from runtime.errors import InvalidRequest, NotFound
from runtime.serve.agent_hints import hints_of
from runtime.serve.answers import Answers
from runtime.serve.context import Caller, Serving
from runtime.serve.responses_input import conversation, text_format
from runtime.serve.responses_shape import ResponseWriter
from runtime.serve.sampling import SamplingFields, answer_grammar, checked_limit, sampling_params
from runtime.serve.store import Stored
from runtime.serve.streams import AnswerStream, read_all
from runtime.serve.tools import read_choice, read_tools
from runtime.serve.trace import trace_of
from runtime.serve.turn import Turn, plan_turn
from runtime.serve.wire import json_response, read
from runtime.text.chat import template_variables


class ResponsesRequest(SamplingFields, kw_only=True):
    """The body. Unknown keys are ignored; null means unset."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    reasoning: Any = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def routes(serving: Serving) -> list[BaseRoute]:
    """The endpoints, bound to one served model."""

    async def create(request: Request) -> Response:
        body = await read(request, ResponsesRequest)
        trace = trace_of(request)
        model = serving.check_model(body.model)
        messages = conversation(body.input, body.instructions, _before(serving, body, trace.caller))
        answers = Answers(serving, plan_turn(serving, to_turn(body, messages, trace.caller)), 1, trace)

        def keep(writer: ResponseWriter) -> None:
            if body.store is not False and answers.states[0].finish is not None:
                history = messages[1:] if body.instructions else messages
                serving.store.put(Stored(writer.whole(), [*history, writer.message()], trace.caller.digest))

        writer = ResponseWriter(_head(body, model), answers, keep)
        if not body.stream:
            await read_all(request, answers.feed)
            keep(writer)
            return json_response(writer.whole())
        return AnswerStream(answers.feed, writer, trace)

    async def retrieve(request: Request) -> Response:
        return json_response(_stored(serving, request).body)

    async def cancel(request: Request) -> Response:
        return json_response(_stored(serving, request).body)

    async def delete(request: Request) -> Response:
        stored = _stored(serving, request)
        serving.store.delete(stored.body["id"], stored.owner)
        return json_response({"id": stored.body["id"], "object": "response", "deleted": True})

    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/{id}", retrieve, methods=["GET"]),
        Route("/v1/responses/{id}", delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", cancel, methods=["POST"]),
    ]


def _stored(serving: Serving, request: Request) -> Stored:
    key = request.path_params["id"]
    found = serving.store.get(key, trace_of(request).caller.digest)
    if found is None:
        raise NotFound(f"There is no response {key!r:.80} here.", param="response_id", code="response_not_found")
    return found


def _before(serving: Serving, body: ResponsesRequest, caller: Caller) -> list[dict[str, Any]]:
    """The conversation that this request goes on with."""
    if body.previous_response_id is None:
        return []
    found = serving.store.get(body.previous_response_id, caller.digest)
    if found is None:
        raise NotFound(
            f"There is no response {body.previous_response_id!r:.80} here.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found.messages


def to_turn(body: ResponsesRequest, messages: list[dict[str, Any]], caller: Caller) -> Turn:
    """The dialect-free turn of a Responses body."""
    if body.background:
        raise InvalidRequest("background responses are not supported.", param="background")
    tools = read_tools(body.tools, only_functions=True)
    return Turn(
        messages=messages,
        params=sampling_params(body, checked_limit("max_output_tokens", body.max_output_tokens)),
        caller=caller,
        tools=tools,
        choice=read_choice(body.tool_choice, tools),
        parallel=body.parallel_tool_calls is not False,
        answer=answer_grammar(body, ("text.format", text_format(body.text))),
        whitespace=body.whitespace,
        template_args=template_variables(body.chat_template_kwargs),
        salt=body.cache_salt or body.extra_key,
        priority=body.priority or 0,
        hints=hints_of(body.hints),
        timeout_s=body.timeout_s,
        stream=bool(body.stream),
    )


def _head(body: ResponsesRequest, model: str) -> dict[str, Any]:
    """What the answer repeats of the request."""
    return {
        "model": model,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "max_output_tokens": body.max_output_tokens,
        "previous_response_id": body.previous_response_id,
        "text": body.text or {"format": {"type": "text"}},
        "truncation": body.truncation or "disabled",
        "reasoning": body.reasoning or {"effort": None, "summary": None},
        "store": body.store is not False,
    }
