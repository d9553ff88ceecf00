"""A whole step in one call, for a backend that can: what goes in, as the scheduler plans it, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.base import FusedDecoder, KVStore, Linear
from kernels.sampling import LogitAdjust

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]


class StepArrays(Protocol):
    """One step. What the arrays mean is said at `kernels.base.AttnMeta` and `kernels.sampling.SamplingRows`."""

    @property
    def qo_indptr(self) -> I32: ...
    @property
    def kv_indptr(self) -> I32: ...
    @property
    def kv_indices(self) -> I32: ...
    @property
    def kv_lens(self) -> I32: ...
    @property
    def share_indptr(self) -> I32: ...
    @property
    def share_n_pages(self) -> I32: ...
    @property
    def positions(self) -> I32: ...
    @property
    def slots(self) -> I64: ...
    @property
    def copy_src(self) -> I64: ...
    @property
    def copy_dst(self) -> I64: ...

    @property
    def token_ids(self) -> I32:
        """[tokens]; -1: read it from the token table, at the place of the token's row."""
        ...

    @property
    def token_row(self) -> I32:
        """[tokens]"""
        ...

    @property
    def table_row(self) -> I32:
        """[rows] places in the token table."""
        ...

    @property
    def sample_index(self) -> I32:
        """[samples] tokens whose logits are sampled."""
        ...

    @property
    def sample_row(self) -> I32: ...
    @property
    def temperature(self) -> F32: ...
    @property
    def top_k(self) -> I32: ...
    @property
    def top_p(self) -> F32: ...
    @property
    def min_p(self) -> F32: ...
    @property
    def seed(self) -> npt.NDArray[np.uint64]: ...
    @property
    def counter(self) -> I64: ...
    @property
    def want_logprob(self) -> npt.NDArray[np.bool_]: ...
    @property
    def late(self) -> npt.NDArray[np.bool_]:
        """Samples that are not drawn yet: their logits are handed out."""
        ...


class Drawn(NamedTuple):
    """`kernels.sampling.Samples` in numpy arrays, one entry a sample; blank for late ones."""

    tokens: I32
    logprobs: F32
    top_ids: I32
    top_logprobs: F32
    failed: npt.NDArray[np.bool_]
    late_logits: Tensor | None  # [late samples, vocab] float32


@dataclass(frozen=True, slots=True)
class DecoderEnds:
    """What the layers stand between."""

    embedding: Linear  # the rows of whose weight are the embedding
    final_norm: Tensor
    head: Linear


class WholeStep(Protocol):
    """From token ids to tokens drawn, in one call."""

    def __call__(
        self,
        arrays: StepArrays,
        token_table: Tensor,
        kv: KVStore,
        adjusts: Sequence[tuple[int, LogitAdjust]] = (),
        n_top: int = 0,
    ) -> Drawn:
        """Samples that are not late are drawn, to the bit as operation by operation, and written to `token_table`."""
        ...


@runtime_checkable
class WholeStepOps(Protocol):
    """What a backend offers besides `FusedOps` when it runs whole steps."""

    def whole_step(self, decoder: FusedDecoder, ends: DecoderEnds) -> WholeStep | None:
        """`decoder` (this backend's own) between its ends, or None: run them one by one."""
        ...
