"""The decode rows of a step: everything about them that stays the same from step to step, computed once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.request import Request
from runtime.scheduler.rows import RowTable
from runtime.scheduler.share import share_groups
from runtime.step import FROM_TABLE

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
REGROUP_STEPS = 16


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
    all_late: bool
    drain_at: I32  # KV length at which a row has nothing more to plan
    ones: I32
    unknown: I32  # FROM_TABLE for every row
    eos_stops: npt.NDArray[np.bool_]
    careful: npt.NDArray[np.bool_]  # rows that need a look at commit
    any_careful: bool
    all_careful: bool
    high: I32  # most KV that earlier attempts and segments computed
    flat: I64  # where each row's tokens begin in the flat token table
    requests: tuple[Request, ...]
    watched: bool  # somebody reads along with one of them

    @property
    def n(self) -> int:
        return len(self.slots)


class DecodeSet:
    """The slots that decode, and their frame, rebuilt only when the set changes.

    Looking for shared pages costs more than the rest of a frame, so rows that join stand alone until the next
    look: every REGROUP_STEPS steps, or when many have joined. Rows that only step out, to compute forced tokens
    among the prompts, come back to their group.
    """

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._alone: dict[int, None] = {}
        self._groups: list[tuple[dict[int, None], int]] = []  # (slots, shared pages)
        self._group_of: dict[int, int] = {}
        self._out: dict[int, int | None] = {}  # slots that stepped out, and their group
        self._frame: Frame | None = None
        self._n_joined = 0
        self._n_steps = 0  # since the last look

    def __len__(self) -> int:
        return len(self._alone) + len(self._group_of)

    def __contains__(self, slot: int) -> bool:
        return slot in self._alone or slot in self._group_of

    def add(self, slot: int) -> None:
        group = self._out.pop(slot, -1)
        self._frame = None
        if group is not None and group >= 0:
            self._group_of[slot] = group
            self._groups[group][0][slot] = None
            return
        self._alone[slot] = None
        self._n_joined += group is not None

    def step_out(self, slot: int) -> None:
        """Leave for a few steps: the slot keeps its request and the pages it shares."""
        group = self._group_of.get(slot)
        self.discard(slot)
        self._out[slot] = group

    def discard(self, slot: int) -> None:
        """Leave for good."""
        self._out.pop(slot, None)
        group = self._group_of.pop(slot, None)
        if group is not None:
            del self._groups[group][0][slot]
            self._frame = None
        elif slot in self._alone:
            del self._alone[slot]
            self._frame = None

    def frame(self) -> Frame:
        """The frame of all rows. Called once or twice a step."""
        self._n_steps += 1
        if self._n_joined and (self._n_steps > REGROUP_STEPS or self._n_joined * 8 > len(self)):
            self._regroup()
        if self._frame is None:
            self._frame = self._build(None)
        return self._frame

    def subset(self, keep: npt.NDArray[np.bool_]) -> Frame:
        """A frame of some rows, for one step only."""
        return self._build(set(self.frame().slots[keep].tolist()))

    def _regroup(self) -> None:
        rows = self._rows
        slots = [*self._alone, *self._group_of]
        n_tree = (rows.published[slots] // rows.page_size).tolist() if slots else []
        sharing = share_groups([rows.pages[slot, :n] for slot, n in zip(slots, n_tree, strict=True)])
        ends = sharing.indptr.tolist()
        ordered = [slots[i] for i in sharing.order]
        self._groups = [
            (dict.fromkeys(ordered[ends[g] : ends[g + 1]]), n) for g, n in enumerate(sharing.n_pages.tolist())
        ]
        self._group_of = {slot: g for g, (members, _) in enumerate(self._groups) for slot in members}
        self._alone = dict.fromkeys(ordered[ends[-1] :])
        self._out.clear()
        self._n_joined = self._n_steps = 0
        self._frame = None

    def _build(self, only: set[int] | None) -> Frame:
        groups = [([s for s in members if only is None or s in only], n) for members, n in self._groups]
        shared = [(members, n) for members, n in groups if len(members) > 1]
        single = [members[0] for members, _ in groups if len(members) == 1]
        rest = [s for s in self._alone if only is None or s in only]
        return build_frame(self._rows, shared, single + rest)


def build_frame(rows: RowTable, shared: list[tuple[list[int], int]], alone: list[int]) -> Frame:
    """Gather the constant columns: groups of slots with their shared pages first, then slots that stand alone."""
    indptr = np.zeros(len(shared) + 1, np.int32)
    np.cumsum([len(members) for members, _ in shared], out=indptr[1:])
    at = np.array([slot for members, _ in shared for slot in members] + alone, np.int64)
    n = len(at)
    late, n_top, careful = rows.late[at], rows.n_top[at], rows.careful[at]
    requests = tuple(map(rows.request, at.tolist()))
    ramp = np.arange(n + 1, dtype=np.int32)
    return Frame(
        slots=at,
        gens=rows.gen[at],
        rids=tuple(rows.num[at].tolist()),
        attempts=tuple(rows.attempt[at].tolist()),
        table_row=at.astype(np.int32),
        range=ramp[:n],
        qo_indptr=ramp,
        share_indptr=indptr,
        share_n_pages=np.array([n for _, n in shared], np.int32),
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
        all_late=bool(late.all()),
        drain_at=rows.limit[at] - 1,
        ones=np.ones(n, np.int32),
        unknown=np.full(n, FROM_TABLE, np.int32),
        eos_stops=rows.eos_stops[at],
        careful=careful,
        any_careful=bool(careful.any()),
        all_careful=bool(careful.all()),
        high=rows.high[at],
        flat=at * rows.width,
        requests=requests,
        watched=any(request.submit.stream for request in requests),
    )
