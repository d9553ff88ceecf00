"""What each operation of the ZMQ door does: the HTTP endpoints' own code behind another socket."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from runtime.errors import InvalidRequest
from runtime.serve.admin import AbortRequest, abort_requests
from runtime.serve.answers import Answers
from runtime.serve.chat import ChatRequest, ChatWriter, to_turn
from runtime.serve.context import Serving
from runtime.serve.models import model_card
from runtime.serve.native import GenerateJob
from runtime.serve.native_request import GenerateRequest, read_batch
from runtime.serve.stats import scheduler_numbers
from runtime.serve.tokenization import DetokenizeRequest, TokenizeRequest, detokenized, tokenized
from runtime.serve.trace import Trace
from runtime.serve.turn import plan_turn
from runtime.serve.wire import convert
from runtime.serve.zmq_frames import OPS, ZmqRequest


async def answer(serving: Serving, request: ZmqRequest, trace: Trace) -> AsyncGenerator[Any]:
    """The replies' data: one for a whole answer, many for a stream. Raises InvalidRequest and kin."""
    body = trace.body = request.body
    match request.op:
        case "generate":
            async with contextlib.aclosing(_generate(serving, convert(body, GenerateRequest), trace)) as items:
                async for item in items:
                    yield item
        case "chat":
            async with contextlib.aclosing(_chat(serving, convert(body, ChatRequest), trace)) as items:
                async for item in items:
                    yield item
        case "abort":
            yield {"aborted": abort_requests(serving, convert(body, AbortRequest), trace.caller)}
        case "tokenize":
            yield tokenized(serving, convert(body, TokenizeRequest))
        case "detokenize":
            yield detokenized(serving, convert(body, DetokenizeRequest))
        case "stats":
            yield await scheduler_numbers(serving)
        case "models":
            yield [model_card(serving)]
        case "ping":
            yield "pong"
        case _:
            raise InvalidRequest(f"Unknown op {request.op!r:.60}; there are {', '.join(OPS)}.", param="op")


async def _generate(serving: Serving, body: GenerateRequest, trace: Trace) -> AsyncGenerator[Any]:
    job = GenerateJob(serving, read_batch(serving, body, trace.caller), trace)
    try:
        while news := await job.feed.take():
            for delta in news if body.stream else ():
                yield job.chunk(delta)
    finally:
        job.feed.close()
    if not body.stream:
        yield job.whole()


async def _chat(serving: Serving, body: ChatRequest, trace: Trace) -> AsyncGenerator[Any]:
    model = serving.check_model(body.model)
    n = serving.check_batch(1, body.n)
    answers = Answers(serving, plan_turn(serving, to_turn(body, trace.caller)), n, trace)
    writer = ChatWriter(serving, body, model, answers)
    chunks = _chat_chunks(writer, answers) if body.stream else _whole_chat(writer, answers)
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        await chunks.aclose()
        answers.feed.close()


async def _whole_chat(writer: ChatWriter, answers: Answers) -> AsyncGenerator[Any]:
    while news := await answers.feed.take():
        for item in news:
            writer.note(item)
    yield writer.whole()


async def _chat_chunks(writer: ChatWriter, answers: Answers) -> AsyncGenerator[Any]:
    news = await answers.feed.take()
    for chunk in writer.opening():
        yield chunk
    while news:
        for item in news:
            for chunk in writer.chunks(item):
                yield chunk
        news = await answers.feed.take()
    for chunk in writer.closing():
        yield chunk
