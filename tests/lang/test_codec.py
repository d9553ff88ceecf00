"""Text is tokenised as the tokenizer would have it whole, however a program cuts it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend_lang.codec import Codec
from frontend_lang.context import Context
from frontend_lang.ir import Text
from tests.lang.fake import FakeBackend

WORDS = st.sampled_from(
    ["the", " the", " cat", "s", "ing", " YES", "A:", " ", "  ", "\n", "\n\n", "é", "42", " 7", "'s", ","]
)
TEXTS = st.lists(st.one_of(WORDS, st.text("abcd eT\n.é1", max_size=90)), min_size=1, max_size=8)


def ids_of(backend: Any, pieces: list[str]) -> list[int]:
    async def add() -> list[int]:
        context = Context(Codec(backend))
        for piece in pieces:
            await context.add(piece)
            await context.settle()
        return list(await context.commit())

    return asyncio.run(add())


@given(TEXTS)
def test_any_split_gives_the_ids_of_the_whole(pieces: list[str]) -> None:
    backend = FakeBackend()
    assert ids_of(backend, pieces) == backend.tokenizer.encode("".join(pieces))


@pytest.fixture(scope="module")
def smollm() -> Any:
    """The real vocabulary of the embedded model, without the model."""
    from runtime.pull import embedded_path
    from runtime.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_model(embedded_path("smollm2-135m"))

    class Vocabulary:
        specials = {tokenizer.token_bytes[i].decode(): i for i in tokenizer.special_ids}

        async def encode(self, text: str) -> list[int]:
            return tokenizer.encode(text, add_special=False)

    vocabulary = Vocabulary()
    vocabulary.whole = lambda text: tokenizer.encode(text, add_special=False)  # type: ignore[attr-defined]
    return vocabulary


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_split_gives_the_ids_of_the_whole_with_a_real_vocabulary(smollm: Any, data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.one_of(WORDS, st.text(max_size=80).filter(lambda t: "<|" not in t)), max_size=6))
    assert ids_of(smollm, pieces) == smollm.whole("".join(pieces))


def test_long_text_is_encoded_once_though_it_grows(backend: FakeBackend) -> None:
    async def grow() -> int:
        context = Context(Codec(backend))
        await context.add("the cat saw the dog and " * 200)
        before = sum(map(len, backend.encoded))
        for _ in range(20):
            await context.add("more of it ")
            await context.settle()
        return sum(map(len, backend.encoded)) - before

    assert asyncio.run(grow()) < 2000


def test_special_tokens_count_only_in_raw_text(backend: FakeBackend) -> None:
    codec = Codec(backend)
    trusted = asyncio.run(codec.encode([Text("<|end|>", special=True)]))
    untrusted = asyncio.run(codec.encode([Text("<|end|>")]))
    split = asyncio.run(codec.encode([Text("<|", special=True), Text("end|>")]))
    assert trusted == [0]
    assert 0 not in untrusted
    assert 0 not in split
    assert backend.tokenizer.text(untrusted) == "<|end|>"


def test_a_tokenizer_that_joins_words_is_never_cut_early() -> None:
    class Joining(FakeBackend):
        async def encode(self, text: str) -> list[int]:
            return [hash(text) % 1000 + 10] if text else []

    codec = Codec(Joining())
    assert asyncio.run(codec.settled([Text("one word and another word")])) == ([], "one word and another word")
