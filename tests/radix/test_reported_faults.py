"""Faults that users of runtimes like this one reported, each as its smallest input."""

from __future__ import annotations

import numpy as np
import pytest

from radix import PrefixCache
from radix.evict import Lru
from radix.tree import Node
from tests.radix.helpers import NS, Client, seq


def client(n_pages: int, page_size: int) -> Client:
    return Client(PrefixCache(n_pages, page_size))


@pytest.mark.parametrize("n", [63, 64, 65, 128, 129])
def test_lengths_around_a_page_border_read_only_their_own_tokens(n: int) -> None:
    c = client(40, 64)
    c.serve(seq(64))
    c.plan()
    warm, cold = c.start(seq(n)), c.start(seq(70, start=9000))  # in one step
    assert warm.computed == min(n - 1, 64)
    for run in (warm, cold):
        c.prefill(run)
    c.drain()  # every row reads its whole context, slot by slot
    for run in (warm, cold):
        c.finish(run)
        c.audit()


def test_two_cold_copies_of_one_prompt_share_pages_and_a_third_takes_only_free_ones() -> None:
    c = client(64, 16)
    a, b = c.start(seq(200)), c.start(seq(200))
    for upto in (64, 128, 192, 200):
        for run in (a, b):
            c.prefill(run, upto)
        c.plan()
        c.audit()
    assert a.pages[:12].tolist() == b.pages[:12].tolist()
    grabber = c.start(seq(500, start=5000))
    c.prefill(grabber)
    c.drain()
    for run in (a, b, grabber):
        c.finish(run)
    c.audit()
    assert c.cache.n_free + c.cache.n_evictable + c.cache.pool.n_quarantined == 64


def test_pages_computed_twice_are_remapped_before_they_are_freed() -> None:
    c = client(64, 16)
    a, b = c.start(seq(200)), c.start(seq(200))
    for run in (a, b):
        c.prefill(run, publish=False)
    c.plan()
    for run in (a, b):
        c.cache.publish(run.lease, run.tokens, run.pages, 200, c.step)
    grabbed = c.cache.alloc(c.cache.n_free)
    assert grabbed is not None
    assert not set(grabbed.tolist()) & set(a.pages.tolist() + b.pages.tolist())
    c.prefill(a)
    c.prefill(b)
    c.drain()


class CountingLru(Lru):
    calls = 0

    def score(self, node: Node, now: float) -> tuple[float]:
        type(self).calls += 1
        return (node.last_used,)


def evict_and_insert(n_leaves: int) -> int:
    """How many leaves are scored when a full cache turns over 64 pages, 20 times."""
    c = Client(PrefixCache(2 * n_leaves, 4, policy=CountingLru()))
    for i in range(n_leaves):
        c.plan()
        lease = c.cache.acquire(NS, seq(8, start=8 * i))
        pages = c.cache.alloc(2)
        assert pages is not None
        c.cache.finish(lease, seq(8, start=8 * i), pages, 8)
    CountingLru.calls = 0
    for i in range(20):
        c.cache.evict(64)
        tokens = seq(256, start=1_000_000 + 1000 * i)
        lease, pages = c.cache.acquire(NS, tokens), c.cache.alloc(64)
        assert pages is not None
        c.cache.finish(lease, tokens, pages, 256)
    return CountingLru.calls


def test_eviction_work_does_not_grow_with_the_number_of_leaves() -> None:
    few, many = evict_and_insert(800), evict_and_insert(8000)
    assert many <= few * 1.1


def test_an_unaligned_end_is_never_a_node() -> None:
    c = client(16, 16)
    c.serve(seq(10))
    assert [n.n_tokens for n in c.cache.tree.nodes()] == [10]
    assert c.cache.tree.is_tail(next(c.cache.tree.nodes()))
    assert c.check_match(np.append(seq(9), seq(5))) == 9


def test_key_shorter_than_the_cached_page_makes_no_empty_node() -> None:
    c = client(8, 64)
    c.serve(seq(64))
    run = c.start(seq(63), limit=63)
    assert run.lease.n_tokens == 0
    assert run.computed == 63
    c.audit()
    c.end(run)
    c.plan()
    c.cache.evict(8)
    c.audit()
    assert c.cache.n_free == 8


def test_split_under_a_lock_keeps_the_evictable_count() -> None:
    c = client(8, 1)
    c.serve(seq(8))
    run = c.start(seq(5), limit=4)
    assert (c.cache.n_evictable, c.cache.tree.n_pinned) == (4, 4)
    c.end(run)
    assert c.cache.n_evictable == 8
    assert c.cache.evict(4) == 4
    c.audit()
    assert c.check_match(seq(9)) == 4
