"""Which parsers fit a model: read off its chat template, or named by the operator."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from runtime.errors import InvalidRequest
from runtime.text.parsers.base import Parser
from runtime.text.parsers.families import (
    DeepSeekParser,
    HermesParser,
    JsonParser,
    LlamaJsonParser,
    MistralParser,
    PythonicParser,
)
from runtime.text.parsers.reasoning import ThinkTags


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """A notation of tool calls. `new(names)` makes a parser for one answer.

    `end`: the text that ends one call, so that generation can stop there when one call is all that is wanted.
    `special`: its markers are special tokens, which the text must then show. `short_ids`: call ids are nine
    letters and digits, as its templates insist.
    """

    name: str
    new: Callable[[Collection[str]], Parser]
    end: str | None = None
    special: bool = False
    short_ids: bool = False


TOOL_FAMILIES = {
    family.name: family
    for family in (
        ToolFamily("hermes", lambda names: HermesParser(), end="</tool_call>"),
        ToolFamily("llama3_json", LlamaJsonParser, special=True),
        ToolFamily("mistral", lambda names: MistralParser(), special=True, short_ids=True),
        ToolFamily("pythonic", PythonicParser, special=True),
        ToolFamily("deepseek", lambda names: DeepSeekParser(), end="<｜tool▁call▁end｜>", special=True),
        ToolFamily("json", JsonParser),
    )
}
_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "llama3": "llama3_json",
    "llama4_pythonic": "pythonic",
    "llama4": "pythonic",
    "deepseekv3": "deepseek",
    "deepseekv31": "deepseek",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
}
_THINK = ThinkTags("<think>", "</think>")
REASONING_FAMILIES: dict[str, ThinkTags | None] = {
    "think": _THINK,
    "deepseek-r1": _THINK,
    "deepseek-v3": _THINK,
    "qwen3": _THINK,
    "qwen3-thinking": _THINK,
    "glm45": _THINK,
    "kimi": ThinkTags("◁think▷", "◁/think▷"),
    "mistral": ThinkTags("[THINK]", "[/THINK]"),
    "none": None,
}
_TOOL_MARKS = (  # what a template writes before a call, most telling first
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters":', "llama3_json"),
)


def choose_tools(name: str, template: str, knows_tools: bool) -> ToolFamily:
    """The notation called `name`; "auto" takes the template's own, or our generic prompt's."""
    if name != "auto":
        known = TOOL_FAMILIES.get(_ALIASES.get(name, name))
        if known is None:
            names = ", ".join(sorted({*TOOL_FAMILIES, *_ALIASES, "auto"}))
            raise InvalidRequest(f"Unknown tool-call parser {name!r}; there are {names}.", param="tool_call_parser")
        return known
    if knows_tools:
        for mark, family in _TOOL_MARKS:
            if mark in template:
                return TOOL_FAMILIES[family]
    return TOOL_FAMILIES["hermes"]


def choose_reasoning(name: str, template: str) -> ThinkTags | None:
    """The thinking tags called `name`; "auto" takes those that the template writes, None if it has none."""
    if name == "auto":
        known = (tags for tags in REASONING_FAMILIES.values() if tags is not None)
        return next((tags for tags in known if tags.open in template or tags.close in template), None)
    if name not in REASONING_FAMILIES:
        names = ", ".join(sorted({*REASONING_FAMILIES, "auto"}))
        raise InvalidRequest(f"Unknown reasoning parser {name!r}; there are {names}.", param="reasoning_parser")
    return REASONING_FAMILIES[name]


def mismatch(name: str, template: str, knows_tools: bool) -> str | None:
    """A warning when the operator's parser is not the one the template calls for."""
    if name == "auto":
        return None
    chosen, fitting = choose_tools(name, template, knows_tools), choose_tools("auto", template, knows_tools)
    if chosen is fitting:
        return None
    return f"The tool-call parser is {chosen.name}, but the chat template writes calls as {fitting.name} does."
