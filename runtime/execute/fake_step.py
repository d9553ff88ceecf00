"""What a fake device does with one step: store, copy, read back and check, sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from runtime.step import FROM_TABLE, Adjust, StepPlan, StepResult

if TYPE_CHECKING:
    from runtime.execute.fake import FakeRunner

BASE = 0x9E3779B97F4A7C15 | 1


class FakeKVError(AssertionError):
    """A step read or wrote KV that is not what its row's tokens ask for."""


def apply_adjust(values: np.ndarray, adjust: Adjust) -> np.ndarray:
    """The order the runner promises: repetition, addition, mask."""
    if adjust.rep_ids is not None and len(adjust.rep_ids):
        picked = values[adjust.rep_ids]
        values[adjust.rep_ids] = np.where(picked > 0, picked / adjust.rep_penalty, picked * adjust.rep_penalty)
    if adjust.add_ids is not None and adjust.add_values is not None:
        np.add.at(values, adjust.add_ids, adjust.add_values)
    if adjust.mask is not None:
        bits = np.unpackbits(adjust.mask.view(np.uint8), bitorder="little")[: len(values)]
        values[bits == 0] = -np.inf
    return values


class Forward:
    """One step on the fake device: store, copy, read back, sample."""

    def __init__(self, runner: FakeRunner, plan: StepPlan) -> None:
        self.runner, self.plan = runner, plan
        self.ids = self._resolve_ids()
        n = len(plan.sample_index)
        self.tokens = np.full(n, -1, np.int32)
        self.logprobs = np.full(n, np.nan, np.float32)
        self.failed: list[int] = []
        self.sequences = self._store_and_read()

    def _resolve_ids(self) -> np.ndarray:
        plan, runner = self.plan, self.runner
        ids = plan.token_ids.astype(np.int64)
        for t in np.flatnonzero(plan.token_ids == FROM_TABLE):
            row = int(plan.token_row[t])
            slot = int(plan.table_row[row])
            want = (plan.rids[row], plan.attempts[row], int(plan.positions[t]))
            if runner.check and runner._table_tag[slot] != want:
                raise FakeKVError(f"table row {slot} holds {runner._table_tag[slot]}, the plan expects {want}")
            ids[t] = runner._table[slot]
        return ids

    def _store_and_read(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per row: its tokens and the running digest at each position."""
        plan, runner = self.plan, self.runner
        if not runner.check:
            return self._cheap_sequences()
        self._check_shape()
        runner._kv_token[plan.slots] = self.ids
        runner._kv_pos[plan.slots] = plan.positions
        if len(np.intersect1d(plan.copy_src, plan.copy_dst)):
            raise FakeKVError("a copy reads what another copy of the same step writes")
        for pool in (runner._kv_token, runner._kv_pos):
            pool[plan.copy_dst] = pool[plan.copy_src]
        rows = [self._read_row(i) for i in range(plan.n_rows)]
        for i, (slots, _, digest) in enumerate(rows):
            n_new = int(plan.qo_indptr[i + 1] - plan.qo_indptr[i])
            runner._kv_digest[slots[-n_new:]] = digest[-n_new:]
        runner._kv_digest[plan.copy_dst] = runner._kv_digest[plan.copy_src]
        for i, (slots, _, digest) in enumerate(rows):
            if not np.array_equal(runner._kv_digest[slots], digest):
                at = int(np.flatnonzero(runner._kv_digest[slots] != digest)[0])
                raise FakeKVError(f"step {plan.step} row {i} reads another sequence's KV at position {at}")
        return [(tokens, digest) for _, tokens, digest in rows]

    def _check_shape(self) -> None:
        plan, size = self.plan, self.runner.page_size
        expect = (np.diff(plan.kv_indptr) - 1) * size + plan.last_page_len
        if not np.array_equal(expect, plan.kv_lens) or (plan.last_page_len < 1).any():
            raise FakeKVError("kv_indptr, last_page_len and kv_lens disagree")
        if len(np.unique(plan.table_row)) != plan.n_rows or (plan.table_row < 1).any():
            raise FakeKVError("two rows share a place in the token table")
        if not np.array_equal(np.diff(plan.qo_indptr), np.bincount(plan.token_row, minlength=plan.n_rows)):
            raise FakeKVError("qo_indptr and token_row disagree")
        if len(np.unique(plan.copy_dst)) != len(plan.copy_dst):
            raise FakeKVError("two copies write one slot")
        for g in range(len(plan.share_n_pages)):
            first, n = int(plan.share_indptr[g]), int(plan.share_n_pages[g])
            head = plan.kv_indices[plan.kv_indptr[first] : plan.kv_indptr[first] + n]
            for row in range(first, int(plan.share_indptr[g + 1])):
                start = int(plan.kv_indptr[row])
                if not np.array_equal(plan.kv_indices[start : start + n], head):
                    raise FakeKVError(f"row {row} does not share its group's pages")

    def _read_row(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        plan, runner = self.plan, self.runner
        kv_len = int(plan.kv_lens[i])
        pages = plan.kv_indices[plan.kv_indptr[i] : plan.kv_indptr[i + 1]].astype(np.int64)
        slots = (pages[:, None] * runner.page_size + np.arange(runner.page_size)).ravel()[:kv_len]
        q0, q1 = int(plan.qo_indptr[i]), int(plan.qo_indptr[i + 1])
        expect = np.arange(kv_len - (q1 - q0), kv_len)
        if not np.array_equal(plan.positions[q0:q1], expect) or not np.array_equal(plan.slots[q0:q1], slots[expect]):
            raise FakeKVError(f"step {plan.step} row {i}: positions or slots do not follow the page table")
        if not np.array_equal(runner._kv_pos[slots], np.arange(kv_len)):
            at = int(np.flatnonzero(runner._kv_pos[slots] != np.arange(kv_len))[0])
            raise FakeKVError(f"step {plan.step} row {i}: slot of position {at} was never written or was given away")
        tokens = runner._kv_token[slots]
        if not np.array_equal(tokens[expect], self.ids[q0:q1]):
            raise FakeKVError(f"step {plan.step} row {i}: its own tokens were overwritten")
        weighted = (tokens + 1).astype(np.uint64) * runner._powers[:kv_len]
        return slots, tokens, np.cumsum(weighted, dtype=np.uint64)

    def _cheap_sequences(self) -> list[tuple[np.ndarray, np.ndarray]]:
        plan = self.plan
        ends = plan.qo_indptr[1:] - 1
        digest = self.ids[ends].astype(np.uint64) * np.uint64(BASE) + plan.positions[ends].astype(np.uint64)
        return [(self.ids[ends[i] : ends[i] + 1], digest[i : i + 1]) for i in range(plan.n_rows)]

    def _digest_at(self, token: int) -> tuple[np.ndarray, int]:
        """The sequence up to flat query token `token`, and its digest."""
        plan = self.plan
        row = int(plan.token_row[token])
        tokens, digest = self.sequences[row]
        back = int(plan.qo_indptr[row + 1]) - token
        end = max(1, len(tokens) - back + 1)
        return tokens[:end], int(digest[end - 1])

    def sample(self, which: list[int], adjust: dict[int, Adjust]) -> None:
        plan, runner = self.plan, self.runner
        for j in which:
            row = int(plan.sample_row[j])
            tokens, digest = self._digest_at(int(plan.sample_index[j]))
            token = runner.choose(plan, j, tokens, digest, adjust.get(j))
            if token < 0:
                self.failed.append(j)
                token = 0
            self.tokens[j] = token
            if plan.want_logprob[j]:
                self.logprobs[j] = runner.logprob(digest, token)
            slot = int(plan.table_row[row])
            runner._table[slot] = token
            runner._table_tag[slot] = (plan.rids[row], plan.attempts[row], int(plan.kv_lens[row]))

    def _tops(self, digests: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The plan's n_top best tokens after each sequence, and their logprobs."""
        n_top = self.plan.n_top
        ids = np.zeros((len(digests), n_top), np.int32)
        values = np.zeros((len(digests), n_top), np.float32)
        for i, digest in enumerate(digests if n_top else ()):
            ids[i], values[i] = self.runner.tops(digest, n_top)
        return ids, values

    def result(self, device_s: float, started: float, finished: float) -> StepResult:
        plan = self.plan
        score = [self._digest_at(int(i))[1] for i in plan.score_index]
        top_ids, top_logprobs = self._tops([self._digest_at(int(i))[1] for i in plan.sample_index])
        score_ids, score_logprobs = self._tops(score)
        return StepResult(
            tokens=self.tokens,
            logprobs=self.logprobs,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            score_logprobs=np.array(
                [self.runner.logprob(d, int(t)) for d, t in zip(score, plan.score_target, strict=True)], np.float32
            ),
            score_top_ids=score_ids,
            score_top_logprobs=score_logprobs,
            failed=tuple(sorted(self.failed)),
            device_s=device_s,
            started=started,
            finished=finished,
        )
