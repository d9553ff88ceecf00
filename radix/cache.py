"""PrefixCache: what the runtime calls. It joins the tree, the page pool, leases and eviction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from radix.audit import audit
from radix.dump import dump
from radix.events import EventSink
from radix.evict import EvictionPolicy, Floors
from radix.explain import Explanation, explain
from radix.hints import HintsLike, note
from radix.lease import Lease, LeaseError, Match, Tail
from radix.pages import REQUEST, TREE, Ids
from radix.rhythm import Rhythm
from radix.store import COMMITTED, PageStore
from radix.tails import Tails
from radix.tree import NO_PAGES, TOKEN_BYTES, Namespace, Node, Spot
from radix.withdraw import first_late

MAX_EXPECTING = 1024


class PrefixCache:
    """The prefix cache of one KV pool. Single-threaded: the scheduler's thread owns it.

    A request's life: `acquire` a lease on what is cached, `alloc` pages for the rest, `publish` whole pages when
    they are planned, `finish` once. `begin_plan` opens each plan; acquire, advance, alloc and publish belong
    between it and the launch, finish also between plans.
    """

    def __init__(
        self,
        n_pages: int,
        page_size: int,
        *,
        policy: str | EvictionPolicy = "lru",
        floors: Floors | None = None,
        enabled: bool = True,
        events: EventSink | None = None,
    ) -> None:
        """`policy`: lru, lfu, slru, priority, hints, or one of your own. `floors`: pages that a namespace keeps
        as long as others have pages to give, a mapping or a function. `enabled`: False shares nothing, to compare
        with. `events`: is told of stored and removed pages whenever `flush_events` is called, and as a plan begins.
        """
        self.store = PageStore(n_pages, page_size, policy, floors, events)
        self.pool, self.tree, self.heap = self.store.pool, self.store.tree, self.store.heap
        self.tails = Tails(self.store)
        self.page_size = page_size
        self.enabled = enabled
        self.now = 0.0
        self.rhythm = Rhythm() if "expect_return_s" in self.heap.policy.honours else None
        self.leases: set[Lease] = set()
        self.expecting: dict[Node, float] = {}  # ends that others will continue from, and since when
        self.sources: list[Node] = []  # tail sources of the current plan, pinned

    # -- plans -------------------------------------------------------------------------------------------------

    def begin_plan(self, step: int, now: float) -> None:
        """Open plan `step` at time `now` (seconds, any monotonic clock).

        Pages quarantined by earlier plans become free and their tail sources are unpinned: the device runs
        plans in order, so whatever this plan does to a page comes after all that they do.
        """
        self.now = now
        self.heap.tick(now)
        self.pool.release_quarantine()
        self._drop_sources()
        self.flush_events()

    # -- matching ----------------------------------------------------------------------------------------------

    def probe(self, ns: Namespace, tokens: Ids, limit: int | None = None) -> Match:
        """What `acquire` would find, at most `limit` tokens (default: all but the last). Changes nothing."""
        root = self.tree.roots.get(ns)
        if root is None or not self.enabled:
            return Match(0, 0, None)
        spot = self.tree.locate(root, _key(tokens, 0, limit))
        n_tokens = spot.n_bytes // TOKEN_BYTES
        tail = (spot.page, spot.r) if spot.r else None
        return Match(n_tokens, n_tokens // self.page_size, tail, self.tree.n_loose(spot))

    def peek(self, ns: Namespace, tokens: Ids, limit: int | None = None) -> Ids:
        """The whole pages that `acquire` would lease, int32. Changes nothing."""
        root = self.tree.roots.get(ns)
        if root is None or not self.enabled:
            return NO_PAGES
        spot = self.tree.locate(root, _key(tokens, 0, limit))
        return self.tree.path(spot.node)[: spot.n_bytes // TOKEN_BYTES // self.page_size]

    def acquire(
        self,
        ns: Namespace,
        tokens: Ids,
        limit: int | None = None,
        *,
        tail: bool = True,
        hints: HintsLike | None = None,
    ) -> Lease:
        """Lease the longest cached prefix of `tokens`, at most `limit` tokens (default: all but the last).

        `tail`: False takes whole pages only, and so holds nothing beside them.
        """
        root = self.tree.root(ns)
        program = hints.program_id if hints is not None else None
        lease = Lease(self.tree, root, program)
        if self.rhythm is not None and program is not None:
            self.rhythm.came(program, self.now)
        self.tree.pin(root, None, self.now)
        self.leases.add(lease)
        if self.enabled:
            self._descend(lease, _key(tokens, 0, limit), tail)
        return lease

    def advance(self, lease: Lease, tokens: Ids, limit: int | None = None, *, tail: bool = True) -> int:
        """Match further down: others may have published since. Returns the new `lease.n_tokens`.

        For a request with nothing of its own after the leased pages: a tail found earlier is given up (an
        adopted leaf stays in the tree as it was) and looked for again.
        """
        lease.check()
        self.tails.disown(lease)
        lease.tail = None
        if self.enabled:
            self._descend(lease, _key(tokens, lease.n_tokens, limit), tail)
        return lease.n_tokens

    def _descend(self, lease: Lease, data: bytes, tail: bool) -> None:
        """Move the lease down to where `data` leads, and take the tail there if wanted."""
        spot = self.tree.locate(lease.node, data)
        self._move(lease, self._border(spot), spot.n_bytes // TOKEN_BYTES, hit=True)
        if spot.source is None or not tail:
            return
        leaf = spot.source
        leaf.awaited = max(0, leaf.awaited - 1)
        adopted = leaf.appender is None and leaf.n_tokens == spot.r and self.tree.is_tail(leaf)
        if adopted:
            leaf.appender, lease.leaf = lease, leaf
            self.tree.pin(leaf, lease.node, self.now, lease.program, hit=True)
        else:
            lease.source = leaf
            self.sources.append(leaf)
            self.tree.pin(leaf, None, self.now)
        lease.tail = Tail(spot.page, spot.r, adopted)

    def forgo_tail(self, lease: Lease) -> None:
        """Do without the tail that this plan's acquire or advance found, whose copy has not been planned.

        Holding its source holds the whole path there, which may be more than the copy saves.
        """
        if lease.tail is None:
            return
        if lease.tail.adopted:
            self.tails.disown(lease)
        elif lease.source in self.sources:
            self.sources.remove(lease.source)
            self.tree.unpin(lease.source, None)
            self.tails.let_go(lease.source)
        lease.tail = lease.source = None

    def _border(self, spot: Spot) -> Node:
        """The node that ends exactly where the walk did, splitting when it ended inside an edge."""
        if spot.n_edge == spot.node.n_pages:
            return spot.node
        return self.tree.split(spot.node, spot.n_edge)

    def _move(self, lease: Lease, node: Node, n_tokens: int, hit: bool = False) -> None:
        self.tree.pin(node, lease.node, self.now, lease.program, hit)
        lease.node = node
        lease.n_tokens += n_tokens

    # -- pages -------------------------------------------------------------------------------------------------

    @property
    def n_free(self) -> int:
        """Pages that can be given out at once."""
        return self.pool.n_free

    @property
    def n_evictable(self) -> int:
        """Pages that eviction can free: those of the tree that no lease or tail copy holds."""
        return self.store.n_evictable

    def n_expected(self, within_s: float) -> int:
        """Evictable pages on the way to ends that were left within the last `within_s` seconds for others to go on
        from: whoever takes them now has them computed again."""
        seen: set[Node] = set()
        for end, since in list(self.expecting.items()):
            if not end.awaited or end.pins or not end.n_pages or self.now - since > within_s:
                del self.expecting[end]
                continue
            node: Node | None = end
            while node is not None and not node.pins and node not in seen:
                seen.add(node)
                node = node.parent
        return sum(node.n_pages for node in seen)

    @property
    def n_evicted(self) -> int:
        """Pages evicted since the start."""
        return self.store.evicted.total()

    def alloc(self, n: int) -> Ids | None:
        """`n` pages for a request, int32 [n], evicting as needed; None, with nothing changed, if impossible."""
        return self.store.alloc(n)

    def evict(self, n: int) -> int:
        """Free up to `n` cached pages, from the tails of the coldest unpinned leaves. Returns how many."""
        return self.store.evict(n)

    # -- giving to the tree ------------------------------------------------------------------------------------

    def publish(self, lease: Lease, tokens: Ids, pages: Ids, upto: int, step: int) -> int:
        """Give the whole pages that cover [lease.n_tokens, upto) to the tree, as written by `step`.

        `pages` is the request's page table, int32, one page for every page_size tokens. Where the tree already
        has a page of the same tokens, the entry is rewritten to the tree's page and the request's own goes to
        quarantine. The lease moves down; returns its new n_tokens. Call `advance` before planning tokens that
        others may have published, or they are computed twice, and the same values written to the tree's page.
        """
        lease.check()
        end = min(upto, len(tokens)) // self.page_size * self.page_size
        if not self.enabled or end <= lease.n_tokens:
            return lease.n_tokens
        data = _key(tokens, lease.n_tokens, end)
        own = pages[lease.n_tokens // self.page_size : end // self.page_size]
        if len(own) * self.tree.page_bytes != len(data):
            raise LeaseError(f"{end} tokens published with only {len(pages)} pages")
        spot = self.tree.locate(lease.node, data)
        known = spot.n_bytes // self.tree.page_bytes
        if known:
            self._remap(lease, spot, own[:known])
        if known < len(own):
            self._insert(lease, data[spot.n_bytes :], own[known:], step)
        return lease.n_tokens

    def show_tail(self, lease: Lease, tokens: Ids, pages: Ids, upto: int, step: int) -> None:
        """Let others match the tokens up to `upto` beyond the published whole pages, as written by `step`.

        The request goes on in that page as in an adopted tail; others copy from it, in this very plan if they
        like. Only for tokens that will never be taken back.
        """
        lease.check()
        if self.enabled and lease.n_tokens < upto < lease.n_tokens + self.page_size:
            self.tails.show(lease, _key(tokens, lease.n_tokens, upto), pages, step, self.now)

    def _remap(self, lease: Lease, spot: Spot, own: Ids) -> None:
        """The tree has these pages: point the request's table at them and retire its own."""
        node = self._border(spot)
        theirs = self.tree.path(node, lease.node)
        mine = own.copy()
        own[:] = theirs
        if lease.leaf is not None:  # the adopted page is among them; a sibling has all of it now
            self.tails.disown(lease)
            mine = mine[1:]
        self._move(lease, node, spot.n_bytes // TOKEN_BYTES)
        self.pool.quarantine(mine, REQUEST)

    def _insert(self, lease: Lease, data: bytes, new: Ids, step: int) -> None:
        """Hang pages that the tree does not have below the lease's node, and move the lease onto them."""
        n_new = len(new)
        self.store.page_step[new] = step
        if lease.leaf is not None:
            if int(new[0]) != int(lease.leaf.pages[0]):
                raise LeaseError(f"page {int(new[0])} stands where the adopted page {int(lease.leaf.pages[0])} must")
            self.tails.fill(lease, data[: self.tree.page_bytes])
            data, new = data[self.tree.page_bytes :], new[1:]
        if len(new):
            self.pool.move(new, REQUEST, TREE)
            self._grow(lease, data, new)
        self.heap.unpark(lease.namespace)
        if self.store.log is not None:
            self.store.log.stored(lease.node, n_new)

    def _grow(self, lease: Lease, data: bytes, new: Ids) -> None:
        """Lengthen the edge at the lease's end if it is this request's alone, else hang a new one there."""
        node = lease.node
        if node.pins == 1 and not node.children and node.program == lease.program:
            self.tree.extend(node, data, new)
            lease.n_tokens += len(data) // TOKEN_BYTES
        else:
            child = self.tree.attach(node, data, new)
            self._move(lease, child, child.n_tokens)
            self.store.drop_shorter_tail(child)

    # -- endings -----------------------------------------------------------------------------------------------

    def finish(
        self,
        lease: Lease,
        tokens: Ids,
        pages: Ids,
        n_tokens: int,
        keep: bool = True,
        *,
        hints: HintsLike | None = None,
    ) -> None:
        """The one ending of a request: stop, length, abort, retract. Raises LeaseError the second time.

        `n_tokens`: how many tokens have KV, committed. With `keep` their whole pages go to the tree and the
        partial page stays as a tail leaf (or lengthens the one it has); without, nothing more is added. All
        other private pages in `pages` (the request's whole table) become free at once: a plan that is being
        built must not name this request (drop its row, or wait for the commit).
        """
        lease.check()
        keep = keep and self.enabled
        if keep:
            self.publish(lease, tokens, pages, n_tokens, COMMITTED)
        rest = _key(tokens, lease.n_tokens, n_tokens)
        tail = lease.leaf
        if tail is None:
            tail = self.tails.leave(lease, rest, pages, self.now) if keep else None
        else:
            if keep:
                self.tails.lengthen(lease, rest)
            self.tails.disown(lease)
        self.pool.free(pages[lease.n_tokens // self.page_size + (tail is not None) :], REQUEST)
        self._note(lease, tail if tail is not None and tail.n_pages else lease.node, hints)
        self._release(lease)

    def _note(self, lease: Lease, end: Node, hints: HintsLike | None) -> None:
        """The path was used until now, and this is what its program says of the next time."""
        for node in self.tree.chain(end):
            self.tree.touch(node, lease.program, self.now)
        if hints is not None and hints.expected_fanout > 0 and "expected_fanout" in self.heap.policy.honours:
            self._expect(end)
        for node in (end, *note(self.tree, end, lease.program, hints, self.now, self._usual(hints))):
            self.heap.offer(node)

    def _expect(self, end: Node) -> None:
        self.expecting.pop(end, None)
        self.expecting[end] = self.now
        if len(self.expecting) > MAX_EXPECTING:
            del self.expecting[next(iter(self.expecting))]

    def _usual(self, hints: HintsLike | None) -> float | None:
        """When the program will be back if it is as always; noted that it is gone, if it did not say it is done."""
        if self.rhythm is None or hints is None or hints.program_id is None or hints.final:
            return None
        self.rhythm.gone(hints.program_id, self.now)
        return self.rhythm.expect(hints.program_id)

    def _release(self, lease: Lease) -> None:
        lease.released = True
        self.leases.discard(lease)
        self.tree.unpin(lease.node, None)
        self.heap.offer(lease.node)

    def _drop_sources(self) -> None:
        for node in self.sources:
            self.tree.unpin(node, None)
            self.tails.let_go(node)
        self.sources.clear()

    # -- failure, flush, report --------------------------------------------------------------------------------

    def holders(self, step: int) -> list[Lease]:
        """Leases on pages that `step` or a later one writes: matched or remapped, whether or not planned since."""

        def late(node: Node) -> bool:
            return first_late(node, self.store.page_step, step) < node.n_pages

        return [lease for lease in self.leases if any(map(late, self.tree.chain(lease.anchor)))]

    def withdraw(self, step: int) -> int:
        """A step failed: take every page published for `step` or a later one, and all below it, out of the tree.

        Finish first every request that had a row in those steps, and every one in `holders(step)`: raises
        LeaseError if a lease still holds such a page. The pages go to quarantine. Returns how many.
        """
        self._drop_sources()
        n = self.store.withdraw(step)
        if isinstance(n, Node):
            raise LeaseError(f"pages of failed step {step} are still leased: {n!r}")
        return n

    def clear(self) -> int:
        """Forget everything that no lease holds. Call between plans. Returns the number of pages freed."""
        self._drop_sources()
        return self.store.clear()

    def flush_events(self) -> None:
        """Hand the events since the last time to the sink, if there is one."""
        if self.store.log is not None:
            self.store.log.flush()

    def explain(self, ns: Namespace, tokens: Ids) -> Explanation:
        """Why the prompt is not cached further than it is. Changes nothing; milliseconds for long prompts."""
        return explain(self.tree, self.store.ghosts, ns, _key(tokens, 0, None))

    def dump(self, max_nodes: int = 2000, users: Mapping[Lease, str] = MappingProxyType({})) -> dict[str, Any]:
        """The tree as JSON-able values, at most `max_nodes` nodes of it, for a UI. `users`: who holds which lease."""
        at: dict[Node, list[str]] = {}
        for lease, name in users.items():
            at.setdefault(lease.anchor, []).append(name)
        return dump(self.tree, self.now, max_nodes, at)

    def audit(self, private: Iterable[Ids] | None = None) -> None:
        """Check every page's owner, every link, pin and count. `private`: the pages that running requests own,
        beyond their leased ones (all of them, if given). Raises AuditError with a report of all that is wrong.
        """
        audit(self, private)

    def stats(self) -> dict[str, Any]:
        """Counts of pages and nodes, and totals since the start."""
        return {
            "n_pages": self.pool.n_pages,
            "page_size": self.page_size,
            "free": self.pool.n_free,
            "quarantined": self.pool.n_quarantined,
            "request": self.pool.count(REQUEST),
            "tree": self.tree.n_pages,
            "evictable": self.n_evictable,
            "protected": self.tree.n_pinned,
            "nodes": self.tree.n_nodes,
            "namespaces": len(self.tree.roots),
            "leases": len(self.leases),
            "evicted": self.n_evicted,
            "evicted_by": dict(self.store.evicted),
        }


def _key(tokens: Ids, start: int, stop: int | None) -> bytes:
    """The bytes of tokens[start:stop]; stop None: all but the last token, which must be computed to go on."""
    stop = len(tokens) - 1 if stop is None else min(stop, len(tokens))
    return np.asarray(tokens[start : max(stop, start)], dtype=np.int32).tobytes()
