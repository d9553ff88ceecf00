"""One plan: room for the decode rows, their arrays, then prefill rows for what is left of the step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.request import Phase
from runtime.scheduler.admission import Admission
from runtime.scheduler.batch import (
    NO_I32,
    NO_I64,
    Copies,
    DecodeStep,
    Piece,
    Planned,
    decode_plan,
    mixed_plan,
)
from runtime.scheduler.budget import prefill_budget
from runtime.scheduler.frame import Frame
from runtime.scheduler.prefill import PrefillPlanner
from runtime.scheduler.retract import make_room, oldest_running, preempt
from runtime.scheduler.sampling import static_terms
from runtime.scheduler.state import State
from runtime.step import FROM_TABLE, Adjust

I32 = npt.NDArray[np.int32]
FLOOR_TOKENS = 64  # prefill tokens a step always carries, so prompts move while streams run
NOTHING = DecodeStep(NO_I32, NO_I32, NO_I64, NO_I32, np.zeros(1, np.int32), NO_I32)


class Planner:
    """Makes the next plan from the state, moving cursors and pages as if it had run."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._prefill = PrefillPlanner(state)
        self._flat: tuple[Frame | None, int, I32, I32] = (None, -1, NO_I32, NO_I32)

    def plan(self) -> Planned | None:
        """The next plan, None when nothing can run now. Retraction and preemption come first, before any row."""
        state = self.state
        state.cache.begin_plan(state.step, state.now)
        self._preempt()
        keep = self._room_for_decode()
        frame = state.decode.frame() if keep is None else state.decode.subset(keep)
        decode = self._decode(frame) if frame.n else NOTHING
        copies = Copies(state.page_size)
        kv_read = int(decode.kv.sum()) if frame.n and (state.prefill or len(state.queue)) else 0
        pieces = self._prefill.plan(self._budget(frame.n, kv_read), copies)
        if not frame.n and not pieces:
            return None
        planned = self._assemble(frame, decode, pieces, copies)
        state.step += 1
        state.growth.calm_step()
        return planned

    def _budget(self, n_decode: int, kv_read: int) -> int:
        config = self.state.config
        return prefill_budget(
            self.state.model,
            n_decode=n_decode,
            kv_read=kv_read,
            max_step_tokens=config.max_step_tokens,
            inflation=config.max_itl_inflation,
            floor=max(FLOOR_TOKENS, self.state.page_size),
        )

    # -- room ------------------------------------------------------------------------------------------------

    def _preempt(self) -> None:
        """Under the priority policy the first waiting request may take the place of lower ones."""
        state = self.state
        if not state.policy.preempts or not len(state.queue) or state.paused:
            return
        first = next(iter(state.queue.candidates(state.work)))
        for _ in range(state.rows.n_used):
            fits = state.rows.n_free > 0 and Admission(state).fits(first, first.hit)
            if fits or not preempt(state, first):
                return

    def _room_for_decode(self) -> npt.NDArray[np.bool_] | None:
        """Make room for the pages that decode rows need now, retracting if need be.

        None: every row can go on. Else a mask of the rows that can; the others wait a step.
        """
        state = self.state
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

    # -- decode ----------------------------------------------------------------------------------------------

    def _decode(self, frame: Frame) -> DecodeStep:
        """One more token for every row of the frame."""
        state, rows, size = self.state, self.state.rows, self.state.page_size
        at = frame.slots
        before = rows.kv[at]
        page_of, offset = np.divmod(before, size)
        border = bool((offset == 0).any())
        if border:
            self._grow(at[page_of >= rows.n_pages[at]])
        kv = before + np.int32(1)
        indptr, indices = self._flat_pages(frame, page_of, border)
        token_ids = np.where(before < rows.known[at], rows.tokens[at, before], np.int32(FROM_TABLE))
        slots = rows.pages[at, page_of].astype(np.int64) * size + offset
        adjust = self._static_adjusts(frame, kv) if frame.static_rows else ()
        rows.kv[at] = kv
        drained = kv + 1 >= frame.limit
        if drained.any():
            for slot in at[drained].tolist():
                state.to_phase(rows.request(slot), Phase.DRAIN)
        return DecodeStep(kv, token_ids, slots, offset + np.int32(1), indptr, indices, adjust)

    def _grow(self, slots: npt.NDArray[np.int64]) -> None:
        """One new page for each of `slots`."""
        if not len(slots):
            return
        rows = self.state.rows
        pages = self.state.cache.alloc(len(slots))
        assert pages is not None, "room was made for these rows"
        rows.pages[slots, rows.n_pages[slots]] = pages
        rows.n_pages[slots] += 1

    def _flat_pages(self, frame: Frame, page_of: I32, border: bool) -> tuple[I32, I32]:
        """kv_indptr and kv_indices of the frame; those of the last step where no row's pages have changed."""
        state, rows = self.state, self.state.rows
        if not border and self._flat[0] is frame and self._flat[1] == state.pages_version:
            return self._flat[2], self._flat[3]
        counts = page_of + 1
        indptr = np.zeros(frame.n + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        pages = rows.pages
        indices = np.concatenate(
            [pages[slot, :n] for slot, n in zip(frame.slots.tolist(), counts.tolist(), strict=True)]
        )
        self._flat = (frame, state.pages_version, indptr, indices)
        return indptr, indices

    def _static_adjusts(self, frame: Frame, kv: I32) -> tuple[Adjust, ...]:
        """Bias and banned ends of rows that sample early."""
        state, out = self.state, []
        for j in frame.static_rows:
            request = state.rows.request(int(frame.slots[j]))
            terms = static_terms(request.params, int(kv[j]) - request.gen_start, state.eos)
            if terms is not None:
                out.append(Adjust(j, add_ids=terms[0], add_values=terms[1]))
        return tuple(out)

    # -- assembly --------------------------------------------------------------------------------------------

    def _assemble(self, frame: Frame, decode: DecodeStep, pieces: list[Piece], copies: Copies) -> Planned:
        state = self.state
        if not pieces:
            plan = decode_plan(state.step, frame, decode)
            return Planned(plan, frame.slots, frame.gens, frame, (), frame.slots, frame.gens)
        plan = mixed_plan(state.step, state.rows, frame, decode, pieces, copies)
        slots = np.concatenate((frame.slots, [p.slot for p in pieces]))
        gens = np.concatenate((frame.gens, [p.gen for p in pieces]))
        return Planned(plan, slots, gens, frame, tuple(pieces), slots[plan.sample_row], gens[plan.sample_row])
