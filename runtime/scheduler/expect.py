"""Room that programs have announced they will need: their branches are on the way."""

from __future__ import annotations

from runtime.request import Request
from runtime.scheduler.state import Growth, State

HOLD_S = 0.2  # how long the end of a request is kept from newcomers for those announced: a client's turn, and more


def announced(state: State) -> int:
    """Pages that announced requests will go on from, and those that they will add."""
    waited_for = state.cache.n_expected(HOLD_S) if state.cache.expecting else 0
    return waited_for + sum(to_come(state, request) for request in state.rows.running())


def to_come(state: State, request: Request) -> int:
    """Pages that the branches of a running request will probably add, each of about its own length."""
    n = request.submit.hints.expected_fanout
    if not n:
        return 0
    most = Growth.CLIP if request.params.max_tokens is None else min(request.params.max_tokens, Growth.CLIP)
    return n * (1 + state.pages_for(max(1, int(most * state.growth.ratio))))


def begins_anew(request: Request, n_cached: int) -> bool:
    """True for a newcomer: most of its prompt is not cached."""
    return 2 * n_cached < request.known
