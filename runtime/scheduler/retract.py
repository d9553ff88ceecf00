"""Taking running requests back into the queue when pages run out.

Termination: the oldest running request is never a victim, so it always moves on; every other victim keeps its
tokens, and what it had computed stays in the tree until somebody needs the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.request import Phase, Request
from runtime.scheduler.release import release
from runtime.scheduler.state import State


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running request as the choice of a victim sees it."""

    num: int
    priority: int
    private_pages: int  # pages that its release makes available
    recompute: int  # tokens it will have to compute again, should those pages be taken
    recovering: bool  # has not yet caught up with what an earlier retraction took
    shared_pages: int = 0  # pages it holds together with others, but not with the protected one


def choose_victim(candidates: Sequence[Candidate], protect: int) -> int | None:
    """The request to retract: lowest priority, not still recovering, most pages per token to recompute, youngest.

    Where every page has several holders, the youngest of them goes first: the last one to go frees it.
    """
    others = [c for c in candidates if c.num != protect]
    eligible = [c for c in others if c.private_pages] or [c for c in others if c.shared_pages]
    if not eligible:
        return None
    best = min(eligible, key=lambda c: (c.priority, c.recovering, -c.private_pages / max(1, c.recompute), -c.num))
    return best.num


def candidates(state: State, protect: Request | None) -> list[Candidate]:
    """Every running request that is not about to end by itself. `protect`: the one that will not be a victim."""
    rows, size, n_pages = state.rows, state.page_size, state.cache.pool.n_pages
    running = rows.running()
    tables = [rows.row_pages(r.slot) for r in running]
    uses = np.bincount(np.concatenate(tables), minlength=n_pages) if tables else np.zeros(0)
    safe = np.zeros(n_pages, np.bool_)
    if protect is not None:
        safe[rows.row_pages(protect.slot)] = True
    out = []
    for request, table in zip(running, tables, strict=True):
        if request.phase is Phase.DRAIN:
            continue
        private = int((uses[table] == 1).sum())
        done = int(rows.done[request.slot])
        out.append(
            Candidate(
                num=request.num,
                priority=state.priority(request),
                private_pages=private,
                recompute=max(0, done - (len(table) - private) * size),
                recovering=done < request.retracted_at,
                shared_pages=int((~safe[table]).sum()) - private,
            )
        )
    return out


def oldest_running(state: State) -> Request | None:
    """The request that must move on whatever happens: highest priority where that counts, then first come."""
    running = state.rows.running()
    if not running:
        return None
    if state.policy.preempts:
        return min(running, key=lambda r: (-state.priority(r), r.num))
    return running[0]


def retract(state: State, request: Request) -> None:
    """Back to the queue with its tokens; its pages become free or evictable."""
    done = int(state.rows.done[request.slot])
    state.stats.retractions += 1
    state.stats.retracted_tokens += done
    requeue(state, request, keep=True)
    request.hit, request.loose = done, state.pages_for(done)
    state.queue.rekey(request)


def make_room(state: State, n_pages: int) -> bool:
    """Retract until `n_pages` can be allocated; False if that is not possible without the oldest."""
    while state.n_available < n_pages:
        oldest = oldest_running(state)
        victim = choose_victim(candidates(state, oldest), oldest.num if oldest else -1)
        if victim is None:
            return False
        state.growth.retracted()
        state.full.say(
            state.now,
            "The KV pool is full: request %d gives way (%d running, %d waiting). A larger --max-total-tokens or a "
            "smaller --max-running avoids it.",
            victim,
            state.rows.n_used,
            len(state.queue),
        )
        retract(state, next(r for r in state.rows.running() if r.num == victim))
    return True


def lower_than(state: State, request: Request) -> list[Request]:
    """Running requests that may be made to give way to `request`."""
    priority = state.priority(request)
    return [r for r in state.rows.running() if state.priority(r) < priority and r.phase is not Phase.DRAIN]


def preempt(state: State, request: Request) -> bool:
    """Make the lowest running request of strictly lower priority than `request` give way; False if there is none."""
    lower = lower_than(state, request)
    if not lower:
        return False
    state.stats.preemptions += 1
    retract(state, max(lower, key=lambda r: (-state.priority(r), r.num)))
    return True


def requeue(state: State, request: Request, *, keep: bool) -> None:
    """Back to the queue with its tokens. `keep`: leave what it has computed in the tree."""
    release(state, request, keep=keep)
    request.tally.retractions += 1
    request.retracted_at = request.high_water
    request.phase = Phase.WAITING
    request.hit = 0
    request.no_tail = False
    state.queue.add(request)


def choose_stuck(state: State) -> Request:
    """Who gives way when nobody can get a page: the youngest, of the lowest priority where that counts."""
    running = state.rows.running()
    if state.policy.preempts:
        return max(running, key=lambda r: (-state.priority(r), r.num))
    return running[-1]
