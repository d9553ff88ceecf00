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

from runtime.execute.fake_step import BASE, FakeKVError, Forward, apply_adjust
from runtime.step import NOT_FORCED, Adjust, ModelSpec, Pending, StepPlan, StepResult

_MASK = (1 << 64) - 1
_N_RANKED = 16


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
        self._live: dict[int, Forward] = {}
        powers = np.full(self.spec.context_length + 1, BASE, np.uint64)
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
            forward = Forward(self, plan)
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

    def _finish(self, plan: StepPlan, forward: Forward) -> StepResult:
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

    def logprob(self, digest: int, token: int) -> float:
        """The log-probability of a token after a sequence."""
        return float(self._log_softmax(digest)[token])

    def tops(self, digest: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """The n best tokens after a sequence and their log-probabilities."""
        scores = self._log_softmax(digest)
        ids = np.argsort(-scores, kind="stable")[:n]
        return ids, scores[ids]

    def _log_softmax(self, digest: int) -> np.ndarray:
        values = self.logits(digest)
        return values - np.log(np.exp(values).sum())

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
