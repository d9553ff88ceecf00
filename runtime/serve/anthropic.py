"""/v1/messages and /v1/messages/count_tokens: the Anthropic API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from runtime.messages import Finish
from runtime.params import SamplingParams
from runtime.serve.answers import Answers, AnswerState, News
from runtime.serve.anthropic_input import AnthropicBody, chat_messages, choice_of, output_grammar, tools_of
from runtime.serve.call_ids import random_id
from runtime.serve.context import Caller, Serving
from runtime.serve.errors import anthropic_body, as_ramet_error
from runtime.serve.streams import AnswerStream, read_all
from runtime.serve.trace import trace_of
from runtime.serve.turn import Turn, plan_turn, render_turn
from runtime.serve.wire import around, dumps, json_response, named_event, read
from runtime.text.parsers.base import CallArgs, CallEnd, CallStart, Event, Text, Thought

HOLE = "\0"


class MessagesRequest(AnthropicBody, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: int
    stream: bool | None = None


def routes(serving: Serving) -> list[BaseRoute]:
    """Both endpoints, bound to one served model."""

    async def messages(request: Request) -> Response:
        body = await read(request, MessagesRequest)
        trace = trace_of(request)
        model = serving.check_model(body.model)
        planned = plan_turn(serving, to_turn(body, trace.caller, body.max_tokens))
        writer = _Writer(model, Answers(serving, planned, 1, trace))
        if not body.stream:
            await read_all(request, writer.answers.feed)
            return json_response(writer.whole())
        return AnswerStream(writer.answers.feed, writer, trace)

    async def count_tokens(request: Request) -> Response:
        body = await read(request, AnthropicBody)
        serving.check_model(body.model)
        _, ids = render_turn(serving, to_turn(body, trace_of(request).caller, 1))
        return json_response({"input_tokens": len(ids)})

    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


def to_turn(body: AnthropicBody, caller: Caller, max_tokens: int) -> Turn:
    """The dialect-free turn of a Messages body."""
    tools = tools_of(body)
    choice, parallel = choice_of(body, tools)
    names = ("temperature", "top_k", "top_p")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    thinking = body.thinking.get("type") if isinstance(body.thinking, dict) else None
    return Turn(
        messages=chat_messages(body),
        params=SamplingParams(**given, max_tokens=max_tokens, stop=tuple(body.stop_sequences or ())),
        caller=caller,
        tools=tools,
        choice=choice,
        parallel=parallel,
        answer=output_grammar(body),
        whitespace=body.whitespace,
        template_args={} if thinking is None else {"enable_thinking": thinking != "disabled"},
        stream=bool(getattr(body, "stream", None)),
    )


class _Writer:
    """Writes one message, whole or as events."""

    def __init__(self, model: str, answers: Answers) -> None:
        self.answers = answers
        self._state: AnswerState = answers.states[0]
        self._head = {"id": f"msg_{random_id()}", "type": "message", "role": "assistant", "model": model}
        self._index = -1
        self._open = ""  # the kind of the open block
        self._frame = (b"", b"")  # what stands before and after a piece of its text

    def whole(self) -> dict[str, Any]:
        return {**self._head, "content": self._blocks(), **self._stop(), "usage": self._usage()}

    def _blocks(self) -> list[dict[str, Any]]:
        parsed = self._state.parsed
        blocks: list[dict[str, Any]] = []
        if parsed.thought:
            blocks.append({"type": "thinking", "thinking": parsed.thought, "signature": ""})
        complete = [(i, c) for i, c in zip(self._state.call_ids, parsed.calls, strict=True) if c.complete]
        if parsed.text or not complete:
            blocks.append({"type": "text", "text": parsed.text})
        for call_id, call in complete:
            arguments = msgspec.json.decode(call.arguments)
            blocks.append({"type": "tool_use", "id": call_id, "name": call.name, "input": arguments})
        return blocks

    def _stop(self) -> dict[str, Any]:
        finish: Finish | None = self._state.finish
        if self._state.reason == "tool_calls" and any(call.complete for call in self._state.parsed.calls):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if finish is not None and isinstance(finish.matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.matched}
        ended = finish is not None and finish.reason == "stop"
        return {"stop_reason": "end_turn" if ended else "max_tokens", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Input tokens without those from the cache; the parts add up to what count_tokens says."""
        usage = self.answers.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        }

    # -- events ------------------------------------------------------------------------------------------

    def opening(self) -> Iterable[bytes]:
        """message_start."""
        start: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        yield named_event({"type": "message_start", "message": start})
        yield named_event({"type": "ping"})

    def pieces(self, item: News) -> Iterable[bytes]:
        """Of blocks: begun, gone on with, ended."""
        for one in item.events:
            yield from self._one(one)

    def frame(self) -> tuple[bytes, bytes] | None:
        return self._frame if self._open == "text" and self.answers.plain else None

    def closing(self) -> Iterable[bytes]:
        """The end of the last block, message_delta, message_stop."""
        if self._index < 0:
            yield self._begin("text", {"type": "text", "text": ""})
        yield from self._end()
        yield named_event({"type": "message_delta", "delta": self._stop(), "usage": self._usage()})
        yield named_event({"type": "message_stop"})

    def last_words(self, error: Exception) -> bytes:
        return named_event(anthropic_body(as_ramet_error(error)))

    def _one(self, one: Event) -> Iterator[bytes]:
        match one:
            case Text(text):
                if self._open != "text":
                    yield from self._end()
                    yield self._begin("text", {"type": "text", "text": ""})
                    self._frame = around(self._delta({"type": "text_delta", "text": HOLE}), HOLE)
                before, after = self._frame
                yield before + dumps(text) + after
            case Thought(text):
                if self._open != "thinking":
                    yield from self._end()
                    yield self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case CallStart(index, name):
                yield from self._end()
                block = {"type": "tool_use", "id": self._state.call_ids[index], "name": name, "input": {}}
                yield self._begin("tool_use", block)
            case CallArgs(_, fragment):
                yield self._delta({"type": "input_json_delta", "partial_json": fragment})
            case CallEnd(_):
                yield from self._end()

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open = kind
        self._index += 1
        return named_event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _end(self) -> Iterator[bytes]:
        if self._open:
            self._open = ""
            yield named_event({"type": "content_block_stop", "index": self._index})
