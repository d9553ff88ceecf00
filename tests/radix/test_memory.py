"""What has left the cache leaves the process too."""

from __future__ import annotations

import gc

from radix import PrefixCache
from radix.lease import Lease
from radix.tree import Node
from tests.radix.helpers import Client, seq


def n_alive(kind: type) -> int:
    gc.collect()
    return sum(type(one) is kind for one in gc.get_objects())


def test_neither_leases_nor_evicted_nodes_outlive_their_requests() -> None:
    c = Client(PrefixCache(16, 4))
    leases, nodes = n_alive(Lease), n_alive(Node)
    for i in range(200):  # each copies the beginning of its last page from the one before it
        prompt = seq(12)
        prompt[10:] = 5000 + i
        c.serve(prompt)
        c.plan()
    assert n_alive(Lease) == leases
    assert n_alive(Node) <= nodes + c.cache.tree.n_pages
    assert c.cache.stats()["evicted"]
