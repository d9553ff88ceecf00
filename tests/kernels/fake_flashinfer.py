"""A stand-in for the flashinfer package that computes on the CPU from the very arrays the wrappers are given.

It shows that our arrays mean what FlashInfer reads in them. It does not show that FlashInfer's kernels run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634


@dataclass
class Plan:
    """What a wrapper was planned with."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor
    n_heads: int
    n_kv_heads: int
    head_dim: int
    page_size: int
    causal: bool
    options: dict[str, Any]


class _Wrapper:
    plans: list[Plan]

    def __init__(self, workspace: Tensor, layout: str, *, backend: str, **options: Any) -> None:
        assert layout == "NHD"
        assert workspace.dtype == torch.uint8
        self.backend, self.options, self.plans = backend, options, []

    def _take(self, plan: Plan) -> None:
        for array in (plan.qo_indptr, plan.kv_indptr, plan.kv_indices, plan.last_page_len):
            assert array.dtype == torch.int32
            assert array.is_contiguous()
        assert plan.qo_indptr[0] == plan.kv_indptr[0] == 0
        assert plan.kv_indptr[-1] == len(plan.kv_indices)
        self.plans.append(plan)

    def run(
        self, q: Tensor, pools: tuple[Tensor, Tensor], *, out: Any = None, lse: Any = None, return_lse: bool = False
    ) -> Any:
        assert isinstance(pools, tuple)
        plan = self.plans[-1]
        assert len(q) == plan.qo_indptr[-1]
        value, log_sum = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32)
        for row in range(len(plan.last_page_len)):
            tokens = slice(int(plan.qo_indptr[row]), int(plan.qo_indptr[row + 1]))
            value[tokens], log_sum[tokens] = _attend(plan, row, q[tokens], pools)
        if out is not None:
            value = out.copy_(value)
        if lse is not None:
            log_sum = lse.copy_(log_sum)
        return (value, log_sum) if return_lse else value


def _attend(plan: Plan, row: int, q: Tensor, pools: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """One row, reading the pools through the plan's arrays alone. (output, base-2 log-sum-exp)"""
    pages = plan.kv_indices[int(plan.kv_indptr[row]) : int(plan.kv_indptr[row + 1])].long()
    kv_len = (len(pages) - 1) * plan.page_size + int(plan.last_page_len[row])
    group = plan.n_heads // plan.n_kv_heads
    k, v = (pool[pages].flatten(0, 1)[:kv_len].double().repeat_interleave(group, dim=1) for pool in pools)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * plan.options["sm_scale"]
    cap, window = plan.options["logits_soft_cap"], plan.options["window_left"]
    if cap:
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(kv_len - len(q), kv_len)[:, None] - torch.arange(kv_len)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if plan.causal:
        hidden |= distance < 0
    if window >= 0:
        hidden |= distance > window
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype), (scores.logsumexp(-1).T * LOG2_E).float()


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, indptr: Tensor, indices: Tensor, last: Tensor, *sizes: int, **options: Any) -> None:
        if not self.options["use_tensor_cores"]:
            assert sizes[0] // sizes[1] in (1, 2, 3, 4, 6, 8, 16), "Unsupported group_size"
            assert "fixed_split_size" not in options
        if self.options.get("use_cuda_graph"):
            # whether a step is split is frozen into the graph, and its tiles are limited
            assert "fixed_split_size" not in options
            assert len(last) == len(self.options["paged_kv_last_page_len_buffer"])
            assert len(indices) <= len(self.options["paged_kv_indices_buffer"])
        one_each = torch.arange(len(last) + 1, dtype=torch.int32)
        self._take(Plan(one_each, indptr, indices, last, *sizes, causal=True, options=options))


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, *sizes: int, causal: bool, **options: Any
    ) -> None:
        self._take(Plan(qo, indptr, indices, last, *sizes, causal=causal, options=options))


@dataclass
class FakePackage:
    """The names of the package that the backend calls."""

    made: list[_Wrapper] = field(default_factory=list)

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **options: Any) -> _Wrapper:
        self.made.append(BatchDecodeWithPagedKVCacheWrapper(*args, **options))
        return self.made[-1]

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **options: Any) -> _Wrapper:
        self.made.append(BatchPrefillWithPagedKVCacheWrapper(*args, **options))
        return self.made[-1]

    def merge_state_in_place(self, v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor) -> None:
        ours, theirs = (torch.exp2(part.double() - torch.maximum(s, s_other)).unsqueeze(-1) for part in (s, s_other))
        v.copy_((v * ours + v_other * theirs) / (ours + theirs))
        s.copy_(torch.logaddexp2(s, s_other))
