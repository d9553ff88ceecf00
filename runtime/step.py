"""The step: what the scheduler hands the runner, and what comes back. numpy only, no torch.

A StepPlan is immutable (a msgspec struct, because one is built every step and a frozen dataclass of this
size costs more to build than all its arrays). Its index arrays are exactly FlashInfer's (int32): row i owns
query tokens `qo_indptr[i]:qo_indptr[i+1]` and KV pages `kv_indices[kv_indptr[i]:kv_indptr[i+1]]`, the last of which
holds `last_page_len[i]` tokens *including* this step's. Query tokens are the last q_len of the kv_len.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]

FROM_TABLE = -1  # a token id only the device knows yet: read token_table[row]
NOT_FORCED = -1
NO_SEED_SALT = 0


class Adjust(msgspec.Struct, frozen=True, eq=False):
    """Changes to one sampled row's logits, applied in this order: repetition, addition, mask.

    `rep_ids`: ids whose logit is divided by `rep_penalty` when positive and multiplied when negative.
    `add_ids`, `add_values`: added (bias, frequency and presence penalties; -inf bans).
    `mask`: packed int32 words, bit = allowed, little bit order, ceil(vocab/32) words.
    `forced`: the token to emit instead of sampling (its logprob is still reported).
    """

    sample: int  # index into the plan's sample_index
    rep_ids: I32 | None = None
    rep_penalty: float = 1.0
    add_ids: I32 | None = None
    add_values: F32 | None = None
    mask: I32 | None = None
    forced: int = NOT_FORCED


class StepPlan(msgspec.Struct, frozen=True, eq=False):
    """One batch. Decode rows first, then prefill rows.

    Sampling: `sample_index[j]` is the flat query token whose logits give sample j; it belongs to batch row
    `sample_row[j]` and is written to `token_table[table_row[sample_row[j]]]`. The random stream of sample j
    is a pure function of (`seed[j]`, `counter[j]`). `late[j]` marks samples that wait for `sample_late`.
    Scoring: `score_index[k]` is a flat query token, `score_target[k]` the token whose logprob its logits give.
    Copies: slot `copy_src[i]` is copied to `copy_dst[i]` in every layer after that layer's KV store and before
    its attention, so a source may be written in this very step. Sources are resolved: none is another copy's
    destination. Slot = page * page_size + offset.
    Sharing: rows `share_indptr[g]:share_indptr[g+1]` have their first `share_n_pages[g]` pages in common.
    """

    step: int
    # rows
    rids: tuple[int, ...]  # internal request numbers
    attempts: tuple[int, ...]
    table_row: I32  # [rows] request's row in the device's token table (0 is scratch)
    qo_indptr: I32  # [rows+1]
    kv_indptr: I32  # [rows+1]
    kv_indices: I32  # [total pages]
    last_page_len: I32  # [rows]
    kv_lens: I32  # [rows]
    n_decode: int  # the first n_decode rows decode: one token each, but for those that were forced several
    # query tokens
    token_ids: I32  # [tokens] FROM_TABLE where the host does not know the value
    token_row: I32  # [tokens] batch row of each token
    positions: I32  # [tokens]
    slots: I64  # [tokens] where the token's KV is stored
    copy_src: I64
    copy_dst: I64
    share_indptr: I32  # [groups+1]
    share_n_pages: I32  # [groups]
    # sampling, one entry a sample
    sample_index: I32
    sample_row: I32
    temperature: F32
    top_k: I32  # 0 off
    top_p: F32
    min_p: F32
    seed: U64
    counter: I64
    late: npt.NDArray[np.bool_]
    want_logprob: npt.NDArray[np.bool_]
    n_top: int = 0  # alternatives reported for every sample and score of this step
    adjust: tuple[Adjust, ...] = ()  # of samples that are not late
    # scoring
    score_index: I32 = msgspec.field(default_factory=lambda: np.zeros(0, np.int32))
    score_target: I32 = msgspec.field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def n_rows(self) -> int:
        return len(self.rids)

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed; arrays follow the plan's sample and score order."""

    tokens: I32  # [samples]
    logprobs: F32  # [samples]; NaN where not wanted
    top_ids: I32  # [samples, n_top]
    top_logprobs: F32
    score_logprobs: F32  # [scores]
    score_top_ids: I32
    score_top_logprobs: F32
    failed: tuple[int, ...] = ()  # samples whose every token was masked, or whose logits were NaN
    device_s: float = 0.0  # time the device spent on the step
    started: float = 0.0  # monotonic seconds
    finished: float = 0.0


class Pending(Protocol):
    """A launched step."""

    def done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the step. Raises TimeoutError, or what the step raised."""
        ...


STEP_TOKENS = 1024  # fills a GPU


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the scheduler and the frontends must know of the loaded model."""

    name: str
    path: str
    vocab_size: int
    context_length: int
    eos_ids: tuple[int, ...]  # every id that ends a turn: config, generation config, tokenizer, chat end
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    kv_bytes_per_token: int
    weight_bytes: int
    dtype: str
    backend: str
    why: str = ""  # one line on why this dtype, backend and pool were chosen
    step_tokens: int = STEP_TOKENS  # a step carries at most so many, if nothing else is asked for


class Runner(Protocol):
    """The device. Work runs in launch order (a FIFO queue); `launch` never waits for it."""

    spec: ModelSpec
    n_pages: int
    page_size: int
    max_running: int  # rows of the token table, the scratch row not counted

    def launch(self, plan: StepPlan) -> Pending: ...

    def sample_late(self, pending: Pending, adjust: Sequence[Adjust]) -> None:
        """Give the plan's late samples their adjustments (one for each late sample); queues their sampling."""
        ...

    def close(self) -> None: ...
