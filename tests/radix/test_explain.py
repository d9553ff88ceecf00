"""Why the rest is not cached, and what a dashboard sees."""

from __future__ import annotations

import json
import tracemalloc
from hashlib import sha256

from radix import Namespace, PrefixCache
from radix.explain import Ghosts
from tests.radix.helpers import NS, Client, Hints, ids, seq


def client(n_pages: int = 32) -> Client:
    return Client(PrefixCache(n_pages, 4))


def test_all_that_can_be_reused_is_cached() -> None:
    c = client()
    c.serve(seq(10))
    why = c.cache.explain(NS, seq(11))
    assert (why.reason, why.matched) == ("cached", 10)
    assert str(why) == "all 10 reusable tokens are cached"


def test_never_seen() -> None:
    c = client()
    assert c.cache.explain(NS, seq(9)).reason == "never seen"
    c.serve(seq(8))
    c.serve(seq(8, 5000))
    why = c.cache.explain(NS, seq(20))
    assert (why.reason, why.matched) == ("never seen", 8)
    assert c.cache.explain(NS, ids(1, 2, 3, 4, 5)).reason == "never seen"


def test_diverges_names_both_tokens() -> None:
    c = client()
    c.serve(seq(20))
    for at in (1, 3, 4, 6, 8, 19):
        fork = seq(30)
        fork[at] = 7
        why = c.cache.explain(NS, fork)
        assert (why.reason, why.matched, why.cached_token, why.token) == ("diverges", at, 1000 + at, 7)
    assert str(c.cache.explain(NS, ids(1000, 7, 7))) == "diverges at token 1: cached 1001, got 7"


def test_evicted_whole_pages_and_tails() -> None:
    c = client()
    c.serve(seq(18))
    c.cache.evict(3)
    why = c.cache.explain(NS, seq(30))
    assert (why.reason, why.matched, why.n_lost) == ("evicted", 8, 10)
    c.cache.evict(9)
    why = c.cache.explain(NS, seq(12))
    assert (why.reason, why.matched, why.n_lost) == ("evicted", 0, 8)
    c.serve(seq(18))
    assert c.cache.explain(NS, seq(19)).reason == "cached"


def test_a_tail_that_a_longer_one_replaced_was_not_evicted() -> None:
    c = client()
    c.serve(ids(1, 2))
    c.serve(ids(1, 2, 3, 4, 5))
    assert c.cache.explain(NS, ids(1, 2, 9, 9)).reason == "diverges"


def test_another_namespace_has_more() -> None:
    c = client()
    other = Namespace(adapter=3)
    c.serve(seq(16), other)
    c.serve(seq(6))
    why = c.cache.explain(NS, seq(20))
    assert (why.reason, why.matched, why.n_lost, why.namespace) == ("other namespace", 6, 10, other)


def test_the_memory_of_the_evicted_is_bounded() -> None:
    c = client()
    c.cache.store.ghosts.size = 4
    for start in range(0, 400, 10):
        c.serve(seq(8, start))
        c.plan()
        c.cache.evict(2)
        assert len(c.cache.store.ghosts) < 8
    assert c.cache.explain(NS, seq(9, 390)).reason == "evicted"
    assert c.cache.explain(NS, seq(9, 0)).reason == "never seen"


def digest(i: int) -> bytes:
    return sha256(i.to_bytes(4)).digest()


def test_the_evicted_take_no_memory_as_they_come() -> None:
    tracemalloc.start()
    try:
        ghosts = Ghosts(1000)
        before, _ = tracemalloc.get_traced_memory()
        for i in range(4500):
            ghosts.add([digest(i)])
            assert digest(i) in ghosts
            assert digest(max(0, i - 999)) in ghosts
            if i % 100 == 0:
                assert tracemalloc.get_traced_memory()[0] < before + 2048
    finally:
        tracemalloc.stop()
    assert digest(0) not in ghosts
    assert 1000 <= len(ghosts) < 2000


def test_digests_that_begin_alike_or_with_nothing_are_told_apart() -> None:
    ghosts = Ghosts(8)
    alike = [bytes([3, *rest]) + bytes(24) for rest in ([0] * 7, [1] * 7, [0] * 6 + [9])]
    ghosts.add([*alike, alike[0]])
    assert len(ghosts) == 3
    assert all(one in ghosts for one in alike)
    assert bytes([3] * 32) not in ghosts
    ghosts.add([bytes(32)])
    assert bytes(32) in ghosts
    ghosts.clear()
    assert bytes(32) not in ghosts
    assert not len(ghosts)


def test_explain_changes_nothing() -> None:
    c = client()
    c.serve(seq(16))
    before = c.cache.stats(), c.cache.dump()
    c.cache.explain(NS, seq(30))
    c.cache.explain(Namespace(salt="x"), seq(30))
    assert (c.cache.stats(), c.cache.dump()) == before


def test_the_dump_is_plain_bounded_and_in_order() -> None:
    c = client(64)
    c.serve(seq(16))
    fork = seq(12)
    fork[8:] = 5
    c.serve(fork, hints=Hints("p", expect_return_s=9))
    run = c.start(seq(9))
    out = c.cache.dump()
    json.dumps(out)
    root, *nodes = out["nodes"]
    assert root["namespace"] == {"adapter": 0, "salt": "", "weights": 0, "media": ""}
    assert (nodes[0]["parent"], nodes[0]["n_tokens"], nodes[0]["pins"]) == (0, 8, 1)
    assert {n["parent"] for n in nodes[1:]} == {1}
    assert nodes[0]["first"] == list(range(1000, 1008))
    assert {n["last"][-1] for n in nodes[1:]} == {1015, 5}
    assert out["shown"] == 4
    assert c.cache.dump(max_nodes=2)["shown"] == 2
    assert c.cache.dump(max_nodes=2)["n_nodes"] == 3
    c.end(run)
