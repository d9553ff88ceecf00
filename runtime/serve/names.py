"""What a client calls our parameters, so that an error names the field which it sent.

Each parameter has one name inside, and one or more in every dialect: the error of a bad `salt` is about the
client's `cache_salt` or `extra_key`, whichever it set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.errors import RametError

_SCHEMAS = ("json_schema", "guided_json", "structural_tag", "structured_outputs", "response_format", "format")
_GRAMMARS = (*_SCHEMAS, "text", "output_config", "tools")
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "salt": ("cache_salt", "extra_key"),
    "messages": ("messages", "input", "prompt"),
    "max_tokens": ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "num_predict"),
    "min_tokens": ("min_tokens", "min_new_tokens"),
    "seed": ("seed", "sampling_seed"),
    "stop": ("stop", "stop_sequences"),
    "repetition_penalty": ("repetition_penalty", "repeat_penalty"),
    "top_logprobs": ("top_logprobs", "top_logprobs_num", "logprobs"),
    "prompt_logprobs_from": ("logprob_start_len",),
    "logprob_ids": ("token_ids_logprob",),
    "include_stop_str": ("include_stop_str_in_output", "no_stop_trim"),
    "regex": ("regex", "guided_regex", "structured_outputs", "response_format"),
    "ebnf": ("ebnf", "grammar", "guided_grammar", "structured_outputs", "response_format"),
    "choices": ("choices", "guided_choice", "structured_outputs"),
    "structural_tag": _GRAMMARS,
    "response_format": _GRAMMARS,
    "json_schema": _GRAMMARS,
    "json_object": ("json_object", *_GRAMMARS),
}
_INNER = {"text": "text.format", "output_config": "output_config.format"}  # fields whose `format` holds the schema
_NESTED = {"sampling_params": "", "options": "options."}  # objects with fields of their own, and how these are named


def in_clients_words(error: RametError, body: Any) -> RametError:
    """`error` with its parameter, and the first mention of it, as `body` (a struct of fields) spells it."""
    theirs = _spelled(error.param, body) if error.param else None
    if theirs is not None and theirs != error.param:
        message = re.sub(rf"\b{error.param}\b", lambda _: theirs, str(error), count=1)
        error.args, error.param = (message,), theirs
    return error


def _spelled(ours: str, body: Any) -> str | None:
    """The client's name of a parameter: the first of its names that is set."""
    parts = list(_parts(body))
    for name in _FIELDS.get(ours, (ours,)):
        for prefix, part in parts:
            if _is_set(name, _value(part, name)):
                return prefix + _INNER.get(name, name)
    return None


def _parts(body: Any) -> Iterator[tuple[str, Any]]:
    yield "", body
    for name, prefix in _NESTED.items():
        nested = _value(body, name)
        for part in nested if isinstance(nested, list) else (nested,):
            yield prefix, part


def _value(part: Any, name: str) -> Any:
    return part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)


def _is_set(name: str, value: Any) -> bool:
    """Whether a field says anything; a format that allows any text is as good as none."""
    if name in _INNER:
        value = value.get("format") if isinstance(value, Mapping) else None
    if name == "response_format" or name in _INNER:
        return isinstance(value, Mapping) and value.get("type") not in (None, "text")
    return bool(value) if name == "tools" else value is not None
