"""Tools: typed Python functions that a model may call. The signature is the schema; the call is constrained to it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from frontend_lang.errors import InvalidSchema, check_text
from frontend_lang.ir import ToolCall
from frontend_lang.schema import Typed, close_objects
from frontend_lang.threads import in_thread
from runtime.messages import GrammarSpec
from runtime.params import SamplingParams

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave. Exactly one of `value` and `error` means something; `text` is what the model reads."""

    tool: str
    arguments: dict[str, Any]
    value: Any
    error: str | None
    text: str

    @property
    def ok(self) -> bool:
        return self.error is None


class Tool(Generic[P, R]):
    """A function, its JSON schema and its description. Calling it calls the function."""

    def __init__(self, fn: Callable[P, R], name: str | None = None, timeout_s: float | None = 30.0) -> None:
        if not callable(fn):
            raise InvalidSchema(f"rt.tool takes a function; got {type(fn).__name__}.")
        self.fn = fn
        self.name = name or fn.__name__
        self.description = inspect.getdoc(fn) or ""
        self.timeout_s = timeout_s
        self._model = _arguments_model(fn, self.name)
        self.schema: dict[str, Any] = close_objects(self._model.model_json_schema())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Tool({self.name!r})"

    def call(
        self,
        name: str,
        *,
        max_tokens: int = 128,
        temperature: float | None = None,
        on_error: Literal["feed", "raise"] = "feed",
    ) -> ToolCall:
        """A piece that has the model write the arguments, runs the function and feeds the result back."""
        return call(name, self, max_tokens=max_tokens, temperature=temperature, on_error=on_error)

    def arguments(self, text: str) -> dict[str, Any]:
        """The call's arguments as the function's types. Raises ValueError."""
        model = self._model.model_validate_json(text)
        return {field: getattr(model, field) for field in self._model.model_fields}

    @property
    def describe(self) -> str:
        """One line for a system prompt: name(arguments): description."""
        parts = ", ".join(f"{key}: {_short(value)}" for key, value in self.schema.get("properties", {}).items())
        return f"{self.name}({parts}): {self.description.splitlines()[0] if self.description else ''}".rstrip(": ")

    async def run(self, arguments: dict[str, Any], timeout_s: float | None) -> Any:
        """Call the function: async ones on this loop, plain ones in a thread of their own. Raises TimeoutError."""
        call: Callable[[], Any] = functools.partial(self.fn, **arguments)
        work = call() if inspect.iscoroutinefunction(self.fn) else in_thread(call)
        return await asyncio.wait_for(work, timeout_s)


@typing.overload
def tool(fn: Callable[P, R], /) -> Tool[P, R]: ...
@typing.overload
def tool(*, name: str | None = None, timeout_s: float | None = 30.0) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(fn: Any = None, /, *, name: str | None = None, timeout_s: float | None = 30.0) -> Any:
    """Make a typed function a tool: `@rt.tool`, or `rt.tool(fn)`."""
    if fn is None:
        return lambda actual: Tool(actual, name, timeout_s)
    return Tool(fn, name, timeout_s)


def call(
    name: str,
    *tools: Tool[Any, Any],
    max_tokens: int = 128,
    temperature: float | None = None,
    timeout_s: float | None = None,
    on_error: Literal["feed", "raise"] = "feed",
    before_result: str = "\n",
    after_result: str = "\n",
) -> ToolCall:
    """A constrained call of one of `tools`; its value is a ToolResult.

    One tool: the model writes its arguments. Several: it writes {"name": ..., "arguments": {...}}. The result is
    fed back as a message of the tool role if this stands in a chat, else as text between `before_result`
    and `after_result`. A tool that raises or takes longer than its timeout feeds its error back.
    """
    if not tools or not all(isinstance(item, Tool) for item in tools):
        raise InvalidSchema("rt.call needs at least one tool made by rt.tool.")
    if len({item.name for item in tools}) != len(tools):
        raise InvalidSchema("rt.call got two tools of one name.")
    if on_error not in ("feed", "raise"):
        raise InvalidSchema(f"on_error must be 'feed' or 'raise'; got {on_error!r}.")
    check_text(before_result, "before_result")
    check_text(after_result, "after_result")
    params = SamplingParams(max_tokens=max_tokens)
    return ToolCall(name, tools, params, temperature, timeout_s, on_error, before_result, after_result)


def call_type(node: ToolCall) -> Typed:
    """Grammar and parser of a call: (tool, arguments)."""
    if len(node.tools) == 1:
        only = node.tools[0]
        return Typed("call", _spec(only.schema), lambda text: (only, only.arguments(text)))
    by_name = {item.name: item for item in node.tools}
    options = [
        {
            "type": "object",
            "properties": {"name": {"const": item.name}, "arguments": _inlined(item.schema)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for item in node.tools
    ]

    def parse(text: str) -> tuple[Tool[Any, Any], dict[str, Any]]:
        made = json.loads(text)
        chosen = by_name[made["name"]]
        return chosen, chosen.arguments(json.dumps(made["arguments"]))

    return Typed("call", _spec({"anyOf": options}), parse)


def show(value: Any) -> str:
    """A tool's result as the model reads it: text as it is, everything else as JSON."""
    if isinstance(value, str):
        return value
    import pydantic_core

    try:
        return pydantic_core.to_json(value).decode()
    except pydantic_core.PydanticSerializationError:
        return str(value)


def _spec(schema: dict[str, Any]) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", spec=json.dumps(schema))


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without `$defs`, so that it can stand inside another one."""
    import copy

    root = copy.deepcopy(schema)
    defs = root.pop("$defs", {})

    def walk(node: Any, depth: int) -> Any:
        if depth > 32:
            raise InvalidSchema("A tool's arguments refer to themselves; give such a tool a call of its own.")
        if isinstance(node, list):
            return [walk(item, depth) for item in node]
        if not isinstance(node, dict):
            return node
        ref = node.get("$ref", "")
        if ref.startswith("#/$defs/"):
            return walk(defs[ref.removeprefix("#/$defs/")], depth + 1)
        return {key: walk(value, depth) for key, value in node.items()}

    inlined: dict[str, Any] = walk(root, 0)
    return inlined


def _short(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return "|".join(map(str, schema["enum"]))
    return str(schema.get("type", "any"))


def _arguments_model(fn: Callable[..., Any], name: str) -> Any:
    import pydantic

    try:
        hints = typing.get_type_hints(fn, include_extras=True)
    except NameError as error:
        raise InvalidSchema(f"Tool {name!r}: an annotation cannot be resolved: {error}.") from error
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InvalidSchema(f"Tool {name!r}: parameter {parameter.name!r} cannot be given by name.")
        if parameter.name not in hints:
            raise InvalidSchema(f"Tool {name!r}: parameter {parameter.name!r} has no type.")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    try:
        return pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="forbid"), **fields)
    except Exception as error:  # pydantic raises many kinds for things that are no types
        raise InvalidSchema(f"Tool {name!r} has parameters that no schema can describe: {error}") from error
