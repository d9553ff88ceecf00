"""The Anthropic body as chat messages and tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import InvalidRequest
from runtime.messages import GrammarSpec
from runtime.serve.sampling import GrammarFields, answer_grammar, response_grammar
from runtime.serve.tools import Tool, ToolChoice, make_tool, read_choice

Message = dict[str, Any]


class AnthropicBody(GrammarFields, kw_only=True):
    """What /v1/messages and count_tokens have in common. Unknown keys are ignored; null means unset."""

    model: str
    messages: list[Any]
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    thinking: Any = None
    output_config: Any = None


def chat_messages(body: AnthropicBody) -> list[Message]:
    """Messages as chat templates know them: tool results become turns of their own, before the user's text."""
    messages: list[Message] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system", sep="\n\n")})
    for i, message in enumerate(body.messages):
        where = f"messages[{i}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise InvalidRequest(f"{where}.role must be user or assistant; got {role!r:.60}.", param=f"{where}.role")
        content = message.get("content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif isinstance(content, Sequence):
            messages += _assistant(content, where) if role == "assistant" else _user(content, role, where)
        else:
            raise InvalidRequest(f"{where}.content must be text or blocks.", param=f"{where}.content")
    return messages


def _user(blocks: Sequence[Any], role: str, where: str) -> list[Message]:
    results: list[Message] = []
    texts: list[str] = []
    for i, block in enumerate(blocks):
        place = f"{where}.content[{i}]"
        if _kind(block) == "tool_result":
            text = _text(block.get("content"), f"{place}.content")
            if block.get("is_error"):
                text = f"Error: {text}"
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            texts.append(_block_text(block, place))
    return [*results, {"role": role, "content": "\n\n".join(texts)}] if texts or not results else results


def _assistant(blocks: Sequence[Any], where: str) -> list[Message]:
    message: Message = {"role": "assistant", "content": ""}
    for i, block in enumerate(blocks):
        place = f"{where}.content[{i}]"
        match _kind(block):
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                message.setdefault("tool_calls", []).append({"id": block.get("id"), "function": function})
            case "thinking":
                message["reasoning_content"] = message.get("reasoning_content", "") + str(block.get("thinking", ""))
            case "redacted_thinking":
                continue
            case _:
                message["content"] += _block_text(block, place)
    return [message]


def _text(value: Any, where: str, sep: str = "") -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        raise InvalidRequest(f"{where} must be text or a list of text blocks.", param=where)
    return sep.join(_block_text(block, f"{where}[{i}]") for i, block in enumerate(value))


def _block_text(block: Any, where: str) -> str:
    text = block.get("text") if isinstance(block, Mapping) else None
    if _kind(block) != "text" or not isinstance(text, str):
        raise InvalidRequest(f"{where} has type {_kind(block)!r:.60}; this model reads text only.", param=where)
    return text


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def tools_of(body: AnthropicBody) -> list[Tool]:
    """Custom tools; those that only Anthropic's own servers run are left out."""
    tools: list[Tool] = []
    for i, item in enumerate(body.tools or ()):
        where = f"tools[{i}]"
        if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
            raise InvalidRequest(f"{where} needs a name.", param=f"{where}.name")
        if item.get("type", "custom") not in ("custom", None):
            continue
        schema = item.get("input_schema")
        tools.append(
            make_tool(item["name"], item.get("description"), schema, item.get("strict"), f"{where}.input_schema")
        )
    return tools


def choice_of(body: AnthropicBody, tools: Sequence[Tool]) -> tuple[ToolChoice, bool]:
    """tool_choice, and whether several calls in one answer are welcome."""
    value = body.tool_choice
    parallel = not (isinstance(value, Mapping) and value.get("disable_parallel_tool_use"))
    return read_choice(dict(value) if isinstance(value, Mapping) else value, tools), parallel


def output_grammar(body: AnthropicBody) -> GrammarSpec | None:
    """The grammar of `output_config.format`, or of a field that the other doors have."""
    shape = body.output_config.get("format") if isinstance(body.output_config, Mapping) else None
    name = "output_config.format"
    return answer_grammar(body, (name, response_grammar(shape, name)))
