"""Programs on an Engine in this process: token ids in, token ids out, no copies of text on the way."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from frontend_lang.backend import Abilities, Piece, PieceStream
from runtime.messages import Submit


class LocalBackend:
    """The backend of an Engine (anything with `generator`, `tokenizer`, `spec` and `chat_renderer`)."""

    def __init__(self, engine: Any) -> None:
        self._generator = engine.generator
        self._tokenizer = engine.tokenizer
        self._renderer = engine.chat_renderer
        self.name = "local"
        self.model: str = engine.spec.name
        self.able = Abilities()
        table = self._tokenizer.token_bytes
        self.specials: Mapping[str, int] = {table[i].decode(): i for i in self._tokenizer.special_ids if table[i]}
        self.stop_ids = frozenset(engine.spec.eos_ids)
        self.bos_ids = tuple(self._tokenizer.encode("", add_special=True)[:1])

    def submit(self, requests: Sequence[Submit]) -> list[PieceStream]:
        return [PieceStream(_pieces(stream), stream.aclose) for stream in self._generator.stream_many(requests)]

    async def encode(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._tokenizer.encode(text, add_special=False)
        return ids

    def token_bytes(self, token: int) -> bytes:
        exact: bytes = self._tokenizer.token_bytes[token]
        return exact

    async def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        text: str = self._renderer.render_text(list(messages), add_generation_prompt=add_generation_prompt)
        return text


async def _pieces(stream: Any) -> AsyncGenerator[Piece, None]:
    async for delta in stream:
        yield Piece.of(delta)
