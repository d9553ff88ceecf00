"""One plan: room for the decode rows, their arrays, then prefill rows for what is left of the step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.request import Phase
from runtime.scheduler.admission import fits_without
from runtime.scheduler.batch import (
    Copies,
    DecodeStep,
    Piece,
    Planned,
    decode_plan,
    mixed_plan,
)
from runtime.scheduler.budget import prefill_budget
from runtime.scheduler.decode import DecodePlanner
from runtime.scheduler.frame import Frame
from runtime.scheduler.prefill import PrefillPlanner
from runtime.scheduler.probes import probed
from runtime.scheduler.retract import lower_than, make_room, oldest_running, preempt
from runtime.scheduler.state import State

FLOOR_TOKENS = 64  # prefill tokens a step always carries, so prompts move while streams run


class Planner:
    """Makes the next plan from the state, moving cursors and pages as if it had run."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._prefill = PrefillPlanner(state)
        self._decode = DecodePlanner(state)

    def plan(self) -> Planned | None:
        """The next plan, None when nothing can run now. Retraction and preemption come first, before any row."""
        state = self.state
        state.cache.begin_plan(state.step, state.now)
        self._preempt()
        if state.rows.n_runs:
            self._limit_runs()
        keep = self._room_for_decode()
        frame = state.decode.frame() if keep is None else state.decode.subset(keep)
        decode = self._decode.plan(frame)
        copies = Copies(state.page_size)
        pieces: list[Piece] = []
        if self._prefill.has_work():
            pieces = self._prefill.plan(self._budget(frame, decode), copies)
        if not frame.n and not pieces:
            return None
        planned = self._assemble(frame, decode, pieces, copies)
        state.step += 1
        state.growth.calm_step()
        return planned

    def _budget(self, frame: Frame, decode: DecodeStep) -> int:
        """Prefill tokens of this step, beside those that its decode rows were forced."""
        return self._budget_beside(frame, decode.kv) - (len(decode.token_ids) - frame.n)

    def _budget_beside(self, frame: Frame, kv: npt.NDArray[np.int32]) -> int:
        """Tokens a step may carry beside one for each decode row. The KV that prefill rows read counts as theirs."""
        state, watched = self.state, frame.watched
        floor, most = self._bounds(frame.n)
        first = [r.slot for r in state.prefill[:2]] if watched else []
        return prefill_budget(
            state.model,
            n_decode=frame.n,
            kv_read=int(kv.sum()) if watched else 0,
            kv_prefill=int(state.rows.kv[first].sum()) if first else 0,
            max_step_tokens=most,
            inflation=state.config.max_itl_inflation,
            floor=floor,
            watched=watched,
        )

    def _bounds(self, n_decode: int) -> tuple[int, int]:
        """(tokens that may always stand beside decode rows, tokens of a step at most)"""
        state = self.state
        floor = max(FLOOR_TOKENS, state.page_size)
        return floor, state.config.max_step_tokens or max(state.spec.step_tokens, n_decode + floor)

    # -- room ------------------------------------------------------------------------------------------------

    def _preempt(self) -> None:
        """Under the priority policy the first waiting request may take the place of lower ones, if that is enough."""
        state = self.state
        if not state.policy.preempts or not len(state.queue) or state.paused:
            return
        first = next(iter(state.queue.candidates(state.work, state.n_admitted)))
        lower = {r.slot for r in lower_than(state, first)}
        if not lower or not fits_without(state, first, lower):
            return  # who gave way in vain would start again and give way again
        for _ in range(state.rows.n_used):
            if (state.rows.n_free and fits_without(state, first)) or not preempt(state, first):
                return

    def _limit_runs(self) -> None:
        """Rows that were forced tokens compute them where they are, if a step has room for all of that. Else they take
        turns with the prompts, piece by piece."""
        state, rows = self.state, self.state.rows
        slots = np.flatnonzero(rows.run)
        n_more = int((rows.known[slots] - rows.kv[slots]).sum()) - len(slots)
        if self._allows(n_more) and self._plenty(len(slots) + n_more // state.page_size):
            return
        for slot in slots.tolist():
            state.to_phase(rows.request(slot), Phase.PREFILL)

    def _allows(self, n_more: int) -> bool:
        """Whether the budget of the step lets its decode rows have so many more tokens; half, where prompts wait."""
        state, frame = self.state, self.state.decode.frame()
        if state.prefill or len(state.queue):
            n_more *= 2
        floor, most = self._bounds(frame.n)
        at_least = min(floor, most - frame.n)
        return n_more <= at_least or n_more <= self._budget_beside(frame, state.rows.kv[frame.slots])

    def _plenty(self, n_pages: int) -> bool:
        """Whether there are pages for every decode row, for a chunk of a prompt, and `n_pages` more."""
        state = self.state
        chunk = state.pages_for(state.config.chunk_tokens) + 1 if state.prefill else 0
        return state.n_available >= len(state.decode) + chunk + n_pages

    def _room_for_decode(self) -> npt.NDArray[np.bool_] | None:
        """Make room for the pages that decode rows need now, retracting if need be.

        None: every row can go on. Else a mask of the rows that can; the others wait a step.
        """
        state = self.state
        if self._plenty(0):
            return None
        short = self._short_rows()
        want = int(short.sum()) + self._oldest_prefill_need()
        if want <= state.n_available or make_room(state, want):
            return None
        short = self._short_rows()
        left = state.n_available
        if int(short.sum()) <= left:
            return None
        keep = ~short
        order = sorted(np.flatnonzero(short), key=lambda i: state.decode.frame().rids[i])
        keep[order[:left]] = True
        return keep

    def _short_rows(self) -> npt.NDArray[np.bool_]:
        """Decode rows whose next token needs a new page, in frame order."""
        rows, slots = self.state.rows, self.state.decode.frame().slots
        short: npt.NDArray[np.bool_] = rows.kv[slots] >= rows.n_pages[slots] * self.state.page_size
        return short

    def _oldest_prefill_need(self) -> int:
        """Pages for the next chunk of the oldest running request, if it is prefilling: it must not starve."""
        state, rows = self.state, self.state.rows
        if not state.prefill:
            return 0
        oldest = oldest_running(state)
        if oldest is None or oldest.phase is not Phase.PREFILL:
            return 0
        end = min(int(rows.known[oldest.slot]), int(rows.kv[oldest.slot]) + state.config.chunk_tokens)
        return max(0, state.pages_for(end) - int(rows.n_pages[oldest.slot]))

    # -- assembly --------------------------------------------------------------------------------------------

    def _assemble(self, frame: Frame, decode: DecodeStep, pieces: list[Piece], copies: Copies) -> Planned:
        state = self.state
        if not pieces:
            plan, probes = probed(decode_plan(state.step, frame, decode), frame, ())
            return Planned(
                plan,
                frame.slots,
                frame.gens,
                frame,
                (),
                frame.slots,
                frame.gens,
                frame.any_late,
                state.rows.epoch,
                decode.drains,
                probes,
            )
        plan, probes = probed(mixed_plan(state.step, state.rows, frame, decode, pieces, copies), frame, pieces)
        slots = np.concatenate((frame.slots, [p.slot for p in pieces]))
        gens = np.concatenate((frame.gens, [p.gen for p in pieces]))
        late = bool(plan.late.any())
        at = plan.sample_row
        return Planned(
            plan, slots, gens, frame, tuple(pieces), slots[at], gens[at], late, state.rows.epoch, decode.drains, probes
        )
