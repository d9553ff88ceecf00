"""The set of decode rows: who shares pages with whom, looked up as seldom as possible."""

from __future__ import annotations

from types import SimpleNamespace

from runtime.scheduler.frame import DecodeSet
from runtime.scheduler.rows import RowTable


def test_rows_that_step_out_come_back_to_their_group() -> None:
    """Only what ended, or is new, makes the set look for shared pages again."""
    rows = RowTable(4, 64, 4)
    rows.requests[1:4] = [SimpleNamespace(submit=SimpleNamespace(stream=False))] * 3  # type: ignore[list-item]
    for slot, pages in ((1, [7, 8, 1]), (2, [7, 8, 2]), (3, [5, 6, 3])):
        rows.pages[slot, :3], rows.published[slot], rows.n_pages[slot] = pages, 12, 3
    decode = DecodeSet(rows)
    for slot in (1, 2, 3):
        decode.add(slot)
    shared = lambda: (decode.frame().slots.tolist(), decode.frame().share_indptr.tolist())
    assert shared() == ([1, 2, 3], [0, 2])
    decode.step_out(1)
    decode.step_out(3)
    assert shared() == ([2], [0])
    decode.add(3)
    decode.add(1)
    assert decode._n_joined == 0
    assert shared() == ([2, 1, 3], [0, 2])
    decode.step_out(1)
    decode.discard(1)  # it ended: the slot's next request has other pages
    decode.add(1)
    assert decode._n_joined == 1
