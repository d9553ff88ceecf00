"""The door of DSL programs: token states by handle, many requests in one message, one stream of news.

`GET /lang/tokenizer` gives a client the model's own tokenizer and chat template, so that text never travels.
`POST /lang/submit` takes requests whose prompt is `keep` ids of an earlier request's sequence (named by its handle)
and a suffix; it answers one JSON line a piece. A handle that is no longer held is a 409, and the client sends
all ids instead. `POST /lang/abort` cancels by request id. Handles belong to the API key that made them.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from runtime.errors import InvalidRequest, RametError, RequestAborted
from runtime.generate import Delta, Generator, Stream
from runtime.lang_wire import LangAbort, LangNews, LangProblem, LangRequest, LangSubmit
from runtime.messages import Ids, NamespaceKey, Submit, pack_ids, unpack_ids
from runtime.serve.context import Caller, Serving
from runtime.serve.trace import trace_of
from runtime.serve.wire import SEND_KEY, Watcher, decode, disconnected, dumps, json_response
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
        return LangStream(serving, handles, trace, owner, body.requests, [one for one in prompts if one is not None])

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


class LangStream(Response):
    """One message of requests, followed together; every line says which request it is about.

    What comes at one moment is one write: of requests that end together, the whole answer with its head and its end.
    """

    def __init__(
        self,
        serving: Serving,
        handles: Handles,
        watcher: Watcher,
        owner: str,
        requests: Sequence[LangRequest],
        prompts: Sequence[Ids],
    ) -> None:
        self.status_code, self.background = 200, None
        self.raw_headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")]
        self._watcher = watcher
        self._handles = handles
        self._owner = owner
        self._names = [secrets.token_hex(8) for _ in requests]
        namespace = Caller(owner).namespace()
        submits = [_submit(one, prompt, owner, namespace) for one, prompt in zip(requests, prompts, strict=True)]
        self._trails = [
            Trail(prompt, one.segments, serving.spec.eos_ids) for one, prompt in zip(requests, prompts, strict=True)
        ]
        self._streams = _open(serving.generator, submits)
        self._going = set(range(len(requests)))  # those that have not ended
        self._ready: dict[int, None] = {}  # those with news, in the order these came
        self._waiter: asyncio.Future[None] | None = None
        self._left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write: Send = scope.get(SEND_KEY, send)
        gone = asyncio.ensure_future(disconnected(receive))
        gone.add_done_callback(self._leave)
        begun = False
        try:
            self._listen()
            while not self._left:
                text = await self._news()
                if not begun and not self._left:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    text = _line(LangNews(handles=tuple(self._names))) + text
                if not self._going:
                    await send({"type": "http.response.body", "body": text, "more_body": False})
                    return
                await write({"type": "http.response.body", "body": text, "more_body": True})
        finally:
            gone.remove_done_callback(self._leave)
            gone.cancel()
            for stream in self._streams:
                if isinstance(stream, Stream):
                    stream.close()
            self._watcher.aborted |= self._left
        if not begun:
            raise RequestAborted("The client closed the connection.")

    def _listen(self) -> None:
        for index, stream in enumerate(self._streams):
            if isinstance(stream, Stream):
                stream.inbox.listen(functools.partial(self._wake, index))
            else:
                self._wake(index)

    def _wake(self, index: int) -> None:
        """Request `index` has news. All that come before the loop's next turn are taken together."""
        self._ready[index] = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _leave(self, gone: asyncio.Task[None]) -> None:
        if not gone.cancelled():
            self._left = True
            self._wake(0)

    async def _news(self) -> bytes:
        """Wait for news; all that are there, as lines."""
        if not self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        ready, self._ready = self._ready, {}
        return b"".join(line for index in ready for line in self._take(index))

    def _take(self, index: int) -> Iterator[bytes]:
        """One request's news. Its handle is there before the client can use it."""
        stream, trail = self._streams[index], self._trails[index]
        try:
            if isinstance(stream, RametError):
                raise stream
            while deltas := stream.poll():
                for delta in deltas:
                    trail.add(delta.segment, delta.token_ids)
                    if delta.usage is not None:
                        self._handles.put(self._names[index], self._owner, trail.ids())
                    yield _line(_of(index, delta))
                if not stream.ended:
                    return
            if stream.ended:
                self._going.discard(index)
        except RametError as error:
            self._going.discard(index)
            yield _line(LangNews(i=index, error=LangProblem(str(error), error.status, error.param)))


def _submit(one: LangRequest, prompt: Ids, owner: str, namespace: NamespaceKey) -> Submit:
    return Submit(
        rid=_rid(owner, one.rid),
        tokens=pack_ids(prompt),
        params=one.params,
        grammar=one.grammar,
        namespace=namespace,
        hints=one.hints,
        client=owner or one.client,
        prompt_logprobs_from=one.prompt_logprobs_from,
        scores=one.scores,
        segments=one.segments,
        timeout_s=one.timeout_s,
        stream=one.stream,
    )


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


def _of(index: int, delta: Delta) -> LangNews:
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
