"""Build StepPlans by hand, the way a test thinks of them: sequences, page tables and what is already computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.step import FROM_TABLE, Adjust, StepPlan


@dataclass
class Seq:
    """One sequence: its tokens (FROM_TABLE for one only the device knows) and the pages it owns, in order."""

    tokens: list[int]
    pages: list[int]
    table_row: int = 1


@dataclass
class Row:
    """Query tokens [start, stop) of a sequence; the last one is sampled unless `sample` is off."""

    seq: Seq
    start: int
    stop: int
    sample: bool = True
    score: bool = False  # every query token's logits score the token after it
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    counter: int = 0
    late: bool = False
    logprob: bool = True
    copies: Sequence[tuple[int, int]] = field(default_factory=tuple)  # slots: source, destination


def make_plan(
    rows: Sequence[Row], page_size: int, *, step: int = 0, n_top: int = 0, adjust: Sequence[Adjust] = ()
) -> StepPlan:
    """The plan that runs `rows` in order."""
    i32 = lambda values: np.asarray(list(values), dtype=np.int32)
    n_pages = [-(-row.stop // page_size) for row in rows]
    starts = np.cumsum([0, *(row.stop - row.start for row in rows)])
    positions = [p for row in rows for p in range(row.start, row.stop)]
    copies = [pair for row in rows for pair in row.copies]
    sampled = [i for i, row in enumerate(rows) if row.sample]
    scored = [
        (int(starts[i]) + p - row.start, row.seq.tokens[p + 1])
        for i, row in enumerate(rows)
        if row.score
        for p in range(row.start, min(row.stop, len(row.seq.tokens) - 1))
    ]
    of_sample = lambda name: [getattr(rows[i], name) for i in sampled]
    return StepPlan(
        step=step,
        rids=tuple(range(len(rows))),
        attempts=(0,) * len(rows),
        table_row=i32(row.seq.table_row for row in rows),
        qo_indptr=i32(starts),
        kv_indptr=i32(np.cumsum([0, *n_pages])),
        kv_indices=i32(page for row, n in zip(rows, n_pages, strict=True) for page in row.seq.pages[:n]),
        last_page_len=i32(row.stop - (n - 1) * page_size for row, n in zip(rows, n_pages, strict=True)),
        kv_lens=i32(row.stop for row in rows),
        n_decode=0,
        token_ids=i32(
            row.seq.tokens[p] if p < len(row.seq.tokens) else FROM_TABLE
            for row in rows
            for p in range(row.start, row.stop)
        ),
        token_row=i32(i for i, row in enumerate(rows) for _ in range(row.start, row.stop)),
        positions=i32(positions),
        slots=np.asarray(
            [slot_of(row.seq, p, page_size) for row in rows for p in range(row.start, row.stop)], np.int64
        ),
        copy_src=np.asarray([source for source, _ in copies], np.int64),
        copy_dst=np.asarray([target for _, target in copies], np.int64),
        share_indptr=i32([0]),
        share_n_pages=i32([]),
        sample_index=i32(starts[i + 1] - 1 for i in sampled),
        sample_row=i32(sampled),
        temperature=np.asarray(of_sample("temperature"), np.float32),
        top_k=i32(of_sample("top_k")),
        top_p=np.asarray(of_sample("top_p"), np.float32),
        min_p=np.asarray(of_sample("min_p"), np.float32),
        seed=np.asarray(of_sample("seed"), np.uint64),
        counter=np.asarray(of_sample("counter"), np.int64),
        late=np.asarray(of_sample("late"), np.bool_),
        want_logprob=np.asarray(of_sample("logprob"), np.bool_),
        n_top=n_top,
        adjust=tuple(adjust),
        score_index=i32(index for index, _ in scored),
        score_target=i32(target for _, target in scored),
    )


def slot_of(seq: Seq, position: int, page_size: int) -> int:
    """Where the sequence's token at `position` keeps its KV."""
    return seq.pages[position // page_size] * page_size + position % page_size
