"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from runtime.errors import InvalidRequest
from runtime.messages import TokenLogprob
from runtime.serve.agent_hints import hints_of
from runtime.serve.answers import Answers, AnswerState, News, now
from runtime.serve.call_ids import random_id
from runtime.serve.context import Caller, Serving
from runtime.serve.openai_shapes import chat_logprobs, usage_object
from runtime.serve.sampling import SamplingFields, answer_grammar, checked_limit, sampling_params
from runtime.serve.streams import AnswerStream, OpenAIWords, read_all
from runtime.serve.tools import read_choice, read_tools
from runtime.serve.trace import trace_of
from runtime.serve.turn import Turn, plan_turn
from runtime.serve.wire import DONE, around, event, json_response, read
from runtime.text.chat import template_variables
from runtime.text.parsers.base import CallArgs, CallStart, Event, Text, Thought

MAX_TOP_LOGPROBS = 20
HOLE = "\0"


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """The body. Unknown keys are ignored; null means unset."""

    messages: list[Any]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    separate_reasoning: bool | None = None
    return_cached_tokens_details: bool | None = None


def routes(serving: Serving) -> list[BaseRoute]:
    """The endpoint, bound to one served model."""

    async def chat_completions(request: Request) -> Response:
        body = await read(request, ChatRequest)
        trace = trace_of(request)
        model = serving.check_model(body.model)
        n = serving.check_batch(1, body.n)
        planned = plan_turn(serving, to_turn(body, trace.caller))
        answers = Answers(serving, planned, n, trace)
        writer = ChatWriter(serving, body, model, answers)
        if not body.stream:
            await read_all(request, answers.feed, writer.note)
            return json_response(writer.whole())
        return AnswerStream(answers.feed, ChatEvents(writer), trace)

    return [Route("/v1/chat/completions", chat_completions, methods=["POST"])]


def to_turn(body: ChatRequest, caller: Caller) -> Turn:
    """The dialect-free turn of a chat body."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options goes with stream=true only.", param="stream_options")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}.", param="top_logprobs")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs goes with logprobs=true only.", param="top_logprobs")
    newer = checked_limit("max_completion_tokens", body.max_completion_tokens)
    limit = body.max_tokens if newer is None else newer
    tools = read_tools(body.tools)
    template_args = template_variables(body.chat_template_kwargs)
    if body.continue_final_message:
        template_args["continue_final_message"] = True
    return Turn(
        messages=body.messages,
        params=sampling_params(body, limit, logprobs=bool(body.logprobs), top_logprobs=body.top_logprobs),
        caller=caller,
        tools=tools,
        choice=read_choice(body.tool_choice, tools),
        parallel=body.parallel_tool_calls is not False,
        answer=answer_grammar(body),
        whitespace=body.whitespace,
        template_args=template_args,
        add_generation_prompt=body.add_generation_prompt is not False,
        salt=body.cache_salt or body.extra_key,
        priority=body.priority or 0,
        hints=hints_of(body.hints),
        timeout_s=body.timeout_s,
        rid=body.rid,
        stream=bool(body.stream),
    )


class ChatWriter:
    """Writes one answer object, or its chunks."""

    def __init__(self, serving: Serving, body: ChatRequest, model: str, answers: Answers) -> None:
        self._tokenizer = serving.tokenizer
        self._body = body
        self._answers = answers
        self._head = {"id": f"chatcmpl-{random_id()}", "created": now(), "model": model}
        self._late_logprobs: dict[int, list[TokenLogprob]] = {state.index: [] for state in answers.states}
        options = body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats and options.include_usage)

    # -- whole -------------------------------------------------------------------------------------------

    def note(self, item: News) -> None:
        """News of an answer that will be given whole."""
        self._late_logprobs[item.state.index] += item.logprobs or ()

    def whole(self) -> dict[str, Any]:
        """The answer, when all of it is there."""
        body: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(state) for state in self._answers.states],
            "usage": usage_object(self._answers.usage),
        }
        if self._body.return_cached_tokens_details:
            body["sglext"] = self._sglext()
        return body

    def _choice(self, state: AnswerState) -> dict[str, Any]:
        parsed = state.parsed
        message: dict[str, Any] = {"role": "assistant", "content": parsed.text, "refusal": None}
        if parsed.thought:
            message["reasoning_content"] = parsed.thought
        if parsed.calls:
            message["content"] = parsed.text or None
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call_id, call in zip(state.call_ids, parsed.calls, strict=True)
            ]
        return {
            "index": state.index,
            "message": message,
            "logprobs": self._logprobs(self._late_logprobs[state.index]) if self._body.logprobs else None,
            "finish_reason": state.reason,
            "matched_stop": state.finish.matched if state.finish else None,
        }

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, entries)

    def _sglext(self) -> dict[str, Any]:
        usage = self._answers.usage
        return {"cached_tokens_details": {"device": usage.cached_tokens, "host": 0}, "cache_miss": usage.miss}

    # -- chunks ------------------------------------------------------------------------------------------

    @property
    def plain(self) -> bool:
        """Whether all that comes is text, a bare event a piece."""
        return self._answers.plain and not self._usage_always and not self._body.logprobs

    def frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in an event that brings nothing else."""
        return around(event(self._chunk(index, {"content": HOLE})), HOLE)

    def opening(self) -> Iterator[dict[str, Any]]:
        """The chunks before all news: roles."""
        for state in self._answers.states:
            yield self._chunk(state.index, {"role": "assistant", "content": ""})

    def chunks(self, item: News) -> Iterator[dict[str, Any]]:
        """Chunks of one piece of news: what was said, and the finish."""
        for delta in self._deltas(item):
            yield self._chunk(item.state.index, delta, logprobs=self._take_logprobs(item, delta))
        if item.finish is not None:
            yield self._last_chunk(item.state)

    def closing(self) -> Iterator[dict[str, Any]]:
        """The chunks after all news: usage if asked for."""
        if self._usage_at_end:
            usage = usage_object(self._answers.usage)
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}

    def bare_text(self, item: News) -> str | None:
        """The text of news that are nothing else, as most are."""
        if len(item.events) != 1 or item.finish is not None or item.logprobs or self._usage_always:
            return None
        [one] = item.events
        return one.text if type(one) is Text and not self._late_logprobs[item.state.index] else None

    def _deltas(self, item: News) -> list[dict[str, Any]]:
        """The news as chunk deltas, neighbouring pieces joined."""
        self._late_logprobs[item.state.index] += item.logprobs or ()
        deltas: list[dict[str, Any]] = []
        for one in item.events:
            delta = self._delta(item.state, one)
            if delta is not None and not (deltas and _join(deltas[-1], delta)):
                deltas.append(delta)
        if not deltas and self._late_logprobs[item.state.index] and item.finish is None:
            deltas.append({"content": ""})
        return deltas

    def _delta(self, state: AnswerState, one: Event) -> dict[str, Any] | None:
        match one:
            case Text(text):
                return {"content": text}
            case Thought(text):
                return {"reasoning_content": text}
            case CallStart(index, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": state.call_ids[index], "type": "function", "function": function}
                return {"tool_calls": [call]}
            case CallArgs(index, fragment):
                return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}
        return None

    def _take_logprobs(self, item: News, delta: dict[str, Any]) -> dict[str, Any] | None:
        held = self._late_logprobs[item.state.index]
        if not held:
            return None
        self._late_logprobs[item.state.index] = []
        return self._logprobs(held)

    def _last_chunk(self, state: AnswerState) -> dict[str, Any]:
        held, self._late_logprobs[state.index] = self._late_logprobs[state.index], []
        extra: dict[str, Any] = {"sglext": self._sglext()} if self._body.return_cached_tokens_details else {}
        return self._chunk(
            state.index,
            {},
            logprobs=self._logprobs(held) if held else None,
            finish_reason=state.reason,
            matched_stop=state.finish.matched if state.finish else None,
            extra=extra,
        )

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        matched_stop: str | int | None = None,
        extra: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["matched_stop"] = matched_stop
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice], **(extra or {})}
        if self._usage_always:
            chunk["usage"] = usage_object(self._answers.usage)
        return chunk


class ChatEvents(OpenAIWords):
    """A ChatWriter's chunks as server-sent events."""

    def __init__(self, writer: ChatWriter) -> None:
        self._writer = writer
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def opening(self) -> Iterable[bytes]:
        return [event(chunk) for chunk in self._writer.opening()]

    def pieces(self, item: News) -> Iterable[bytes]:
        text = self._writer.bare_text(item)
        if text is None:
            return [event(chunk) for chunk in self._writer.chunks(item)]
        before, after = self._frame_of(item.state.index)
        return (before + orjson.dumps(text) + after,)

    def frame(self) -> tuple[bytes, bytes] | None:
        return self._frame_of(0) if self._writer.plain else None

    def _frame_of(self, index: int) -> tuple[bytes, bytes]:
        frame = self._frames.get(index)
        if frame is None:
            frame = self._frames[index] = self._writer.frame(index)
        return frame

    def closing(self) -> Iterable[bytes]:
        return [*(event(chunk) for chunk in self._writer.closing()), DONE]


def _join(last: dict[str, Any], delta: dict[str, Any]) -> bool:
    """Merge `delta` into the one before it, if both are pieces of the same thing."""
    for key in ("content", "reasoning_content"):
        if key in last and key in delta:
            last[key] += delta[key]
            return True
    if "tool_calls" in last and "tool_calls" in delta:
        one, two = last["tool_calls"][0], delta["tool_calls"][0]
        if one["index"] == two["index"] and "id" not in two:
            one["function"]["arguments"] += two["function"]["arguments"]
            return True
    return False
