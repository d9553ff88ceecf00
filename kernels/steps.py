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
        """Samples whose changes are not known yet when the step begins."""
        ...


class Drawn(NamedTuple):
    """`kernels.sampling.Samples` in numpy arrays, one entry a sample."""

    tokens: I32
    logprobs: F32
    top_ids: I32
    top_logprobs: F32
    failed: npt.NDArray[np.bool_]


class LateChanges(Protocol):
    """The way of changes to a step's late samples. The step computes meanwhile, and waits for them at its very end."""

    def post(self, changes: Sequence[tuple[int, LogitAdjust]]) -> None:
        """Once, from any thread: (sample, change) for late samples; without one, a sample is drawn as it is."""
        ...

    def abandon(self) -> None:
        """Nothing will be posted: the step fails instead of waiting."""
        ...

    @property
    def waited_s(self) -> float:
        """How long the step waited."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderEnds:
    """What the layers stand between."""

    embedding: Linear  # the rows of whose weight are the embedding
    final_norm: Tensor
    head: Linear


class WholeStep(Protocol):
    """From token ids to tokens drawn, in one call."""

    def expect(self, late: npt.NDArray[np.bool_]) -> LateChanges:
        """[samples] which of a step's samples are late, of which one at least is."""
        ...

    def __call__(
        self,
        arrays: StepArrays,
        token_table: Tensor,
        kv: KVStore,
        adjusts: Sequence[tuple[int, LogitAdjust]] = (),
        n_top: int = 0,
        late: LateChanges | None = None,
    ) -> Drawn:
        """Samples are drawn, to the bit as operation by operation, and written to `token_table`.

        `late` must be given where samples are late.
        """
        ...


@runtime_checkable
class WholeStepOps(Protocol):
    """What a backend offers besides `FusedOps` when it runs whole steps."""

    def whole_step(self, decoder: FusedDecoder, ends: DecoderEnds) -> WholeStep | None:
        """`decoder` (this backend's own) between its ends, or None: run them one by one."""
        ...
