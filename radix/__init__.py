"""Ramet's radix-tree prefix cache: token ids in, page ids out. numpy and the standard library only."""

from radix.audit import AuditError
from radix.cache import COMMITTED, PrefixCache
from radix.evict import EvictionPolicy
from radix.lease import Lease, LeaseError, Match, Tail
from radix.pages import Owner, PageError, PagePool
from radix.tree import Namespace

__all__ = [
    "COMMITTED",
    "AuditError",
    "EvictionPolicy",
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
