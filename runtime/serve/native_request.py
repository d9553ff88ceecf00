"""The body of /generate: SGLang's names, brought to Submits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from runtime.errors import InvalidRequest
from runtime.messages import Submit
from runtime.params import SamplingParams
from runtime.serve.agent_hints import AgentHints, hints_of
from runtime.serve.context import Caller, Serving
from runtime.serve.prompts import Prompt, read_prompts
from runtime.serve.sampling import (
    GrammarFields,
    answer_grammar,
    as_logit_bias,
    as_stops,
    checked_limit,
    no_grammar,
    spaced,
)
from runtime.serve.wire import convert

DEFAULT_MAX_NEW_TOKENS = 128
OUTPUT_ONLY = -1
_UNSUPPORTED = (
    "image_data",
    "audio_data",
    "video_data",
    "input_embeds",
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
    "lora_path",
)


class NativeSampling(GrammarFields, kw_only=True):
    """`sampling_params`. Null means the default."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None


class GenerateRequest(GrammarFields, kw_only=True):
    """The body. Unknown keys are ignored; fields of a grammar are refused here, since `sampling_params` has them."""

    text: Any = None
    input_ids: Any = None
    sampling_params: Any = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | list[str] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    hints: AgentHints | None = None
    timeout_s: float | None = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    input_embeds: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None
    lora_path: Any = None


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of the request. `start`: first prompt token that is scored, None for none."""

    prompt: Prompt
    submit: Submit
    start: int | None


@dataclass(frozen=True, slots=True)
class Batch:
    """The request as a whole. `names`: what the client calls each item. `is_list`: the answer is a list."""

    items: Sequence[Item]
    names: Sequence[str]
    n: int
    is_list: bool
    logprobs: bool
    text_in_logprobs: bool
    top: int


def read_batch(serving: Serving, body: GenerateRequest, caller: Caller) -> Batch:
    """Check and translate. Raises InvalidRequest naming the parameter."""
    for name in _UNSUPPORTED:
        if _is_set(getattr(body, name)):
            raise InvalidRequest(f"{name} is not supported by this server.", param=name)
    no_grammar(body, "inside sampling_params")
    prompts, is_list = _prompts(serving, body)
    sampling = _sampling(body.sampling_params, len(prompts))
    n = serving.check_batch(len(prompts), sampling[0].n)
    if any((one.n or 1) != n for one in sampling):
        raise InvalidRequest("All sampling_params of a batch must have the same n.", param="sampling_params.n")
    _check_lengths(body, len(prompts))
    items = [_item(body, i, prompt, sampling[i], caller) for i, prompt in enumerate(prompts)]
    return Batch(
        items=items,
        names=_names(body.rid, len(prompts)),
        n=n,
        is_list=is_list or n > 1,
        logprobs=any(item.submit.params.logprobs for item in items),
        text_in_logprobs=bool(body.return_text_in_logprobs),
        top=max(item.submit.params.top_logprobs for item in items),
    )


def _is_set(value: Any) -> bool:
    """Whether an option says anything, for the request or for one of its prompts."""
    return any(one is not None and one is not False for one in (value if isinstance(value, list) else (value,)))


def _prompts(serving: Serving, body: GenerateRequest) -> tuple[list[Prompt], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("Exactly one of text and input_ids is needed.", param="text")
    if body.input_ids is not None:
        if not isinstance(body.input_ids, list):
            raise InvalidRequest("input_ids must be a list of token ids.", param="input_ids")
        return read_prompts(body.input_ids, serving.tokenizer, "input_ids")
    if isinstance(body.text, list) and not all(isinstance(text, str) for text in body.text):
        raise InvalidRequest("text must be text or a list of texts; token ids go into input_ids.", param="text")
    return read_prompts(body.text, serving.tokenizer, "text")


def _sampling(value: Any, n_prompts: int) -> list[NativeSampling]:
    if not isinstance(value, list):
        one = convert(value if value is not None else {}, NativeSampling)
        return [one] * n_prompts
    if len(value) != n_prompts:
        raise InvalidRequest(
            f"sampling_params has {len(value)} entries for {n_prompts} prompts.", param="sampling_params"
        )
    return [convert(item if item is not None else {}, NativeSampling) for item in value]


def _item(body: GenerateRequest, i: int, prompt: Prompt, sampling: NativeSampling, caller: Caller) -> Item:
    logprobs = bool(_at(body.return_logprob, i))
    top = _at(body.top_logprobs_num, i) or 0
    params = _params(sampling, logprobs, top if logprobs else 0)
    if logprobs and (ids := _probed_ids(body.token_ids_logprob, i)):
        params = replace(params, logprob_ids=ids)
    start = _score_from(_at(body.logprob_start_len, i), params, len(prompt.ids)) if logprobs else None
    submit = Submit(
        rid="",
        tokens=prompt.packed,
        params=params,
        grammar=spaced(answer_grammar(sampling), sampling.whitespace),
        namespace=caller.namespace(body.cache_salt or body.extra_key),
        client=caller.digest,
        group=caller.digest,
        priority=body.priority or 0,
        hints=hints_of(body.hints),
        timeout_s=body.timeout_s,
        prompt_logprobs_from=start,
        stream=bool(body.stream),
    )
    return Item(prompt, submit, start)


def _check_lengths(body: GenerateRequest, n_prompts: int) -> None:
    """An option given as a list has one entry for each prompt."""
    for name in ("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"):
        value = getattr(body, name)
        if name == "token_ids_logprob" and value and all(isinstance(one, int) for one in value):
            continue  # ids for all prompts
        if isinstance(value, list) and value and len(value) != n_prompts:
            raise InvalidRequest(f"{name} has {len(value)} entries for {n_prompts} prompts.", param=name)


def _at(value: Any, i: int) -> Any:
    """An option's value for one prompt."""
    if not isinstance(value, list):
        return value
    return value[i] if value else None


def _probed_ids(value: Any, i: int) -> tuple[int, ...]:
    """One list of ids for all prompts, or one for each."""
    if value and not all(isinstance(one, int) for one in value):
        value = _at(value, i)
    if not isinstance(value, list | None):
        raise InvalidRequest("token_ids_logprob must be a list of ids, or of such lists.", param="token_ids_logprob")
    return tuple(value or ())


def _score_from(start: int | None, params: SamplingParams, n_prompt: int) -> int | None:
    """Without a start, only a request that generates nothing has its prompt scored."""
    if start is None:
        start = 0 if params.max_tokens == 0 else OUTPUT_ONLY
    if start < OUTPUT_ONLY:
        raise InvalidRequest("logprob_start_len must be -1 or more.", param="logprob_start_len")
    return None if start == OUTPUT_ONLY or start >= n_prompt else start


def _params(sampling: NativeSampling, logprobs: bool, top: int) -> SamplingParams:
    names = (
        ("temperature", "temperature"),
        ("top_p", "top_p"),
        ("top_k", "top_k"),
        ("min_p", "min_p"),
        ("frequency_penalty", "frequency_penalty"),
        ("presence_penalty", "presence_penalty"),
        ("repetition_penalty", "repetition_penalty"),
        ("ignore_eos", "ignore_eos"),
        ("skip_special_tokens", "skip_special_tokens"),
        ("sampling_seed", "seed"),
        ("min_new_tokens", "min_tokens"),
    )
    given = {ours: value for theirs, ours in names if (value := getattr(sampling, theirs)) is not None}
    limit = checked_limit("max_new_tokens", sampling.max_new_tokens)
    checked_limit("min_new_tokens", sampling.min_new_tokens)
    return SamplingParams(
        **given,
        max_tokens=DEFAULT_MAX_NEW_TOKENS if limit is None else limit,
        stop=as_stops(sampling.stop),
        stop_regex=as_stops(sampling.stop_regex),
        stop_token_ids=tuple(sampling.stop_token_ids or ()),
        logit_bias=as_logit_bias(sampling.logit_bias),
        include_stop_str=bool(sampling.no_stop_trim),
        logprobs=logprobs,
        top_logprobs=top,
    )


def _names(rid: str | list[str] | None, n_prompts: int) -> list[str]:
    if isinstance(rid, list):
        if len(rid) != n_prompts:
            raise InvalidRequest(f"rid has {len(rid)} entries for {n_prompts} prompts.", param="rid")
        return rid
    if rid is None:
        return []
    return [rid] if n_prompts == 1 else [f"{rid}_{i}" for i in range(n_prompts)]
