"""Programs on an OpenAI-compatible URL: text only, the rest a clear error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import ramet as rt
from frontend_lang.errors import GenerationFailed, Unsupported
from frontend_lang.openai import OpenAIBackend
from runtime.engine import Engine
from runtime.errors import Unavailable
from tests.lang.engines import toy_engine, toy_server
from tests.lang.test_http import everything


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with toy_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def openai(engine: Engine) -> Iterator[OpenAIBackend]:
    with toy_server(engine) as url:
        yield OpenAIBackend(url)


@rt.function
def chat(s: rt.State) -> Any:
    s.system("Be brief.")
    s.user("Hello?")
    s.assistant(rt.gen("a", max_tokens=6))
    branches = s.fork(2)
    for branch in branches:
        branch.user("And " + branch.name)
        branch.assistant(rt.gen("b", max_tokens=6))
    return branches.values("b")


def test_chats(openai: OpenAIBackend, engine: Engine) -> None:
    """The first answer is what the engine says; later ones may differ, as text is tokenised again."""
    there, here = chat.run(openai), chat.run(engine)
    assert there["a"] == here["a"]
    assert len(there.value) == 2
    assert there.totals.requests == 3
    assert "\U0010fff1" in there.text  # roles are marks, not a template


def test_text(openai: OpenAIBackend, engine: Engine) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "Once upon a time"
        s += rt.gen("a", max_tokens=5)
        return s["a"]

    assert program.run(openai).value == program.run(engine).value


def test_what_cannot_be_expressed_says_so(openai: OpenAIBackend) -> None:
    @rt.function
    def selects(s: rt.State) -> Any:
        s += "x"
        s += rt.select("a", ["b", "c"])

    @rt.function
    def outside(s: rt.State) -> Any:
        s.user("x")
        s += rt.gen("a")

    with pytest.raises(Unsupported, match=r"score.*branch 'main', test_openai\.py"):
        selects.run(openai)
    with pytest.raises(Unsupported, match=r"inside a message.*branch 'main', test_openai\.py"):
        outside.run(openai)
    with pytest.raises(Unsupported):
        everything.run(openai)


def test_refusals_and_dead_servers(openai: OpenAIBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "x" * 20000
        s += rt.gen("a")
        return s["a"]

    with pytest.raises(GenerationFailed, match="context length"):
        program.run(openai)
    with pytest.raises(Unavailable, match="No OpenAI"):
        OpenAIBackend("http://127.0.0.1:9")


def test_typed_gens_in_a_chat_and_on_plain_text(openai: OpenAIBackend) -> None:
    """Servers call the same grammar by different names; ours knows several of them."""

    @rt.function
    def program(s: rt.State) -> Any:
        s += "1 + 1 = "
        s += rt.gen("plain", int, max_tokens=3)
        return s["plain"]

    @rt.function
    def in_chat(s: rt.State) -> Any:
        s.user("hi")
        s.assistant(
            "I say ", rt.gen("number", int, max_tokens=3), " and ", rt.gen("word", regex="[a-z]+", max_tokens=3)
        )
        s.user("and?")
        s.assistant(rt.gen("one", choices=["yes", "no"]))
        s.user("and?")
        s.assistant(rt.gen("price", float, max_tokens=5), " ", rt.gen("many", list[bool], max_tokens=99))
        return s["number"], s["word"], s["one"], s["price"], s["many"]

    assert isinstance(program.run(openai).value, int)
    number, word, one, price, many = in_chat.run(openai).value
    assert isinstance(number, int)
    assert word.islower()
    assert one in ("yes", "no")
    assert isinstance(price, float)
    assert isinstance(many, list)


@pytest.mark.parametrize("in_chat", [True, False])
def test_logprobs_are_the_servers_with_texts_for_ids(openai: OpenAIBackend, engine: Engine, in_chat: bool) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        if in_chat:
            s.user("hi")
            s.assistant(rt.gen("a", max_tokens=6, logprobs=2))
        else:
            s += "hi"
            s += rt.gen("a", max_tokens=6, logprobs=2)
        return s.info("a").logprobs

    there, here = program.run(openai).value, program.run(engine).value
    assert [one.logprob for one in there] == [one.logprob for one in here]
    names = engine.tokenizer.token_bytes
    for mine, exact in zip(there, here, strict=True):
        shown = names[exact.token].decode("utf-8", "replace")
        assert mine.text == shown or mine.text.startswith("bytes:")  # how text completions write half a character
        assert len(mine.top_ids) == len(mine.top_texts) == len(mine.top_logprobs) >= 2
        assert set(exact.top_logprobs) <= set(mine.top_logprobs)


@pytest.mark.parametrize("in_chat", [True, False])
def test_no_more_than_the_prompt_is_told_as_cached(openai: OpenAIBackend, in_chat: bool) -> None:
    """The second time, what the grammar forces first is in the cache as well."""

    @rt.function
    def program(s: rt.State) -> Any:
        if in_chat:
            s.user("hi")
            s.assistant(rt.gen("a", regex="it always begins with the same words: [a-z]", max_tokens=60))
        else:
            s += "hi"
            s += rt.gen("a", regex="it always begins with the same words: [a-z]", max_tokens=60)

    for _ in range(2):
        totals = program.run(openai).totals
        assert totals.prefilled >= 0
        assert totals.prefilled + totals.reused == totals.prompt
