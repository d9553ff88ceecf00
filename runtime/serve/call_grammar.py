"""Calls or an answer, under one grammar: what `tool_choice` "auto" and a response schema promise together.

Each family writes its calls in a fixed form of its own notation; where that needs control tokens, which no grammar
spells, calls are a JSON list instead, as under "required". The reader decides by the form's first characters, so
nothing in an answer's strings is taken for a call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.messages import GrammarSpec
from runtime.serve.sampling import canonical
from runtime.serve.tools import Tool
from runtime.text.parsers.base import CallsOrAnswer, Parser
from runtime.text.parsers.choose import ToolFamily
from runtime.text.parsers.forced import ForcedCalls

Format = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallForm:
    """The one spelling of calls that a grammar allows. `begin` takes the tool's name as JSON text."""

    begin: str
    end: str
    separator: str
    head: str = ""
    tail: str = ""

    def opening(self, tool: Tool) -> str:
        return self.begin % canonical(tool.name)

    def calls(self, tools: Sequence[Tool], *, parallel: bool) -> Format:
        """The format of one call or several."""
        tags = {
            "type": "tags_with_separator",
            "tags": [self.tag(tool) for tool in tools],
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        if not self.head:
            return tags
        ends = [{"type": "const_string", "value": text} for text in (self.head, self.tail)]
        return {"type": "sequence", "elements": [ends[0], tags, ends[1]]}

    def tag(self, tool: Tool) -> Format:
        content = {"type": "json_schema", "json_schema": tool.parameters}
        return {"type": "tag", "begin": self.opening(tool), "content": content, "end": self.end}


_HERMES = CallForm('<tool_call>\n{"name": %s, "arguments": ', "}\n</tool_call>", "\n")
_LLAMA = CallForm('{"name": %s, "parameters": ', "}", "; ")
_JSON_LIST = CallForm('{"name": %s, "arguments": ', "}", ", ", head="[", tail="]")


def form_of(family: ToolFamily) -> CallForm:
    """How a family's calls are spelled under a grammar."""
    return {"hermes": _HERMES, "llama3_json": _LLAMA}.get(family.name, _JSON_LIST)


def auto_grammar(
    tools: Sequence[Tool], family: ToolFamily, answer: GrammarSpec | None, *, parallel: bool
) -> GrammarSpec | None:
    """The grammar of a free choice between calls and `answer`; None where nothing has to be enforced.

    Without a response schema only strict tools have something to enforce, where a text marker tells a call.
    """
    form = form_of(family)
    if answer is not None:
        calls = form.calls(tools, parallel=parallel)
        return _tag_spec({"type": "or", "elements": [calls, *_answer_formats(answer)]})
    if family.name != "hermes" or not any(tool.strict for tool in tools):
        return None
    tags = [form.tag(tool) for tool in tools]
    return _tag_spec(
        {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags, "stop_after_first": not parallel}
    )


def auto_parser(tools: Sequence[Tool], family: ToolFamily) -> Parser:
    """The reader of an answer under `auto_grammar` with a response schema."""
    form = form_of(family)
    calls = ForcedCalls() if form is _JSON_LIST else family.new([tool.name for tool in tools])
    return CallsOrAnswer([form.head + form.opening(tool) for tool in tools], calls)


def _answer_formats(answer: GrammarSpec) -> list[Format]:
    match answer.kind:
        case "json_schema":
            return [{"type": "json_schema", "json_schema": json.loads(answer.spec)}]
        case "json_object":
            return [{"type": "json_schema", "json_schema": {"type": "object"}}]
        case "regex":
            return [{"type": "regex", "pattern": answer.spec}]
        case "ebnf":
            return [{"type": "grammar", "grammar": answer.spec}]
        case "choices":
            return [{"type": "const_string", "value": choice} for choice in json.loads(answer.spec)]
        case "structural_tag":
            return [json.loads(answer.spec)["format"]]


def _tag_spec(shape: Format) -> GrammarSpec:
    return GrammarSpec(kind="structural_tag", spec=canonical({"type": "structural_tag", "format": shape}))
