"""One request's life in the scheduler: what it asks, where it stands, what it has cost."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from runtime.messages import (
    Finish,
    FromScheduler,
    GrammarSpec,
    Output,
    Segment,
    Submit,
    TokenLogprob,
    Usage,
    unpack_ids,
)
from runtime.params import SamplingParams

if TYPE_CHECKING:
    from runtime.scheduler.sampling import PenaltyState
    from runtime.scheduler.stops import StopMatcher

Sink = Callable[[FromScheduler], None]
I32 = npt.NDArray[np.int32]


class Phase(enum.IntEnum):
    """Where a request stands. Only PREFILL, DECODE and DRAIN hold a row and a lease."""

    WAITING = 0
    PREFILL = 1  # has known tokens whose KV is not planned yet
    DECODE = 2  # one token a step
    DRAIN = 3  # everything it may do is planned; waits for its last commit
    ENDED = 4


@dataclass(slots=True)
class Tally:
    """What a request has cost so far, in tokens, pages' worth and seconds."""

    cached: int = 0
    copied: int = 0
    prefilled: int = 0
    forced: int = 0
    completion: int = 0
    retractions: int = 0
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    miss: str | None = None
    honoured: tuple[str, ...] = ()


@dataclass(slots=True)
class GrammarState:
    """A request's grammar: the compilation it waits for, then its cursor (kept through retraction)."""

    spec: GrammarSpec
    future: Future[Any]
    cursor: Any = None
    opened: bool = False  # the forced start of the answer, if any, was appended to the prompt


@dataclass(slots=True, eq=False)
class Request:
    """Cursors live in the row table while it runs: computed (done) <= planned (kv) <= tokens + depth.

    `tokens` holds every committed token while the request has no row; `known` counts them. `attempt` goes up
    whenever rows planned earlier must be ignored at commit: retraction, a new segment.
    """

    num: int
    submit: Submit
    sink: Sink
    arrival: float
    tokens: I32
    params: SamplingParams
    known: int
    gen_start: int  # position of the current segment's first generated token
    phase: Phase = Phase.WAITING
    slot: int = 0
    attempt: int = 0
    segment: int = 0
    lease: Any = None
    high_water: int = 0  # most KV ever computed over all attempts
    scored: int = -1  # next position whose logprob the forward owes; -1 none
    score_end: int = 0  # where that ends: the prompt's end, later that of a forced run
    n_owed: int = 0  # forced tokens known but not said: they come with the next sample, and with their logprobs
    owed_logprobs: list[TokenLogprob] = field(default_factory=list)
    no_tail: bool = False  # the pool had no page for a tail copy: match whole pages only
    deadline: float | None = None
    retracted_at: int = 0  # high_water when last retracted
    work_at_arrival: int = 0  # the scheduler's prefill work when it came
    skipped_since: int | None = None  # admissions done when it was first skipped for lack of room
    account: Hashable = None  # whom its service is booked to, under a policy with accounts
    charged: int = 0  # tokens of it that are booked already: what a retraction makes it compute again is not
    hit: int = 0  # tokens a probe found for it
    loose: int = 0  # pages of these that nobody held then
    probed_at: int = -1
    grammar: GrammarState | None = None
    stops: StopMatcher | None = None
    penalties: PenaltyState | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    @classmethod
    def from_submit(cls, num: int, submit: Submit, sink: Sink, now: float) -> Request:
        tokens = unpack_ids(submit.tokens)
        deadline = now + submit.timeout_s if submit.timeout_s is not None else None
        request = cls(
            num=num,
            submit=submit,
            sink=sink,
            arrival=submit.arrival or now,
            tokens=tokens,
            params=submit.params,
            known=len(tokens),
            gen_start=len(tokens),
            deadline=deadline,
        )
        if submit.prompt_logprobs_from is not None:
            request.scored = max(1, submit.prompt_logprobs_from)
            request.score_end = request.n_prompt
            if submit.prompt_logprobs_from == 0:
                request.prompt_logprobs.append(TokenLogprob(int(tokens[0]), None))
        elif submit.scores:
            request.scored, request.score_end = submit.scores[0][0], request.n_prompt + 1
        return request

    @property
    def rid(self) -> str:
        return self.submit.rid

    @property
    def n_prompt(self) -> int:
        return len(self.submit.tokens) // 4

    @property
    def segments_left(self) -> int:
        return len(self.submit.segments) - self.segment

    def next_segment(self) -> Segment:
        return self.submit.segments[self.segment]

    def match_limit(self, n_tokens: int) -> int:
        """Most tokens that may come from the cache: something must be left to give the logits wanted."""
        limit = n_tokens - 1
        if 0 <= self.scored < self.score_end:
            limit = min(limit, self.scored - 1)
        return max(0, limit)

    def owe(self, start: int, n: int) -> None:
        """Tokens [start, start + n) are known and not said. Their logprobs, if wanted, follow those of the prompt."""
        self.n_owed = n
        if self.params.logprobs:
            if not 0 <= self.scored < self.score_end:
                self.scored = start
            self.score_end = start + n

    def usage(self, now: float) -> Usage:
        tally = self.tally
        queued_until = tally.admitted_at or now
        return Usage(
            prompt_tokens=self.n_prompt,
            completion_tokens=tally.completion,
            cached_tokens=tally.cached,
            copied_tokens=tally.copied,
            prefilled_tokens=tally.prefilled,
            forced_tokens=tally.forced,
            retractions=tally.retractions,
            queue_s=max(0.0, queued_until - self.arrival),
            first_token_s=max(0.0, tally.first_token_at - self.arrival) if tally.first_token_at else 0.0,
            total_s=max(0.0, now - self.arrival),
            miss=tally.miss,
            hints_honoured=tally.honoured,
        )

    def output(self, finish: Finish | None = None, usage: Usage | None = None) -> Output:
        return Output(rid=self.rid, finish=finish, usage=usage, segment=self.segment)
