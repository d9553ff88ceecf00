"""Sampling fields of the OpenAI-like bodies, and what they mean to the sampler and to the grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from runtime.errors import InvalidRequest
from runtime.messages import GrammarKind, GrammarSpec
from runtime.params import SamplingParams
from runtime.serve.agent_hints import AgentHints


class GrammarFields(msgspec.Struct, kw_only=True):
    """Fields that ask for a grammar, the same on every door: our names and those of other servers."""

    response_format: Any = None
    json_schema: Any = None
    json_object: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    choices: list[str] | None = None
    structural_tag: str | dict[str, Any] | None = None
    grammar: str | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: Any = None
    structured_outputs: dict[str, Any] | None = None
    after: str | None = None
    whitespace: Literal["fixed", "flexible"] | None = None


class SamplingFields(GrammarFields, kw_only=True):
    """Fields that completions, chat and responses have in common. Null means unset; the rest is ignored."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    priority: int | None = None
    hints: AgentHints | None = None
    timeout_s: float | None = None
    rid: str | None = None


def sampling_params(
    fields: SamplingFields, max_tokens: int | None, *, logprobs: bool = False, top_logprobs: int | None = None
) -> SamplingParams:
    """The sampler's parameters; values out of range are refused where the request is submitted."""
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "min_tokens",
        "ignore_eos",
        "skip_special_tokens",
    )
    given = {name: value for name in names if (value := getattr(fields, name)) is not None}
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        stop=as_stops(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        stop_regex=as_stops(fields.stop_regex),
        logit_bias=as_logit_bias(fields.logit_bias),
        include_stop_str=bool(fields.include_stop_str_in_output or fields.no_stop_trim),
        logprobs=logprobs,
        top_logprobs=top_logprobs or 0,
    )


def checked_limit(name: str, value: int | None) -> int | None:
    """A token limit, refused under the name the client knows it by."""
    if value is not None and not 0 <= value < 2**31:
        raise InvalidRequest(f"{name} must be an integer from 0 to {2**31 - 1}; got {value}.", param=name)
    return value


def as_stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """One stop, many, or none; an empty string stops nothing."""
    if stop is None or stop == "":
        return ()
    return (stop,) if isinstance(stop, str) else tuple(text for text in stop if text != "")


def as_logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): value for token, value in (bias or {}).items()}
    except ValueError as error:
        raise InvalidRequest(f"logit_bias must map token ids to numbers: {error}.", param="logit_bias") from None


# What each field asks for. `response_format` has a reader of its own, the others hold the grammar itself.
_KINDS: Mapping[str, GrammarKind | Literal["response_format"]] = {
    "response_format": "response_format",
    "json_schema": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "ebnf": "ebnf",
    "choices": "choices",
    "structural_tag": "structural_tag",
    "grammar": "ebnf",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_grammar": "ebnf",
}
_STRUCTURED: Mapping[str, tuple[type, GrammarKind | None]] = {
    "json": (object, "json_schema"),
    "regex": (str, "regex"),
    "choice": (list, "choices"),
    "grammar": (str, "ebnf"),
    "json_object": (bool, "json_object"),
    "structural_tag": (object, "structural_tag"),
    "disable_fallback": (bool, None),
    "disable_any_whitespace": (bool, None),
}


def no_grammar(fields: GrammarFields, place: str, prefix: str = "") -> None:
    """Refuse fields of a grammar where a client might put them, but nothing reads them. `place`: where it is read."""
    for name in GrammarFields.__struct_fields__:
        if getattr(fields, name) not in (None, False):
            raise InvalidRequest(f"{prefix}{name} is read {place} only.", param=prefix + name)


def answer_grammar(fields: GrammarFields, *shape: tuple[str, GrammarSpec | None]) -> GrammarSpec | None:
    """The one grammar of a body, with the marker `after` which it begins. `shape`: a field of the dialect's own, and
    what it says. `whitespace` is left to `spaced`, since tools may bring a grammar later."""
    if fields.guided_whitespace_pattern is not None:
        name = "guided_whitespace_pattern"
        raise InvalidRequest(f'{name} is not supported; whitespace may be "fixed" or "flexible".', param=name)
    given = [(name, value) for name in _KINDS if (value := getattr(fields, name)) is not None]
    found = [(name, _read(_KINDS[name], value, name)) for name, value in given]
    if fields.structured_outputs is not None:
        found += _structured_outputs(fields.structured_outputs)
    grammar = _only([(name, spec) for name, spec in (*shape, *found) if spec is not None])
    if fields.after is None:
        return grammar
    if grammar is None:
        raise InvalidRequest("after goes with a grammar only.", param="after")
    return msgspec.structs.replace(grammar, after=fields.after)


def spaced(grammar: GrammarSpec | None, whitespace: Literal["fixed", "flexible"] | None) -> GrammarSpec | None:
    """The grammar, the answer's or that of calls, with the whitespace asked for, which means nothing on its own."""
    if whitespace is None:
        return grammar
    if grammar is None:
        raise InvalidRequest("whitespace goes with a grammar only.", param="whitespace")
    return msgspec.structs.replace(grammar, whitespace=whitespace)


def _read(kind: GrammarKind | Literal["response_format"], value: Any, where: str) -> GrammarSpec | None:
    match kind:
        case "response_format":
            return response_grammar(value, where)
        case "json_object":
            return GrammarSpec(kind=kind, spec="{}") if value else None
        case "json_schema" | "structural_tag":
            return GrammarSpec(kind=kind, spec=canonical(_decoded(value, where)))
        case "choices":
            return GrammarSpec(kind=kind, spec=canonical(value))
    return GrammarSpec(kind=kind, spec=value)


def _structured_outputs(value: dict[str, Any]) -> list[tuple[str, GrammarSpec | None]]:
    """The grammars in it. Words that are not read are refused: each of them changes the grammar."""
    name = "structured_outputs"
    found: list[tuple[str, GrammarSpec | None]] = []
    for word, inner in value.items():
        if inner is None:
            continue
        if word not in _STRUCTURED:
            raise InvalidRequest(f"{name}.{word:.60} is not supported.", param=name)
        kind_of_value, kind = _STRUCTURED[word]
        if not isinstance(inner, kind_of_value):
            raise InvalidRequest(f"{name}.{word} has a value of the wrong type.", param=name)
        if kind is not None:
            found.append((name, _read(kind, inner, name)))
    return found


def _decoded(value: Any, where: str) -> Any:
    """A value that may come as a string holding JSON."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not valid JSON: {error}.", param=where) from None


def _only(found: list[tuple[str, GrammarSpec]]) -> GrammarSpec | None:
    """The one grammar among those found. A client that does not know its server may say the same one in every
    server's words; two that differ are refused."""
    if not found:
        return None
    first, grammar = found[0]
    for name, other in found:
        if other != grammar:
            raise InvalidRequest(f"At most one of {first} and {name} may be set: they differ.", param=first)
    return grammar


def canonical(value: Any) -> str:
    """JSON text of a schema with its key order kept, so that equal schemas are one grammar."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The schema cannot be read: {error}.", param="json_schema") from None


def response_grammar(response_format: Any, where: str = "response_format") -> GrammarSpec | None:
    """The grammar of an OpenAI `response_format`. A schema is enforced whatever `strict` says."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return GrammarSpec(kind="json_object", spec="{}")
        case "json_schema":
            inner = response_format.get("json_schema", response_format)
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if not isinstance(schema, dict | bool):
                raise InvalidRequest(f"{where}.json_schema.schema must be a JSON Schema object.", param=where)
            return GrammarSpec(kind="json_schema", spec=canonical(schema))
        case "structural_tag":
            return GrammarSpec(kind="structural_tag", spec=canonical(response_format))
        case "regex" | "ebnf" | "grammar":
            text = response_format.get("pattern") or response_format.get("grammar") or response_format.get("regex")
            if not isinstance(text, str):
                raise InvalidRequest(f"{where} needs its pattern or grammar as a string.", param=where)
            return GrammarSpec(kind="regex" if kind == "regex" else "ebnf", spec=text)
    raise InvalidRequest(
        f"{where}.type must be text, json_object, json_schema, structural_tag, regex or ebnf; got {kind!r:.60}.",
        param=where,
    )
