"""A page that is still being filled can be matched already: siblings of one step share to the token."""

from __future__ import annotations

import numpy as np

from radix import PrefixCache
from tests.radix.helpers import NS, Client, ids, seq


def client(n_pages: int = 32, page_size: int = 4) -> Client:
    return Client(PrefixCache(n_pages, page_size))


def test_a_twin_of_the_same_step_copies_the_page_that_is_being_filled() -> None:
    c = client()
    first = c.start(seq(7))
    assert c.prefill(first, show=True)
    twin = c.start(np.append(seq(7), ids(1, 2)))
    assert (twin.lease.n_tokens, twin.lease.tail.n, twin.lease.tail.adopted) == (4, 3, False)  # type: ignore[union-attr]
    assert c.prefill(twin, show=True)
    third = c.start(np.append(seq(7), ids(1, 9)))  # its source is the copy that the twin has just planned
    assert third.computed == 8
    assert c.prefill(third)
    for run in (first, twin, third):
        c.end(run)  # every step read the right tokens
    c.audit()


def test_who_shows_a_page_goes_on_in_it_until_it_is_full() -> None:
    c = client()
    run = c.start(seq(6))
    assert c.prefill(run, show=True)
    page = int(run.pages[1])
    for n in (7, 8, 9):
        c.plan()
        run.tokens = seq(n)
        assert c.prefill(run, show=True)
        assert c.cache.probe(NS, seq(20)).total == n
    assert int(run.lease.pages[1]) == page
    c.end(run)
    c.audit()


def test_a_page_shown_by_a_failed_step_is_withdrawn() -> None:
    c = client()
    first = c.start(seq(7))
    assert c.prefill(first, show=True)
    twin = c.start(seq(9))
    assert c.prefill(twin)
    c.fail()
    assert not c.runs
    assert c.check_match(seq(9)) == 0
    c.audit()


def test_a_longer_sibling_outlives_a_page_that_was_shown() -> None:
    c = client()
    short, long = c.start(seq(6)), None
    assert c.prefill(short, show=True)
    long = c.start(seq(7))
    assert c.prefill(long, show=True)
    c.end(short)
    c.plan()
    assert c.cache.tree.n_nodes == 2  # the whole page, and the longer tail
    c.end(long)
    assert c.check_match(seq(20)) == 7
    c.audit()
