"""The decode rows of a step. While the same rows go on, a step differs from the last by one in every row: only what
moves is computed, and how long that stays true is counted ahead instead of looked at in every step."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.request import Phase
from runtime.scheduler.batch import NO_I32, NO_I64, DecodeStep
from runtime.scheduler.frame import Frame
from runtime.scheduler.sampling import static_terms
from runtime.scheduler.state import State
from runtime.step import FROM_TABLE, Adjust

I32 = npt.NDArray[np.int32]
NOTHING = DecodeStep(
    NO_I32, NO_I64, NO_I32, NO_I32, NO_I64, NO_I32, np.zeros(1, np.int32), NO_I32, np.zeros(1, np.int32), NO_I32, NO_I32
)


class _Last(msgspec.Struct):
    """The decode rows planned last, and for how many more steps they need no new page and come to no end."""

    frame: Frame
    step: int
    pages_version: int
    decode: DecodeStep
    border_in: int
    drain_in: int


class DecodePlanner:
    """One more token for every row of a frame."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._last: _Last | None = None

    def plan(self, frame: Frame) -> DecodeStep:
        """The rows' arrays. Moves their cursors; rows that have nothing more to plan go to DRAIN."""
        if not frame.n:
            return NOTHING
        state, last = self.state, self._last
        if state.rows.n_runs:
            return self._with_runs(frame)
        if last is None or last.frame is not frame or last.step != state.step - 1:
            return self._enter(frame, self._from_table(frame))
        if last.pages_version != state.pages_version:
            return self._enter(frame, self._from_table(frame))
        if last.border_in:
            return self._go_on(last)
        return self._enter(frame, self._over_border(frame, last.decode))

    def _go_on(self, last: _Last) -> DecodeStep:
        """Everything moves by one slot."""
        state, frame, old = self.state, last.frame, last.decode
        one = frame.ones
        last.border_in -= 1
        last.drain_in -= 1
        last.step = state.step
        kv = old.kv + one
        last.decode = decode = DecodeStep(
            kv,
            old.counter + 1,
            old.kv,  # positions
            frame.unknown if state.committed < state.step - 1 else self._token_ids(frame, old.kv),
            old.slots + 1,
            old.last_page_len + one,
            old.kv_indptr,
            old.kv_indices,
            frame.qo_indptr,
            frame.range,
            frame.range,
            self._static_adjusts(frame, kv) if frame.static_rows else (),
            not last.drain_in,
        )
        state.rows.kv[frame.slots] = kv
        if decode.drains:
            self._drain(frame, kv)
        return decode

    def _enter(self, frame: Frame, decode: DecodeStep) -> DecodeStep:
        """Move the cursors and note for how long the rows will go on like this."""
        state = self.state
        state.rows.kv[frame.slots] = decode.kv
        border_in = state.page_size - int(decode.last_page_len.max())
        drain_in = int((frame.drain_at - decode.kv).min())
        self._last = _Last(frame, state.step, state.pages_version, decode, border_in, drain_in)
        if decode.drains:
            self._drain(frame, decode.kv)
        return decode

    def _drain(self, frame: Frame, kv: I32) -> None:
        state = self.state
        for slot in frame.slots[kv >= frame.drain_at].tolist():
            state.to_phase(state.rows.request(slot), Phase.DRAIN)

    def _over_border(self, frame: Frame, old: DecodeStep) -> DecodeStep:
        """Everything moves by one slot, which for some rows is the first of a new page."""
        short = np.flatnonzero(old.last_page_len == self.state.page_size)
        pages = self._grow(frame.slots[short])
        slots, lens = old.slots + 1, old.last_page_len + frame.ones
        slots[short] = pages.astype(np.int64) * self.state.page_size
        lens[short] = 1
        more = np.zeros(frame.n + 1, np.int32)
        more[short + 1] = 1
        kv = old.kv + frame.ones
        return DecodeStep(
            kv=kv,
            counter=old.counter + 1,
            positions=old.kv,
            token_ids=self._token_ids(frame, old.kv),
            slots=slots,
            last_page_len=lens,
            kv_indptr=old.kv_indptr + np.cumsum(more, dtype=np.int32),
            kv_indices=np.insert(old.kv_indices, old.kv_indptr[short + 1], pages),
            qo_indptr=frame.qo_indptr,
            token_row=frame.range,
            last=frame.range,
            adjust=self._static_adjusts(frame, kv) if frame.static_rows else (),
            drains=bool((kv >= frame.drain_at).any()),
        )

    def _from_table(self, frame: Frame) -> DecodeStep:
        """Work the arrays out from the page table. Rows that were forced tokens compute all of them."""
        rows, at, size = self.state.rows, frame.slots, np.int32(self.state.page_size)
        before = rows.kv[at]
        kv = before + frame.ones
        if rows.n_runs:
            kv = np.maximum(kv, rows.known[at])  # where a sample is in flight, its token is not known
            qo, row, positions = _spread(frame, before, kv)
            token_ids, last = self._run_ids(frame, before, qo, row, positions), qo[1:] - frame.ones
        else:
            qo, row, positions = frame.qo_indptr, frame.range, before
            token_ids, last = self._token_ids(frame, before), frame.range
        n_pages = (kv + (size - 1)) // size
        self._grow_to(at, n_pages)
        indptr = np.zeros(frame.n + 1, np.int32)
        n_pages.cumsum(out=indptr[1:])
        pages = rows.pages
        tables = [pages[slot, :n] for slot, n in zip(at.tolist(), n_pages.tolist(), strict=True)]
        page_of = positions // size
        return DecodeStep(
            kv=kv,
            counter=kv.astype(np.int64),
            positions=positions,
            token_ids=token_ids,
            slots=pages[at[row], page_of].astype(np.int64) * size + (positions - page_of * size),
            last_page_len=kv - (n_pages - frame.ones) * size,
            kv_indptr=indptr,
            kv_indices=np.concatenate(tables),
            qo_indptr=qo,
            token_row=row,
            last=last,
            adjust=self._static_adjusts(frame, kv) if frame.static_rows else (),
            drains=bool(np.count_nonzero(kv >= frame.drain_at)),
        )

    def _with_runs(self, frame: Frame) -> DecodeStep:
        """A step in which some rows compute tokens that they were forced."""
        rows, at = self.state.rows, frame.slots
        before = rows.kv[at]
        decode = self._from_table(frame)
        self._account_runs(frame, before, decode.kv)
        rows.kv[at] = decode.kv
        self._last = None  # the next step's rows have other lengths
        if decode.drains:
            self._drain(frame, decode.kv)
        return decode

    def _account_runs(self, frame: Frame, before: I32, kv: I32) -> None:
        state, rows = self.state, self.state.rows
        for j in np.flatnonzero(rows.run[frame.slots]).tolist():
            state.account(frame.requests[j], int(before[j]), int(kv[j]))
        rows.clear_runs()

    def _grow_to(self, slots: npt.NDArray[np.int64], n_pages: I32) -> None:
        """New pages for those of `slots` that have fewer than `n_pages`."""
        rows = self.state.rows
        missing = n_pages - rows.n_pages[slots]
        short = np.flatnonzero(missing > 0)
        if not len(short):
            return
        ends = np.cumsum(missing[short])
        pages = self.state.cache.alloc(int(ends[-1]))
        assert pages is not None, "room was made for these rows"
        for slot, end, n in zip(slots[short].tolist(), ends.tolist(), missing[short].tolist(), strict=True):
            rows.add_pages(slot, pages[end - n : end])

    def _run_ids(self, frame: Frame, before: I32, qo: I32, row: I32, positions: I32) -> I32:
        """The tokens to feed, of rows with several; a row whose sample is in flight has one."""
        rows = self.state.rows
        tokens: I32 = rows.flat_tokens[frame.flat[row] + positions]
        unknown = before >= rows.known[frame.slots]
        if np.count_nonzero(unknown):
            tokens[qo[:-1][unknown]] = FROM_TABLE
        return tokens

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

    def _grow(self, slots: npt.NDArray[np.int64]) -> I32:
        """One new page for each of `slots`; returns them."""
        if not len(slots):
            return NO_I32
        rows = self.state.rows
        pages = self.state.cache.alloc(len(slots))
        assert pages is not None, "room was made for these rows"
        rows.pages[slots, rows.n_pages[slots]] = pages
        rows.n_pages[slots] += 1
        return pages

    def _static_adjusts(self, frame: Frame, kv: I32) -> tuple[Adjust, ...]:
        """Bias and banned ends of rows that sample early."""
        state, out = self.state, []
        for j in frame.static_rows:
            request = state.rows.request(int(frame.slots[j]))
            terms = static_terms(request.params, int(kv[j]) - request.gen_start, state.eos)
            if terms is not None:
                out.append(Adjust(j, add_ids=terms[0], add_values=terms[1]))
        return tuple(out)


def _spread(frame: Frame, before: I32, kv: I32) -> tuple[I32, I32, I32]:
    """(qo_indptr, token_row, positions) of rows that compute [before, kv)."""
    lens = kv - before
    qo = np.zeros(frame.n + 1, np.int32)
    lens.cumsum(out=qo[1:])
    row = frame.range.repeat(lens)
    return qo, row, np.arange(qo[-1], dtype=np.int32) - (qo[:-1] - before)[row]
