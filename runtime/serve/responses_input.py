"""Input items of the Responses API as chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.errors import InvalidRequest
from runtime.messages import GrammarSpec
from runtime.serve.sampling import response_grammar

Message = dict[str, Any]


def conversation(items: str | list[Any], instructions: str | None, before: list[Message]) -> list[Message]:
    """All messages of a request: instructions, what came before, the new input."""
    new = [{"role": "user", "content": items}] if isinstance(items, str) else _messages(items)
    head = [{"role": "system", "content": instructions}] if instructions else []
    return [*head, *before, *new]


def _messages(items: list[Any]) -> list[Message]:
    messages: list[Message] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, Mapping):
            raise InvalidRequest(f"{where} must be an object.", param=where)
        _add(messages, item, where)
    return messages


def _add(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    match item.get("type", "message"):
        case "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        case "function_call":
            _add_call(messages, item, where)
        case "function_call_output":
            output = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        case "reasoning" | "item_reference":
            return
        case kind:
            raise InvalidRequest(f"{where} has type {kind!r:.60}, which is not supported.", param=f"{where}.type")


def _add_call(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    """Calls in a row, and the text before them, are one turn of the assistant."""
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    last = messages[-1] if messages else None
    if last is not None and last.get("role") == "assistant":
        messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", []), call]}
    else:
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})


def text_format(text: Any) -> GrammarSpec | None:
    """The grammar of `text.format`, where the schema lies flat."""
    shape = text.get("format") if isinstance(text, dict) else None
    return response_grammar(shape, "text.format")
