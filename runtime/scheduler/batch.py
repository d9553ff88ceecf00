"""Building a StepPlan: decode rows from their frame, then the prefill rows. Values in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.request import Request
from runtime.scheduler.frame import Frame
from runtime.scheduler.rows import RowTable
from runtime.step import Adjust, StepPlan

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
NO_I32: I32 = np.zeros(0, np.int32)
NO_I64: I64 = np.zeros(0, np.int64)


class DecodeStep(msgspec.Struct, frozen=True, eq=False):
    """What changes each step for the decode rows. A row has one token, unless it was forced several."""

    kv: I32  # [rows] after this step
    counter: I64  # the same, as the random streams want it
    positions: I32  # [tokens]
    token_ids: I32  # [tokens]
    slots: I64  # [tokens]
    last_page_len: I32
    kv_indptr: I32
    kv_indices: I32
    qo_indptr: I32  # [rows+1]
    token_row: I32  # [tokens]
    last: I32  # each row's last token, which is sampled
    adjust: tuple[Adjust, ...] = ()
    drains: bool = False  # some row has nothing more to plan after this


@dataclass(frozen=True, slots=True)
class Piece:
    """One prefill row: tokens [start, end) of a request. `pages` is a snapshot; publishing may remap the table."""

    request: Request
    slot: int
    gen: int
    start: int
    end: int
    tokens: I32
    pages: I32
    samples: bool
    score: I32 = field(default_factory=lambda: NO_I32)  # positions whose logprob is owed
    score_tokens: I32 = field(default_factory=lambda: NO_I32)
    static: tuple[I32, npt.NDArray[np.float32]] | None = None
    recovering: bool = False  # recomputes what a retraction threw away


class Planned(msgspec.Struct, frozen=True, eq=False):
    """A plan and what commit must know of it beyond the plan."""

    plan: StepPlan
    slots: I64  # [rows]
    gens: I64  # [rows]
    frame: Frame
    pieces: tuple[Piece, ...]
    sample_slots: I64  # [samples]
    sample_gens: I64
    any_late: bool
    epoch: int  # of the row table when it was planned: while it is the same, no row is stale
    drains: bool = False  # some decode row comes to its length limit
    probes: Mapping[int, int] = {}  # of runtime.scheduler.probes


class Copies:
    """The page copies of one plan, resolved so that none reads what another writes."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._from: dict[int, I64] = {}  # destination page -> source slots of its first tokens

    def add(self, src_page: int, dst_page: int, n: int) -> None:
        """Copy the first n slots of src_page into dst_page."""
        src = np.arange(src_page * self._size, src_page * self._size + n, dtype=np.int64)
        earlier = self._from.get(src_page)
        if earlier is not None:
            m = min(n, len(earlier))
            src[:m] = earlier[:m]
        self._from[dst_page] = src

    def arrays(self) -> tuple[I64, I64]:
        """(source slots, destination slots)."""
        if not self._from:
            return NO_I64, NO_I64
        dst = [np.arange(p * self._size, p * self._size + len(s), dtype=np.int64) for p, s in self._from.items()]
        return np.concatenate(list(self._from.values())), np.concatenate(dst)


def decode_plan(step: int, frame: Frame, decode: DecodeStep) -> StepPlan:
    """A step of decode rows only: everything constant comes from the frame as it is.

    Positional, in the order of StepPlan's fields: matching 27 names would cost more than the step's arithmetic.
    """
    return StepPlan(
        step,
        frame.rids,
        frame.attempts,
        frame.table_row,
        decode.qo_indptr,
        decode.kv_indptr,
        decode.kv_indices,
        decode.last_page_len,
        decode.kv,  # kv_lens
        frame.n,  # n_decode
        decode.token_ids,
        decode.token_row,
        decode.positions,
        decode.slots,
        NO_I64,  # copy_src
        NO_I64,  # copy_dst
        frame.share_indptr,
        frame.share_n_pages,
        decode.last,  # sample_index
        frame.range,  # sample_row
        frame.temperature,
        frame.top_k,
        frame.top_p,
        frame.min_p,
        frame.seed,
        decode.counter,
        frame.late,
        frame.want_logprob,
        frame.n_top,
        decode.adjust,
        NO_I32,  # score_index
        NO_I32,  # score_target
    )


def mixed_plan(
    step: int, rows: RowTable, frame: Frame, decode: DecodeStep, pieces: Sequence[Piece], copies: Copies
) -> StepPlan:
    """Decode rows, then one row a piece."""
    n = frame.n
    size = rows.page_size
    slots = np.array([p.slot for p in pieces], np.int64)
    ends = np.array([p.end for p in pieces], np.int32)
    lens = np.array([p.end - p.start for p in pieces], np.int32)
    qo = np.concatenate((decode.qo_indptr, decode.qo_indptr[-1] + np.cumsum(lens, dtype=np.int32)))
    n_pages = np.array([len(p.pages) for p in pieces], np.int32)
    kv_indptr = np.concatenate((decode.kv_indptr, decode.kv_indptr[-1] + np.cumsum(n_pages, dtype=np.int32)))
    sampling = [i for i, p in enumerate(pieces) if p.samples]
    s_slots = slots[sampling]
    s_row = np.array([n + i for i in sampling], np.int32)
    late = np.concatenate((frame.late, rows.late[s_slots]))
    src, dst = copies.arrays()
    score_index, score_target, n_top = _scores(rows, pieces, qo[n:])
    return StepPlan(
        step=step,
        rids=frame.rids + tuple(p.request.num for p in pieces),
        attempts=frame.attempts + tuple(p.request.attempt for p in pieces),
        table_row=np.concatenate((frame.table_row, slots.astype(np.int32))),
        qo_indptr=qo,
        kv_indptr=kv_indptr,
        kv_indices=np.concatenate((decode.kv_indices, *(p.pages for p in pieces))),
        last_page_len=np.concatenate((decode.last_page_len, (ends - 1) % size + 1)),
        kv_lens=np.concatenate((decode.kv, ends)),
        n_decode=n,
        token_ids=np.concatenate((decode.token_ids, *(p.tokens for p in pieces))),
        token_row=np.concatenate((decode.token_row, np.repeat(np.arange(n, n + len(pieces), dtype=np.int32), lens))),
        positions=np.concatenate((decode.positions, *(np.arange(p.start, p.end, dtype=np.int32) for p in pieces))),
        slots=np.concatenate((decode.slots, *(_piece_slots(p, size) for p in pieces))),
        copy_src=src,
        copy_dst=dst,
        share_indptr=frame.share_indptr,
        share_n_pages=frame.share_n_pages,
        sample_index=np.concatenate((decode.last, qo[s_row + 1] - 1)),
        sample_row=np.concatenate((frame.range, s_row)),
        temperature=np.concatenate((frame.temperature, rows.temperature[s_slots])),
        top_k=np.concatenate((frame.top_k, rows.top_k[s_slots])),
        top_p=np.concatenate((frame.top_p, rows.top_p[s_slots])),
        min_p=np.concatenate((frame.min_p, rows.min_p[s_slots])),
        seed=np.concatenate((frame.seed, rows.seed[s_slots])),
        counter=np.concatenate((decode.counter, ends[sampling])),
        late=late,
        want_logprob=np.concatenate((frame.want_logprob, rows.want_logprob[s_slots])),
        n_top=max(frame.n_top, n_top, int(rows.n_top[s_slots].max(initial=0))),
        adjust=decode.adjust + _piece_adjusts(pieces, sampling, late, n),
        score_index=score_index,
        score_target=score_target,
    )


def _piece_slots(piece: Piece, size: int) -> I64:
    positions = np.arange(piece.start, piece.end, dtype=np.int64)
    return piece.pages[positions // size].astype(np.int64) * size + positions % size


def _piece_adjusts(
    pieces: Sequence[Piece], sampling: list[int], late: npt.NDArray[np.bool_], n: int
) -> tuple[Adjust, ...]:
    out = []
    for j, i in enumerate(sampling, n):
        static = pieces[i].static
        if static is not None and not late[j]:
            out.append(Adjust(j, add_ids=static[0], add_values=static[1]))
    return tuple(out)


def _scores(rows: RowTable, pieces: Sequence[Piece], starts: I32) -> tuple[I32, I32, int]:
    """Flat tokens whose logits score a prompt token, the tokens scored, and the alternatives wanted."""
    index = [starts[i] + p.score - 1 - p.start for i, p in enumerate(pieces) if len(p.score)]
    target = [p.score_tokens for p in pieces if len(p.score)]
    if not index:
        return NO_I32, NO_I32, 0
    n_top = max(p.request.params.top_logprobs for p in pieces if len(p.score))
    return np.concatenate(index).astype(np.int32), np.concatenate(target).astype(np.int32), n_top
