"""What a Submit must satisfy before it may queue. The same check stands at the engine's and the server's door."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.config import EngineConfig
from runtime.errors import ContextLengthExceeded, InvalidRequest
from runtime.messages import GrammarSpec, Hints, NamespaceKey, Submit, unpack_ids
from runtime.params import SamplingParams, is_text, shown
from runtime.step import ModelSpec

MAX_RID_CHARS = 256
MAX_KEY_CHARS = 1024
MAX_SEGMENTS = 256
MAX_PRIORITY = 10**6
MAX_SECONDS = 7 * 24 * 3600.0
MAX_FANOUT = 4096
MAX_DEPTH = 4096
_NO_HINTS = Hints()
MAX_SCORES = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What this model and this pool can hold. `max_len`: prompt + answer of one request, in tokens."""

    vocab_size: int
    max_len: int

    @classmethod
    def of(cls, spec: ModelSpec, config: EngineConfig, pool_tokens: int | None = None) -> Limits:
        """`pool_tokens`: size of the KV pool where it is known (the scheduler's side always knows it)."""
        bounds = [spec.context_length, config.context_length, pool_tokens]
        return cls(spec.vocab_size, min(bound for bound in bounds if bound is not None))


def validate_submit(submit: Submit, limits: Limits, *, param: str = "messages") -> None:
    """Raise InvalidRequest naming the parameter and the limit it broke. `param`: what the client calls the prompt."""
    if not isinstance(submit.rid, str) or not 0 < len(submit.rid) <= MAX_RID_CHARS:
        raise InvalidRequest(f"rid must be a string of 1 to {MAX_RID_CHARS} characters.", param="rid")
    n_prompt = _check_tokens(submit.tokens, limits, param)
    _check_length(n_prompt, submit.params, limits, param)
    submit.params.validate(limits.vocab_size)
    _check_grammar(submit.grammar)
    _check_segments(submit, limits)
    _check_namespace(submit.namespace)
    _check_hints(submit.hints)
    _check_number("priority", submit.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_number("timeout_s", submit.timeout_s, 0.0, MAX_SECONDS, open_low=True)
    _check_key("client", submit.client)
    _check_key("group", submit.group)
    start = submit.prompt_logprobs_from
    if start is not None and not (isinstance(start, int) and 0 <= start < n_prompt):
        raise InvalidRequest(
            f"prompt_logprobs_from must be from 0 to {n_prompt - 1}; got {shown(start)}.", param="prompt_logprobs_from"
        )
    if submit.scores:
        _check_scores(submit, n_prompt, limits)


def _check_scores(submit: Submit, n_prompt: int, limits: Limits) -> None:
    """Any token may be scored after any part of the prompt, by a request that does nothing else."""
    if submit.params.max_tokens != 0 or submit.segments or submit.prompt_logprobs_from is not None:
        raise InvalidRequest("scores go with max_tokens 0, without prompt_logprobs_from or segments.", param="scores")
    if len(submit.scores) > MAX_SCORES:
        raise InvalidRequest(f"scores has {len(submit.scores)} entries; at most {MAX_SCORES}.", param="scores")
    last = 1
    for after, token in submit.scores:
        if not last <= after <= n_prompt or not 0 <= token < limits.vocab_size:
            raise InvalidRequest(
                f"scores must be pairs of a length from 1 to {n_prompt}, in ascending order, and a token id from 0 to "
                f"{limits.vocab_size - 1}; got {shown((after, token))}.",
                param="scores",
            )
        last = after


def _check_tokens(data: bytes, limits: Limits, param: str, *, may_be_empty: bool = False) -> int:
    if not isinstance(data, bytes) or len(data) % 4:
        raise InvalidRequest("Token ids must be little-endian int32 bytes.", param=param)
    ids = unpack_ids(data)
    if not len(ids) and not may_be_empty:
        raise InvalidRequest("The prompt is empty; at least one token is needed.", param=param)
    if len(ids) and int(ids.view(np.uint32).max()) >= limits.vocab_size:  # a negative id is a huge one
        low, high = int(ids.min()), int(ids.max())
        raise InvalidRequest(
            f"The prompt has token id {low if low < 0 else high}; the vocabulary has ids 0 to {limits.vocab_size - 1}.",
            param=param,
        )
    return len(ids)


def _check_length(n_prompt: int, params: SamplingParams, limits: Limits, param: str) -> None:
    room = 0 if params.max_tokens == 0 else 1
    if n_prompt + room > limits.max_len:
        raise ContextLengthExceeded(n_prompt, limits.max_len, param=param)


def _check_segments(submit: Submit, limits: Limits) -> None:
    if len(submit.segments) > MAX_SEGMENTS:
        raise InvalidRequest(
            f"segments has {len(submit.segments)} entries; at most {MAX_SEGMENTS} are allowed.", param="segments"
        )
    for segment in submit.segments:
        _check_tokens(segment.tokens, limits, "segments", may_be_empty=True)
        segment.params.validate(limits.vocab_size)
        _check_grammar(segment.grammar)


def _check_grammar(grammar: GrammarSpec | None) -> None:
    if grammar is None:
        return
    if not isinstance(grammar, GrammarSpec) or not isinstance(grammar.spec, str):
        param = grammar.param if isinstance(grammar, GrammarSpec) else "grammar"
        raise InvalidRequest("The grammar must be given as text.", param=param)
    if not is_text(grammar.spec):
        raise InvalidRequest("The grammar holds half a surrogate pair, which is no character.", param=grammar.param)


def _check_namespace(key: NamespaceKey) -> None:
    _check_number("adapter", key.adapter, 0, 2**63 - 1)
    _check_key("salt", key.salt)
    _check_key("media", key.media)


def _check_hints(hints: Hints) -> None:
    if hints == _NO_HINTS:
        return
    if not isinstance(hints, Hints):
        raise InvalidRequest(f"hints must be of type Hints; got {shown(hints)}.", param="hints")
    for name, value in (("program_id", hints.program_id), ("parent_id", hints.parent_id)):
        if value is not None:
            _check_key(name, value)
    _check_number("priority", hints.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_number("expect_return_s", hints.expect_return_s, 0.0, MAX_SECONDS)
    _check_number("retain_ttl_s", hints.retain_ttl_s, 0.0, MAX_SECONDS)
    _check_number("retain_priority", hints.retain_priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_number("expected_fanout", hints.expected_fanout, 0, MAX_FANOUT)
    _check_count("depth", hints.depth, MAX_DEPTH)


def _check_key(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > MAX_KEY_CHARS:
        raise InvalidRequest(f"{name} must be a string of at most {MAX_KEY_CHARS} characters.", param=name)


def _check_count(name: str, value: object, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= high:
        raise InvalidRequest(f"{name} must be a whole number from 0 to {high}; got {shown(value)}.", param=name)


def _check_number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        bound = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise InvalidRequest(f"{name} must be a number {bound}; got {shown(value)}.", param=name)
