"""The waiting requests, kept sorted. Every operation costs the same whether ten or ten thousand wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterator

from runtime.request import Request
from runtime.scheduler.policy import Key, Policy, Waiting

SCAN = 24  # candidates looked at in one step
WALL_AFTER = 64  # admissions that may overtake a request that does not fit
MAX_ACCOUNTS = 1 << 16
OVERDUE = 1 << 16  # tokens of prefill work after which a request goes first, whatever the policy
SLACK = 64  # numbers of removed requests kept beyond twice those that wait


class Bucket:
    """One account of a policy: its waiting requests by key, and the service it has had, in tokens."""

    __slots__ = ("keys", "name", "serial", "service")

    def __init__(self, name: Hashable, serial: int, service: float) -> None:
        self.name = name
        self.serial = serial
        self.service = service
        self.keys: list[Key] = []  # each ends with the request's number


class WaitingQueue:
    """`view(request)` says what the policy may know of a request."""

    def __init__(self, policy: Policy, view: Callable[[Request], Waiting]) -> None:
        self.policy = policy
        self._view = view
        self._requests: dict[int, Request] = {}
        self._keys: dict[int, tuple[Hashable, Key]] = {}
        self._buckets: dict[Hashable, Bucket] = {}
        self._order: list[tuple[float, int, Hashable]] = []  # buckets that wait, least served first
        self._ages: deque[int] = deque()  # numbers in order of arrival; removed ones are skipped later
        self._next_serial = 0
        self._service: dict[Hashable, float] = {}
        self._wall: int | None = None
        self._round: deque[int] = deque()  # whose cached prefix is looked up next; removed ones are skipped later

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.num in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def add(self, request: Request) -> None:
        view = self._view(request)
        name = self.policy.bucket(view) if self.policy.bucketed else None
        key = self.policy.key(view)
        self._requests[request.num] = request
        self._keys[request.num] = (name, key)
        self._ages.append(request.num)
        self._round.append(request.num)
        self._sweep()
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._open(name)
        insort(bucket.keys, key)

    def remove(self, request: Request) -> None:
        num = request.num
        del self._requests[num]
        name, key = self._keys.pop(num)
        bucket = self._buckets[name]
        del bucket.keys[bisect_left(bucket.keys, key)]
        if not bucket.keys:
            self._close(bucket)
        if self._wall == num:
            self._wall = None

    def rekey(self, request: Request) -> None:
        """What the policy knows of this request has changed."""
        name, key = self._keys[request.num]
        bucket = self._buckets[name]
        del bucket.keys[bisect_left(bucket.keys, key)]
        key = self.policy.key(self._view(request))
        self._keys[request.num] = (name, key)
        insort(bucket.keys, key)

    def charge(self, name: Hashable, tokens: float) -> None:
        """Book service to an account."""
        service = self._service.pop(name, 0.0) + tokens
        self._service[name] = service  # last in order: what was charged long ago is forgotten first
        if len(self._service) > MAX_ACCOUNTS:
            del self._service[next(iter(self._service))]
        bucket = self._buckets.get(name)
        if bucket is not None:
            self._unlist(bucket)
            bucket.service = service
            self._list(bucket)

    def account(self, request: Request) -> Hashable:
        return self.policy.bucket(self._view(request)) if self.policy.bucketed else None

    # -- looking ---------------------------------------------------------------------------------------------

    def candidates(self, work: int) -> Iterator[Request]:
        """Requests to try, best first, at most SCAN. After each yield the caller may remove the one it got.

        A request that has been overtaken too often is a wall: nothing behind it is offered. It comes first, as does
        one that is overdue, except where priorities are strict.
        """
        strict = self.policy.preempts
        if self._wall is not None and not strict:
            yield self._requests[self._wall]
            if self._wall is not None:
                return
        seen: set[int] = set()
        oldest = self.oldest()
        if oldest is not None and not strict and work - oldest.work_at_arrival > OVERDUE:
            seen.add(oldest.num)
            yield oldest
        if self.policy.arrange is not None:
            yield from self._arranged(seen)
            return
        for _ in range(SCAN):
            request = self._next(seen)
            if request is None:
                return
            seen.add(request.num)
            yield request
            if request.num == self._wall:
                return

    def skip(self, request: Request, n_admitted: int) -> None:
        """It did not fit. After WALL_AFTER admissions of others it becomes the wall."""
        if request.skipped_since is None:
            request.skipped_since = n_admitted
        elif self._wall is None and n_admitted - request.skipped_since >= WALL_AFTER:
            self._wall = request.num

    def oldest(self) -> Request | None:
        while self._ages and self._ages[0] not in self._requests:
            self._ages.popleft()
        return self._requests[self._ages[0]] if self._ages else None

    def stale_hits(self, n: int) -> list[Request]:
        """Up to n requests whose cached prefix should be looked up again: the next ones, and others in rotation."""
        out: dict[int, Request] = {}
        half = max(1, n // 2)
        per_bucket = max(1, half // max(1, len(self._order)))
        for _, _, name in self._order[:half]:
            for key in self._buckets[name].keys[:per_bucket]:
                out[int(key[-1])] = self._requests[int(key[-1])]
        for _ in range(min(n, len(self._round))):
            num = self._round.popleft()
            request = self._requests.get(num)
            if request is not None:
                self._round.append(num)
                out[num] = request
            if len(out) >= n:
                break
        return list(out.values())[:n]

    def _next(self, seen: set[int]) -> Request | None:
        """The best request not in `seen`: the first of the least served bucket that has one."""
        for _, _, name in self._order[: len(seen) + 1]:
            for key in self._buckets[name].keys[: len(seen) + 1]:
                if int(key[-1]) not in seen:
                    return self._requests[int(key[-1])]
        return None

    def _arranged(self, seen: set[int]) -> Iterator[Request]:
        """The first SCAN requests by key, in the policy's own arrangement."""
        assert self.policy.arrange is not None
        window = [self._requests[int(key[-1])] for _, _, name in self._order for key in self._buckets[name].keys[:SCAN]]
        for view in self.policy.arrange([self._view(r) for r in window if r.num not in seen]):
            yield self._requests[view.num]

    def _sweep(self) -> None:
        """Forget numbers of removed requests. At least half are, so each addition pays for its own removal once."""
        most = 2 * len(self._requests) + SLACK
        if len(self._ages) > most:
            self._ages = deque(dict.fromkeys(num for num in self._ages if num in self._requests))
        if len(self._round) > most:
            self._round = deque(dict.fromkeys(num for num in self._round if num in self._requests))

    # -- buckets ---------------------------------------------------------------------------------------------

    def _open(self, name: Hashable) -> Bucket:
        service = self._service.get(name, 0.0)
        if self.policy.catch_up and self._order:
            service = max(service, self._order[0][0])
        self._service[name] = service
        bucket = self._buckets[name] = Bucket(name, self._next_serial, service)
        self._next_serial += 1
        self._list(bucket)
        return bucket

    def _close(self, bucket: Bucket) -> None:
        self._unlist(bucket)
        del self._buckets[bucket.name]

    def _list(self, bucket: Bucket) -> None:
        insort(self._order, (bucket.service, bucket.serial, bucket.name), key=_rank)

    def _unlist(self, bucket: Bucket) -> None:
        at = bisect_left(self._order, (bucket.service, bucket.serial), key=_rank)
        assert self._order[at][2] == bucket.name
        del self._order[at]


def _rank(entry: tuple[float, int, Hashable]) -> tuple[float, int]:
    return entry[0], entry[1]
