"""The prefill rows of a step: whose turn it is, how many tokens each gets, and the rows themselves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radix import Tail
from runtime.request import Phase, Request
from runtime.scheduler.admission import MAX_LONG, Admission, probe_hit, refresh_hits
from runtime.scheduler.batch import NO_I32, Copies, Piece
from runtime.scheduler.budget import water_fill
from runtime.scheduler.grammar import force_start, resolve_grammar, sampling_ready
from runtime.scheduler.release import fail
from runtime.scheduler.sampling import static_terms
from runtime.scheduler.state import State

I32 = npt.NDArray[np.int32]
MAX_ROWS = 32
MAX_PROBES = 6  # candidates whose cached prefix is looked up in one step, beside those looked up in rotation


class PrefillPlanner:
    """Plans the prefill rows. Each row's pages are published before the next row is planned, so requests that
    share an uncached prefix compute it together, each the part the one before it has not."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._turn = 0

    def has_work(self) -> bool:
        """Take grammars that are ready, and say whether some prompt may move on or start. Who only waits for a grammar
        costs the others next to nothing."""
        state = self.state
        for request in list(state.prefill):
            resolve_grammar(state, request)
        if len(state.queue) and state.rows.n_free and not state.paused:
            return True
        return any(self._pending(request) > 0 for request in state.prefill)

    def plan(self, budget: int, copies: Copies) -> list[Piece]:
        """Rows for at most `budget` tokens: answers that were given a few at once, admitted prompts, then new ones."""
        state = self.state
        if budget <= 0 or not (state.prefill or len(state.queue)):
            return []
        max_rows = min(MAX_ROWS, max(1, budget // state.page_size))
        admission = Admission(state)
        in_rotation = self._in_rotation()
        runs = [r for r in in_rotation if self._is_run(r)]
        going = [r for r in in_rotation if not self._is_run(r)] if runs else in_rotation
        fresh = self._choose_new(admission, going, max_rows, budget)
        most = max(max_rows - len(fresh), max_rows // 2, self._turn % 2) if fresh else max_rows
        runs = self._first(runs, budget // 2 if going or fresh else budget)
        return self._rows(admission, runs + going[:most], fresh, budget, copies)

    def _is_run(self, request: Request) -> bool:
        """Whether all it has to compute is its answer's: a few tokens that were forced, on which its reader waits."""
        return bool(self.state.rows.kv[request.slot] >= request.gen_start)

    def _first(self, runs: list[Request], n_tokens: int) -> list[Request]:
        """The first ones that have at most `n_tokens` together, but one at least."""
        for n, request in enumerate(runs):
            n_tokens -= self._pending(request)
            if n_tokens < 0:
                return runs[: max(n, 1)]
        return runs

    def _in_rotation(self) -> list[Request]:
        """Requests with tokens to compute, starting one further each step."""
        going = [r for r in self.state.prefill if self._pending(r) > 0]
        self._turn += 1
        start = self._turn % len(going) if going else 0
        return going[start:] + going[:start]

    def _pending(self, request: Request) -> int:
        """Known tokens not planned yet; the last one waits while the grammar is being compiled."""
        rows, slot = self.state.rows, request.slot
        return int(rows.known[slot] - rows.kv[slot]) - (0 if sampling_ready(request) else 1)

    def _choose_new(self, admission: Admission, going: list[Request], max_rows: int, budget: int) -> list[Request]:
        """Waiting requests to start in this step, in the policy's order. What does not fit is passed over.

        Each row is to get a page's worth of tokens at least, or all it needs: of prompts that are cached but for a few
        tokens, more start at once.
        """
        state, chunk = self.state, self.state.config.chunk_tokens
        if state.paused or not len(state.queue) or not state.rows.n_free:
            return []
        refresh_hits(state)
        n_long = sum(self._pending(r) > chunk for r in going)
        room = min(state.rows.n_free, max(1, MAX_ROWS - len(going)))
        left = budget - min(len(going), max_rows) * state.page_size
        chosen: list[Request] = []
        n_probes = 0
        for request in state.queue.candidates(state.work, state.n_admitted):
            if len(chosen) >= room:
                break
            resolve_grammar(state, request)
            if request not in state.queue:
                continue
            if request.probed_at != state.step and n_probes < MAX_PROBES:
                probe_hit(state, request)
                n_probes += 1
            needs = max(1, request.known - request.hit)
            if chosen and left < min(needs, state.page_size):
                break
            is_long = needs > chunk
            if is_long and n_long >= MAX_LONG:
                continue
            if not admission.fits(request, request.hit, request.loose):
                state.queue.skip(request, state.n_admitted)
                continue
            n_long += is_long
            left -= min(needs, state.page_size)
            chosen.append(request)
        return chosen

    def _rows(
        self, admission: Admission, going: list[Request], fresh: list[Request], budget: int, copies: Copies
    ) -> list[Piece]:
        state = self.state
        sizes = [self._pending(r) for r in going] + [max(1, r.known - r.hit) for r in fresh]
        shares = water_fill(sizes, budget, state.config.chunk_tokens)
        pieces: list[Piece] = []
        spare = budget - sum(shares)
        new = set(map(id, fresh))
        for request, share in zip([*going, *fresh], shares, strict=True):
            give = min(share + spare, state.config.chunk_tokens)
            spare += share
            if give <= 0:
                continue
            is_new = id(request) in new
            if is_new and not admission.admit(request):
                state.queue.skip(request, state.n_admitted)
                continue
            piece = self._row(admission, request, give, copies, is_new)
            if piece is not None:
                pieces.append(piece)
                spare -= piece.end - piece.start
        return pieces

    def _row(self, admission: Admission, request: Request, give: int, copies: Copies, is_new: bool) -> Piece | None:
        """Plan up to `give` tokens of one request; None when there is no page for them now, or nothing to do yet."""
        if not self._forced_start(request):
            return None
        rows, slot = self.state.rows, request.slot
        tail = self._match_on(admission, request, is_new)
        known, start = int(rows.known[slot]), int(rows.kv[slot]) + (tail.n if tail else 0)
        target = known if sampling_ready(request) else known - 1
        if start >= target:
            return None
        pages, end = self._allocate(request, tail, start, min(start + give, target), target)
        if pages is None:
            return None
        if tail is not None:
            if tail.adopted:
                rows.add_pages(slot, np.array([tail.page], np.int32))
            admission.take_tail(request, int(pages[0]) if len(pages) else -1, copies)
        rows.add_pages(slot, pages)
        return self._enter(request, start, end)

    def _forced_start(self, request: Request) -> bool:
        """Append what the answer must begin with. False if the grammar has given up, which ends the request."""
        try:
            force_start(self.state, request)
        except Exception as err:
            fail(self.state, request, err)
            return False
        return True

    def _match_on(self, admission: Admission, request: Request, is_new: bool) -> Tail | None:
        """At a page border with nothing private behind it: take what others have published meanwhile."""
        state, rows, slot = self.state, self.state.rows, request.slot
        kv = int(rows.kv[slot])
        if kv != rows.published[slot] or int(rows.n_pages[slot]) * state.page_size != kv:
            return None
        if not is_new:
            tokens = rows.row_tokens(slot)
            limit = state.match_limit(request, len(tokens))
            state.cache.advance(request.lease, tokens, limit, tail=not request.no_tail)
            admission.take_leased(request)
        tail: Tail | None = request.lease.tail
        return tail

    def _allocate(
        self, request: Request, tail: Tail | None, start: int, end: int, target: int
    ) -> tuple[npt.NDArray[np.int32] | None, int]:
        """Pages for [start, end), or for as much of it as there is room; and where the row really ends."""
        state, size = self.state, self.state.page_size
        had = int(state.rows.n_pages[request.slot]) + (1 if tail is not None and tail.adopted else 0)
        most = (had + state.n_available) * size
        end = min(end, most)
        if end < target and end // size * size > start:
            end = end // size * size
        if end <= start:
            request.no_tail = request.no_tail or (tail is not None and not tail.adopted)
            return None, start
        return state.cache.alloc(max(0, state.pages_for(end) - had)), end

    def _enter(self, request: Request, start: int, end: int) -> Piece:
        """Make the row, move the cursors, publish its whole pages."""
        state, rows, slot = self.state, self.state.rows, request.slot
        known = int(rows.known[slot])
        samples = end == known and known < rows.limit[slot]
        tokens = rows.tokens[slot, start:end].copy()
        score, score_tokens = self._score(request, start, end)
        static = None
        if samples and rows.static[slot]:
            static = static_terms(request.params, known - request.gen_start, state.eos)
        piece = Piece(
            request=request,
            slot=slot,
            gen=int(rows.gen[slot]),
            start=start,
            end=end,
            tokens=tokens,
            pages=rows.pages[slot, : state.pages_for(end)].copy(),
            samples=samples,
            score=score,
            score_tokens=score_tokens,
            static=static,
            recovering=end <= int(rows.high[slot]),
        )
        rows.kv[slot] = end
        state.account(request, start, end)
        if end - rows.published[slot] >= state.page_size:
            rows.published[slot] = state.cache.publish(
                request.lease, rows.row_tokens(slot), rows.row_pages(slot), end, state.step
            )
        if end <= request.gen_start:  # what is generated may be cut again by a stop
            state.cache.show_tail(request.lease, rows.row_tokens(slot), rows.row_pages(slot), end, state.step)
        if end == known:
            more = samples and end + 1 < rows.limit[slot]
            state.to_phase(request, Phase.DECODE if more else Phase.DRAIN)
        return piece

    def _score(self, request: Request, start: int, end: int) -> tuple[I32, I32]:
        """(positions, tokens there) whose logprob is owed and this row's logits give."""
        if not 0 <= request.scored < request.score_end:
            return NO_I32, NO_I32
        first, last = max(start + 1, request.scored), min(end, request.score_end - 1)
        if request.submit.scores:
            due = [pair for pair in request.submit.scores if first <= pair[0] <= last]
            positions, tokens = np.array(due, np.int32).reshape(-1, 2).T
            return positions, tokens
        score = np.arange(first, last + 1, dtype=np.int32)
        return score, self.state.rows.tokens[request.slot, score]
