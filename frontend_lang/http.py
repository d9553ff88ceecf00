"""Programs on our server: token states by handle, so that only new ids travel.

The model's tokenizer and chat template are fetched once; from then on text is encoded here.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from frontend_lang.backend import Abilities, Piece, PieceStream
from frontend_lang.plain import answer, scores
from frontend_lang.record import common_prefix
from runtime.errors import InvalidRequest, RametError, RequestFailed, Unavailable
from runtime.generate import error_of
from runtime.lang_wire import LangAbort, LangNews, LangProblem, LangRequest, LangSubmit
from runtime.messages import Finish, Ids, Submit, unpack_ids
from runtime.text.chat import ChatRenderer
from runtime.text.tokenizer import Tokenizer
from runtime.trail import Trail

MAX_KNOWN = 512  # sequences whose handles are remembered
_decode = msgspec.json.Decoder(LangNews).decode
CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Known:
    """A sequence the server holds, as it was when its request ended."""

    handle: str
    ids: Ids


class HttpBackend:
    """A Ramet server at `url`. `api_key` is sent as a bearer token. Raises Unavailable if nobody answers.

    `plain`: without the server's help for programs, each request by itself through `/generate`.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float | None = None, plain: bool = False
    ) -> None:
        self.name = "http"
        self.able = Abilities(segments=not plain)
        self._plain = plain
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        self._clients: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}
        self._known: dict[str, OrderedDict[str, _Known]] = {}  # program run -> its latest sequences
        about = self._fetch("/lang/tokenizer")
        self.model: str = about["model"]
        self.tokenizer = Tokenizer.from_json(
            about["tokenizer"],
            chat_template=about["chat_template"],
            eos_ids=about["eos_ids"],
            bos=about["bos"],
            eos=about["eos"],
        )
        self.renderer = ChatRenderer(self.tokenizer)
        table = self.tokenizer.token_bytes
        self.specials: Mapping[str, int] = {table[i].decode(): i for i in self.tokenizer.special_ids if table[i]}
        self.stop_ids = frozenset(about["eos_ids"])
        self.bos_ids = tuple(self.tokenizer.encode("", add_special=True)[:1])
        self.ids_sent = 0  # token ids that travelled, for whoever wonders

    def _fetch(self, path: str) -> dict[str, Any]:
        try:
            reply = httpx.get(self._url + path, headers=self._headers, timeout=CONNECT_S)
            reply.raise_for_status()
            found: dict[str, Any] = reply.json()
        except httpx.HTTPStatusError as error:
            raise _error_of(error.response.status_code, error.response.content) from error
        except (httpx.HTTPError, ValueError) as error:
            raise Unavailable(f"No Ramet server answers at {self._url}: {error}") from error
        return found

    # ---- the Backend protocol -----------------------------------------------------------------------------

    def submit(self, requests: Sequence[Submit]) -> Sequence[AsyncIterator[Piece]]:
        if self._plain:
            return [self._alone(request) for request in requests]
        inboxes: list[asyncio.Queue[Piece | RametError | None]] = [asyncio.Queue() for _ in requests]
        task = asyncio.get_running_loop().create_task(self._exchange(list(requests), inboxes))
        message = _Message(self, task, [request.rid for request in requests])
        return [
            PieceStream(message.read(index, inbox), functools.partial(message.leave, index))
            for index, inbox in enumerate(inboxes)
        ]

    async def _alone(self, request: Submit) -> AsyncGenerator[Piece, None]:
        """One request as any client would send it."""
        self.ids_sent += len(request.tokens) // 4
        pieces = (scores if request.scores else answer)(self.client(), request)
        try:
            async for piece in pieces:
                yield piece
        except httpx.HTTPError as error:
            raise Unavailable(f"The server at {self._url} is gone: {error or type(error).__name__}") from error
        finally:
            await pieces.aclose()

    async def encode(self, text: str) -> Sequence[int]:
        return self.tokenizer.encode(text, add_special=False)

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes[token]

    async def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        return self.renderer.render_text(list(messages), add_generation_prompt=add_generation_prompt)

    # ---- one message --------------------------------------------------------------------------------------

    def client(self) -> httpx.AsyncClient:
        """The connections of the running loop; those of loops that have ended are forgotten."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients = {old: client for old, client in self._clients.items() if not old.is_closed()}
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            self._clients[loop] = httpx.AsyncClient(
                base_url=self._url,
                headers=self._headers,
                timeout=self._timeout,
                limits=limits,
                verify=self._url.startswith("https:"),  # reading the certificates takes longer than a short program
            )
        return self._clients[loop]

    async def _exchange(self, requests: list[Submit], inboxes: list[asyncio.Queue[Any]]) -> None:
        """Send the message, hand out what comes, and end every inbox whatever happens."""
        try:
            if await self._stream(requests, inboxes, by_handle=True):
                await self._stream(requests, inboxes, by_handle=False)
            problem: RametError | None = Unavailable("The server closed the connection before the end.")
        except httpx.HTTPError as error:
            problem = Unavailable(f"The server at {self._url} is gone: {error or type(error).__name__}")
        except RametError as error:
            problem = error
        for inbox in inboxes:
            inbox.put_nowait(problem)

    async def _stream(self, requests: list[Submit], inboxes: list[asyncio.Queue[Any]], *, by_handle: bool) -> bool:
        """Follow one exchange. True if a handle was lost: nothing ran, send all ids."""
        bodies = [self._body(request, by_handle) for request in requests]
        content = msgspec.json.encode(LangSubmit(tuple(bodies)))
        async with self.client().stream("POST", "/lang/submit", content=content) as reply:
            if reply.status_code == 409 and by_handle:
                await reply.aread()
                for request in requests:
                    self._known.pop(request.client, None)
                return True
            if reply.status_code != 200:
                raise _error_of(reply.status_code, await reply.aread())
            handles: tuple[str, ...] = ()
            trails = [Trail(unpack_ids(one.tokens), one.segments, self.stop_ids) for one in requests]
            async for line in _lines(reply):
                news = _decode(line)
                if news.handles:
                    handles = news.handles
                elif news.error is not None:
                    inboxes[news.i].put_nowait(_failure(news.error))
                else:
                    trails[news.i].add(news.segment, news.token_ids)
                    if news.usage is not None:
                        self._remember(requests[news.i].client, handles[news.i], trails[news.i])
                    inboxes[news.i].put_nowait(Piece.of(news))
        return False

    def _body(self, request: Submit, by_handle: bool) -> LangRequest:
        ids = unpack_ids(request.tokens)
        parent, keep = self._longest(request.client, ids) if by_handle else (None, 0)
        self.ids_sent += len(ids) - keep
        return LangRequest(
            rid=request.rid,
            parent=parent,
            keep=keep,
            suffix=ids[keep:].tobytes(),
            params=request.params,
            grammar=request.grammar,
            hints=request.hints,
            client=request.client,
            prompt_logprobs_from=request.prompt_logprobs_from,
            scores=request.scores,
            segments=request.segments,
            timeout_s=request.timeout_s,
            stream=request.stream,
        )

    def _longest(self, run: str, ids: Ids) -> tuple[str | None, int]:
        """The handle of the known sequence that begins most like `ids`, and how much of it to keep."""
        best: tuple[str | None, int] = (None, 0)
        for known in self._known.get(run, {}).values():
            n = common_prefix(ids, known.ids)
            if n > best[1]:
                best = (known.handle, n)
        return best

    def _remember(self, run: str, handle: str, trail: Trail) -> None:
        known = self._known.setdefault(run, OrderedDict())
        known[handle] = _Known(handle, trail.ids())
        while len(known) > MAX_KNOWN:
            known.popitem(last=False)
        while len(self._known) > MAX_KNOWN:
            self._known.pop(next(iter(self._known)))


class _Message:
    """The readers of one message's streams; the last to leave ends the exchange."""

    def __init__(self, backend: HttpBackend, task: asyncio.Task[None], rids: list[str]) -> None:
        self._backend = backend
        self._task = task
        self._rids = rids
        self._left = len(rids)
        self._early = False
        self._done: set[int] = set()

    async def read(self, index: int, inbox: asyncio.Queue[Piece | RametError | None]) -> AsyncGenerator[Piece, None]:
        while index not in self._done:
            item = await inbox.get()
            if isinstance(item, RametError):
                self._done.add(index)
                raise item
            assert item is not None
            if item.usage is not None:
                self._done.add(index)
            yield item

    async def leave(self, index: int) -> None:
        self._left -= 1
        early = index not in self._done
        self._early |= early
        if self._left and early and not self._task.done():
            await asyncio.shield(self._abort(index))
        elif not self._left:
            if self._early and not self._task.cancelling():  # a second time would cut the closing short
                self._task.cancel()  # closes the connection, which aborts what still runs
            await asyncio.wait([self._task])  # a gather would hand our own cancellation on

    async def _abort(self, index: int) -> None:
        content = msgspec.json.encode(LangAbort((self._rids[index],)))
        await self._backend.client().post("/lang/abort", content=content)


async def _lines(reply: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The answer's lines, as bytes: a line is decoded once, by msgspec."""
    rest = b""
    async for chunk in reply.aiter_raw():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


def _failure(problem: LangProblem) -> RametError:
    return error_of(Finish(reason="error", message=problem.message, status=problem.status, param=problem.param))


def _error_of(status: int, body: bytes) -> RametError:
    """A refusal of the whole message as the error the engine would have raised."""
    try:
        problem = json.loads(body)["error"]
        text, param = str(problem["message"]), problem.get("param")
    except (ValueError, KeyError, TypeError):
        text, param = f"The server answered {status}: {body[:200]!r}", None
    if status == 404:
        return InvalidRequest(f"{text} (is this a Ramet server?)", param="url")
    if status in (401, 403):
        return InvalidRequest(text, param="api_key")
    return error_of(Finish(reason="error", message=text, status=status, param=param)) if text else RequestFailed(text)
