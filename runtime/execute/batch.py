"""A StepPlan's arrays as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.base import AttnMeta
from kernels.sampling import LogitAdjust, SamplingRows
from runtime.step import FROM_TABLE, Adjust, StepPlan


def attn_meta(plan: StepPlan, page_size: int) -> AttnMeta:
    """The plan's page tables, as the kernels read them (CPU tensors that share the plan's memory)."""
    names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "kv_lens", "positions", "slots")
    sharing = ("copy_src", "copy_dst", "share_indptr", "share_n_pages")
    return AttnMeta(page_size, **{name: as_tensor(getattr(plan, name)) for name in names + sharing})


def as_tensor(array: np.ndarray) -> Tensor:
    """The array's memory as a tensor; a read-only array is copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def input_ids(plan: StepPlan, token_table: Tensor) -> Tensor:
    """[tokens] int64: the plan's ids, with those only the device knows read from the token table."""
    ids = as_tensor(plan.token_ids).long()
    unknown = torch.nonzero(ids == FROM_TABLE).flatten()
    if len(unknown):
        rows = as_tensor(plan.token_row).long()[unknown]
        ids[unknown] = token_table[as_tensor(plan.table_row).long()[rows]]
    return ids


@dataclass(frozen=True, slots=True)
class SampleSet:
    """Some of a plan's samples, in plan order, with their adjustments renumbered to match."""

    index: Tensor  # [n] which samples of the plan
    query: Tensor  # [n] flat query token whose logits count
    table: Tensor  # [n] token table row to write
    rows: SamplingRows
    want_logprob: Tensor
    adjusts: tuple[tuple[int, LogitAdjust], ...]

    @staticmethod
    def of(plan: StepPlan, index: np.ndarray, adjust: Sequence[Adjust]) -> SampleSet:
        place = {int(sample): row for row, sample in enumerate(index)}
        pick = lambda values: torch.from_numpy(values[index])  # indexing by an array copies
        rows = SamplingRows(
            temperature=pick(plan.temperature),
            top_k=pick(plan.top_k).long(),
            top_p=pick(plan.top_p),
            min_p=pick(plan.min_p),
            seed=pick(plan.seed.view(np.int64)),
            counter=pick(plan.counter),
        )
        return SampleSet(
            index=torch.from_numpy(index),
            query=pick(plan.sample_index).long(),
            table=torch.from_numpy(plan.table_row[plan.sample_row[index]]).long(),
            rows=rows,
            want_logprob=pick(plan.want_logprob),
            adjusts=tuple((place[change.sample], change) for change in adjust),
        )

    def __len__(self) -> int:
        return len(self.index)
