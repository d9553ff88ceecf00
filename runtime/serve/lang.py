"""The door of DSL programs: token states by handle, many requests in one message, one stream of news.

`GET /lang/tokenizer` gives a client the model's own tokenizer and chat template, so that text never travels.
`POST /lang/submit` takes requests whose prompt is `keep` ids of an earlier request's sequence (named by its handle)
and a suffix; it answers one JSON line a piece. A handle that is no longer held is a 409, and the client sends
all ids instead. `POST /lang/abort` cancels by request id. Handles belong to the API key that made them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from runtime.errors import InvalidRequest, RametError
from runtime.generate import Delta, Generator, Stream
from runtime.lang_wire import LangAbort, LangNews, LangProblem, LangRequest, LangSubmit
from runtime.messages import Ids, Submit, pack_ids, unpack_ids
from runtime.serve.context import Caller, Serving
from runtime.serve.trace import trace_of
from runtime.serve.wire import EventStream, decode, dumps, json_response
from runtime.trail import Trail

MAX_REQUESTS = 4096
LEASE_S = 600.0
MAX_HELD_TOKENS = 4_000_000


class Handles:
    """Token sequences by handle: leased for a while, dropped oldest first when there are too many tokens."""

    def __init__(self, *, lease_s: float = LEASE_S, max_tokens: int = MAX_HELD_TOKENS) -> None:
        self._held: OrderedDict[str, tuple[str, Ids, float]] = OrderedDict()
        self._lease_s = lease_s
        self._max_tokens = max_tokens
        self._n_tokens = 0

    def __len__(self) -> int:
        return len(self._held)

    def put(self, handle: str, owner: str, ids: Ids) -> None:
        self._drop(handle)
        self._held[handle] = (owner, ids, time.monotonic() + self._lease_s)
        self._n_tokens += len(ids)
        while self._held and (self._n_tokens > self._max_tokens or self._oldest_end() < time.monotonic()):
            self._drop(next(iter(self._held)))

    def get(self, handle: str, owner: str) -> Ids | None:
        """The sequence, its lease renewed; None if it is not held, or is someone else's."""
        found = self._held.get(handle)
        if found is None or found[0] != owner or found[2] < time.monotonic():
            return None
        self._held[handle] = (owner, found[1], time.monotonic() + self._lease_s)
        self._held.move_to_end(handle)
        return found[1]

    def _oldest_end(self) -> float:
        return next(iter(self._held.values()))[2]

    def _drop(self, handle: str) -> None:
        held = self._held.pop(handle, None)
        if held is not None:
            self._n_tokens -= len(held[1])


def routes(serving: Serving) -> list[BaseRoute]:
    """The endpoints, bound to one served model."""
    handles = Handles()
    tokenizer_body = _tokenizer_body(serving)

    async def tokenizer(request: Request) -> Response:
        return Response(tokenizer_body, media_type="application/json")

    async def submit(request: Request) -> Response:
        trace = trace_of(request)
        owner = trace.caller.digest
        body = decode(await request.body(), LangSubmit)
        if not 0 < len(body.requests) <= MAX_REQUESTS:
            raise InvalidRequest(f"requests must hold 1 to {MAX_REQUESTS} requests.", param="requests")
        prompts = [_prompt(handles, owner, one, index) for index, one in enumerate(body.requests)]
        lost = [index for index, prompt in enumerate(prompts) if prompt is None]
        if lost:
            return json_response({"lost": lost}, status=409)
        job = _Job(serving, handles, owner, body.requests, [prompt for prompt in prompts if prompt is not None])
        return EventStream(job.lines(), trace)

    async def abort(request: Request) -> Response:
        owner = trace_of(request).caller.digest
        body = decode(await request.body(), LangAbort)
        return json_response({"aborted": sum(serving.generator.abort(_rid(owner, rid)) for rid in body.rids)})

    return [
        Route("/lang/tokenizer", tokenizer, methods=["GET"]),
        Route("/lang/submit", submit, methods=["POST"]),
        Route("/lang/abort", abort, methods=["POST"]),
    ]


def _tokenizer_body(serving: Serving) -> bytes:
    tokenizer = serving.tokenizer
    return dumps(
        {
            "model": serving.spec.name,
            "tokenizer": tokenizer.to_json(),
            "chat_template": tokenizer.chat_template,
            "eos_ids": list(serving.spec.eos_ids),
            "bos": tokenizer.bos_token,
            "eos": tokenizer.eos_token,
        }
    )


def _prompt(handles: Handles, owner: str, request: LangRequest, index: int) -> Ids | None:
    """All ids of a request's prompt; None if its handle is lost."""
    if len(request.suffix) % 4:
        raise InvalidRequest("suffix must be int32 ids.", param=f"requests[{index}].suffix")
    suffix = unpack_ids(request.suffix)
    if request.parent is None:
        return suffix
    before = handles.get(request.parent, owner)
    if before is None or not 0 <= request.keep <= len(before):
        return None
    return np.concatenate([before[: request.keep], suffix]).astype(np.int32)


def _rid(owner: str, rid: str) -> str:
    return f"{owner}:{rid}" if owner else rid


class _Job:
    """One message of requests, followed together; every line says which request it is about."""

    def __init__(
        self, serving: Serving, handles: Handles, owner: str, requests: Sequence[LangRequest], prompts: Sequence[Ids]
    ) -> None:
        self._handles = handles
        self._owner = owner
        self._names = [secrets.token_hex(8) for _ in requests]
        namespace = Caller(owner).namespace()
        submits = [
            Submit(
                rid=_rid(owner, one.rid),
                tokens=pack_ids(prompt),
                params=one.params,
                grammar=one.grammar,
                namespace=namespace,
                hints=one.hints,
                client=owner or one.client,
                prompt_logprobs_from=one.prompt_logprobs_from,
                segments=one.segments,
                timeout_s=one.timeout_s,
                stream=one.stream,
            )
            for one, prompt in zip(requests, prompts, strict=True)
        ]
        self._trails = [
            Trail(prompt, one.segments, serving.spec.eos_ids) for one, prompt in zip(requests, prompts, strict=True)
        ]
        self._streams = _open(serving.generator, submits)

    async def lines(self) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._follow(index, queue)) for index in range(len(self._streams))]
        yield _line(LangNews(handles=tuple(self._names)))
        try:
            left = len(tasks)
            while left:
                lines = [await queue.get()]
                while not queue.empty():  # siblings often end in one step: one write for all of them
                    lines.append(queue.get_nowait())
                left -= lines.count(None)
                if text := b"".join(line for line in lines if line is not None):
                    yield text
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in self._streams:
                if isinstance(stream, Stream):
                    stream.close()

    async def _follow(self, index: int, queue: asyncio.Queue[bytes | None]) -> None:
        trail, stream = self._trails[index], self._streams[index]
        try:
            if isinstance(stream, RametError):
                raise stream
            async for delta in stream:
                trail.add(delta.segment, delta.token_ids)
                if delta.usage is not None:  # the handle is there before the client can use it
                    self._handles.put(self._names[index], self._owner, trail.ids())
                queue.put_nowait(_line(_news(index, delta)))
        except RametError as error:
            problem = LangProblem(str(error), error.status, error.param)
            queue.put_nowait(_line(LangNews(i=index, error=problem)))
        finally:
            queue.put_nowait(None)


def _open(generator: Generator, submits: Sequence[Submit]) -> list[Stream | RametError]:
    """The streams of one message. If one request is refused the others go on; if it is the only one, it raises."""
    try:
        return list(generator.stream_many(submits))
    except InvalidRequest:
        if len(submits) == 1:
            raise
    streams: list[Stream | RametError] = []
    for submit in submits:
        try:
            streams.extend(generator.stream_many([submit]))
        except InvalidRequest as error:
            streams.append(error)
    return streams


def _news(index: int, delta: Delta) -> LangNews:
    return LangNews(
        i=index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        prompt_logprobs=delta.prompt_logprobs,
        finish=delta.finish,
        usage=delta.usage,
        segment=delta.segment,
        forced=delta.forced,
    )


def _line(news: LangNews) -> bytes:
    return msgspec.json.encode(news) + b"\n"
