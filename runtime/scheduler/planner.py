"""One plan: room for the decode rows, their arrays, then prefill rows for what is left of the step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.request import Phase
from runtime.scheduler.admission import Admission, fits_without
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
from runtime.scheduler.retract import lower_than, make_room, oldest_running, preempt
from runtime.scheduler.sampling import static_terms
from runtime.scheduler.state import State
from runtime.step import FROM_TABLE, Adjust

I32 = npt.NDArray[np.int32]
FLOOR_TOKENS = 64  # prefill tokens a step always carries, so prompts move while streams run
NOTHING = DecodeStep(NO_I32, NO_I32, NO_I32, NO_I64, NO_I32, np.zeros(1, np.int32), NO_I32)


class Planner:
    """Makes the next plan from the state, moving cursors and pages as if it had run."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._prefill = PrefillPlanner(state)
        self._last: tuple[Frame | None, int, DecodeStep] = (None, -1, NOTHING)

    def plan(self) -> Planned | None:
        """The next plan, None when nothing can run now. Retraction and preemption come first, before any row."""
        state = self.state
        state.cache.begin_plan(state.step, state.now)
        self._preempt()
        keep = self._room_for_decode()
        frame = state.decode.frame() if keep is None else state.decode.subset(keep)
        decode = self._decode(frame) if frame.n else NOTHING
        copies = Copies(state.page_size)
        pieces: list[Piece] = []
        if state.prefill or (len(state.queue) and state.rows.n_free and not state.paused):
            pieces = self._prefill.plan(self._budget(decode), copies)
        if not frame.n and not pieces:
            return None
        planned = self._assemble(frame, decode, pieces, copies)
        state.step += 1
        state.growth.calm_step()
        return planned

    def _budget(self, decode: DecodeStep) -> int:
        """Prefill tokens of this step. The KV that prefill rows read counts as prefill, not as decode."""
        state, config = self.state, self.state.config
        return prefill_budget(
            state.model,
            n_decode=len(decode.kv),
            kv_read=int(decode.kv.sum()),
            kv_prefill=int(state.rows.kv[[r.slot for r in state.prefill[:2]]].sum()) if state.prefill else 0,
            max_step_tokens=config.max_step_tokens,
            inflation=config.max_itl_inflation,
            floor=max(FLOOR_TOKENS, state.page_size),
        )

    # -- room ------------------------------------------------------------------------------------------------

    def _preempt(self) -> None:
        """Under the priority policy the first waiting request may take the place of lower ones, if that is enough."""
        state = self.state
        if not state.policy.preempts or not len(state.queue) or state.paused:
            return
        first = next(iter(state.queue.candidates(state.work)))
        lower = {r.slot for r in lower_than(state, first)}
        if not lower or not fits_without(state, first, lower):
            return  # who gave way in vain would start again and give way again
        for _ in range(state.rows.n_used):
            fits = state.rows.n_free > 0 and Admission(state).fits(first, first.hit)
            if fits or not preempt(state, first):
                return

    def _room_for_decode(self) -> npt.NDArray[np.bool_] | None:
        """Make room for the pages that decode rows need now, retracting if need be.

        None: every row can go on. Else a mask of the rows that can; the others wait a step.
        """
        state = self.state
        if not state.prefill and state.n_available >= len(state.decode):
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

    # -- decode ----------------------------------------------------------------------------------------------

    def _decode(self, frame: Frame) -> DecodeStep:
        """One more token for every row of the frame."""
        state, rows, at = self.state, self.state.rows, frame.slots
        before = rows.kv[at]
        kv = before + frame.ones
        step = self._same_pages(frame, before, kv) or self._new_pages(frame, before, kv)
        rows.kv[at] = kv
        drained = kv >= frame.drain_at
        if np.count_nonzero(drained):
            for slot in at[drained].tolist():
                state.to_phase(rows.request(slot), Phase.DRAIN)
        self._last = (frame, state.pages_version, step)
        return step

    def _same_pages(self, frame: Frame, before: I32, kv: I32) -> DecodeStep | None:
        """The last step moved on by one slot in every row; None if a row needs another page, or others ran."""
        of, version, last = self._last
        if of is not frame or version != self.state.pages_version:
            return None
        if np.count_nonzero(last.last_page_len == self.state.page_size):
            return None
        return DecodeStep(
            kv,
            before,
            self._token_ids(frame, before),
            last.slots + frame.ones,
            last.last_page_len + frame.ones,
            last.kv_indptr,
            last.kv_indices,
            self._static_adjusts(frame, kv) if frame.static_rows else (),
        )

    def _new_pages(self, frame: Frame, before: I32, kv: I32) -> DecodeStep:
        """Work the page arrays out from the table, after giving a page to each row that stands at a border."""
        rows, at, size = self.state.rows, frame.slots, self.state.page_size
        page_of, offset = np.divmod(before, np.int32(size))
        self._grow(at[page_of >= rows.n_pages[at]])
        indptr = np.zeros(frame.n + 1, np.int32)
        np.cumsum(page_of + 1, out=indptr[1:])
        pages = rows.pages
        tables = [pages[slot, :n] for slot, n in zip(at.tolist(), (page_of + 1).tolist(), strict=True)]
        return DecodeStep(
            kv=kv,
            positions=before,
            token_ids=self._token_ids(frame, before),
            slots=pages[at, page_of].astype(np.int64) * size + offset,
            last_page_len=offset + frame.ones,
            kv_indptr=indptr,
            kv_indices=np.concatenate(tables),
            adjust=self._static_adjusts(frame, kv) if frame.static_rows else (),
        )

    def _token_ids(self, frame: Frame, before: I32) -> I32:
        """The tokens to feed; FROM_TABLE where a step in flight is still to sample them."""
        rows, at = self.state.rows, frame.slots
        unknown = before >= rows.known[at]
        n = np.count_nonzero(unknown)
        if n == frame.n:
            return frame.unknown
        tokens: I32 = rows.tokens[at, before]
        if n:
            tokens[unknown] = FROM_TABLE
        return tokens

    def _grow(self, slots: npt.NDArray[np.int64]) -> None:
        """One new page for each of `slots`."""
        if not len(slots):
            return
        rows = self.state.rows
        pages = self.state.cache.alloc(len(slots))
        assert pages is not None, "room was made for these rows"
        rows.pages[slots, rows.n_pages[slots]] = pages
        rows.n_pages[slots] += 1

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
            return Planned(plan, frame.slots, frame.gens, frame, (), frame.slots, frame.gens, frame.any_late)
        plan = mixed_plan(state.step, state.rows, frame, decode, pieces, copies)
        slots = np.concatenate((frame.slots, [p.slot for p in pieces]))
        gens = np.concatenate((frame.gens, [p.gen for p in pieces]))
        late = bool(plan.late.any())
        at = plan.sample_row
        return Planned(plan, slots, gens, frame, tuple(pieces), slots[at], gens[at], late)
