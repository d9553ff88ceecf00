"""Who may start: a waiting request gets a row and a lease when its pages are there, for now and a while to come."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from radix import Lease
from runtime.request import Phase, Request
from runtime.scheduler.batch import Copies
from runtime.scheduler.expect import announced, begins_anew, to_come
from runtime.scheduler.queue import WALL_AFTER
from runtime.scheduler.state import Growth, State

MAX_LONG = 4  # prompts of several chunks that are prefilled at the same time
EXPLAIN_SHARE = 8  # a miss is explained when it is at least one part in so many of the prompt
EXPLAIN_AHEAD = 4096  # tokens looked at beyond the cached ones to say why they are not
REFRESH = 4  # cached-prefix lookups of waiting requests in one step


def expected_growth(state: State, but: Collection[int] = ()) -> int:
    """Pages the running requests will probably still ask for, those in the slots `but` apart."""
    rows = state.rows
    slots = np.flatnonzero(rows.gen)
    if but:
        slots = slots[~np.isin(slots, list(but))]
    if not len(slots):
        return 0
    ahead = np.minimum(rows.limit[slots] - rows.known[slots], Growth.CLIP) * state.growth.ratio
    pages = np.ceil((rows.known[slots] + ahead) / state.page_size).astype(np.int64) - rows.n_pages[slots]
    decoding = (rows.kv[slots] >= rows.known[slots] - 1) | rows.run[slots]
    return int(np.maximum(pages, 0)[decoding].sum())


def reserved(state: State, but: Collection[int] = ()) -> int:
    """Pages that the admitted prompts still need, those in the slots `but` apart."""
    rows, slots = state.rows, [r.slot for r in state.prefill if r.slot not in but]
    return sum(max(0, state.pages_for(int(rows.known[slot]) + 1) - int(rows.n_pages[slot])) for slot in slots)


def pages_needed(state: State, request: Request, n_cached: int) -> int:
    """New pages for the tokens it has, and its share of the answer to come."""
    params = request.params
    room = state.limits.max_len - request.known
    if params.max_tokens is not None:
        room = min(room, request.gen_start + params.max_tokens - request.known)
    ahead = int(min(max(room, 0), Growth.CLIP) * state.growth.ratio)
    return state.pages_for(request.known + max(1, ahead)) - n_cached // state.page_size


def fits_without(state: State, request: Request, slots: Collection[int] = ()) -> bool:
    """Would a waiting request fit if the running ones in `slots` gave way? Exact, so it looks at every page.

    What it finds cached and nobody else holds is among the pages that could be freed, but will not be: it is its own.
    """
    rows = state.rows
    stay = [r.slot for r in rows.running() if r.slot not in slots]
    if not stay:
        return True
    held = np.unique(np.concatenate([rows.row_pages(slot) for slot in stay]))
    gone = [rows.row_pages(slot) for slot in slots]
    freed = np.setdiff1d(np.concatenate(gone), held) if gone else held[:0]
    cached = state.cache.peek(state.namespace(request), request.tokens, state.match_limit(request, request.known))
    loose = len(np.setdiff1d(cached, held))
    free = state.n_available + len(freed) - reserved(state, slots) - expected_growth(state, slots)
    return pages_needed(state, request, len(cached) * state.page_size) + loose <= free


class Admission:
    """Fills one step's free rows. Made anew for every plan; keeps the running account of pages."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._growth = -1
        self._announced = -1

    def admit(self, request: Request) -> bool:
        """Give the request a row and its cached prefix, if it fits. False: nothing has changed."""
        state = self.state
        alone = state.rows.n_used == 0
        tokens = request.tokens
        limit = state.match_limit(request, request.known)
        lease = state.cache.acquire(
            state.namespace(request), tokens, limit, tail=not request.no_tail, hints=request.submit.hints
        )
        if not alone and not self.fits(request, lease.n_tokens):
            state.cache.forgo_tail(lease)
        if not alone and not self.fits(request, lease.n_tokens):
            state.cache.finish(lease, tokens, np.zeros(0, np.int32), 0, keep=False)
            return False
        self._enter(request, lease)
        return True

    def fits(self, request: Request, n_cached: int, n_loose: int = 0) -> bool:
        """Pages for it are there beyond what the running requests will need, and those they have announced. Alone, a
        request always fits.

        `n_loose`: pages of the cached ones that nobody holds yet, and that are counted as available until it does.
        """
        state = self.state
        held = self._held_back(request, n_cached)
        if state.rows.n_used == 0 and not held:
            return True
        if self._growth < 0:
            self._growth = expected_growth(state)
        free = state.n_available - reserved(state) - self._growth - held
        return pages_needed(state, request, n_cached) + n_loose <= free

    def _held_back(self, request: Request, n_cached: int) -> int:
        """Pages that a newcomer leaves to those announced. Not for ever: who was passed over often leaves none."""
        state = self.state
        if "expected_fanout" not in state.cache.heap.policy.honours or not begins_anew(request, n_cached):
            return 0
        if request.skipped_since is not None and state.n_admitted - request.skipped_since >= WALL_AFTER:
            return 0
        if self._announced < 0:
            self._announced = announced(state)
        return self._announced

    def _enter(self, request: Request, lease: Lease) -> None:
        state, rows = self.state, self.state.rows
        if self._announced >= 0:
            self._announced += to_come(state, request)
        state.queue.remove(request)
        request.lease = lease
        request.skipped_since = None
        rows.take(request, state.config.seed + request.num)
        state.to_phase(request, Phase.PREFILL)
        state.n_admitted += 1
        if not request.tally.admitted_at:
            request.tally.admitted_at = state.now
            state.stats.queue_s.add(state.now - request.arrival)
            state.stats.prompt_tokens += request.n_prompt
            request.tally.miss = why_missed(state, request, lease)
        self.take_leased(request)
        state.charge(request, max(0, request.known - max(lease.total, request.charged)))

    def take_leased(self, request: Request) -> None:
        """Enter the pages a lease has newly matched into the row's table, and move the cursors to them."""
        rows, slot, lease = self.state.rows, request.slot, request.lease
        had = int(rows.published[slot])
        n = lease.n_tokens
        pages = lease.pages
        rows.pages[slot, : len(pages)] = pages
        rows.n_pages[slot] = len(pages)
        rows.published[slot] = rows.kv[slot] = rows.done[slot] = n
        self._count_reuse(request, n - had)

    def _count_reuse(self, request: Request, n: int) -> None:
        self.state.stats.reused += n
        if not request.tally.retractions:
            request.tally.cached += n

    def take_tail(self, request: Request, page: int, copies: Copies) -> None:
        """Use the tokens matched beyond whole pages: go on in the adopted leaf, or copy them into `page`."""
        state, rows, slot = self.state, self.state.rows, request.slot
        tail = request.lease.tail
        if tail.adopted:
            rows.done[slot] += tail.n
            state.stats.adopted += tail.n
        else:
            copies.add(tail.page, page, tail.n)
            state.stats.copied += tail.n
            if not request.tally.retractions:
                request.tally.copied += tail.n
        rows.kv[slot] += tail.n
        self._count_reuse(request, tail.n)


def why_missed(state: State, request: Request, lease: Lease) -> str | None:
    """In words, why the prompt was not cached further; None where only a small rest was not (asking takes time)."""
    missed = request.known - lease.total
    if not state.cache.enabled or missed * EXPLAIN_SHARE < request.known:
        return None
    ahead = min(request.known, lease.total + EXPLAIN_AHEAD + 1)
    why = state.cache.explain(state.namespace(request), request.tokens[:ahead])
    return None if why.reason == "cached" else str(why)


def refresh_hits(state: State) -> None:
    """Look up again what the first waiting requests would find in the cache; a bounded number of lookups a step."""
    if not state.policy.uses_hits:
        return
    for request in state.queue.stale_hits(REFRESH):
        if request.probed_at == state.step:
            continue
        probe_hit(state, request)


def probe_hit(state: State, request: Request) -> None:
    """Note what a request would find in the cache, and its new place in the queue."""
    request.probed_at = state.step
    found = state.cache.probe(state.namespace(request), request.tokens, request.match_limit(request.known))
    request.loose = found.n_loose
    if found.total != request.hit:
        request.hit = found.total
        if request in state.queue:
            state.queue.rekey(request)
