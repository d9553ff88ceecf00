"""Free text in which calls are kept to their tools' schemas, for every notation: `tool_choice` "auto" and strict tools.

The text is free until the notation's own marker, which the text can then spell only to call. Where a notation also
takes an answer's beginning for a call (`{` or `[`), an answer that begins so is one. Apart from hermes' notation, calls
end the answer.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from runtime.errors import InvalidRequest
from runtime.grammar.door import MAX_TEXT
from runtime.grammar.limits import Limits
from runtime.grammar.tags import check_content
from runtime.serve.sampling import canonical
from runtime.serve.tools import Tool

Format = dict[str, Any]
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
_PYTHON_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_BLANKS = "".join(f"\\u{code:04x}" for code in range(0x10000) if chr(code).isspace())


@dataclass(frozen=True, slots=True)
class CallForm:
    """One spelling of calls. `begin` takes the tool's name as JSON text, or as it is where the name is `bare`."""

    begin: str
    end: str
    separator: str
    head: str = ""
    tail: str = ""
    content: str = "json_schema"
    bare: bool = False

    def opening(self, tool: Tool) -> str:
        return self.begin % (tool.name if self.bare else canonical(tool.name))

    def calls(self, tools: Sequence[Tool], *, parallel: bool) -> Format:
        """The format of one call or several."""
        tags = {
            "type": "tags_with_separator",
            "tags": [self.tag(tool) for tool in tools],
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        return _sequence(_text(self.head), tags, _text(self.tail)) if self.head else tags

    def tag(self, tool: Tool) -> Format:
        content = {"type": self.content, "json_schema": tool.parameters}
        return {"type": "tag", "begin": self.opening(tool), "content": content, "end": self.end}


HERMES = CallForm('<tool_call>\n{"name": %s, "arguments": ', "}\n</tool_call>", "\n")
LLAMA = CallForm('{"name": %s, "parameters": ', "}", "; ")
JSON_LIST = CallForm('{"name": %s, "arguments": ', "}", ", ", head="[", tail="]")
_JSON = CallForm('{"name": %s, "arguments": ', "}", "\n")
_PYTHON = CallForm("%s(", ")", ", ", head="[", tail="]", content="keyword_arguments", bare=True)


def free_text_or_calls(tools: Sequence[Tool], family: str, *, parallel: bool) -> Format:
    """Raises InvalidRequest, naming the tool, where the notation cannot hold its calls to its schema."""
    make = _FAMILIES.get(family)
    if make is None:
        why = f"strict: calls in the notation {family!r} cannot be told from free text; tool_choice can be 'required'."
        raise InvalidRequest(f"{tools[0].where}: {why}", param=tools[0].where)
    check_contents(tools, _PYTHON.content if family == "pythonic" else "json_schema")
    return make(tools, parallel)


def check_contents(tools: Sequence[Tool], kind: str) -> None:
    """Raise InvalidRequest, naming the tool, for parameters that no tag can hold. Large ones are left to the engine."""
    for tool in tools:
        schema = canonical(tool.parameters)
        why = _refusal(kind, schema) if len(schema) <= MAX_TEXT else None
        if why is not None:
            raise InvalidRequest(f"{tool.where}: {why}", param=tool.where)


@lru_cache(1024)
def _refusal(kind: str, schema: str) -> str | None:
    try:
        check_content({"type": kind, "json_schema": Limits().parse(schema, "tools")})
    except InvalidRequest as error:
        return str(error)
    return None


def _hermes(tools: Sequence[Tool], parallel: bool) -> Format:
    tags = [HERMES.tag(tool) for tool in tools]
    return {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags, "stop_after_first": not parallel}


def _llama(tools: Sequence[Tool], parallel: bool) -> Format:
    return _begun_or_marked("{", "<|python_tag|>", LLAMA.calls(tools, parallel=parallel))


def _pythonic(tools: Sequence[Tool], parallel: bool) -> Format:
    for tool in tools:
        words = tool.name.split(".")
        if not _PYTHON_NAME.fullmatch(tool.name) or any(map(keyword.iskeyword, words)):
            _no_name(tool, "no name in Python, so no call of it can be written in the notation 'pythonic'")
    calls = _PYTHON.calls(tools, parallel=parallel)
    marked = _sequence(_marker("<|python_start|>"), calls, _optional(_marker("<|python_end|>")))
    return _begun("[", ("<|python_start|>", "<|python_end|>"), calls, marked)


def _json(tools: Sequence[Tool], parallel: bool) -> Format:
    begun = _either(JSON_LIST.calls(tools, parallel=parallel), _JSON.calls(tools, parallel=parallel))
    marked = HERMES.calls(tools, parallel=parallel)
    return _begun("{[", ("<tool_call>", "```json"), begun, marked)


def _mistral(tools: Sequence[Tool], parallel: bool) -> Format:
    start, middle, ident = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
    listed = _sequence(_marker(start), _optional(_text(" ")), JSON_LIST.calls(tools, parallel=parallel))
    named = [
        _sequence(
            _marker(start),
            _text(tool.name),
            _optional(_sequence(_marker(ident), {"type": "regex", "pattern": "[a-zA-Z0-9]{9}"})),
            _marker(middle),
            _arguments(tool),
        )
        for tool in tools
        if _PLAIN_NAME.fullmatch(tool.name)
    ]
    forms = [listed, _several(_either(*named), parallel=parallel)] if named else [listed]
    return _sequence(_free(start, middle, ident), _optional(_either(*forms)))


def _deepseek(tools: Sequence[Tool], parallel: bool) -> Format:
    all_begin, all_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    begin, middle, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    bodies: list[Format] = []
    for tool in tools:
        if not _PLAIN_NAME.fullmatch(tool.name):
            _no_name(tool, "not plain, so no call of it can be written in the notation 'deepseek'")
        if tool.name != "function":  # read as the word before the older form's name
            bodies.append(_sequence(_text(tool.name), _marker(middle), _arguments(tool)))
        older = _sequence(_text(f"{tool.name}\n```json\n"), _arguments(tool), _text("\n```"))
        bodies.append(_sequence(_text("function"), _marker(middle), older))
    call = _sequence(_marker(begin), _either(*bodies), _marker(end), _optional(_text("\n")))
    calls = _sequence(_marker(all_begin), _several(call, parallel=parallel), _marker(all_end))
    return _sequence(_free(all_begin, begin, middle, end, all_end), _optional(calls))


_FAMILIES: dict[str, Callable[[Sequence[Tool], bool], Format]] = {
    "hermes": _hermes,
    "llama3_json": _llama,
    "pythonic": _pythonic,
    "json": _json,
    "mistral": _mistral,
    "deepseek": _deepseek,
}


def _begun_or_marked(first: str, marker: str, calls: Format) -> Format:
    """Calls at the very beginning, where they begin with `first`, or after free text and a marker."""
    return _begun(first, (marker,), calls, _sequence(_marker(marker), calls))


def _begun(first: str, markers: Sequence[str], begun: Format, marked: Format) -> Format:
    """`begun` at the very beginning, where it begins with one of `first`; or free text, then perhaps `marked`.

    Free text begins with another character, and what follows that must not complete a marker begun by it. One blank
    may stand before either, no more: masks are dear there (every token of several characters is looked at).
    """
    blanks = {"type": "regex", "pattern": f"[{_BLANKS}]?"}
    other = "".join(f"\\u{ord(c):04x}" for c in first)
    start = {"type": "regex", "pattern": f"[^{_BLANKS}{other}]"}
    text = _sequence(start, _free(*markers, *(marker[1:] for marker in markers)))
    return _sequence(blanks, _either(begun, _sequence(_optional(text), _optional(marked))))


def _free(*excluded: str) -> Format:
    return {"type": "any_text", "excludes": list(excluded)}


def _marker(text: str) -> Format:
    return {"type": "marker", "text": text}


def _text(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _either(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def _several(content: Format, *, parallel: bool) -> Format:
    return {"type": "plus", "content": content} if parallel else content


def _arguments(tool: Tool) -> Format:
    return {"type": "json_schema", "json_schema": tool.parameters}


def _no_name(tool: Tool, why: str) -> None:
    raise InvalidRequest(f"{tool.where}: the tool's name {tool.name[:60]!r} is {why}.", param=tool.where)
