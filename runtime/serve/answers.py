"""Answers as they come: Deltas of the generator through each answer's parser, with what every dialect needs."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from runtime.errors import InvalidRequest
from runtime.generate import Delta
from runtime.messages import Finish, TokenLogprob, Usage
from runtime.serve.call_ids import canonical_calls, new_call_id
from runtime.serve.context import Serving
from runtime.serve.trace import Trace
from runtime.serve.turn import PlannedTurn
from runtime.text.messages import parse_arguments
from runtime.text.parsers.base import Answer, Event, Parser


@dataclass(slots=True)
class AnswerState:
    """One answer being written: what was parsed so far, and the ids of its calls."""

    index: int
    parser: Parser
    parsed: Answer = field(default_factory=Answer)
    call_ids: list[str] = field(default_factory=list)
    raw: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    usage: Usage = field(default_factory=Usage)
    n_thought: int = 0

    @property
    def reason(self) -> str:
        """The OpenAI finish reason: "tool_calls" if and only if there are calls and nothing was cut off."""
        assert self.finish is not None
        if self.finish.reason != "stop":
            return "length"
        return "tool_calls" if self.parsed.calls else "stop"


@dataclass(frozen=True, slots=True)
class News:
    """What one Delta brought to one answer."""

    state: AnswerState
    events: Sequence[Event]
    logprobs: Sequence[TokenLogprob] | None
    finish: Finish | None


class Answers:
    """The answers to one planned turn: iterate for News; `states` and `usage` hold the totals.

    The first step of the iteration raises what is wrong with the request. Close it to abort.
    """

    def __init__(self, serving: Serving, planned: PlannedTurn, n: int, trace: Trace) -> None:
        self._serving = serving
        self._planned = planned
        self._caller = trace.caller
        self._trace = trace
        self._stream = serving.generator.stream(planned.submit, n=n, param="messages")
        self.states = [AnswerState(i, planned.new_parser()) for i in range(n)]

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
            cached_tokens=first.cached_tokens,
            hints_honoured=first.hints_honoured,
            reasoning_tokens=sum(state.n_thought for state in self.states),
            miss=first.miss,
        )

    async def __aiter__(self) -> AsyncGenerator[News]:
        planned, live = self._planned, self._serving.live
        names = [planned.name] if planned.name else []
        claim = live.claim(self._caller.digest, names, [planned.submit.rid] * len(names))
        try:
            async for delta in self._stream:
                yield self._digest(delta)
        finally:
            self._stream.close()
            claim.release()

    async def run(self) -> None:
        """Read all to the end."""
        async for _ in self:
            pass

    def _digest(self, delta: Delta) -> News:
        state = self.states[delta.index]
        if delta.token_ids:
            self._trace.tokens(len(delta.token_ids))
        state.token_ids += delta.token_ids
        state.raw += delta.text
        events = state.parser.push(delta.text) if delta.text else []
        if delta.finish is not None:
            events = [*events, *state.parser.finish()]
            state.finish = delta.finish
            state.usage = delta.usage or Usage(prompt_tokens=self.n_prompt)
            state.n_thought = self._serving.n_thought(state.token_ids, self._planned.start)
        state.parsed.add(events)
        while len(state.call_ids) < len(state.parsed.calls):
            state.call_ids.append(new_call_id(short=self._serving.tool_family.short_ids))
        if delta.finish is not None:
            self._remember(state)
            self._trace.finished(delta.finish, state.usage)
        return News(state, events, delta.logprobs, delta.finish)

    def _remember(self, state: AnswerState) -> None:
        """Keep the ids of an answer, for the next turn of the conversation; not if its text was cut by a stop."""
        ids = state.token_ids
        if ids and ids[-1] in self._serving.spec.eos_ids:
            ids = ids[:-1]
        if not ids or self._serving.tokenizer.decode(ids, skip_special=False) != state.raw:
            return
        history, owner = self._serving.history, self._caller.digest
        history.keep(owner, self._planned.prompt + state.raw, (*self._planned.prompt_ids, *ids))
        if state.parsed.calls and self._planned.native_calls:
            try:
                pairs = [(call.name, parse_arguments(call.arguments, "arguments")) for call in state.parsed.calls]
            except InvalidRequest:
                return
            key = [state.parsed.text, *canonical_calls(pairs)]
            history.keep_calls(owner, state.call_ids, key, state.raw)


def now() -> int:
    """Unix seconds, for `created`."""
    return int(time.time())
