"""Requests in, text out: what every door (HTTP, ZMQ, the Engine, the DSL) uses to generate.

A Generator validates, submits, detokenises and aborts; it holds no KV and works from any event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from runtime.client import Health, SchedulerClient, is_last
from runtime.config import EngineConfig
from runtime.delta import Answer, Completion, Delta, Gathered, TextTables, error_of
from runtime.errors import InvalidRequest, RametError, Unavailable
from runtime.grammar.door import GrammarDoor
from runtime.messages import Abort, GrammarSpec, Output, Submit, SubmitMany
from runtime.params import MAX_N, shown
from runtime.step import ModelSpec
from runtime.text.detokenizer import IncrementalDetokenizer
from runtime.validate import Limits, validate_submit

SEED_WRAP = 1 << 64
PATIENCE_S = 0.2  # how long outputs wait for more of their kind where nobody reads along

__all__ = ["Completion", "Delta", "Generator", "Stream", "TextTables", "error_of"]


class Generator:
    """Generates with a scheduler behind `client`. Thread-safe; each stream belongs to the loop that started it."""

    def __init__(
        self,
        client: SchedulerClient,
        tokenizer: Any,
        spec: ModelSpec,
        config: EngineConfig,
        *,
        pool_tokens: int | None = None,
        check_grammar: Callable[[GrammarSpec], None] | None = None,
    ) -> None:
        """`tokenizer` has at least what TextTables names; `pool_tokens` is the KV pool's size where it is known.
        `check_grammar`: the static check of the grammar service, where it is in this process."""
        self.client = client
        self.tokenizer = tokenizer
        self.spec = spec
        self.config = config
        self.eos_ids = frozenset(spec.eos_ids) | frozenset(getattr(tokenizer, "eos_ids", ()))
        self.limits = Limits.of(spec, config, pool_tokens)
        self.grammars = GrammarDoor(config.grammar_backend, check_grammar)  # type: ignore[arg-type]
        self.draining = False
        self._live: dict[str, _Live] = {}
        self._prefix = secrets.token_hex(4)  # rids are unique across restarts of a frontend
        self._counter = itertools.count()

    # -- what runs ---------------------------------------------------------------------------------------

    @property
    def n_live(self) -> int:
        """Requests submitted and not ended yet."""
        return len(self._live)

    def health(self) -> Health:
        health = self.client.health()
        if health.ready and self.draining:
            return Health(True, False, "The server is shutting down.")
        return health

    def begin_drain(self) -> None:
        """Accept nothing new; what runs goes on."""
        self.draining = True

    def new_rid(self) -> str:
        """A request id nobody else has."""
        return f"{self._prefix}-{next(self._counter):x}"

    # -- generate ----------------------------------------------------------------------------------------

    def stream(self, submit: Submit, *, n: int = 1, param: str = "prompt") -> Stream:
        """`n` answers as they come. Submitted at the first step of the iteration, which raises what is wrong with it.

        Errors: InvalidRequest and kin, QueueFull, Unavailable; later RequestFailed or Unavailable. An abort is no
        error but a finish. Closing (or dropping) the stream aborts what still runs. `param`: what the client calls
        its prompt, for messages about its length.
        """
        return Stream(self, [submit], n, param)

    def stream_many(self, submits: Sequence[Submit], *, param: str = "prompt") -> list[Stream]:
        """One stream a request, all submitted now as one group, so that siblings share their prefill."""
        streams = [Stream(self, [submit], 1, param) for submit in submits]
        self._start(streams)
        return streams

    async def complete(self, submit: Submit, *, n: int = 1, param: str = "prompt") -> list[Completion]:
        """All `n` answers, finished. Raises like `stream`."""
        return (await self.complete_many([submit], n=n, param=param))[0]

    async def complete_many(
        self, submits: Sequence[Submit], *, n: int = 1, param: str = "prompt"
    ) -> list[list[Completion]]:
        """`n` answers to each of `submits`, planned together. One failure aborts the rest and is raised."""
        if not submits:
            return []
        _check_n(n)
        stream = Stream(self, [replace(submit, stream=False) for submit in submits], n, param)  # nobody reads along
        gathered = [Gathered() for _ in range(len(submits) * n)]
        try:
            async for delta in stream:
                gathered[delta.index].add(delta)
        finally:
            stream.close()
        done = [one.completion(i % n) for i, one in enumerate(gathered)]
        return [done[i * n : (i + 1) * n] for i in range(len(submits))]

    # -- control -----------------------------------------------------------------------------------------

    def abort(self, rid: str) -> int:
        """Cancel the request `rid` (all its answers); the number of requests hit."""
        live = self._live.get(rid)
        return self._abort([live]) if live else 0

    def abort_group(self, group: str) -> int:
        return self._abort([live for live in list(self._live.values()) if live.group == group])

    def abort_all(self) -> int:
        return self._abort(list(self._live.values()))

    async def call(self, op: str, **args: Any) -> Any:
        """A control call to the scheduler: stats, flush, audit, tree, explain."""
        return await self.client.call(op, **args)

    def _abort(self, hit: Sequence[_Live]) -> int:
        for live in hit:
            for rid in live.rids:
                self.client.abort(Abort(rid=rid))
        return len(hit)

    # -- start -------------------------------------------------------------------------------------------

    def _start(self, streams: Sequence[Stream]) -> None:
        """Validate and submit every request of `streams` as one message."""
        health = self.health()
        if not health.ready:
            raise Unavailable(health.reason or "The scheduler is not ready.")
        items = [item for stream in streams for item in stream.prepare()]
        boxes = {rid: stream.inbox for stream in streams for rid in stream.rids}
        if len(boxes) < len(items):
            raise InvalidRequest("rid names more than one of these requests; each needs its own.", param="rid")
        for stream in streams:
            stream.inbox.bind()
        message = items[0] if len(items) == 1 else SubmitMany(items=tuple(items))
        self.client.submit(message, _dispatch(boxes))
        for stream in streams:
            stream.opened()


class _Live(NamedTuple):
    """One public request: its scheduler ids and its abort group."""

    rids: tuple[str, ...]
    group: str


class _Inbox:
    """Outputs waiting to be read. Holds no stream, so a dropped stream is collected and aborts.

    With `patience_s`, outputs that finish nothing are kept for that long, so that a reader who only wants the end is
    woken rarely.
    """

    __slots__ = ("_items", "_loop", "_patience_s", "_ripe", "_taken_at", "_wake")

    def __init__(self, patience_s: float = 0.0) -> None:
        self._items: list[Output] = []
        self._patience_s = patience_s
        self._ripe = False  # something waits that is to be read now
        self._taken_at = time.monotonic()
        self._wake: Callable[[], object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self) -> None:
        self._loop = asyncio.get_running_loop()

    def put(self, output: Output) -> None:
        self._items.append(output)
        if self._ripe:
            return
        if self._patience_s and output.finish is None and time.monotonic() - self._taken_at < self._patience_s:
            return
        self._ripe = True
        if self._wake is not None:
            self._wake()

    def ring(self) -> None:
        """Tell whoever listens that something is to be read."""
        self._ripe = True
        if self._wake is not None:
            self._wake()

    def end(self) -> None:
        """Whoever waits sees the end; nobody is held any more."""
        self.ring()
        self._wake = None

    def listen(self, wake: Callable[[], object] | None) -> None:
        """Call `wake`, which must not raise, once something is to be read, and again after each `drain`."""
        assert self._loop is asyncio.get_running_loop(), "a stream is read in the loop that started it"
        self._wake = wake
        if self._ripe and wake is not None:
            wake()

    def drain(self) -> list[Output]:
        """Everything that came since the last call; nothing while there is nothing to be read."""
        if not self._ripe:
            return []
        items, self._items = self._items, []
        self._ripe = False
        if self._patience_s:
            self._taken_at = time.monotonic()
        return items

    async def arrival(self) -> None:
        """Wait until something is to be read."""
        if self._ripe:
            return
        assert self._loop is not None
        waiter: asyncio.Future[None] = self._loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        self.listen(wake)
        try:
            await waiter
        finally:
            self._wake = None


def _dispatch(boxes: dict[str, _Inbox]) -> Callable[[Output], None]:
    if len(boxes) == 1:
        return next(iter(boxes.values())).put
    return lambda output: boxes[output.rid].put(output)


class Stream(AsyncIterator[Delta]):
    """The answers to one request (or to several that end together), as Deltas; `index` is prompt-major."""

    __slots__ = (
        "__weakref__",
        "_answers",
        "_early_ids",
        "_early_texts",
        "_error",
        "_generator",
        "_n",
        "_open",
        "_publics",
        "_ready",
        "_short",
        "_started",
        "_submits",
        "ended",
        "inbox",
        "param",
        "rids",
    )

    def __init__(self, generator: Generator, submits: Sequence[Submit], n: int, param: str) -> None:
        self.param = param
        self.inbox = _Inbox(0.0 if any(submit.stream for submit in submits) else PATIENCE_S)
        self.rids: tuple[str, ...] = ()
        self._generator = generator
        self._submits = submits
        self._n = n
        self._answers: dict[str, Answer] = {}
        self._ready: deque[Delta] = deque()
        self._error: RametError | None = None
        self._publics: list[tuple[str, _Live]] = []
        self._short: IncrementalDetokenizer | None = None  # of the only answer, where that is all text
        self._early_ids: list[int] = []
        self._early_texts: list[str] = []
        self._started = self._open = False
        self.ended = False  # nothing more will come; what `poll` has to raise may be left

    def prepare(self) -> list[Submit]:
        """The scheduler's requests: checked, ids made unique, `n` siblings a prompt. Raises InvalidRequest."""
        _check_n(self._n)
        self._started = True
        now = time.monotonic()
        items: list[Submit] = []
        for submit in self._submits:
            rid = submit.rid or self._generator.new_rid()
            named = replace(submit, rid=rid, arrival=submit.arrival or now)
            validate_submit(named, self._generator.limits, param=self.param)
            self._generator.grammars.admit(named)
            siblings = _siblings(named, self._n)
            self._publics.append((rid, _Live(tuple(one.rid for one in siblings), submit.group)))
            items.extend(siblings)
        tables, eos_ids = self._generator.tokenizer, self._generator.eos_ids
        self._answers = {item.rid: Answer(index, item, tables, eos_ids) for index, item in enumerate(items)}
        self.rids = tuple(self._answers)
        if len(items) == 1 and not items[0].segments and not items[0].params.logprobs:
            self._short = self._answers[items[0].rid].detokenizer
        return items

    def opened(self) -> None:
        """The scheduler has the requests."""
        self._open = True
        self._generator._live.update(self._publics)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        if not self._ready:
            self._ready.extend(await self.take())
            if not self._ready:
                raise StopAsyncIteration
        return self._ready.popleft()

    async def take(self) -> list[Delta]:
        """All news since the last call, at least one; none at the end. Raises like the iteration."""
        self.start()
        while not (news := self.poll()) and not self.ended:
            try:
                await self.inbox.arrival()
            except asyncio.CancelledError:
                self.close()
                raise
        return news

    def start(self) -> None:
        """Submit the requests, once. Raises what is wrong with them."""
        if self._started or self.ended:
            return
        try:
            self._generator._start([self])
        except RametError:
            self.ended = True
            raise

    def poll(self) -> list[Delta]:
        """What is there now, perhaps nothing. Raises like the iteration."""
        while not self.ended and (outputs := self.inbox.drain()):
            if deltas := self._digest(outputs):
                return deltas
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return []

    def short(self) -> tuple[int, str] | None:
        """How many tokens came, and their text, where that is all there is to tell of the only answer; else None, and
        `poll` has the news. What is taken here comes again, as `early`, with the next Delta."""
        box, short = self.inbox, self._short
        if short is None or not box._ripe or self.ended:
            return None
        items = box._items
        for output in items:
            if output.finish is not None or output.prompt_logprobs is not None:
                return None
        box._items, box._ripe = [], False
        ids = items[0].tokens if len(items) == 1 else tuple(token for output in items for token in output.tokens)
        text = short.push(ids)
        self._early_ids += ids
        self._early_texts.append(text)
        return len(ids), text

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Abort what still runs; nothing if everything has ended. Idempotent."""
        if self.ended:
            return
        self.ended = True
        if not self._open:
            return
        client = self._generator.client
        for rid in self._answers:
            client.forget(rid)
            client.abort(Abort(rid=rid))
        self._answers = {}
        for rid, _ in self._publics:
            self._generator._live.pop(rid, None)
        self.inbox.end()

    def __del__(self) -> None:
        self.close()

    def _digest(self, outputs: list[Output]) -> list[Delta]:
        """Outputs as Deltas, one for each answer and segment that has news."""
        deltas = self._deltas(outputs)
        if self._early_ids and deltas:
            deltas[0] = deltas[0].after(self._early_ids, "".join(self._early_texts))
            self._early_ids, self._early_texts = [], []
        return deltas

    def _deltas(self, outputs: list[Output]) -> list[Delta]:
        if len(outputs) == 1 and outputs[0].finish is None:  # as a rule: one token of one answer
            return [self._answers[outputs[0].rid].delta(outputs)]
        deltas: list[Delta] = []
        merged: dict[tuple[str, int], list[Output]] = {}
        for output in outputs:
            merged.setdefault((output.rid, output.segment), []).append(output)
        for (rid, _), news in merged.items():
            finish = news[-1].finish
            failed = finish is not None and finish.reason == "error"
            if failed:
                assert finish is not None
                self._error = self._error or error_of(finish)
                news.pop()  # what came before the failure is still delivered
            if news:
                deltas.append(self._answers[rid].delta(news))
            if failed or is_last(news[-1]):
                del self._answers[rid]
        if self._error is not None or not self._answers:
            self.close()
        return deltas


def _check_n(n: object) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_N:
        raise InvalidRequest(f"n must be an integer from 1 to {MAX_N}; got {shown(n)}.", param="n")


def _siblings(submit: Submit, n: int) -> list[Submit]:
    """`n` requests with ids and seeds of their own; answer i of seed s is the answer to seed s + i alone."""
    if n == 1:
        return [submit]
    seed = submit.params.seed
    siblings = []
    for i in range(n):
        params = submit.params
        if seed is not None and i:
            wrapped = seed + i if seed + i < SEED_WRAP else seed + i - SEED_WRAP
            params = replace(params, seed=wrapped)
        siblings.append(replace(submit, rid=f"{submit.rid}.{i}", params=params))
    return siblings
