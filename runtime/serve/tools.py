"""Tools and tool_choice: what a client declares, and the grammar that keeps what it was promised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from runtime.errors import InvalidRequest
from runtime.messages import GrammarSpec
from runtime.serve.sampling import canonical

MAX_TOOLS = 512
MAX_PARALLEL_CALLS = 8
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A declared function. `parameters` is always an object schema."""

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool = False
    where: str = "tools"  # its parameters, as the client wrote them

    def for_template(self) -> dict[str, Any]:
        """The form that chat templates know."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the answer may, must or must not be calls. `name` goes with "named"."""

    mode: Literal["none", "auto", "required", "named"]
    name: str = ""


NO_TOOLS = ToolChoice("none")


def read_tools(value: Any, where: str = "tools", *, only_functions: bool = False) -> list[Tool]:
    """Declared tools, in the chat form (`function: {…}`) or flat as the Responses API has them.

    `only_functions` leaves out those that only OpenAI's own servers can run, as SDKs send them by default.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a list.", param=where)
    if len(value) > MAX_TOOLS:
        raise InvalidRequest(f"{where} has {len(value)} entries; at most {MAX_TOOLS} are allowed.", param=where)
    mine = [not only_functions or _is_function(item) for item in value]
    return [_tool(item, f"{where}[{i}]") for i, item in enumerate(value) if mine[i]]


def _is_function(item: Any) -> bool:
    return not isinstance(item, dict) or item.get("type", "function") == "function"


def _tool(item: Any, where: str) -> Tool:
    if not isinstance(item, dict) or item.get("type", "function") != "function":
        kind = item.get("type") if isinstance(item, dict) else item
        raise InvalidRequest(f"{where} must be a function tool; got {kind!r:.60}.", param=where)
    function = item.get("function", item)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where} needs a name.", param=f"{where}.name")
    place = f"{where}.parameters" if function is item else f"{where}.function.parameters"
    return make_tool(name, function.get("description"), function.get("parameters"), function.get("strict"), place)


def make_tool(name: str, description: Any, parameters: Any, strict: Any, where: str) -> Tool:
    """`where`: what the client calls these parameters."""
    if parameters is None:
        parameters = _NO_ARGUMENTS
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"{where} must be a JSON Schema object.", param=where)
    kinds = parameters.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise InvalidRequest(f"{where} must describe an object: a call's arguments have names.", param=where)
    if "type" not in parameters and not ({"anyOf", "oneOf", "allOf", "$ref"} & parameters.keys()):
        parameters = {"type": "object", **parameters}
    return Tool(name, description if isinstance(description, str) else "", parameters, bool(strict), where)


def check_tools(tools: Iterable[Tool], check: Callable[[GrammarSpec], None]) -> None:
    """Raise InvalidRequest, naming the tool, for parameters that no grammar can keep."""
    for tool in tools:
        try:
            check(GrammarSpec(kind="json_schema", spec=canonical(tool.parameters)))
        except InvalidRequest as error:
            raise InvalidRequest(f"{tool.where}: {error}", param=tool.where) from None


def read_choice(value: Any, tools: Sequence[Tool], where: str = "tool_choice") -> ToolChoice:
    """`tool_choice` in any dialect. "auto" is never refused; a name that no tool bears is."""
    if isinstance(value, dict):
        return _choice_object(value, tools, where)
    mode = {"any": "required"}.get(value, value) if isinstance(value, str) else value
    if mode is None or mode == "auto":
        return ToolChoice("auto" if tools else "none")
    if mode == "none":
        return ToolChoice("none")
    if mode == "required":
        if not tools:
            raise InvalidRequest(f"{where} is {value!r}, but there are no tools.", param=where)
        return ToolChoice("required")
    raise InvalidRequest(f"{where} must be none, auto, required or a function's name; got {value!r:.60}.", param=where)


def _choice_object(value: dict[str, Any], tools: Sequence[Tool], where: str) -> ToolChoice:
    kind = value.get("type")
    if kind in ("auto", "none", "required", "any"):
        return read_choice(kind, tools, where)
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else value.get("name")
    if kind not in ("function", "tool") or not isinstance(name, str):
        raise InvalidRequest(f"{where} must name a function.", param=where)
    if name not in {tool.name for tool in tools}:
        raise InvalidRequest(f"{where} names {name!r:.60}, which is not among the tools.", param=where)
    return ToolChoice("named", name)


def required_grammar(tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> GrammarSpec:
    """The grammar of an answer that must be calls: a list of them, or one call's arguments."""
    if choice.mode == "named":
        tool = next(tool for tool in tools if tool.name == choice.name)
        return GrammarSpec(kind="json_schema", spec=canonical(tool.parameters))
    calls = [_call_schema(tool) for tool in tools]
    schema = {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_PARALLEL_CALLS if parallel else 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    return GrammarSpec(kind="json_schema", spec=canonical(_hoist_definitions(schema, tools)))


def _call_schema(tool: Tool) -> dict[str, Any]:
    parameters = {
        key: value for key, value in tool.parameters.items() if key not in ("$defs", "definitions", "$schema")
    }
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _hoist_definitions(schema: dict[str, Any], tools: Sequence[Tool]) -> dict[str, Any]:
    """`$ref: #/$defs/X` counts from the root, so the tools' definitions move there. Equal names must agree."""
    for key in ("$defs", "definitions"):
        merged: dict[str, Any] = {}
        for tool in tools:
            for name, definition in (tool.parameters.get(key) or {}).items():
                if merged.setdefault(name, definition) != definition:
                    raise InvalidRequest(f"Two tools define {key}/{name} differently.", param="tools")
        if merged:
            schema[key] = merged
    return schema
