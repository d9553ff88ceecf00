"""Ramet's radix-tree prefix cache: token ids in, page ids out. numpy and the standard library only."""

from radix.audit import AuditError
from radix.cache import PrefixCache
from radix.events import AllBlocksCleared, BlockRemoved, BlockStored, EventSink, KvEvent
from radix.evict import EvictionPolicy
from radix.explain import Explanation
from radix.lease import Lease, LeaseError, Match, Tail
from radix.pages import Owner, PageError, PagePool
from radix.store import COMMITTED
from radix.tree import Namespace

__all__ = [
    "COMMITTED",
    "AllBlocksCleared",
    "AuditError",
    "BlockRemoved",
    "BlockStored",
    "EventSink",
    "EvictionPolicy",
    "Explanation",
    "KvEvent",
    "Lease",
    "LeaseError",
    "Match",
    "Namespace",
    "Owner",
    "PageError",
    "PagePool",
    "PrefixCache",
    "Tail",
]
