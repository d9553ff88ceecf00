"""Thoughts apart from answers: on, off, under a grammar, and in both modes alike."""

from __future__ import annotations

import pytest

from tests.serve.scripted import CHATML, THINKING, serve
from tests.serve.test_tools import choice, stream

OPENED = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
SHAPE = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


async def both(served, **body) -> tuple[str, str]:
    """(thoughts, content), the same whole and streamed."""
    message = (await choice(served, **body))["message"]
    chunks = await stream(served, **body)
    thought = "".join(c["delta"].get("reasoning_content") or "" for c in chunks)
    content = "".join(c["delta"].get("content") or "" for c in chunks)
    assert (message.get("reasoning_content", ""), message["content"]) == (thought, content)
    return thought, content


@pytest.mark.parametrize("k", [1, 2, 5])
async def test_thoughts_are_split_off(k):
    assert await both(serve(["<think>", "h", "</think>", "42"], k=k, template=THINKING)) == ("h", "42")
    assert await both(serve(["<th", "ink>h</thi", "nk>\n\n42"], k=k, template=THINKING)) == ("h", "42")
    assert await both(serve(["h", "</think>", "42"], k=k, template=OPENED)) == ("h", "42")


async def test_with_thinking_off_everything_is_answer():
    args = {"chat_template_kwargs": {"enable_thinking": False}}
    assert await both(serve(["42"], template=THINKING), **args) == ("", "42")


async def test_a_tag_in_the_answer_is_text():
    served = serve(["<think>a</think>", "use the ", "<think>", " tag"], template=THINKING)
    assert await both(served) == ("a", "use the <think> tag")


async def test_a_model_without_thoughts_keeps_its_tags():
    assert await both(serve(["<think>a</think>b"])) == ("", "<think>a</think>b")


async def test_a_grammar_begins_after_the_thoughts():
    served = serve(["h", "</think>", '{"answer":1}'], template=OPENED)
    assert await both(served, response_format=SHAPE) == ("h", '{"answer":1}')
    assert served.client.submits[-1].grammar.after == "</think>"


async def test_a_grammar_opens_the_block_for_a_model_that_would():
    served = serve(["h", "</think>", "{}"], template=THINKING)
    assert await both(served, response_format=SHAPE) == ("h", "{}")
    served = serve(["{}"], template=THINKING)
    args = {"chat_template_kwargs": {"enable_thinking": False}}
    assert await both(served, response_format=SHAPE, **args) == ("", "{}")
    assert served.client.submits[-1].grammar.after is None
