"""Everything the scheduler's parts share. They decide and act on it in turn, all on one thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from radix import Namespace, PrefixCache
from radix.events import EventSink
from runtime.config import EngineConfig
from runtime.floors import floor_pages, parse_floors
from runtime.grammar.protocol import GrammarService
from runtime.request import Phase, Request
from runtime.scheduler.budget import StepTimeModel
from runtime.scheduler.families import Families
from runtime.scheduler.frame import DecodeSet
from runtime.scheduler.output import OutputBatch
from runtime.scheduler.policy import POLICIES, Waiting
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.rows import RowTable
from runtime.scheduler.seldom import Seldom
from runtime.scheduler.stats import Rate, Stats
from runtime.step import Runner
from runtime.validate import Limits

log = logging.getLogger("ramet.scheduler")

CPU_BACKENDS = ("native", "reference")  # whose kernels and the scheduler share the cores


@dataclass(slots=True)
class Growth:
    """Share of its remaining answer that a running request is expected to need: learned from retractions."""

    ratio: float = 0.3
    LOW: ClassVar[float] = 0.1
    CLIP: ClassVar[int] = 1024  # tokens of answer looked ahead at most

    def retracted(self) -> None:
        self.ratio = min(1.0, self.ratio * 1.5 + 0.1)

    def calm_step(self) -> None:
        self.ratio = max(self.LOW, self.ratio * 0.999)


class State:
    """Shared by the parts of one scheduler. `now` is the time of the current turn."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        token_bytes: Sequence[bytes],
        special_ids: frozenset[int],
        eos_ids: Sequence[int] | None,
        grammar: GrammarService | None,
        events: EventSink | None,
        clock: Callable[[], float],
    ) -> None:
        spec = runner.spec
        self.config, self.runner, self.spec = config, runner, spec
        self.clock, self.now = clock, clock()
        self.token_bytes, self.special_ids = token_bytes, special_ids
        self.grammar = grammar
        ends = spec.eos_ids if eos_ids is None else eos_ids
        self.eos = frozenset(t for t in ends if 0 <= t < spec.vocab_size)
        self.is_eos: npt.NDArray[np.bool_] = np.zeros(spec.vocab_size, np.bool_)
        self.is_eos[list(self.eos)] = True
        self.limits = Limits.of(spec, config, runner.n_pages * runner.page_size)
        n_rows = min(config.max_running, runner.max_running)
        self.cache = PrefixCache(
            runner.n_pages,
            runner.page_size,
            policy=config.eviction_policy,
            floors=floor_pages(parse_floors(config.cache_floors), runner.page_size),
            enabled=config.prefix_cache,
            events=events,
        )
        self.runs_decode = spec.backend != "flashinfer"  # whose decode rows have one token each, and stand apart
        self.rows = RowTable(n_rows, self.limits.max_len, runner.page_size)
        self.decode = DecodeSet(self.rows)
        self.prefill: list[Request] = []  # requests in phase PREFILL, by admission
        self.policy = POLICIES[config.schedule_policy]
        self.queue = WaitingQueue(self.policy, self.view)
        self.families = Families()
        self.live: dict[str, Request] = {}
        self.out = OutputBatch()
        self.stats = Stats()
        self.rate = Rate()
        self.model = StepTimeModel()
        self.growth = Growth()
        self.full = Seldom(log, logging.WARNING)
        self.step = 0  # number of the next plan
        self.committed = -1  # number of the plan committed last
        self.pages_version = 0  # changes when a running row's pages may have been remapped
        self.work = 0  # prompt tokens prefilled since the start
        self.n_admitted = 0
        self.weights_version = 0
        self.paused = False
        self.wake: Callable[[], None] = lambda: None  # makes an idle loop turn; callable from any thread
        self.draining = False

    # -- small facts -----------------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        return self.cache.page_size

    @property
    def n_available(self) -> int:
        """Pages that an allocation could get right now."""
        return self.cache.n_free + self.cache.n_evictable

    def pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_size)

    def match_limit(self, request: Request, n_tokens: int) -> int:
        """Most of its tokens that may come from the cache."""
        return request.match_limit(n_tokens)

    def charge(self, request: Request, n_tokens: int) -> None:
        """Book service to the request's program or client, where the policy keeps accounts."""
        if self.policy.bucketed:
            self.queue.charge(request.account, n_tokens)

    def account(self, request: Request, start: int, end: int) -> None:
        """Tokens [start, end) of the request, known before, are computed by the plan that is being made."""
        n = end - start
        self.work += n
        self.stats.prefilled += n
        request.tally.prefilled += n
        if request.tally.retractions:
            self.stats.recomputed += max(0, min(end, request.retracted_at) - start)

    def namespace(self, request: Request) -> Namespace:
        key = request.submit.namespace
        return Namespace(key.adapter, key.salt, self.weights_version, key.media)

    def priority(self, request: Request) -> int:
        return request.submit.priority or request.submit.hints.priority

    def view(self, request: Request) -> Waiting:
        submit = request.submit
        prefix = b""
        if self.policy.arrange is not None:
            prefix = request.tokens[: request.hit].tobytes()
        return Waiting(
            num=request.num,
            n_tokens=request.known,
            hit=request.hit,
            work_at_arrival=request.work_at_arrival,
            priority=self.priority(request),
            resumed=request.tally.retractions > 0,
            program=self.families.root_of(submit.hints.program_id or submit.group),
            client=submit.client,
            prefix=prefix,
        )

    def visible_bytes(self, request: Request, token: int) -> bytes:
        """The bytes by which a token takes part in stop strings: what a client would see of it."""
        if token in self.special_ids and request.params.skip_special_tokens:
            return b""
        return self.token_bytes[token] if token < len(self.token_bytes) else b""

    def to_phase(self, request: Request, phase: Phase) -> None:
        """Move a request between the sets that planning walks."""
        if request.phase is Phase.PREFILL:
            self.prefill.remove(request)
        elif request.phase is Phase.DECODE:
            self.rows.clear_run(request.slot)
            if phase is Phase.PREFILL:
                self.decode.step_out(request.slot)
        request.phase = phase
        if phase is Phase.PREFILL:
            self.prefill.append(request)
        elif phase is Phase.DECODE:
            self.decode.add(request.slot)
        else:
            self.decode.discard(request.slot)

    # -- reports ---------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Everything `stats()` says."""
        pool = self.cache.pool
        used = pool.n_pages - self.cache.n_free
        seen = self.stats.reused + self.stats.prefilled - self.stats.recomputed
        out = self.stats.snapshot()
        out.update(
            running=self.rows.n_used,
            waiting=len(self.queue),
            prefilling=len(self.prefill),
            decoding=len(self.decode),
            step=self.step,
            policy=self.policy.name,
            growth_ratio=self.growth.ratio,
            outputs_sent=self.out.n_sent,
            outputs_lost=self.out.n_lost,
            pool_tokens=pool.n_pages * self.page_size,
            used_tokens=used * self.page_size,
            pool_usage=used / pool.n_pages,
            hit_rate=self.stats.reused / seen if seen else 0.0,
            evicted_tokens=self.cache.n_evicted * self.page_size,
            gen_throughput=self.rate.per_second,
            cache=self.cache.stats(),
        )
        if self.grammar is not None:
            out["grammar"] = self.grammar.stats()
        return out

    def audit(self) -> None:
        """Check that every page has one owner and every cursor its order. Raises AuditError or AssertionError."""
        rows = self.rows
        private = []
        for request in rows.running():
            slot = request.slot
            known, kv, done = int(rows.known[slot]), int(rows.kv[slot]), int(rows.done[slot])
            published, n_pages = int(rows.published[slot]), int(rows.n_pages[slot])
            assert done <= kv <= known + 2, (request.rid, done, kv, known)
            assert published == request.lease.n_tokens <= n_pages * self.page_size, (request.rid, published)
            assert n_pages * self.page_size >= kv, (request.rid, n_pages, kv)
            first = published // self.page_size
            assert (request.lease.pages == rows.pages[slot, :first]).all(), request.rid
            adopted = request.lease.leaf is not None and n_pages > first
            private.append(rows.row_pages(slot)[first + adopted :])
        self.cache.audit(private)
        assert set(self.prefill) == {r for r in rows.running() if r.phase is Phase.PREFILL}
        n_waiting = sum(r.phase is Phase.WAITING for r in self.live.values())
        assert n_waiting == len(self.queue)
        assert len(self.live) == n_waiting + rows.n_used
