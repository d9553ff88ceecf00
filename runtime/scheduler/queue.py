"""The waiting requests, kept sorted. Every operation costs the same whether ten or ten thousand wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterator

from runtime.request import Request
from runtime.scheduler.policy import Key, Policy, Waiting

SCAN = 24  # best candidates looked at in one step
ROTATE = 8  # others looked at beside them, in turn: if none of the best fits, one of these may
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
        self._skipped: deque[int] = deque()  # who did not fit, the first skipped first; others are dropped later
        self._turn: deque[int] = deque()  # who is looked at next beside the best; removed ones are skipped later
        self._round: deque[int] = deque()  # whose cached prefix is looked up next; removed ones are skipped later

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.num in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def add(self, request: Request) -> None:
        view = self._view(request)
        name = request.account = self.policy.bucket(view) if self.policy.bucketed else None
        key = self.policy.key(view)
        self._requests[request.num] = request
        self._keys[request.num] = (name, key)
        self._ages.append(request.num)
        self._round.append(request.num)
        self._turn.append(request.num)
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

    # -- looking ---------------------------------------------------------------------------------------------

    def candidates(self, work: int, n_admitted: int = 0) -> Iterator[Request]:
        """Requests to try: the best SCAN in order, then ROTATE others in turn. The caller may remove the one it got.

        A request that has been overtaken too often is a wall: nothing behind it is offered. It comes first, as does
        one that is overdue, except where priorities are strict.
        """
        self._raise_wall(n_admitted)
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
        for request in self._arranged(seen) if self.policy.arrange is not None else self._in_order(seen):
            seen.add(request.num)
            yield request
            if request.num == self._wall:
                return
        if self._wall is None:
            yield from self._others(seen)

    def _in_order(self, seen: set[int]) -> Iterator[Request]:
        """The first SCAN requests by account and key."""
        for _ in range(SCAN):
            request = self._next(seen)
            if request is None:
                return
            yield request

    def _others(self, seen: set[int]) -> Iterator[Request]:
        """ROTATE requests that are not among the best, each time the next ones."""
        left = ROTATE
        for _ in range(min(len(self._turn), SCAN + 4 * ROTATE)):  # some were removed, some are seen
            num = self._turn.popleft()
            request = self._requests.get(num)
            if request is None:
                continue
            self._turn.append(num)
            if num not in seen:
                seen.add(num)
                yield request
                left -= 1
                if not left:
                    return

    def skip(self, request: Request, n_admitted: int) -> None:
        """It did not fit. After WALL_AFTER admissions of others it becomes the wall."""
        if request.skipped_since is None:
            request.skipped_since = n_admitted
            self._skipped.append(request.num)
        self._raise_wall(n_admitted)

    def _raise_wall(self, n_admitted: int) -> None:
        """Who was skipped first becomes the wall when its time has come, looked at again or not."""
        while self._wall is None and self._skipped:
            first = self._requests.get(self._skipped[0])
            if first is not None and first.skipped_since is not None:
                if n_admitted - first.skipped_since >= WALL_AFTER:
                    self._wall = first.num
                return
            self._skipped.popleft()

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
        if len(self._turn) > most:
            self._turn = deque(dict.fromkeys(num for num in self._turn if num in self._requests))
        if len(self._skipped) > most:
            self._skipped = deque(num for num in self._skipped if num in self._requests)

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
