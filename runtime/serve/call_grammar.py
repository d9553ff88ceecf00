"""Calls or an answer, under one grammar: what `tool_choice` "auto" and a response schema promise together.

Beside a response schema each family writes its calls in a fixed form of its own notation; where that needs control
tokens, calls are a JSON list instead, as under "required". The reader decides by the form's first characters, so
nothing in an answer's strings is taken for a call. Beside free text see `free_calls`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from runtime.messages import GrammarSpec
from runtime.serve.free_calls import (
    HERMES,
    JSON_LIST,
    LLAMA,
    CallForm,
    Format,
    check_contents,
    free_text_or_calls,
)
from runtime.serve.sampling import canonical
from runtime.serve.tools import Tool
from runtime.text.parsers.base import CallsOrAnswer, Parser
from runtime.text.parsers.choose import ToolFamily
from runtime.text.parsers.forced import ForcedCalls


def form_of(family: ToolFamily) -> CallForm:
    """How a family's calls are spelled under a grammar."""
    return {"hermes": HERMES, "llama3_json": LLAMA}.get(family.name, JSON_LIST)


def auto_grammar(
    tools: Sequence[Tool], family: ToolFamily, answer: GrammarSpec | None, *, parallel: bool
) -> GrammarSpec | None:
    """The grammar of a free choice between calls and `answer`; None where nothing has to be enforced.

    Without a response schema only strict tools have something to enforce. Raises InvalidRequest, naming the tool, for
    one whose calls cannot be kept to its schema.
    """
    if answer is None:
        if not any(tool.strict for tool in tools):
            return None
        return _tag_spec(free_text_or_calls(tools, family.name, parallel=parallel))
    form = form_of(family)
    check_contents(tools, "json_schema")
    calls = form.calls(tools, parallel=parallel)
    return _tag_spec({"type": "or", "elements": [calls, *_answer_formats(answer)]})


def auto_parser(tools: Sequence[Tool], family: ToolFamily) -> Parser:
    """The reader of an answer under `auto_grammar` with a response schema."""
    form = form_of(family)
    calls = ForcedCalls() if form is JSON_LIST else family.new([tool.name for tool in tools])
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
