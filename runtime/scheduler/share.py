"""Which decode rows read the same leading pages, so a kernel can read those once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]


class Sharing(NamedTuple):
    """`order`: the rows, grouped. Rows `indptr[g]:indptr[g+1]` of that order share their first `n_pages[g]` pages."""

    order: list[int]
    indptr: I32
    n_pages: I32


def share_groups(tables: Sequence[I32]) -> Sharing:
    """Group rows by their leading tree pages (`tables[i]`: row i's whole pages in the tree, in order).

    A group is the set of rows below one point of the tree; of nested choices the one that saves most page reads
    wins. Rows that share nothing come last and are in no group.
    """
    groups: list[tuple[list[int], int]] = []
    for members in _split(tables, range(len(tables)), 0):
        groups += _best(tables, members)[1]
    groups.sort(key=lambda group: group[1] == 0)  # rows alone last, outside every group
    sizes = [len(rows) for rows, n_pages in groups if n_pages]
    indptr = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(np.array(sizes, np.int32), out=indptr[1:])
    n_pages = np.array([n for _, n in groups if n], np.int32)
    return Sharing([row for rows, _ in groups for row in rows], indptr, n_pages)


def _split(tables: Sequence[I32], rows: Sequence[int], at: int) -> list[list[int]]:
    """Rows by their page at index `at`; those that have none are alone."""
    by_page: dict[int, list[int]] = {}
    for row in rows:
        key = int(tables[row][at]) if len(tables[row]) > at else -1 - row
        by_page.setdefault(key, []).append(row)
    return list(by_page.values())


def _best(tables: Sequence[I32], rows: list[int]) -> tuple[int, list[tuple[list[int], int]]]:
    """(page reads saved, groups) of the best way to group `rows`, which share at least one page or are alone."""
    if len(rows) == 1:
        return 0, [(rows, 0)]
    common = _common(tables, rows)
    whole = (len(rows) - 1) * common
    parts = _split(tables, rows, common)
    if len(parts) == len(rows):
        return whole, [(rows, common)]
    solved = [_best(tables, part) for part in parts]
    saved = sum(s for s, _ in solved)
    if saved > whole:
        return saved, [group for _, groups in solved for group in groups]
    return whole, [(rows, common)]


def _common(tables: Sequence[I32], rows: list[int]) -> int:
    """Length of the common prefix of the rows' tables, in pages."""
    n = min(len(tables[row]) for row in rows)
    stacked = np.stack([tables[row][:n] for row in rows])
    differs = (stacked != stacked[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else n
