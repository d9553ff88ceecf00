"""Answers as they come: Deltas of the generator through each answer's parser, with what every dialect needs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.errors import InvalidRequest
from runtime.generate import Delta
from runtime.messages import Finish, TokenLogprob, Usage
from runtime.serve.call_ids import canonical_calls, new_call_id
from runtime.serve.context import Serving
from runtime.serve.live import Claim
from runtime.serve.streams import Feed
from runtime.serve.trace import Trace
from runtime.serve.turn import PlannedTurn
from runtime.text.messages import parse_arguments
from runtime.text.parsers.base import Answer, Event, Parser, PlainParser


@dataclass(slots=True)
class AnswerState:
    """One answer being written: what was parsed so far, and the ids of its calls."""

    index: int
    parser: Parser
    parsed: Answer = field(default_factory=Answer)
    call_ids: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # of the raw text
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    usage: Usage = field(default_factory=Usage)
    n_thought: int = 0

    @property
    def raw(self) -> str:
        """The text as it was generated."""
        return "".join(self.pieces)

    @property
    def reason(self) -> str:
        """The OpenAI finish reason: "tool_calls" if and only if there are calls and nothing was cut off."""
        assert self.finish is not None
        if self.finish.reason != "stop":
            return "length"
        return "tool_calls" if self.parsed.calls else "stop"


class News(NamedTuple):
    """What one Delta brought to one answer."""

    state: AnswerState
    events: Sequence[Event]
    logprobs: Sequence[TokenLogprob] | None
    finish: Finish | None


class Answers:
    """The answers to one planned turn: read `feed` to its end; `states` and `usage` hold the totals."""

    def __init__(self, serving: Serving, planned: PlannedTurn, n: int, trace: Trace) -> None:
        self._serving = serving
        self._planned = planned
        self._caller = trace.caller
        self._trace = trace
        stream = serving.generator.stream(planned.submit, n=n, param="messages")
        self.feed: Feed[News] = Feed(stream, self._digest, self._claimed)
        self.states = [AnswerState(i, planned.new_parser()) for i in range(n)]

    @property
    def plain(self) -> bool:
        """Whether an answer's text is all that is in it: no calls, no thoughts."""
        return type(self.states[0].parser) is PlainParser

    @property
    def n_prompt(self) -> int:
        return len(self._planned.prompt_ids)

    @property
    def n_completion(self) -> int:
        return sum(len(state.token_ids) for state in self.states)

    @property
    def usage(self) -> Usage:
        """The prompt once, all answers' tokens; what was cached for the first answer."""
        first = self.states[0].usage
        return Usage(
            prompt_tokens=self.n_prompt,
            completion_tokens=self.n_completion,
            cached_tokens=first.prompt_cached,
            forced_tokens=sum(state.usage.forced_tokens for state in self.states),
            hints_honoured=first.hints_honoured,
            reasoning_tokens=sum(state.n_thought for state in self.states),
            miss=first.miss,
        )

    def _claimed(self) -> Claim:
        names = [self._planned.name] if self._planned.name else []
        return self._serving.live.claim(self._caller.digest, names, [self._planned.submit.rid] * len(names))

    def _digest(self, delta: Delta) -> News:
        state, text, ids = self.states[delta.index], delta.text, delta.token_ids
        if ids:
            state.token_ids += ids
            if self._planned.submit.stream and len(ids) > delta.n_early:
                self._trace.tokens(len(ids) - delta.n_early)
        if delta.early:  # told already
            state.pieces.append(delta.early)
            state.parsed.add(state.parser.push(delta.early))
        events: list[Event] = []
        if text:
            state.pieces.append(text)
            events = state.parser.push(text)
            state.parsed.add(events)
            if len(state.call_ids) < len(state.parsed.calls):
                self._name_calls(state)
        if delta.finish is not None:
            events = [*events, *self._finished(state, delta.finish, delta.usage)]
        return News(state, events, delta.logprobs, delta.finish)

    def _name_calls(self, state: AnswerState) -> None:
        while len(state.call_ids) < len(state.parsed.calls):
            state.call_ids.append(new_call_id(short=self._serving.tool_family.short_ids))

    def _finished(self, state: AnswerState, finish: Finish, usage: Usage | None) -> list[Event]:
        events = state.parser.finish()
        state.finish = finish
        state.usage = usage or Usage(prompt_tokens=self.n_prompt)
        state.n_thought = self._serving.n_thought(state.token_ids, self._planned.start)
        state.parsed.add(events)
        self._name_calls(state)
        self._remember(state)
        self._trace.finished(finish, state.usage)
        return events

    def _remember(self, state: AnswerState) -> None:
        """Keep the ids of an answer, for the next turn of the conversation; not if its text was cut by a stop."""
        ids = state.token_ids
        if ids and ids[-1] in self._serving.spec.eos_ids:
            ids = ids[:-1]
        raw = state.raw
        if not ids or self._serving.tokenizer.decode(ids, skip_special=False) != raw:
            return
        history, owner = self._serving.history, self._caller.digest
        history.keep(owner, self._planned.prompt + raw, (*self._planned.prompt_ids, *ids))
        if state.parsed.calls and self._planned.native_calls:
            try:
                pairs = [(call.name, parse_arguments(call.arguments, "arguments")) for call in state.parsed.calls]
            except InvalidRequest:
                return
            key = [state.parsed.text, *canonical_calls(pairs)]
            history.keep_calls(owner, state.call_ids, key, raw)


def now() -> int:
    """Unix seconds, for `created`."""
    return int(time.time())
