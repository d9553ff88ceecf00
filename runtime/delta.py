"""An answer as it is written: outputs of the scheduler in, text and its meta-data out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from runtime.errors import (
    InvalidRequest,
    NotFound,
    QueueFull,
    QueueTimeout,
    RametError,
    RequestAborted,
    RequestFailed,
    RequestTimeout,
    Unavailable,
)
from runtime.messages import Finish, Output, Submit, TokenLogprob, Usage, unpack_ids
from runtime.params import SamplingParams
from runtime.text.detokenizer import IncrementalDetokenizer

TAIL_IDS = 4  # a character has at most four bytes, so a prompt's half character lies in its last ids


class TextTables(Protocol):
    """What detokenising needs of a tokenizer."""

    @property
    def token_bytes(self) -> Sequence[bytes]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """News of one answer. `token_ids` are raw: a final EOS or stop token is among them, but not in `text`.

    What `Stream.short` gave before comes again with the next Delta, for whoever keeps count: `early` is that text, and
    the first `n_early` ids are its.
    """

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish: Finish | None = None
    usage: Usage | None = None  # with the finish of the last segment
    segment: int = 0
    forced: tuple[int, ...] = ()  # places in `token_ids` of what a grammar forced: computed, never sampled
    early: str = ""
    n_early: int = 0

    def after(self, ids: Sequence[int], text: str) -> Delta:
        """The same with what was given before it."""
        n = len(ids)
        forced = tuple(place + n for place in self.forced)
        all_ids = (*ids, *self.token_ids)
        return msgspec.structs.replace(self, token_ids=all_ids, forced=forced, early=text, n_early=n)


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


def error_of(finish: Finish) -> RametError:
    """The typed error that an error finish stands for."""
    text = finish.message or "The request failed."
    match finish.status:
        case 400:
            return InvalidRequest(text, param=finish.param)
        case 404:
            return NotFound(text, param=finish.param)
        case 408:
            return RequestTimeout(text)
        case 429:
            return QueueFull(text)
        case 499:
            return RequestAborted(text)
        case 503 if finish.param == QueueTimeout.param:
            return QueueTimeout(text)
        case 503:
            return Unavailable(text)
        case _:
            return RequestFailed(text)


class Answer:
    """One answer being written: which segment it is in, and that segment's detokenizer."""

    __slots__ = ("_eos_ids", "_include_stop", "_index", "_parts", "_segment", "_tables", "detokenizer")

    def __init__(self, index: int, submit: Submit, tables: TextTables, eos_ids: frozenset[int]) -> None:
        self._index = index
        self._eos_ids = eos_ids
        self._tables = tables
        self._parts: list[tuple[SamplingParams, bytes]] = [(submit.params, submit.tokens)]
        self._parts += [(segment.params, segment.tokens) for segment in submit.segments]
        self._open(0)

    def delta(self, news: list[Output]) -> Delta:
        """One Delta from outputs of one segment, in order."""
        last = news[-1]
        if last.segment != self._segment:
            self._open(last.segment)
        if len(news) == 1:
            ids, logprobs, prompt_logprobs = last.tokens, last.logprobs, last.prompt_logprobs
        else:
            ids = tuple(token for output in news for token in output.tokens)
            logprobs = _join([output.logprobs for output in news])
            prompt_logprobs = _join([output.prompt_logprobs for output in news])
        return Delta(
            index=self._index,
            text=self._text(ids, last.finish),
            token_ids=ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish=last.finish,
            usage=last.usage,
            segment=last.segment,
            forced=_forced(news) if len(ids) > 1 else (),
        )

    def _open(self, segment: int) -> None:
        params, prompt = self._parts[min(segment, len(self._parts) - 1)]
        self._segment = segment
        self._include_stop = params.include_stop_str
        self.detokenizer = IncrementalDetokenizer(
            self._tables.token_bytes,
            self._tables.special_ids,
            [int(i) for i in unpack_ids(prompt[-4 * TAIL_IDS :])],
            params.stop,
            params.skip_special_tokens,
            params.include_stop_str,
            params.stop_regex,
        )

    def _text(self, ids: tuple[int, ...], finish: Finish | None) -> str:
        if finish is None:
            return self.detokenizer.push(ids)
        if ids and finish.reason == "stop" and not self._include_stop:
            # a finished grammar ends with a token of its text; only the token that meant the end is no text
            ending = self._eos_ids if finish.matched is None else (finish.matched,)
            if ids[-1] in ending:
                ids = ids[:-1]
        return self.detokenizer.push(ids) + self.detokenizer.finish()


def _forced(news: Sequence[Output]) -> tuple[int, ...]:
    """Places of forced tokens among all tokens of `news`: an output holds one sampled token, then what it forces."""
    if all(len(output.tokens) < 2 for output in news):
        return ()
    places: list[int] = []
    at = 0
    for output in news:
        places += range(at + 1, at + len(output.tokens))
        at += len(output.tokens)
    return tuple(places)


def _join(parts: Sequence[tuple[TokenLogprob, ...] | None]) -> tuple[TokenLogprob, ...] | None:
    present = [part for part in parts if part is not None]
    return tuple(one for part in present for one in part) if present else None


class Gathered:
    """An answer's Deltas added up."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []

    def add(self, delta: Delta) -> None:
        self._deltas.append(delta)

    def completion(self, index: int) -> Completion:
        last = self._deltas[-1]
        assert last.finish is not None
        return Completion(
            index=index,
            text="".join(delta.text for delta in self._deltas),
            token_ids=tuple(token for delta in self._deltas for token in delta.token_ids),
            finish=last.finish,
            usage=last.usage or Usage(),
            logprobs=_join([delta.logprobs for delta in self._deltas]),
            prompt_logprobs=_join([delta.prompt_logprobs for delta in self._deltas]),
        )
