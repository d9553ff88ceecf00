"""A device without a model: it runs StepPlans on a fake KV pool and catches every wrong page.

Each slot of the pool holds (token, position, digest of the sequence up to it). A step reads a row's sequence
through `kv_indptr`, `kv_indices` and `last_page_len` alone and checks every slot it reads, so a page given away
too early, a missing copy or a stale index raises `FakeKVError`. The next token is a function of the sequence
read. Work is queued and runs in order when a result is asked for: a plan whose arrays change after launch fails.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from runtime.step import FROM_TABLE, NOT_FORCED, Adjust, ModelSpec, Pending, StepPlan, StepResult

_BASE = 0x9E3779B97F4A7C15 | 1
_MASK = (1 << 64) - 1
_N_RANKED = 16


class FakeKVError(AssertionError):
    """A step read or wrote KV that is not what its row's tokens ask for."""


def fake_spec(vocab_size: int = 64, context_length: int = 512, eos_ids: tuple[int, ...] = (1,)) -> ModelSpec:
    """A toy model's description."""
    return ModelSpec(
        name="fake",
        path="",
        vocab_size=vocab_size,
        context_length=context_length,
        eos_ids=eos_ids,
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
        head_dim=1,
        kv_bytes_per_token=16,
        weight_bytes=0,
        dtype="float32",
        backend="fake",
    )


def mix(value: int) -> int:
    """A 64-bit finaliser: every input bit moves every output bit."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class FakePending:
    """A launched fake step; asking for its result runs the queue up to it."""

    def __init__(self, runner: FakeRunner, plan: StepPlan) -> None:
        self._runner = runner
        self.plan = plan
        self.value: StepResult | None = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self.value is not None or self.error is not None

    def result(self, timeout: float | None = None) -> StepResult:
        self._runner.run_until(self, timeout)
        if self.error is not None:
            raise self.error
        if self.value is None:
            raise TimeoutError("the fake device is stuck")
        return self.value


class FakeRunner:
    """Runner over a fake KV pool. Deterministic; a row's tokens depend on its own sequence and seed only.

    `latency_s`: seconds a step takes (slept). `cost`: seconds a step takes on a virtual clock, added to
    `device_now` (no sleep). `fail_at`: step numbers that raise. `stuck_at`: step numbers that never return.
    `check`: verify every slot read (off only to time the scheduler).
    """

    def __init__(
        self,
        spec: ModelSpec | None = None,
        *,
        n_pages: int = 64,
        page_size: int = 4,
        max_running: int = 16,
        latency_s: float = 0.0,
        cost: Callable[[StepPlan], float] | None = None,
        fail_at: Iterable[int] = (),
        stuck_at: Iterable[int] = (),
        check: bool = True,
    ) -> None:
        self.spec = spec or fake_spec()
        self.n_pages, self.page_size, self.max_running = n_pages, page_size, max_running
        self.latency_s, self.cost, self.check = latency_s, cost, check
        self.fail_at, self.stuck_at = set(fail_at), set(stuck_at)
        self.device_now = 0.0
        self.n_steps = 0
        self.n_tokens = 0
        self.plans: deque[StepPlan] = deque(maxlen=4096)
        n_slots = n_pages * page_size
        self._kv_token = np.full(n_slots, -1, np.int64)
        self._kv_pos = np.full(n_slots, -1, np.int64)
        self._kv_digest = np.zeros(n_slots, np.uint64)
        self._table = np.full(max_running + 1, -1, np.int64)
        self._table_tag: list[tuple[int, int, int] | None] = [None] * (max_running + 1)  # (rid, attempt, position)
        self._queue: deque[tuple[str, FakePending | None, Any]] = deque()
        self._live: dict[int, _Forward] = {}
        powers = np.full(self.spec.context_length + 1, _BASE, np.uint64)
        powers[0] = 1
        self._powers = np.cumprod(powers, dtype=np.uint64)
        self.closed = False

    # -- the Runner protocol -------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> Pending:
        pending = FakePending(self, plan)
        self._queue.append(("forward", pending, ()))
        return pending

    def sample_late(self, pending: Pending, adjust: Sequence[Adjust]) -> None:
        assert isinstance(pending, FakePending)
        n_late = int(pending.plan.late.sum())
        if len(adjust) != n_late:
            raise FakeKVError(f"step {pending.plan.step} has {n_late} late samples, got {len(adjust)} adjustments")
        self._queue.append(("late", pending, tuple(adjust)))

    def set_token(self, table_row: int, token: int) -> None:
        self._queue.append(("token", None, (table_row, token)))

    def close(self) -> None:
        self.closed = True

    # -- the device ----------------------------------------------------------------------------------------

    def run_until(self, pending: FakePending, timeout: float | None) -> None:
        """Run queued work in order until `pending` has its result."""
        while not pending.done():
            if not self._queue:
                raise FakeKVError(f"step {pending.plan.step} waits for a late sampling that was never queued")
            kind, owner, adjust = self._queue[0]
            if owner is None:
                self._queue.popleft()
                self._table[adjust[0]] = adjust[1]
                continue
            if owner.plan.step in self.stuck_at:
                time.sleep(min(timeout or 0.0, 0.01))
                raise TimeoutError(f"step {owner.plan.step} does not return")
            self._queue.popleft()
            try:
                self._run(kind, owner, adjust)
            except Exception as err:
                owner.error = err
                self._live.pop(owner.plan.step, None)

    def _run(self, kind: str, pending: FakePending, adjust: Sequence[Adjust]) -> None:
        plan = pending.plan
        if pending.error is not None:
            return
        if kind == "forward":
            self.n_steps += 1
            self.n_tokens += plan.n_tokens
            self.plans.append(plan)
            if plan.step in self.fail_at:
                raise RuntimeError(f"step {plan.step} was told to fail")
            forward = _Forward(self, plan)
            self._live[plan.step] = forward
            early = [j for j in range(len(plan.sample_index)) if not plan.late[j]]
            forward.sample(early, {a.sample: a for a in plan.adjust})
            if plan.late.any():
                return
        else:
            forward = self._live[plan.step]
            forward.sample([int(j) for j in np.flatnonzero(plan.late)], {a.sample: a for a in adjust})
        self._live.pop(plan.step, None)
        pending.value = self._finish(plan, forward)

    def _finish(self, plan: StepPlan, forward: _Forward) -> StepResult:
        started = time.monotonic()
        if self.latency_s:
            time.sleep(self.latency_s)
        finished = time.monotonic()
        device_s = finished - started
        if self.cost is not None:
            device_s = self.cost(plan)
            started, finished = self.device_now, self.device_now + device_s
            self.device_now = finished
        return forward.result(device_s, started, finished)

    def logits(self, digest: int) -> np.ndarray:
        """Fake logits [vocab] of a sequence: a ranked head of tokens picked by the digest, then the rest."""
        vocab = self.spec.vocab_size
        values = -8.0 - np.arange(vocab, dtype=np.float64) / vocab
        for rank in reversed(range(min(_N_RANKED, vocab))):
            values[self.candidate(digest, rank)] = 4.0 - 0.5 * rank
        return values

    def candidate(self, digest: int, rank: int) -> int:
        return mix(digest + rank * 0x632BE59BD9B4E019) % self.spec.vocab_size

    def choose(self, plan: StepPlan, sample: int, tokens: np.ndarray, digest: int, adjust: Adjust | None) -> int:
        """The token of one sample; -1 when every token is masked. Overridden by ScriptedRunner."""
        if adjust is not None and adjust.forced != NOT_FORCED:
            return adjust.forced
        if plan.temperature[sample] > 0:
            digest = mix(digest ^ mix(int(plan.seed[sample]) * 31 + int(plan.counter[sample])))
        if adjust is None:
            return self.candidate(digest, 0)
        values = apply_adjust(self.logits(digest), adjust)
        best = int(values.argmax())
        return best if np.isfinite(values[best]) else -1


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


class _Forward:
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
        digest = self.ids[ends].astype(np.uint64) * np.uint64(_BASE) + plan.positions[ends].astype(np.uint64)
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
                self.logprobs[j] = self._log_softmax(digest)[token]
            slot = int(plan.table_row[row])
            runner._table[slot] = token
            runner._table_tag[slot] = (plan.rids[row], plan.attempts[row], int(plan.kv_lens[row]))

    def _log_softmax(self, digest: int) -> np.ndarray:
        values = self.runner.logits(digest)
        return values - np.log(np.exp(values).sum())

    def _tops(self, digests: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The plan's n_top best tokens after each sequence, and their logprobs."""
        n_top = self.plan.n_top
        ids = np.zeros((len(digests), n_top), np.int32)
        values = np.zeros((len(digests), n_top), np.float32)
        for i, digest in enumerate(digests if n_top else ()):
            scores = self._log_softmax(digest)
            ids[i] = np.argsort(-scores, kind="stable")[:n_top]
            values[i] = scores[ids[i]]
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
                [self._log_softmax(d)[t] for d, t in zip(score, plan.score_target, strict=True)], np.float32
            ),
            score_top_ids=score_ids,
            score_top_logprobs=score_logprobs,
            failed=tuple(sorted(self.failed)),
            device_s=device_s,
            started=started,
            finished=finished,
        )


class ScriptedRunner(FakeRunner):
    """A fake runner that says what it is told: `scripts[prompt ids] -> output ids`, else `default`.

    A prompt is what a request had computed when its first token was sampled. Past the end of its script a
    row emits the first EOS id. Masks are obeyed: where the scripted token is not allowed, the best allowed is taken.
    """

    def __init__(
        self,
        spec: ModelSpec | None = None,
        *,
        scripts: Mapping[tuple[int, ...], Sequence[int]] | None = None,
        default: Sequence[int] = (),
        n_pages: int = 256,
        page_size: int = 4,
        max_running: int = 16,
        latency_s: float = 0.0,
        fail_at: Iterable[int] = (),
        stuck_at: Iterable[int] = (),
    ) -> None:
        super().__init__(
            spec,
            n_pages=n_pages,
            page_size=page_size,
            max_running=max_running,
            latency_s=latency_s,
            fail_at=fail_at,
            stuck_at=stuck_at,
        )
        self.scripts = dict(scripts or {})
        self.default = tuple(default)
        self._prompt_len: dict[int, int] = {}

    def choose(self, plan: StepPlan, sample: int, tokens: np.ndarray, digest: int, adjust: Adjust | None) -> int:
        if adjust is not None and adjust.forced != NOT_FORCED:
            return adjust.forced
        rid = plan.rids[int(plan.sample_row[sample])]
        n_prompt = self._prompt_len.setdefault(rid, len(tokens))
        script = self.scripts.get(tuple(int(t) for t in tokens[:n_prompt]), self.default)
        said = len(tokens) - n_prompt
        token = int(script[said]) if said < len(script) else self.spec.eos_ids[0]
        if adjust is None:
            return token
        values = self.logits(digest)
        values[token] = 1e4
        values = apply_adjust(values, adjust)
        best = int(values.argmax())
        return best if np.isfinite(values[best]) else -1
