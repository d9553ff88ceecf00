"""The scheduler's side of structured output: waiting for compilation, masks, accepting, jumping forward."""

from __future__ import annotations

import numpy as np

from runtime.errors import RequestFailed
from runtime.messages import GrammarSpec
from runtime.request import GrammarState, Request
from runtime.scheduler.batch import Planned
from runtime.scheduler.release import fail
from runtime.scheduler.state import CPU_BACKENDS, State

MAX_JUMP = 64
MIN_JUMP_IDLE, MIN_JUMP, MIN_JUMP_GPU = 1, 2, 4  # with no sample in flight; with one; out of a captured graph
WORTH_A_WAIT = 0.06  # jumps a sample: each saves a step more where no step is in flight that cannot know of it
CLOSING_TOKENS = 8  # a text that is near its end for longer is inside its last string
CLOSING_ROWS = 6  # near their end: a wait costs as much as some rows more in a step, and each may well not end yet
_MEMORY = 0.05  # weight of the newest step in the rate of jumps


def start_grammar(state: State, request: Request, spec: GrammarSpec | None) -> None:
    """Begin compiling a segment's grammar; prefill goes on meanwhile."""
    request.grammar = None
    if spec is None:
        return
    assert state.grammar is not None, "the door lets grammars in only where there is a service"
    future = state.grammar.compile_async(spec)
    future.add_done_callback(lambda _: state.wake())
    request.grammar = GrammarState(spec, future)


def resolve_grammar(state: State, request: Request) -> None:
    """Take a finished compilation. A grammar that could not be compiled ends the request here."""
    grammar = request.grammar
    if grammar is None or grammar.cursor is not None or not grammar.future.done():
        return
    try:
        grammar.cursor = grammar.future.result().cursor()
    except Exception as err:
        fail(state, request, err)


def sampling_ready(request: Request) -> bool:
    """True when the request may be sampled: it has no grammar, or a compiled one."""
    return request.grammar is None or request.grammar.cursor is not None


def fill_mask(request: Request) -> np.ndarray | None:
    """The allowed tokens at the request's place, packed, not to be written; None: all. Raises RequestFailed."""
    assert request.grammar is not None
    mask: np.ndarray | None = request.grammar.cursor.allowed()
    return mask


def accept(request: Request, token: int) -> None:
    """Move the grammar on by a committed token. Raises RequestFailed if it is not allowed: a fault of ours."""
    assert request.grammar is not None
    if not request.grammar.cursor.accept(token):
        raise RequestFailed(f"The grammar does not allow token {token}, which was sampled under its mask.")


def forced_run(state: State, request: Request, *, mixed: bool) -> list[int]:
    """Tokens the grammar leaves no choice about, if appending them at once is worth a row of its own.

    Where no step in flight samples the first of them, each of them saves a step. What ends the answer needs no step.
    """
    if not state.config.jump_forward or request.grammar is None:
        return []
    rows, slot = state.rows, request.slot
    known = int(rows.known[slot])
    room = int(rows.limit[slot]) - known
    tokens: list[int] = request.grammar.cursor.forced_tokens(min(MAX_JUMP, room))[:room]
    if state.spec.backend == "flashinfer" and not mixed:
        least = MIN_JUMP_GPU
    else:
        least = MIN_JUMP if rows.kv[slot] >= known else MIN_JUMP_IDLE
    if len(tokens) >= least:
        return tokens
    last = last_token(request) if not request.params.logprobs else None
    return [] if last is None else [last]


def next_forced(state: State, request: Request) -> int | None:
    """The token that must come next. It is taken even where it is no jump: else whether a text is written in the
    tokenizer's own tokens would depend on what happened to be in flight."""
    if not state.config.jump_forward or request.grammar is None:
        return None
    cursor = request.grammar.cursor
    if cursor.goes_on(unforced=True):
        return None
    room = int(state.rows.limit[request.slot]) - int(state.rows.known[request.slot])
    tokens: list[int] = cursor.forced_tokens(min(MAX_JUMP, room))
    return tokens[0] if tokens else None


def last_token(request: Request) -> int | None:
    """The token that completes the grammar, where nothing else may come."""
    assert request.grammar is not None
    try:
        token: int | None = request.grammar.cursor.last_token()
    except RequestFailed:
        return None  # the next sample will meet it too, after what is said now
    return token


def owe_forced(state: State, request: Request, tokens: list[int]) -> None:
    """Forced tokens, written behind the row's known ones, that are computed now and said with the next sample.

    Grammar and penalties move on at once, since that sample depends on them; stops are looked at when it is said.
    """
    rows, slot = state.rows, request.slot
    request.owe(int(rows.known[slot]), len(tokens))
    for token in tokens:
        rows.known[slot] += 1
        if request.penalties is not None:
            request.penalties.push(token)
        accept(request, token)
    count_jump(state, request, len(tokens))


def count_jump(state: State, request: Request, n: int) -> None:
    state.stats.jumps += 1
    state.stats.forced += n
    state.charge(request, n)
    request.tally.forced += n


def force_start(state: State, request: Request) -> None:
    """What an answer must begin with is computed together with the end of its prompt. Raises RequestFailed."""
    grammar, rows, slot = request.grammar, state.rows, request.slot
    if grammar is None or grammar.cursor is None or grammar.opened:
        return
    grammar.opened = True
    known = int(rows.known[slot])
    if not state.config.jump_forward or known != request.gen_start:
        return
    room = int(rows.limit[slot]) - known
    tokens: list[int] = grammar.cursor.forced_tokens(min(MAX_JUMP, room))[:room]
    if tokens:
        rows.tokens[slot, known : known + len(tokens)] = tokens
        owe_forced(state, request, tokens)


class JumpRule:
    """When not to plan ahead: a step in flight samples one token of what its successor could have appended, and the
    successor of a grammar's last token is computed for nothing.

    Waiting for a step leaves a CPU idle for some percent of it, and a GPU for far more, where it is never done. It pays
    while every row has a grammar and jumps come often enough, or where enough rows are near their end: a row alone,
    whose whole next step would be for nothing, or several.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._on_cpu = state.spec.backend in CPU_BACKENDS
        self._eager = state.config.jump_forward and self._on_cpu
        self.rate = 2 * WORTH_A_WAIT

    def wait_for(self, planned: Planned) -> bool:
        """Whether `planned` is to be committed before the next plan is made."""
        if not self._eager or not planned.any_late or self.rate < WORTH_A_WAIT:
            return False
        return bool(self._state.rows.masked[planned.sample_slots].all())

    def ends_soon(self, planned: Planned) -> bool:
        """Whether the samples of a step in flight may well end rows that the next plan would go on with."""
        if not self._on_cpu or not planned.any_late or not self._state.rows.n_closing:
            return False
        closing = self._state.rows.closing[planned.sample_slots]
        n_closing = int(np.count_nonzero((closing > 0) & (closing <= CLOSING_TOKENS)))
        return n_closing >= (CLOSING_ROWS if len(closing) > 1 else 1)

    def note(self, planned: Planned, n_jumps: int) -> None:
        """A step was committed and brought that many jumps."""
        if planned.any_late:
            n_masked = int(np.count_nonzero(self._state.rows.masked[planned.sample_slots]))
            if n_masked:
                self.rate += _MEMORY * (n_jumps / n_masked - self.rate)
