"""What callers of the Engine may write, turned into Submits: prompts, sampling options, grammars."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

from runtime.errors import InvalidRequest
from runtime.messages import GrammarSpec, pack_ids
from runtime.params import SamplingParams, is_text

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages."""

MAX_ID = 2**31 - 1
SAMPLING_NAMES = frozenset(SamplingParams.__struct_fields__)
SEQUENCES = ("stop", "stop_token_ids", "stop_regex")
GRAMMARS = ("json_schema", "regex", "ebnf", "choices", "json_object")


class Renderer(Protocol):
    """Messages to ids (ChatRenderer)."""

    def render(
        self, messages: Any, tools: Sequence[Any] | None = None, add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]: ...


class Encoder(Protocol):
    """Text to ids (Tokenizer)."""

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...


def is_one(prompt: Any) -> bool:
    """True for a single prompt, False for a list of prompts. Raises InvalidRequest for anything else."""
    if isinstance(prompt, str | np.ndarray):
        return True
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise InvalidRequest(
            f"prompt must be text, a list of token ids, a list of messages, or a list of such; got a {_kind(prompt)}.",
            param="prompt",
        )
    if not prompt:
        raise InvalidRequest("prompt is empty.", param="prompt")
    return isinstance(prompt[0], Mapping | int | np.integer)


def to_ids(prompt: Any, encoder: Encoder, renderer: Renderer, /, **render: Any) -> bytes:
    """One prompt as packed token ids. Raises InvalidRequest."""
    tools = render.get("tools")
    if tools is not None and (isinstance(tools, str) or not isinstance(tools, Sequence)):
        raise InvalidRequest(f"tools must be a list; got a {_kind(tools)}.", param="tools")
    if tools and not _is_chat(prompt):
        raise InvalidRequest("tools go with a list of messages, not with a plain prompt.", param="tools")
    if isinstance(prompt, str):
        if not is_text(prompt):
            raise InvalidRequest("prompt holds half a surrogate pair, which is no character.", param="prompt")
        return pack_ids(encoder.encode(prompt, add_special=True))
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
            raise InvalidRequest("An array prompt must be one row of integer token ids.", param="prompt")
        prompt = prompt.tolist()
    if not prompt or not is_one(prompt):
        raise InvalidRequest("prompt is empty." if not prompt else "prompt is nested too deeply.", param="prompt")
    if isinstance(prompt[0], Mapping):
        return pack_ids(renderer.render(list(prompt), **render))
    return pack_ids(_checked_ids(prompt))


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def _checked_ids(ids: Sequence[Any]) -> list[int]:
    for place, token in enumerate(ids):
        if not isinstance(token, int | np.integer) or isinstance(token, bool) or not 0 <= token <= MAX_ID:
            raise InvalidRequest(f"prompt[{place}] must be a token id; got {str(token)[:80]!r}.", param="prompt")
    return [int(token) for token in ids]


def sampling(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """`params` with `options` on top. Raises InvalidRequest for a name there is not, suggesting the nearest."""
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params must be of type SamplingParams; got a {_kind(params)}.", param="params")
    changes: dict[str, Any] = {}
    for name, value in options.items():
        if name not in SAMPLING_NAMES:
            near = difflib.get_close_matches(name, [*SAMPLING_NAMES, *GRAMMARS], n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise InvalidRequest(f"There is no option {name!r}.{hint}", param=name)
        changes[name] = _sequence(name, value) if name in SEQUENCES else value
    return msgspec.structs.replace(params or SamplingParams(), **changes)


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | int):
        return (value,)
    if not isinstance(value, Sequence):
        raise InvalidRequest(f"{name} must be one value or a list of them; got a {_kind(value)}.", param=name)
    return tuple(value)


def grammar_of(
    grammar: GrammarSpec | None,
    *,
    json_schema: Any = None,
    regex: str | None = None,
    ebnf: str | None = None,
    choices: Sequence[str] | None = None,
    json_object: bool = False,
) -> GrammarSpec | None:
    """The one grammar asked for, None when there is none. Raises InvalidRequest for two at once."""
    asked: dict[str, GrammarSpec] = {}
    if grammar is not None:
        asked["grammar"] = grammar
    if json_schema is not None:
        asked["json_schema"] = GrammarSpec(kind="json_schema", spec=_schema_text(json_schema))
    if regex is not None:
        asked["regex"] = GrammarSpec(kind="regex", spec=regex)
    if ebnf is not None:
        asked["ebnf"] = GrammarSpec(kind="ebnf", spec=ebnf)
    if choices is not None:
        if isinstance(choices, str) or not isinstance(choices, Sequence):
            raise InvalidRequest(f"choices must be a list of strings; got a {_kind(choices)}.", param="choices")
        asked["choices"] = GrammarSpec(kind="choices", spec=_json_text("choices", list(choices)))
    if json_object:
        asked["json_object"] = GrammarSpec(kind="json_object", spec="{}")
    for name, one in asked.items():
        if not isinstance(one, GrammarSpec) or not isinstance(one.spec, str):
            wanted = "a GrammarSpec" if name == "grammar" else "text"
            raise InvalidRequest(f"{name} must be {wanted}.", param=name)
    if len(asked) > 1:
        raise InvalidRequest(f"At most one grammar may be given; got {' and '.join(asked)}.", param=list(asked)[1])
    return next(iter(asked.values()), None)


def _schema_text(schema: Any) -> str:
    """A schema as JSON text; a class that can tell its own schema (pydantic) may be given instead."""
    if isinstance(schema, str):
        return schema
    own = getattr(schema, "model_json_schema", None)
    return _json_text("json_schema", own() if callable(own) else schema)


def _json_text(name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as err:
        raise InvalidRequest(f"{name} cannot be written as JSON: {err}.", param=name) from err


def _kind(value: Any) -> str:
    return type(value).__name__
