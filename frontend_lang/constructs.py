"""What one writes inside a program: gen, select, raw. (Tools: tools.py; fork and roles: state.py.)"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, overload

from frontend_lang.errors import InvalidPiece, InvalidSchema, check_text
from frontend_lang.ir import Gen, Score, Select, Text
from frontend_lang.schema import Typed, check_choices, of_choices, of_json_schema, of_regex, of_type
from runtime.errors import InvalidRequest
from runtime.params import MAX_N, SamplingParams

T = TypeVar("T")
DEFAULT_MAX_TOKENS = 128
ANY_VOCAB = 2**31 - 1  # token ids are checked against the real vocabulary by the runtime


Schema = Mapping[str, Any] | str | type[Any]


@overload
def gen(name: str, /, *, json_schema: Schema, **options: Any) -> Gen[Any]: ...
@overload
def gen(name: str, /, *, n: Literal[1] = ..., max_tokens: int = ..., **options: Any) -> Gen[str]: ...
@overload
def gen(name: str, /, *, n: int, **options: Any) -> Gen[list[str]]: ...
@overload
def gen(name: str, type: type[T], /, *, n: Literal[1] = ..., max_tokens: int = ..., **options: Any) -> Gen[T]: ...
@overload
def gen(name: str, type: type[T], /, *, n: int, **options: Any) -> Gen[list[T]]: ...
@overload
def gen(name: str, type: Any, /, **options: Any) -> Gen[Any]: ...
def gen(
    name: str,
    type: Any = str,
    /,
    *,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    stop: str | Sequence[str] = (),
    temperature: float | None = None,
    regex: str | None = None,
    json_schema: Schema | None = None,
    choices: Sequence[str] | None = None,
    n: int = 1,
    logprobs: bool | int = False,
    seed: int | None = None,
    deadline: float | None = None,
    **sampling: Any,
) -> Gen[Any]:
    """A generation whose value is read as `s[name]`.

    `type`: str, int, float, bool, Literal[...], Enum, dataclass, pydantic model, list[...]: the answer is
    constrained to it and comes back as a value of it. Or one of `regex`,
    `json_schema` (value: the parsed JSON), `choices`.
    `temperature` None takes the run's. `n` > 1 makes the value a list; the branch goes on with its first
    (at temperature 0 in the run, such a gen samples at 1). `logprobs` True, or the number of alternatives to report in
    `s.info(name)`. `deadline`: seconds. Further keywords are SamplingParams' (top_p, top_k, min_p ...).
    Raises InvalidPiece for a wrong value, InvalidSchema or InvalidChoices for what cannot be constrained.
    """
    _check_name(name)
    typed = _typed(type, regex, json_schema, choices)
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_N:
        raise InvalidPiece(f"n must be an integer from 1 to {MAX_N}; got {n!r}.")
    if deadline is not None and not (isinstance(deadline, int | float) and deadline > 0 and math.isfinite(deadline)):
        raise InvalidPiece(f"deadline must be a positive number of seconds; got {deadline!r}.")
    params = _params(max_tokens, stop, temperature, logprobs, seed, sampling)
    parse = None if typed.grammar is None and typed.kind == "text" else typed.parse
    return Gen(name, params, temperature, typed.grammar, parse, n, deadline, typed.kind)


def select(name: str, choices: Sequence[str], *, score: Score = "mean", temperature: float = 0.0) -> Select:
    """The likeliest of `choices`, all scored at once; its text becomes part of the state.

    `score`: "mean" log-probability a token (no bias to short choices), "sum" (the choice's probability), "greedy"
    (what greedy decoding restricted to the choices would write), "unconditional" (mean, less the mean of the choice on
    its own: no bias to common words). `temperature` > 0 samples from softmax(scores / temperature).
    Exact numbers are in `s.info(name).scores`.
    """
    _check_name(name)
    if score not in get_args(Score):
        raise InvalidPiece(f"score must be one of {', '.join(get_args(Score))}; got {score!r}.")
    if not isinstance(temperature, int | float) or not 0 <= temperature <= 100:
        raise InvalidPiece(f"temperature must be a number from 0 to 100; got {temperature!r}.")
    return Select(name, check_choices(choices), score, float(temperature))


def raw(text: str) -> Text:
    """Text in which special tokens count as such: `s += rt.raw("<|im_start|>user\\n")`. Never for untrusted text."""
    if not isinstance(text, str):
        raise InvalidPiece(f"rt.raw takes a string; got {type(text).__name__}.")
    check_text(text, "The text of rt.raw")
    return Text(text, special=True)


def _typed(kind: Any, regex: str | None, json_schema: Any, choices: Any) -> Typed:
    given = [
        label
        for label, value in (("type", None if kind is str else kind), ("regex", regex), ("json_schema", json_schema),
                             ("choices", choices))
        if value is not None
    ]  # fmt: skip
    if len(given) > 1:
        raise InvalidSchema(f"A gen takes one of type, regex, json_schema and choices; got {' and '.join(given)}.")
    if isinstance(regex, str):
        check_text(regex, "regex")
    if isinstance(json_schema, str):
        check_text(json_schema, "json_schema")
    if regex is not None:
        return of_regex(regex)
    if choices is not None:
        return of_choices(choices)
    if json_schema is None:
        return of_type(kind)
    if isinstance(json_schema, Mapping | str):
        return of_json_schema(json_schema)
    return of_type(json_schema, "json_schema")


def _params(
    max_tokens: int,
    stop: Any,
    temperature: float | None,
    logprobs: bool | int,
    seed: int | None,
    more: Mapping[str, Any],
) -> SamplingParams:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for one in stops:
        if isinstance(one, str):
            check_text(one, "stop")
    tops = 0 if isinstance(logprobs, bool) else logprobs
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            stop=stops,
            temperature=1.0 if temperature is None else temperature,
            logprobs=bool(logprobs) or tops > 0,
            top_logprobs=tops,
            seed=seed,
            **more,
        )
        params.validate(ANY_VOCAB)
    except TypeError as error:
        raise InvalidPiece(f"rt.gen: {str(error).replace('SamplingParams.', '')}.") from error
    except InvalidRequest as error:
        raise InvalidPiece(str(error)) from error
    return params


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidPiece(f"A name must be a non-empty string; got {name!r}.")
    check_text(name, "A name")
