"""The cache's behaviour, example by example."""

from __future__ import annotations

import numpy as np
import pytest

from radix import COMMITTED, LeaseError, Namespace, PageError, PrefixCache
from tests.radix.helpers import NS, Client, ids, seq


def client(n_pages: int = 32, page_size: int = 4) -> Client:
    return Client(PrefixCache(n_pages, page_size))


# -- matching ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 9, 15, 16, 17, 32, 33])
def test_a_prompt_sent_twice_is_cached_up_to_its_last_token(page_size: int, n: int) -> None:
    c = client(200, page_size)
    assert c.serve(seq(n)) == 0
    assert c.serve(seq(n)) == n - 1
    assert c.serve(seq(n + 1)) == n


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_divergence_is_matched_to_the_token(page_size: int) -> None:
    c = client(200, page_size)
    c.serve(seq(40))
    for at in range(40):
        fork = seq(40)
        fork[at] = 7
        assert c.check_match(fork) == at


def test_best_sibling_wins_inside_a_page() -> None:
    c = client()
    for last in (ids(1, 2, 3, 4), ids(1, 9, 9, 9), ids(1, 2, 8)):
        c.serve(last)
    assert c.check_match(ids(1, 2, 3, 5, 0)) == 3
    assert c.check_match(ids(1, 2, 8, 8, 0)) == 3
    assert c.check_match(ids(1, 9, 0)) == 2
    assert c.check_match(ids(5, 9, 0)) == 0


def test_empty_and_tiny_prompts_match_nothing() -> None:
    c = client()
    c.serve(seq(10))
    assert c.cache.probe(NS, ids()).total == 0
    assert c.cache.probe(NS, seq(1)).total == 0
    lease = c.cache.acquire(NS, ids())
    assert (lease.n_tokens, lease.pages.tolist(), lease.tail) == (0, [], None)
    c.cache.finish(lease, ids(), ids(), 0)
    c.audit()


def test_limit_bounds_the_match() -> None:
    c = client()
    c.serve(seq(20))
    for limit in range(25):
        assert c.check_match(seq(20), limit=limit) == min(limit, 20)


def test_probe_changes_nothing() -> None:
    c = client()
    c.serve(seq(19))
    before = c.cache.stats()
    c.cache.probe(NS, seq(10))
    c.cache.probe(Namespace(salt="nobody"), seq(10))
    assert c.cache.stats() == before


def test_namespaces_share_nothing_whatever_their_spelling() -> None:
    c = client(100)
    c.serve(seq(12), Namespace(salt="a", media="b"))
    for other in (Namespace(), Namespace(salt="ab"), Namespace(media="ab"), Namespace(1, "a", 0, "b")):
        assert c.serve(seq(12), other) == 0
    assert c.serve(seq(12), Namespace(salt="a", media="b")) == 11


# -- tails ---------------------------------------------------------------------------------------------------------


def test_a_leaf_that_the_next_turn_continues_is_adopted_not_copied() -> None:
    c = client()
    c.serve(seq(6))
    run = c.start(seq(9))
    assert run.lease.tail is not None
    assert run.lease.tail.adopted
    assert run.computed == 6
    assert c.check_match(seq(9)) == 6  # still everyone's to copy from
    c.prefill(run, 7)
    c.audit()
    c.end(run)
    c.audit()
    assert c.check_match(seq(9)) == 7
    assert c.cache.tree.n_pages == 2


def test_one_appender_a_leaf() -> None:
    c = client()
    c.serve(seq(6))
    first, second = c.start(seq(9)), c.start(seq(9))
    assert first.lease.tail is not None
    assert second.lease.tail is not None
    assert (first.lease.tail.adopted, second.lease.tail.adopted) == (True, False)
    assert (first.computed, second.computed) == (6, 6)
    c.audit()
    for run in (first, second):
        c.prefill(run)
    assert first.pages[1] == second.pages[1]  # the second was remapped to the leaf that the first filled
    for run in (first, second):
        c.drain()
        c.end(run)
        c.audit()


def test_a_leaf_matched_in_part_is_copied() -> None:
    c = client()
    c.serve(ids(1, 2, 3, 4, 5, 6))
    run = c.start(ids(1, 2, 3, 4, 5, 9, 9))
    assert run.lease.tail is not None
    assert not run.lease.tail.adopted
    assert run.computed == 5


def test_an_adopted_tail_that_fills_becomes_a_normal_child() -> None:
    c = client()
    c.serve(seq(6))
    leaf_page = c.cache.probe(NS, seq(7)).tail[0]  # type: ignore[index]
    run = c.start(seq(13))
    c.prefill(run, 10)
    c.audit()
    assert run.lease.n_tokens == 8
    assert run.pages[1] == leaf_page
    assert run.lease.leaf is None
    assert c.check_match(seq(9)) == 8
    c.prefill(run)
    c.end(run)
    c.audit()
    assert c.check_match(seq(14)) == 13


def test_a_longer_tail_replaces_a_shorter_one() -> None:
    c = client()
    c.serve(ids(1, 2))
    c.serve(ids(1, 2, 3, 4)[:3])
    assert c.cache.tree.n_pages == 1
    c.serve(ids(1, 2, 3, 4, 5))
    assert c.check_match(ids(1, 2, 3, 4, 5, 6)) == 5
    c.serve(ids(1, 2))
    assert c.cache.tree.n_pages == 2  # [1 2 3 4] and [5]


def test_two_requests_that_end_with_the_same_tail_leave_it_once() -> None:
    c = client()
    c.serve(ids(1))
    appender, copier = c.start(ids(1, 2, 3)), c.start(ids(1, 2, 3))
    for run in (appender, copier):
        c.prefill(run)
    c.end(copier)
    c.end(appender)
    c.audit()
    c.plan()
    assert c.check_match(ids(1, 2, 3, 4)) == 3
    assert (c.cache.tree.n_pages, c.cache.n_free) == (1, 31)


def test_a_shorter_tail_that_someone_holds_stays() -> None:
    c = client()
    c.serve(ids(1, 2))
    holder = c.start(ids(1, 2, 9))
    other = c.start(ids(1, 2, 3, 4, 5))
    c.prefill(other)
    c.end(other)
    c.audit()
    c.prefill(holder)
    c.end(holder)
    c.audit()
    assert c.check_match(ids(1, 2, 9, 9)) == 3
    assert c.check_match(ids(1, 2, 3, 4, 5, 9)) == 5


def test_a_tail_source_is_pinned_until_the_next_plan() -> None:
    c = client(n_pages=2)
    c.serve(ids(1, 2, 3))
    c.start(ids(1, 2, 9))  # copies two tokens, so both pages are held
    assert c.cache.n_evictable == 0
    assert c.cache.alloc(1) is None
    c.audit()
    c.plan()
    assert c.cache.n_evictable == 1
    assert c.cache.alloc(1) is not None


def test_page_size_one_has_no_tails() -> None:
    c = client(100, 1)
    c.serve(seq(7))
    run = c.start(np.append(seq(5), ids(1, 2)))
    assert (run.lease.n_tokens, run.lease.tail) == (5, None)


# -- publishing ----------------------------------------------------------------------------------------------------


def test_a_planned_prefix_is_visible_at_once() -> None:
    c = client()
    leader, follower = c.start(seq(20)), c.start(seq(20))
    c.prefill(leader, 12)
    assert c.cache.advance(follower.lease, follower.tokens) == 12
    assert follower.lease.pages.tolist() == leader.pages[:3].tolist()
    c.audit()


def test_the_loser_of_a_race_is_remapped_and_its_pages_quarantined() -> None:
    c = client()
    a, b = c.start(seq(17)), c.start(seq(17))
    for run in (a, b):
        c.prefill(run, publish=False)
    own = b.pages.copy()
    for run in (a, b):
        c.cache.publish(run.lease, run.tokens, run.pages, 17, c.step)
        c.audit()
    assert b.pages[:4].tolist() == a.pages[:4].tolist()
    assert b.pages[4] == own[4]
    assert c.cache.pool.n_quarantined == 4
    grabbed = c.cache.alloc(c.cache.n_free)
    assert grabbed is not None
    assert not set(grabbed.tolist()) & set(own[:4].tolist())
    free = c.cache.n_free
    c.plan()
    assert c.cache.n_free == free + 4
    c.drain()


def test_publish_continues_past_a_known_part() -> None:
    c = client()
    c.serve(seq(8))
    run = c.start(seq(20), limit=0)
    c.prefill(run)
    c.drain()
    assert run.lease.n_tokens == 20
    assert c.cache.tree.n_pages == 5
    c.audit()


def test_growing_an_edge_keeps_one_node_until_others_hold_it() -> None:
    c = client()
    run = c.start(seq(20))
    for upto in (4, 8, 11, 12):
        c.prefill(run, upto)
    assert c.cache.tree.n_nodes == 1
    other = c.start(seq(20))
    c.prefill(run, 16)
    assert c.cache.tree.n_nodes == 2
    assert other.lease.n_tokens == 12
    c.audit()


def test_a_pinned_node_can_be_split() -> None:
    c = client()
    long = c.start(seq(20))
    c.prefill(long)
    short = c.start(seq(9))
    assert short.lease.n_tokens == 8
    c.audit()
    c.end(long)
    c.audit()
    assert c.cache.tree.n_pinned == 2
    c.end(short)
    assert c.cache.tree.n_pinned == 0
    c.audit()


# -- endings -------------------------------------------------------------------------------------------------------


def test_a_lease_is_released_once() -> None:
    c = client()
    run = c.start(seq(5))
    c.end(run)
    with pytest.raises(LeaseError):
        c.cache.finish(run.lease, run.tokens, run.pages, 0)
    with pytest.raises(LeaseError):
        c.cache.publish(run.lease, run.tokens, run.pages, 4, 1)
    with pytest.raises(LeaseError):
        c.cache.advance(run.lease, run.tokens)


def test_finish_without_keep_adds_nothing() -> None:
    c = client()
    run = c.start(seq(10))
    c.prefill(run, publish=False)
    c.drain()
    c.finish(run, keep=False)
    assert c.cache.n_free == 32
    assert c.cache.stats()["namespaces"] == 0
    c.serve(seq(6))
    run = c.start(seq(9))
    c.prefill(run, 7)
    c.finish(run, keep=False)
    c.audit()
    assert c.check_match(seq(9)) == 6  # the adopted leaf as it was


def test_foreign_pages_are_refused() -> None:
    c = client()
    c.serve(seq(8))
    lease = c.cache.acquire(NS, seq(3))
    with pytest.raises(PageError, match="belongs to TREE"):
        c.cache.finish(lease, seq(3), c.cache.acquire(NS, seq(9)).pages, 0)


# -- failed steps --------------------------------------------------------------------------------------------------


def test_withdraw_removes_what_a_failed_step_was_to_write() -> None:
    c = client()
    run = c.start(seq(20))
    c.prefill(run, 8)
    good = c.step
    failed = c.plan()
    c.prefill(run, 16)
    other = c.start(seq(20))  # matched pages of the failed step
    with pytest.raises(LeaseError):
        c.cache.withdraw(failed)
    c.runs.clear()
    c.cache.finish(other.lease, other.tokens, other.pages, other.lease.n_tokens)
    c.cache.finish(run.lease, run.tokens, run.pages, 8)
    assert c.cache.withdraw(failed) == 2
    c.audit()
    assert c.check_match(seq(20)) == 8
    assert c.cache.withdraw(good) == 2
    c.audit()
    assert c.check_match(seq(20)) == 0
    c.plan()
    assert c.cache.n_free == 32


def test_withdraw_takes_what_hangs_below_too() -> None:
    c = client()
    run = c.start(seq(8))
    c.prefill(run)
    c.serve(seq(15))  # plans again, ends committed, below the pages of step 1
    c.end(run)
    c.cache.withdraw(1)
    c.audit()
    assert c.check_match(seq(15)) == 0


def test_committed_pages_are_never_withdrawn() -> None:
    c = client()
    run = c.start(seq(11))
    c.prefill(run, publish=False)
    c.end(run)
    assert c.cache.withdraw(COMMITTED + 1) == 0
    assert c.check_match(seq(12)) == 11


# -- eviction ------------------------------------------------------------------------------------------------------


def test_eviction_trims_tails_of_the_coldest_leaf() -> None:
    c = client(n_pages=10)
    c.serve(seq(16))
    c.serve(seq(16, start=5000))
    assert c.cache.evict(1) == 1
    assert c.check_match(seq(16)) == 12
    assert c.check_match(seq(16, start=5000)) == 16 - 1
    assert c.cache.evict(5) == 5
    c.audit()
    assert c.check_match(seq(16)) == 0
    assert c.check_match(seq(16, start=5000)) == 8


def test_a_hit_makes_hot() -> None:
    c = client(n_pages=10)
    c.serve(seq(16))
    c.serve(seq(16, start=5000))
    c.serve(seq(16))
    c.plan()
    c.cache.evict(2)
    assert c.check_match(seq(16)) == 15
    assert c.check_match(seq(16, start=5000)) == 8


def test_alloc_evicts_or_changes_nothing() -> None:
    c = client(n_pages=8)
    c.serve(seq(16))
    run = c.start(seq(9))
    assert run.lease.n_tokens == 8
    before = c.cache.stats()
    assert c.cache.alloc(7) is None
    assert c.cache.stats() == before
    pages = c.cache.alloc(6)
    assert pages is not None
    assert len(set(pages.tolist())) == 6
    assert c.check_match(seq(16)) == 8


def test_the_heap_does_not_grow_without_eviction() -> None:
    c = client(n_pages=64)
    for _ in range(400):
        c.serve(seq(6))
        c.serve(seq(7))
    assert len(c.cache.heap) < 200


def test_clear_forgets_all_but_what_is_held() -> None:
    c = client()
    c.serve(seq(16))
    c.serve(seq(30, start=5000))
    run = c.start(seq(16))
    c.cache.clear()
    c.audit()
    assert c.check_match(seq(16)) == 12
    assert c.check_match(seq(30, start=5000)) == 0
    c.end(run)
    c.cache.clear()
    assert c.cache.n_free == 32
    c.audit()


def test_a_disabled_cache_only_hands_out_pages() -> None:
    c = Client(PrefixCache(16, 4, enabled=False))
    assert c.serve(seq(10)) == 0
    assert c.serve(seq(10)) == 0
    assert c.cache.n_free == 16
