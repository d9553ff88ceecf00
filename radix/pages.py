"""The page pool: who owns each KV page. A page has exactly one owner, and the counts always add up."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


class Owner(IntEnum):
    """Who may write a page, and who must give it back."""

    FREE = 0
    TREE = 1
    REQUEST = 2
    IO = 3  # nobody's any more, but work already queued on the device (or a transfer) may still touch it


FREE, TREE, REQUEST, IO = map(int, Owner)  # plain integers: numpy compares with them ten times as fast


class PageError(RuntimeError):
    """A page was taken from, or given by, someone who does not own it."""


class PagePool:
    """`n_pages` page ids, each in the hands of one `Owner`.

    Pages leave FREE through `take` and come back through `free`, or through `quarantine` when the plan that is
    being built may still name them: those become FREE only at `release_quarantine`, when the next plan begins.
    """

    __slots__ = ("_counts", "_free", "_n_free", "_owner", "_quarantined", "n_pages", "page_size")

    def __init__(self, n_pages: int, page_size: int) -> None:
        if n_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs n_pages >= 1 and page_size >= 1; got {n_pages} and {page_size}")
        self.n_pages = n_pages
        self.page_size = page_size
        self._owner = np.full(n_pages, FREE, np.int8)
        self._free: Ids = np.arange(n_pages - 1, -1, -1, dtype=np.int32)  # a stack; its top is _n_free
        self._n_free = n_pages
        self._counts = [n_pages, 0, 0, 0]
        self._quarantined: list[Ids] = []

    @property
    def n_free(self) -> int:
        return self._n_free

    @property
    def n_quarantined(self) -> int:
        return sum(len(pages) for pages in self._quarantined)

    def count(self, owner: int) -> int:
        """Pages in `owner`'s hands."""
        return self._counts[owner]

    def owner_of(self, page: int) -> Owner:
        return Owner(int(self._owner[page]))

    def take(self, n: int, owner: int) -> Ids:
        """Give `n` free pages to `owner`, int32 [n]. Raises PageError when fewer are free."""
        if not 0 <= n <= self._n_free:
            raise PageError(f"{n} pages asked for, {self._n_free} free")
        low = self._n_free - n
        pages = self._free[low : self._n_free][::-1].copy()
        self._n_free = low
        self._hand_over(pages, FREE, owner)
        return pages

    def move(self, pages: Ids, source: int, target: int) -> None:
        """Change owner, neither of the two being FREE. Raises PageError, changing nothing, if `source` owns not all."""
        self._check(pages, source)
        self._hand_over(pages, source, target)

    def free(self, pages: Ids, source: int) -> None:
        """Take `pages` back from `source`; they can be given out at once."""
        self._check(pages, source)
        self._hand_over(pages, source, FREE)
        self._push(pages)

    def quarantine(self, pages: Ids, source: int) -> None:
        """Take `pages` back from `source`, but give them out only after `release_quarantine`."""
        if len(pages):
            self.move(pages, source, IO)
            self._quarantined.append(np.array(pages, dtype=np.int32))

    def release_quarantine(self) -> int:
        """Free every quarantined page: a new plan begins, and the device runs plans in order. Returns how many."""
        n = 0
        for pages in self._quarantined:
            self.free(pages, IO)
            n += len(pages)
        self._quarantined.clear()
        return n

    def snapshot(self) -> tuple[npt.NDArray[np.int8], Ids, Ids]:
        """(owner of every page, the free stack, the quarantined pages), copied for the audit."""
        held = np.concatenate(self._quarantined) if self._quarantined else np.zeros(0, np.int32)
        return self._owner.copy(), self._free[: self._n_free].copy(), held

    def _push(self, pages: Ids) -> None:
        top = self._n_free + len(pages)
        self._free[self._n_free : top] = pages[::-1]
        self._n_free = top

    def _check(self, pages: Ids, source: int) -> None:
        wrong = self._owner[pages] != source
        if wrong.any():
            page = int(np.asarray(pages)[wrong][0])
            raise PageError(f"page {page} belongs to {self.owner_of(page).name}, not to {Owner(source).name}")

    def _hand_over(self, pages: Ids, source: int, target: int) -> None:
        self._owner[pages] = target
        self._counts[source] -= len(pages)
        self._counts[target] += len(pages)
