"""KV events: hashes name contents, chains are whole, and nothing but contents changes them."""

from __future__ import annotations

import numpy as np

from radix import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Namespace, PrefixCache
from tests.radix.helpers import NS, Client, seq


def client(n_pages: int = 32) -> tuple[Client, list[KvEvent]]:
    got: list[KvEvent] = []
    c = Client(PrefixCache(n_pages, 4, events=got.extend))
    return c, got


def taken(c: Client, got: list[KvEvent]) -> list[KvEvent]:
    c.cache.flush_events()
    out = list(got)
    got.clear()
    return out


def test_the_stream_begins_with_a_clear() -> None:
    c, got = client()
    assert taken(c, got) == [AllBlocksCleared()]


def test_stores_of_one_chain_are_one_event() -> None:
    c, got = client()
    taken(c, got)
    run = c.start(seq(18))
    for upto in (6, 12, 18):
        c.prefill(run, upto)
    (event,) = taken(c, got)
    assert isinstance(event, BlockStored)
    assert event.parent_block_hash is None
    assert len(event.block_hashes) == len(set(event.block_hashes)) == 4
    assert event.token_ids == tuple(range(1000, 1016))
    assert all(-(2**63) <= h < 2**63 for h in event.block_hashes)


def test_a_branch_names_its_parent_and_splits_say_nothing() -> None:
    c, got = client()
    c.serve(seq(16))
    (_, first) = taken(c, got)
    assert isinstance(first, BlockStored)
    fork = seq(16)
    fork[10:] = 7
    c.serve(fork)
    (second,) = taken(c, got)
    assert isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[1]
    assert len(second.block_hashes) == 2
    assert c.cache.tree.n_nodes == 3


def test_an_adopted_tail_is_told_when_it_is_full() -> None:
    c, got = client()
    c.serve(seq(6))
    taken(c, got)
    c.serve(seq(17))
    (event,) = taken(c, got)
    assert isinstance(event, BlockStored)
    assert event.token_ids == tuple(range(1004, 1016))


def test_hashes_depend_on_contents_and_namespace_alone() -> None:
    hashes = []
    for cuts in ((16,), (5, 9, 16), (1, 2, 3, 16)):
        c, got = client()
        for cut in cuts:
            c.serve(seq(cut))
        stored = [e for e in taken(c, got) if isinstance(e, BlockStored)]
        hashes.append([h for event in stored for h in event.block_hashes])
    assert hashes[0] == hashes[1] == hashes[2]
    c, got = client()
    c.serve(seq(16), Namespace(salt="other"))
    (_, event) = taken(c, got)
    assert isinstance(event, BlockStored)
    assert not set(event.block_hashes) & set(hashes[0])
    assert event.namespace.salt == "other"


def test_removals_come_from_the_tail_up() -> None:
    c, got = client()
    c.serve(seq(16))
    (_, stored) = taken(c, got)
    assert isinstance(stored, BlockStored)
    c.cache.evict(1)
    c.cache.evict(2)
    assert taken(c, got) == [BlockRemoved(stored.block_hashes[:0:-1])]


def test_a_flush_of_everything_is_one_event_and_the_same_hashes_come_back() -> None:
    c, got = client()
    c.serve(seq(16))
    before = taken(c, got)[1:]
    c.cache.clear()
    assert taken(c, got) == [AllBlocksCleared()]
    c.serve(seq(16))
    assert taken(c, got) == before


def test_a_flush_that_leaves_something_names_what_went() -> None:
    c, got = client()
    c.serve(seq(16))
    c.start(seq(9))
    (_, stored) = taken(c, got)
    assert isinstance(stored, BlockStored)
    c.cache.clear()
    assert taken(c, got) == [BlockRemoved(stored.block_hashes[:1:-1])]


def test_withdrawn_pages_are_removed() -> None:
    c, got = client()
    taken(c, got)
    c.prefill(c.start(seq(8)))
    c.fail()
    stored, removed = taken(c, got)
    assert isinstance(stored, BlockStored)
    assert removed == BlockRemoved(stored.block_hashes[::-1])


def test_probing_tells_nothing() -> None:
    c, got = client()
    c.serve(seq(16))
    taken(c, got)
    c.cache.probe(NS, seq(16))
    c.cache.explain(NS, np.append(seq(16), seq(4)))
    assert taken(c, got) == []
