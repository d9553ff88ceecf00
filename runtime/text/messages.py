"""Chat messages as clients send them, brought to the one form that templates are given.

Every role and content variant real clients use is accepted: absent, null, empty and list content, text
parts of any dialect, `developer` for system, arguments as a JSON string. What is wrong is refused with the
place: `messages[1].tool_calls[0].function.arguments`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import InvalidRequest

Message = dict[str, Any]

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
MAX_MESSAGES = 8192


def normalise_messages(messages: Any, param: str = "messages") -> list[Message]:
    """Messages with a known role, string content, and tool-call arguments as objects."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequest(f"{param} must be a list of messages.", param=param)
    if not messages:
        raise InvalidRequest(f"{param} must hold at least one message.", param=param)
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"{param} has {len(messages)} messages; at most {MAX_MESSAGES} are allowed.", param=param)
    return [_message(message, f"{param}[{i}]") for i, message in enumerate(messages)]


def merge_consecutive(messages: Sequence[Message]) -> list[Message]:
    """Join neighbours of the same role (user, system, plain assistant) with a blank line between."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last is not None and _can_join(last, message):
            merged[-1] = {**last, "content": _joined(last["content"], message["content"])}
        else:
            merged.append(message)
    return merged


def _can_join(last: Message, message: Message) -> bool:
    return last["role"] == message["role"] != "tool" and not last.get("tool_calls") and not message.get("tool_calls")


def _joined(first: str, second: str) -> str:
    return f"{first}\n\n{second}" if first and second else first or second


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object with a role and content.", param=where)
    role = message.get("role")
    known = _ROLES.get(role.lower()) if isinstance(role, str) else None
    if known is None:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(_ROLES)}; got {_short(role)}.", param=f"{where}.role"
        )
    plain: Message = {"role": known, "content": text_of(message.get("content"), f"{where}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            plain[name] = message[name]
    if "reasoning_content" not in plain and isinstance(message.get("reasoning"), str):
        plain["reasoning_content"] = message["reasoning"]
    if known == "assistant" and message.get("tool_calls"):
        plain["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return plain


def text_of(content: Any, where: str) -> str:
    """The text of a string, null, or list of parts. A part that is no text is a 400 naming its type."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where} must be a string, null or a list of parts.", param=where)
    return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return part["refusal"]
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return part["text"]
    raise InvalidRequest(f"{where} has type {_short(kind)}; this model reads text parts only.", param=where)


def _tool_calls(calls: Any, where: str) -> list[Message]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidRequest(f"{where} must be a list.", param=where)
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"{where}.function.name must be a non-empty string.", param=f"{where}.function.name")
    arguments = parse_arguments(function.get("arguments"), f"{where}.function.arguments")
    plain: Message = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        plain["id"] = call["id"]
    return plain


def parse_arguments(value: Any, where: str) -> dict[str, Any]:
    """Arguments of a past call as an object: a JSON string is parsed, empty and null mean none."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise InvalidRequest(f"{where} is not valid JSON: {error}.", param=where) from error
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where} must be a JSON object; got {_short(value)}.", param=where)
    return dict(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
