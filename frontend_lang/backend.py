"""The one face a program talks to. A backend turns requests (token ids in, token ids out) into streams.

`local.LocalBackend` drives an Engine in this process, `http.HttpBackend` our server, and
`openai.OpenAIBackend` any OpenAI-compatible URL, for which a "token" is one character of text.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from runtime.delta import Delta
from runtime.lang_wire import LangNews
from runtime.messages import Finish, Submit, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Piece:
    """What one request gave since the last piece.

    `token_ids` are the sampled ids as they are, a final stop token included. `text` is what may be shown:
    it never holds a part of a stop string or half a character. `finish` closes a segment; the stream ends
    after the last one, which brings `usage`. A request that was refused or failed ends in a Finish with reason "error".
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    usage: Usage | None = None
    segment: int = 0
    forced: tuple[int, ...] = ()  # places in `token_ids` of tokens that a grammar forced

    @classmethod
    def of(cls, news: Delta | LangNews) -> Piece:
        """What the runtime told, in process or over the wire."""
        return cls(
            text=news.text,
            token_ids=news.token_ids,
            logprobs=news.logprobs or (),
            prompt_logprobs=news.prompt_logprobs or (),
            finish=news.finish,
            usage=news.usage,
            segment=news.segment,
            forced=news.forced,
        )


class PieceStream(AsyncIterator[Piece]):
    """Pieces from a generator, with an end that is run once, even if nobody ever began to read."""

    def __init__(self, pieces: AsyncGenerator[Piece, None], leave: Callable[[], Awaitable[None]]) -> None:
        self._pieces = pieces
        self._leave = leave
        self._left = False

    async def __anext__(self) -> Piece:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent."""
        await self._pieces.aclose()
        if not self._left:
            self._left = True
            await self._leave()


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a backend can express; the driver plans around what it cannot."""

    segments: bool = True  # several generations in one request
    scoring: bool = True  # prompt_logprobs_from
    grammar: bool = True  # constrained generation
    prefetch: bool = True  # max_tokens=0 keeps the prompt's KV
    raw_text: bool = True  # text outside chat roles


@runtime_checkable
class Backend(Protocol):
    """Submit requests, and know the model's text rules. All of it is usable from any one running event loop."""

    name: str
    model: str
    able: Abilities
    specials: Mapping[str, int]  # text of special tokens -> id
    stop_ids: frozenset[int]  # ids that end a turn
    bos_ids: tuple[int, ...]  # what a fresh prompt of raw text starts with

    def submit(self, requests: Sequence[Submit]) -> Sequence[AsyncIterator[Piece]]:
        """Send the requests as one message, so that they are planned together. Closing an iterator aborts."""
        ...

    async def encode(self, text: str) -> Sequence[int]:
        """Ids of plain text, with no special tokens added; `text` holds none."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes of one id (a special token's text)."""
        ...

    async def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The model's chat template as text. Raises InvalidRequest with the template's own message."""
        ...
