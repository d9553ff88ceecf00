"""The cache against an obviously correct model: a list of the sequences that were ever made available.

The best match of a prompt is its longest common prefix with any of them; the cache must find exactly that as
long as nothing was evicted or withdrawn, and never more. A fake device (helpers.py) executes the steps up to
two plans late and checks that every row reads exactly its own tokens. The full audit runs after every rule.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from radix import LeaseError, Namespace, PrefixCache
from tests.radix.helpers import Client, Run

SPACES = (Namespace(), Namespace(adapter=1), Namespace(salt="s"))
DEPTH = 2  # steps that may be launched and not executed


class Known:
    """Every sequence made available, by namespace."""

    def __init__(self) -> None:
        self.sequences: dict[Namespace, set[tuple[int, ...]]] = {}

    def add(self, ns: Namespace, tokens: np.ndarray) -> None:
        self.sequences.setdefault(ns, set()).add(tuple(tokens.tolist()))

    def best(self, ns: Namespace, tokens: np.ndarray, limit: int) -> int:
        want = tuple(tokens.tolist())[:limit]
        return max((_common(want, seq) for seq in self.sequences.get(ns, ())), default=0)


class CacheMachine(RuleBasedStateMachine):
    page_size = 4
    n_pages = 24

    def __init__(self) -> None:
        super().__init__()
        self.client = Client(PrefixCache(self.n_pages, self.page_size))
        self.cache = self.client.cache
        self.known = Known()
        self.exact = True  # nothing evicted or withdrawn since the cache was last empty
        self.evicted = 0
        self.planning = True
        self.hogs: list[np.ndarray] = []
        self.asked: list[tuple[Namespace, np.ndarray]] = []

    # -- steps -----------------------------------------------------------------------------------------------------

    @rule()
    def next_step(self) -> None:
        """Launch the current plan if it is open (else open the next), and keep at most DEPTH in flight."""
        if not self.planning:
            self.client.plan()
        self.planning = not self.planning
        while len(self.client.queue) > DEPTH:
            self.client.execute()

    @precondition(lambda self: not self.planning and self.client.queue)
    @rule()
    def commit(self) -> None:
        self.client.execute()

    @precondition(lambda self: not self.planning and any(step.rows for step in self.client.queue))
    @rule()
    def fail(self) -> None:
        before = self.cache.tree.n_pages
        self.client.fail()
        self.exact &= self.cache.tree.n_pages == before

    # -- requests --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.planning)
    @rule(data=st.data(), ns=st.sampled_from(SPACES), slack=st.integers(0, 3))
    def start(self, data: st.DataObject, ns: Namespace, slack: int) -> None:
        tokens = self.prompt(data)
        limit = max(len(tokens) - slack, 0)
        self.asked.append((ns, tokens))
        found = self.cache.probe(ns, tokens, limit)
        before = self.cache.n_evicted
        self.check_total(ns, tokens, limit, found.total)
        run = self.client.try_start(tokens, ns, limit)
        if run is not None:
            assert run.computed == found.total
        self.note_evictions(before)

    @precondition(lambda self: self.planning and self.client.runs)
    @rule(data=st.data(), n=st.integers(1, 40), publish=st.booleans())
    def prefill(self, data: st.DataObject, n: int, publish: bool) -> None:
        run = data.draw(st.sampled_from(self.client.runs))
        upto = min(run.computed + n, len(run.tokens))
        before = self.cache.n_evicted
        if self.client.prefill(run, upto, publish=publish) and publish:
            self.add_pages(run)
        self.note_evictions(before)

    @precondition(lambda self: self.planning and self.client.runs)
    @rule(data=st.data(), token=st.integers(0, 2), n=st.integers(1, 9))
    def generate(self, data: st.DataObject, token: int, n: int) -> None:
        run = data.draw(st.sampled_from(self.client.runs))
        run.tokens = np.append(run.tokens, np.full(n, token, np.int32))

    @precondition(lambda self: self.planning and any(self.untouched(run) for run in self.client.runs))
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from([run for run in self.client.runs if self.untouched(run)]))
        before, limit = self.cache.n_evicted, max(len(run.tokens) - 1, run.computed)
        self.client.advance(run)
        if run in self.client.runs:
            self.check_total(run.lease.namespace, run.tokens, limit, run.computed)
        self.note_evictions(before)

    @precondition(lambda self: not self.planning and self.client.runs)
    @rule(data=st.data())
    def publish_late(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.client.runs))
        self.cache.publish(run.lease, run.tokens, run.pages, run.committed, -1)
        self.add_pages(run)

    @precondition(lambda self: self.client.runs)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data: st.DataObject, keep: bool) -> None:
        run = data.draw(st.sampled_from(self.client.runs))
        if self.planning and any(row[0] is run for row in self.client.queue[-1].rows):
            return  # a scheduler never ends a request that the open plan names
        self.client.finish(run, keep=keep)
        if keep:
            self.known.add(run.lease.namespace, run.tokens[: run.committed])
        with pytest.raises(LeaseError):
            self.cache.finish(run.lease, run.tokens, run.pages, 0)

    # -- pages -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.planning)
    @rule(n=st.integers(0, 12))
    def alloc(self, n: int) -> None:
        before, evicted = self.cache.stats(), self.cache.n_evicted
        pages = self.cache.alloc(n)
        if pages is None:
            assert n > before["free"] + before["evictable"]
            assert self.cache.stats() == before
        else:
            assert len(pages) == n
            self.hogs.append(pages)
        self.note_evictions(evicted)

    @precondition(lambda self: self.hogs)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.hogs) - 1))
        lease = self.cache.acquire(SPACES[0], self.hogs[i][:0])
        self.cache.finish(lease, self.hogs[i][:0], self.hogs.pop(i), 0, keep=False)

    @rule(n=st.integers(1, 5))
    def evict(self, n: int) -> None:
        evictable, before = self.cache.n_evictable, self.cache.n_evicted
        assert self.cache.evict(n) == min(n, evictable)
        self.note_evictions(before)

    @precondition(lambda self: not self.planning)
    @rule()
    def clear(self) -> None:
        self.exact &= self.cache.clear() == 0
        if self.cache.tree.n_pages == 0:
            self.known, self.exact = Known(), True

    # -- checks ----------------------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        self.cache.audit([*self.client.private(), *self.hogs])

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        ns, tokens = data.draw(st.sampled_from(self.asked))
        before = self.cache.stats()
        self.check_total(ns, tokens, len(tokens) - 1, self.cache.probe(ns, tokens).total)
        assert self.cache.stats() == before

    def teardown(self) -> None:
        """Everything ends, and the pool is whole again."""
        while self.client.queue:
            self.client.execute()
        self.client.plan()
        for run in list(self.client.runs):
            self.client.finish(run)
        self.cache.audit(self.hogs)
        held = sum(len(pages) for pages in self.hogs)
        self.client.plan()
        assert self.cache.n_free + self.cache.n_evictable + held == self.n_pages
        self.cache.clear()
        assert self.cache.n_free + held == self.n_pages
        assert not self.cache.tree.roots

    def prompt(self, data: st.DataObject) -> np.ndarray:
        """Something new, or a piece of what was asked before with something new after it."""
        new = data.draw(st.lists(st.integers(0, 2), max_size=3 * self.page_size + 2))
        old: list[int] = []
        if self.asked and data.draw(st.booleans()):
            _, tokens = data.draw(st.sampled_from(self.asked))
            old = tokens[: data.draw(st.integers(0, len(tokens)))].tolist()
        return np.array(old + new, np.int32)

    def check_total(self, ns: Namespace, tokens: np.ndarray, limit: int, total: int) -> None:
        best = self.known.best(ns, tokens, limit)
        assert total == best if self.exact else total <= best

    def untouched(self, run: Run) -> bool:
        """Nothing private, nothing adopted, nothing in flight beyond the lease."""
        return run.computed == run.lease.n_tokens and run.lease.leaf is None

    def add_pages(self, run: Run) -> None:
        self.known.add(run.lease.namespace, run.tokens[: run.lease.n_tokens])

    def note_evictions(self, before: int) -> None:
        self.exact &= self.cache.n_evicted == before


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize(("page_size", "n_pages"), [(1, 80), (4, 24), (4, 400), (16, 12), (16, 100)])
def test_any_sequence_of_operations_keeps_the_laws(page_size: int, n_pages: int) -> None:
    machine = type("Machine", (CacheMachine,), {"page_size": page_size, "n_pages": n_pages})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )
