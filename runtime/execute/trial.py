"""Steps made up for no request: the largest that options allow, to measure it, and padding alone, to capture it."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.execute.graphs import pad_decode
from runtime.step import I32, StepPlan


def trial_plan(n_tokens: int, n_samples: int, page_size: int) -> StepPlan:
    """One prompt of `n_tokens`, all of its pages page 0, with `n_samples` samples that use every filter."""
    n_pages = -(-n_tokens // page_size)
    positions = np.arange(n_tokens, dtype=np.int32)
    n_samples = min(n_samples, n_tokens)
    return msgspec.structs.replace(
        _nothing(),
        rids=(-1,),
        attempts=(-1,),
        table_row=_i32(0),
        qo_indptr=_i32(0, n_tokens),
        kv_indptr=_i32(0, n_pages),
        kv_indices=np.zeros(n_pages, np.int32),
        last_page_len=_i32(n_tokens - (n_pages - 1) * page_size),
        kv_lens=_i32(n_tokens),
        token_ids=np.zeros(n_tokens, np.int32),
        token_row=np.zeros(n_tokens, np.int32),
        positions=positions,
        slots=(positions % page_size).astype(np.int64),
        sample_index=np.arange(n_tokens - n_samples, n_tokens, dtype=np.int32),
        sample_row=np.zeros(n_samples, np.int32),
        temperature=np.full(n_samples, 1.0, np.float32),
        top_k=np.full(n_samples, 40, np.int32),
        top_p=np.full(n_samples, 0.9, np.float32),
        min_p=np.full(n_samples, 0.01, np.float32),
        seed=np.ones(n_samples, np.uint64),
        counter=np.ones(n_samples, np.int64),
        late=np.zeros(n_samples, np.bool_),
        want_logprob=np.ones(n_samples, np.bool_),
    )


def blank_plan(n_rows: int, scratch_page: int, page_size: int) -> StepPlan:
    """A decode step of nothing but padding rows: what a size is captured with before anyone needs it."""
    return pad_decode(_nothing(), n_rows, scratch_page, page_size)


def _i32(*values: int) -> I32:
    return np.array(values, np.int32)


def _nothing() -> StepPlan:
    """A step without rows."""
    f32: npt.NDArray[np.float32] = np.zeros(0, np.float32)
    i64: npt.NDArray[np.int64] = np.zeros(0, np.int64)
    return StepPlan(
        step=-1,
        rids=(),
        attempts=(),
        table_row=_i32(),
        qo_indptr=_i32(0),
        kv_indptr=_i32(0),
        kv_indices=_i32(),
        last_page_len=_i32(),
        kv_lens=_i32(),
        n_decode=0,
        token_ids=_i32(),
        token_row=_i32(),
        positions=_i32(),
        slots=i64,
        copy_src=i64,
        copy_dst=i64,
        share_indptr=_i32(0),
        share_n_pages=_i32(),
        sample_index=_i32(),
        sample_row=_i32(),
        temperature=f32,
        top_k=_i32(),
        top_p=f32,
        min_p=f32,
        seed=np.zeros(0, np.uint64),
        counter=i64,
        late=np.zeros(0, np.bool_),
        want_logprob=np.zeros(0, np.bool_),
    )
