"""Sampling fields of the OpenAI-like bodies, and what they mean to the sampler and to the grammar."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from runtime.errors import InvalidRequest
from runtime.messages import GrammarSpec
from runtime.params import SamplingParams
from runtime.serve.agent_hints import AgentHints


class SamplingFields(msgspec.Struct, kw_only=True):
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
    regex: str | None = None
    ebnf: str | None = None
    json_schema: Any = None
    choices: list[str] | None = None
    after: str | None = None
    whitespace: Literal["fixed", "flexible"] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
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


_GRAMMAR_FIELDS = (
    "json_schema",
    "regex",
    "ebnf",
    "choices",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_grammar",
    "guided_choice",
)


def sampling_grammar(fields: SamplingFields) -> GrammarSpec | None:
    """The grammar asked for by the extension fields."""
    if not any(getattr(fields, name) is not None for name in _GRAMMAR_FIELDS):  # as a rule
        return None
    extra = _structured_outputs(fields.structured_outputs or {})
    found = [
        *_schema_of("json_schema", fields.json_schema),
        *_schema_of("guided_json", fields.guided_json),
        *_schema_of("structured_outputs", extra.get("json")),
        *(("regex", text) for text in (fields.regex, fields.guided_regex, extra.get("regex")) if text is not None),
        *(("ebnf", text) for text in (fields.ebnf, fields.guided_grammar, extra.get("grammar")) if text is not None),
        *(
            ("choices", canonical(c))
            for c in (fields.choices, fields.guided_choice, extra.get("choice"))
            if c is not None
        ),
        *([("json_object", "{}")] if extra.get("json_object") else ()),
        *(("structural_tag", _tag_text(tag)) for tag in (extra.get("structural_tag"),) if tag is not None),
    ]
    return only_grammar([GrammarSpec(kind=kind, spec=spec) for kind, spec in found])


_STRUCTURED = {"json": object, "regex": str, "choice": list, "grammar": str, "json_object": bool}
_STRUCTURED |= {"structural_tag": object, "disable_fallback": bool, "disable_any_whitespace": bool}


def _structured_outputs(value: dict[str, Any]) -> dict[str, Any]:
    """What it holds besides nulls. Words that are not read are refused: each of them changes the grammar."""
    given = {name: inner for name, inner in value.items() if inner is not None}
    for name, inner in given.items():
        if not isinstance(inner, _STRUCTURED.get(name, ())):
            why = "has a value of the wrong type" if name in _STRUCTURED else "is not supported"
            raise InvalidRequest(f"structured_outputs.{name:.60} {why}.", param="structured_outputs")
    return given


def _tag_text(value: Any) -> str:
    return value if isinstance(value, str) else canonical(value)


def with_options(grammar: GrammarSpec | None, after: str | None, whitespace: str | None) -> GrammarSpec | None:
    """The grammar with the options that stand beside it, which mean nothing on their own."""
    options = {"after": after, "whitespace": whitespace}
    given = {name: value for name, value in options.items() if value is not None}
    if grammar is None:
        for name in given:
            raise InvalidRequest(f"{name} goes with a grammar only.", param=name)
        return None
    return msgspec.structs.replace(grammar, **given) if given else grammar


def answer_grammar(fields: SamplingFields, shape: GrammarSpec | None) -> GrammarSpec | None:
    """The one grammar of a body: `shape` is what its dialect's own field says."""
    found = [g for g in (shape, sampling_grammar(fields)) if g is not None]
    return with_options(only_grammar(found), fields.after, fields.whitespace)


def _schema_of(name: str, value: Any) -> list[tuple[str, str]]:
    if value is None:
        return []
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{name} is not valid JSON: {error}.", param=name) from None
    return [("json_schema", canonical(value))]


def only_grammar(found: list[GrammarSpec]) -> GrammarSpec | None:
    """The one grammar among those found. A client that does not know its server may say the same one in every
    server's words; two that differ are refused."""
    if len(set(found)) > 1:
        raise InvalidRequest(
            "At most one of response_format, json_schema, regex, ebnf and choices may be set.", param="response_format"
        )
    return found[0] if found else None


def canonical(value: Any) -> str:
    """JSON text of a schema with its key order kept, so that equal schemas are one grammar."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The schema cannot be read: {error}.", param="response_format") from None


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
