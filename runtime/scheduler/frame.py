"""The decode rows of a step: everything about them that stays the same from step to step, computed once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.scheduler.rows import RowTable
from runtime.scheduler.share import share_groups
from runtime.step import FROM_TABLE

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Frame:
    """Decode rows in plan order. All arrays are `[rows]` and shared by every plan made while the set stays the same."""

    slots: I64
    gens: I64
    rids: tuple[int, ...]
    attempts: tuple[int, ...]
    table_row: I32
    range: I32  # 0, 1, ... rows-1
    qo_indptr: I32  # [rows+1]
    share_indptr: I32
    share_n_pages: I32
    temperature: npt.NDArray[np.float32]
    top_k: I32
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    late: npt.NDArray[np.bool_]
    want_logprob: npt.NDArray[np.bool_]
    n_top: int
    static_rows: tuple[int, ...]  # rows with adjustments known at plan time
    any_late: bool
    drain_at: I32  # KV length at which a row has nothing more to plan
    ones: I32
    unknown: I32  # FROM_TABLE for every row
    eos_stops: npt.NDArray[np.bool_]
    careful: npt.NDArray[np.bool_]  # rows that need a look at commit

    @property
    def n(self) -> int:
        return len(self.slots)


class DecodeSet:
    """The slots that decode one token a step, and their frame, rebuilt only when the set changes."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._slots: dict[int, None] = {}
        self._frame: Frame | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def add(self, slot: int) -> None:
        self._slots[slot] = None
        self._frame = None

    def discard(self, slot: int) -> None:
        if slot in self._slots:
            del self._slots[slot]
            self._frame = None

    def frame(self) -> Frame:
        if self._frame is None:
            self._frame = build_frame(self._rows, list(self._slots))
        return self._frame

    def subset(self, keep: npt.NDArray[np.bool_]) -> Frame:
        """A frame of some rows, for one step only."""
        return build_frame(self._rows, self.frame().slots[keep].tolist())


def build_frame(rows: RowTable, slots: list[int]) -> Frame:
    """Gather the constant columns of `slots`, rows that share leading pages next to each other."""
    n_tree = (rows.published[slots] // rows.page_size).tolist() if slots else []
    sharing = share_groups([rows.pages[slot, :n] for slot, n in zip(slots, n_tree, strict=True)])
    at = np.array([slots[i] for i in sharing.order], np.int64)
    n = len(at)
    late, n_top = rows.late[at], rows.n_top[at]
    ramp = np.arange(n + 1, dtype=np.int32)
    return Frame(
        slots=at,
        gens=rows.gen[at],
        rids=tuple(rows.num[at].tolist()),
        attempts=tuple(rows.attempt[at].tolist()),
        table_row=at.astype(np.int32),
        range=ramp[:n],
        qo_indptr=ramp,
        share_indptr=sharing.indptr,
        share_n_pages=sharing.n_pages,
        temperature=rows.temperature[at],
        top_k=rows.top_k[at],
        top_p=rows.top_p[at],
        min_p=rows.min_p[at],
        seed=rows.seed[at],
        late=late,
        want_logprob=rows.want_logprob[at],
        n_top=int(n_top.max()) if n else 0,
        static_rows=tuple(np.flatnonzero(rows.static[at] & ~late).tolist()),
        any_late=bool(late.any()),
        drain_at=rows.limit[at] - 1,
        ones=np.ones(n, np.int32),
        unknown=np.full(n, FROM_TABLE, np.int32),
        eos_stops=rows.eos_stops[at],
        careful=rows.careful[at],
    )
