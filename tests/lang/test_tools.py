"""Tools: the signature is the schema, the result comes back as a message, errors too."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any, Literal

import pytest

import ramet as rt
from frontend_lang.errors import InvalidSchema, ToolFailed
from tests.lang.fake import FakeBackend


@rt.tool
def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Both are whole.
    """
    return a + b


@dataclasses.dataclass
class Place:
    city: str


@rt.tool
async def weather(place: Place, unit: Literal["c", "f"] = "c") -> dict[str, Any]:
    """The weather of a place."""
    await asyncio.sleep(0)
    return {"city": place.city, "sky": "blue", "unit": unit}


def test_the_schema_comes_from_the_signature() -> None:
    assert add.schema["properties"]["a"]["type"] == "integer"
    assert add.schema["required"] == ["a"]
    assert add.schema["additionalProperties"] is False
    assert add.describe == "add(a: integer, b: integer): Add two numbers."
    assert add(1, 3) == 4


def test_in_a_chat_the_result_is_a_message(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s.user("what is it")
        s.assistant(add.call("sum"), "So", rt.gen("answer"))
        return s["sum"]

    result = program.run(backend)
    sum_ = result.value
    assert sum_.ok
    assert sum_.value == sum_.arguments["a"] + sum_.arguments["b"]
    assert f"<|end|>\n<|begin|>user\n{sum_.value}<|end|>\n<|begin|>assistant\nSo{result['answer']}" in result.text
    assert backend.requests[0].hints.expect_return_s is not None


def test_outside_a_chat_the_result_is_text(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "call:"
        s += rt.call("w", weather, before_result=" -> ", after_result=".")
        return s["w"].value["city"]

    result = program.run(backend)
    assert f' -> {{"city":"{result.value}"' in result.text
    assert result.text.endswith("}.")


def test_one_of_several_tools(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s.user("go")
        s += rt.call("r", add, weather)
        s.user("thanks")
        return s["r"]

    result = program.run(backend)
    assert result.value.tool in ("add", "weather")
    assert result.value.ok
    assert result.text.count("<|begin|>assistant") == 1


@rt.tool
def broken(x: int) -> int:
    """Fails."""
    raise KeyError("no such thing")


def test_a_tool_that_raises_feeds_its_error_back(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += broken.call("r")
        return s["r"]

    result = program.run(backend)
    assert not result.value.ok
    assert "KeyError" in result.value.error
    assert "error: KeyError" in result.text
    assert not result.record.tools[0].ok


def test_a_tool_that_raises_may_raise(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += broken.call("r", on_error="raise")
        return s["r"]

    with pytest.raises(ToolFailed, match=r"KeyError.*test_tools.py:") as caught:
        program.run(backend)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_tool_that_never_returns(backend: FakeBackend) -> None:
    forever = threading.Event()

    @rt.tool(timeout_s=0.05)
    def stuck(x: int) -> int:
        forever.wait()
        return x

    @rt.function
    def program(s: rt.State) -> Any:
        s += stuck.call("r")
        return s["r"].error

    assert program.run(backend).value == "no answer within 0.05 s"
    forever.set()


def test_a_result_that_is_no_text_is_an_error_of_the_call(backend: FakeBackend) -> None:
    @rt.tool
    def broken(x: int) -> str:
        return "\ud800"

    @rt.tool
    def rude(x: int) -> str:
        raise ValueError("\ud800")

    @rt.function
    def program(s: rt.State) -> Any:
        s += broken.call("r")
        s += rude.call("q")
        return s["r"].error, s["q"].error

    first, second = program.run(backend).value
    assert "surrogates not allowed" in first
    assert second == "ValueError: \\ud800"


def test_a_call_cut_short_is_an_error_of_the_call(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += add.call("r", max_tokens=2)
        return s["r"]

    result = program.run(backend).value
    assert not result.ok
    assert "max_tokens=2" in result.error


def test_functions_that_cannot_be_tools() -> None:
    def untyped(x):  # type: ignore[no-untyped-def]
        return x

    def starred(*args: int) -> None: ...

    def odd(x: threading.Thread) -> None: ...

    for function, word in ((untyped, "no type"), (starred, "by name"), (odd, "schema")):
        with pytest.raises(InvalidSchema, match=word):
            rt.tool(function)
    with pytest.raises(InvalidSchema, match="at least one"):
        rt.call("x")
    with pytest.raises(InvalidSchema, match="one name"):
        rt.call("x", add, add)
