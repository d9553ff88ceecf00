"""Page tables taken apart: the contract FlashInfer assumes unchecked, decode rows, and prefixes that rows share.

Row borders (`*_indptr`, lengths, sharing) are CPU tensors; `kv_indices` may lie on a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.base import AttnMeta
from kernels.sampling import upload


class MetaError(ValueError):
    """Page tables that a kernel would read wrongly without complaint."""


def check_meta(meta: AttnMeta, n_pages: int) -> None:
    """Raise MetaError unless the arrays keep the contract: int32, monotone, exactly the pages the lengths need,
    pages that exist, query tokens within the keys, and slots where the page tables say."""
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "kv_lens"):
        if getattr(meta, name).dtype != torch.int32:
            raise MetaError(f"{name} is {getattr(meta, name).dtype}; FlashInfer reads int32")
    rows = len(meta.last_page_len)
    q_lens, n_used = meta.qo_indptr.diff(), meta.kv_indptr.diff()
    if len(meta.qo_indptr) != rows + 1 or len(meta.kv_indptr) != rows + 1:
        raise MetaError(f"{rows} rows need {rows + 1} borders")
    if meta.qo_indptr[0] != 0 or meta.kv_indptr[0] != 0 or (q_lens < 1).any() or (n_used < 1).any():
        raise MetaError("borders must start at 0 and every row needs a query token and a page")
    if len(meta.kv_indices) != int(meta.kv_indptr[-1]):
        raise MetaError(f"{len(meta.kv_indices)} page ids for {int(meta.kv_indptr[-1])} pages")
    if (meta.last_page_len < 1).any() or (meta.last_page_len > meta.page_size).any():
        raise MetaError(f"last_page_len must be from 1 to {meta.page_size}")
    if not torch.equal((n_used - 1) * meta.page_size + meta.last_page_len, meta.kv_lens):
        raise MetaError("kv_lens do not fit the pages and last_page_len (over-allocated pages?)")
    if (q_lens > meta.kv_lens).any():
        raise MetaError("a row has more query tokens than keys")
    pages = meta.kv_indices.cpu()
    if (pages < 0).any() or (pages >= n_pages).any():
        raise MetaError(f"a page id is outside the pool of {n_pages}")
    _check_slots(meta, pages.long(), q_lens)


def _check_slots(meta: AttnMeta, pages: Tensor, q_lens: Tensor) -> None:
    row = _row_of(q_lens)
    first = (meta.kv_lens - q_lens).long()[row] - meta.qo_indptr[:-1].long()[row]
    position = torch.arange(len(row)) + first
    slots = pages[meta.kv_indptr.long()[row] + position // meta.page_size] * meta.page_size + position % meta.page_size
    if not torch.equal(meta.slots.cpu().long(), slots):
        raise MetaError("slots are not where the page tables put the query tokens")
    if not torch.equal(meta.positions.cpu().long(), position):
        raise MetaError("positions are not the last of each row")


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a step, as one call of a wrapper takes them. `begin`, `end` are the query tokens they cover."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor
    begin: int
    end: int

    def __len__(self) -> int:
        return len(self.last_page_len)


def all_rows(meta: AttnMeta) -> Rows:
    return Rows(meta.qo_indptr, meta.kv_indptr, meta.kv_indices, meta.last_page_len, 0, int(meta.qo_indptr[-1]))


def split_decode(rows: Rows) -> tuple[Rows | None, Rows | None]:
    """(the leading rows of one query token, the others); None for a part without rows."""
    longer = torch.nonzero(rows.qo_indptr.diff() != 1).flatten()
    n = int(longer[0]) if len(longer) else len(rows)
    return (
        part_of_rows(rows, 0, n) if n else None,
        part_of_rows(rows, n, len(rows)) if n < len(rows) else None,
    )


def part_of_rows(rows: Rows, start: int, stop: int) -> Rows:
    """Rows start to stop, their borders from 0."""
    q, kv = rows.qo_indptr[start : stop + 1], rows.kv_indptr[start : stop + 1]
    return Rows(
        q - q[0],
        kv - kv[0],
        rows.kv_indices[int(kv[0]) : int(kv[-1])],
        rows.last_page_len[start:stop],
        rows.begin + int(q[0]),
        rows.begin + int(q[-1]),
    )


@dataclass(frozen=True, slots=True)
class Chunks:
    """Decode rows whose keys are cut at fixed places: each chunk is attended to as a row of its own, then merged.

    The cuts depend on a row's own length only, so do its results. Chunks past `indptr[-1]` are padding.
    """

    rows: Rows  # one a chunk
    row_of: Tensor  # [chunks] int64: the row whose query a chunk takes; 0 for padding
    indptr: Tensor  # [rows+1] int32: the chunks of each row


def n_chunks(kv_indptr: Tensor, chunk_pages: int) -> int:
    """Chunks that rows with these pages are cut into."""
    return int(_chunk_counts(kv_indptr, chunk_pages).sum())


def _chunk_counts(kv_indptr: Tensor, chunk_pages: int) -> Tensor:
    return torch.div(kv_indptr.diff() + (chunk_pages - 1), chunk_pages, rounding_mode="floor")


def _row_of(counts: Tensor) -> Tensor:
    """0 counts[0] times, 1 counts[1] times, ... Not by torch, which wakes every core for it: milliseconds a step."""
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts.numpy()))


def cut_keys(rows: Rows, page_size: int, chunk_pages: int) -> Chunks:
    """The chunks of decode rows. Page ids past the last row's become one chunk of one key each: the padding that keeps
    a captured step at a fixed number of chunks."""
    counts = _chunk_counts(rows.kv_indptr, chunk_pages).long()
    indptr = torch.zeros(len(rows) + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    row_of = _row_of(counts)
    nth = torch.arange(len(row_of)) - indptr.long()[row_of]
    starts = rows.kv_indptr.long()[row_of] + nth * chunk_pages
    ends_row = nth == counts[row_of] - 1
    last = torch.where(ends_row, rows.last_page_len.long()[row_of], page_size)
    n_real, n_pages = int(rows.kv_indptr[-1]), len(rows.kv_indices)
    n_padding = n_pages - n_real
    total = len(row_of) + n_padding
    cut = Rows(
        torch.arange(total + 1, dtype=torch.int32),
        torch.cat([starts, torch.arange(n_real, n_pages + 1)]).int(),
        rows.kv_indices,
        torch.cat([last, torch.ones(n_padding, dtype=torch.long)]).int(),
        0,
        total,
    )
    return Chunks(cut, torch.cat([row_of, torch.zeros(n_padding, dtype=torch.long)]), indptr)


@dataclass(frozen=True, slots=True)
class Cascade:
    """Attention in two levels: every group's shared pages read once, then each row's own pages, merged by LSE."""

    shared: tuple[Rows, ...]  # one row a group: its query tokens over the shared pages, no mask
    own: Rows  # all rows over the pages after the shared ones, causal


def split_shared(meta: AttnMeta, *, min_rows: int = 2) -> Cascade | None:
    """The two levels of a step whose rows hang under common prefixes, or None where too few do.

    A row must keep a page of its own, so a group's shared pages end before the last page of any of its rows
    and before the first page that this step writes to.
    """
    groups = _usable_groups(meta, min_rows)
    if not groups:
        return None
    skip = torch.zeros(len(meta.last_page_len), dtype=torch.long)
    shared = []
    for start, stop, n_pages in groups:
        skip[start:stop] = n_pages
        begin, end = int(meta.qo_indptr[start]), int(meta.qo_indptr[stop])
        first = int(meta.kv_indptr[start])
        shared.append(
            Rows(
                torch.tensor([0, end - begin], dtype=torch.int32),
                torch.tensor([0, n_pages], dtype=torch.int32),
                meta.kv_indices[first : first + n_pages],
                torch.tensor([meta.page_size], dtype=torch.int32),
                begin,
                end,
            )
        )
    return Cascade(tuple(shared), _without_first_pages(meta, skip))


def _usable_groups(meta: AttnMeta, min_rows: int) -> list[tuple[int, int, int]]:
    borders, counts = meta.share_indptr.tolist(), meta.share_n_pages.tolist()
    q_lens = meta.qo_indptr.diff()
    untouched = (meta.kv_lens - q_lens) // meta.page_size  # whole pages before this step's tokens
    groups = []
    for start, stop, n_pages in zip(borders[:-1], borders[1:], counts, strict=True):
        if stop - start >= min_rows:
            n_pages = min(n_pages, int(untouched[start:stop].min()))
            if n_pages > 0:
                groups.append((start, stop, n_pages))
    return groups


def _without_first_pages(meta: AttnMeta, skip: Tensor) -> Rows:
    counts = meta.kv_indptr.diff().long() - skip
    kv_indptr = torch.zeros_like(meta.kv_indptr)
    kv_indptr[1:] = counts.cumsum(0)
    row = _row_of(counts)
    source = torch.arange(len(row)) - kv_indptr.long()[row] + meta.kv_indptr.long()[row] + skip[row]
    indices = meta.kv_indices[upload(source, meta.kv_indices.device)]
    return Rows(meta.qo_indptr, kv_indptr, indices, meta.last_page_len, 0, int(meta.qo_indptr[-1]))
