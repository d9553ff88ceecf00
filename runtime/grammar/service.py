"""Compiles grammars for the scheduler: off its thread, once per spec, within bounds."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from runtime.errors import InvalidRequest, RametError, RequestFailed
from runtime.grammar.backends import Backend, BackendError, BackendName, Template, make_backend
from runtime.grammar.beginnings import Beginnings, places_of
from runtime.grammar.cache import ByteCache
from runtime.grammar.cursor import Counters, GrammarCursor, MaskBudget, Matcher
from runtime.grammar.gate import Gate, GrammarTimeout
from runtime.grammar.limits import Limits
from runtime.grammar.marker import MarkedCompiled, Marker
from runtime.grammar.pace import Busy, step_aside
from runtime.grammar.pieces import Pieces, packed_row
from runtime.grammar.placed import PlacedMatcher
from runtime.grammar.places import Atlas
from runtime.grammar.prepare import Choice, Prepared, prepare
from runtime.grammar.protocol import Compiled, Cursor, MaskRow, Vocabulary
from runtime.grammar.stepwise import StepwiseMatcher
from runtime.grammar.work import HERE_S, OutOfTime
from runtime.messages import GrammarSpec

CACHE_BYTES = 256 << 20
INVALID_TTL_S = 60.0
TIMEOUT_TTL_S = 5.0  # long enough to stop a retry storm, short enough not to call a valid grammar invalid
_MAX_NEGATIVE = 1024
_PREPARED_BYTES = 8 << 20
READ_HERE = 6 * 1024  # bytes of text that are read in a few milliseconds
_NICENESS = 15
_OBJECTS = 40  # bytes of a grammar's objects for one byte of its text


def vocabulary(
    token_bytes: Sequence[bytes], vocab_size: int, special_ids: Sequence[int] | frozenset[int], stop_ids: Sequence[int]
) -> Vocabulary:
    """The vocabulary as grammars see it. Every stop id counts as a control token, every special id too."""
    controls = frozenset(special_ids) | frozenset(stop_ids)
    return Vocabulary(tuple(token_bytes), vocab_size, tuple(sorted(set(stop_ids))), controls)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """Shared by requests; makes their cursors."""

    template: Template
    stops: frozenset[int]
    stop_row: MaskRow
    counters: Counters
    budget: MaskBudget
    places: Atlas | Beginnings
    slowly: Pieces | None = None  # where forced text may be long: it is found byte by byte, with these

    @property
    def n_bytes(self) -> int:
        return self.template.n_bytes + self.places.n_bytes

    def cursor(self) -> Cursor:
        make: Callable[[], Matcher] = self.template.matcher if self.slowly is None else self._stepwise
        return GrammarCursor(PlacedMatcher(self.places, make), self.stops, self.stop_row, self.counters, self.budget)

    def _stepwise(self) -> Matcher:
        assert self.slowly is not None
        return StepwiseMatcher(self.template.matcher(), self.slowly)


@dataclass(slots=True)
class _Refusal:
    error: RametError
    until: float


class CompileService:
    """See `protocol.GrammarService`.

    Two lanes, so that a grammar which needs the gate (and may take its whole time there) does not hold up the
    ordinary ones: those are known to compile in milliseconds and go straight to the compiler.
    """

    def __init__(
        self,
        vocab: Vocabulary,
        backend: Choice = "auto",
        *,
        limits: Limits | None = None,
        cache_bytes: int = CACHE_BYTES,
        gate: Gate | None = None,
        budget: MaskBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not vocab.stop_ids:
            raise InvalidRequest("Structured output needs at least one stop id.", param="model")
        self._vocab = vocab
        self._choice: Choice = backend
        self._limits = limits or Limits()
        self._gate = gate or Gate(vocab)
        self._budget = budget or MaskBudget()
        self._clock = clock
        self._busy: Busy = lambda: False  # whether streams run on this machine's cores
        self._lock = threading.Lock()
        self._pieces = Pieces(vocab)
        self._stops = frozenset(vocab.stop_ids)
        self._stop_row = packed_row(vocab.stop_ids, vocab.vocab_size)
        self._backends: dict[BackendName, Backend] = {}
        self._backend_locks = {"xgrammar": threading.Lock(), "llguidance": threading.Lock()}
        self._marker_lock = threading.Lock()
        self._import: Future[Backend] | None = None
        self._markers: dict[str, Marker] = {}
        self._compiled: ByteCache[CompiledGrammar] = ByteCache(cache_bytes)
        self._prepared: ByteCache[Prepared] = ByteCache(_PREPARED_BYTES)
        self._refused: dict[bytes, _Refusal] = {}
        self._flights: dict[bytes, list[Future[Compiled]]] = {}
        self._counters = Counters()
        self._compiles = 0
        self._compile_s = 0.0
        self._timeouts = 0
        self._lanes = [
            ThreadPoolExecutor(1, "ramet-grammar-fast"),
            ThreadPoolExecutor(1, "ramet-grammar-gated"),
            ThreadPoolExecutor(1, "ramet-grammar-large", initializer=_give_way),
        ]

    def warm(self) -> Future[Backend]:
        """Import the default backend in the background, so that the first request does not wait for it."""
        name: BackendName = "llguidance" if self._choice == "llguidance" else "xgrammar"
        with self._lock:
            if self._import is None:
                self._import = self._lanes[1].submit(self._backend, name)
                self._lanes[1].submit(self._gate.warm, name)
            return self._import

    def spare(self, busy: Busy) -> None:
        """While `busy()`, what may compile for long gets little of a core."""
        self._busy = self._gate.busy = busy

    def validate(self, spec: GrammarSpec) -> None:
        key = _key(spec)
        with self._lock:
            known = key in self._compiled
        if not known:
            self._prepare(spec, key)

    def compile_async(self, spec: GrammarSpec) -> Future[Compiled]:
        future: Future[Compiled] = Future()
        key = _key(spec)
        with self._lock:
            ready = self._compiled.get(key)
            refusal = self._refused.get(key)
            if ready is None and (refusal is None or refusal.until <= self._clock()):
                waiting = self._flights.setdefault(key, [])
                waiting.append(future)
                if len(waiting) == 1:
                    self._lanes[0].submit(self._fly, spec, key)
                return future
        if ready is not None:
            future.set_result(self._after(spec, ready))
        else:
            assert refusal is not None
            future.set_exception(refusal.error)
        return future

    def stats(self) -> dict[str, Any]:
        with self._lock:
            cache, counters = self._compiled, self._counters
            return {
                "cache_entries": len(cache),
                "cache_bytes": cache.n_bytes,
                "cache_hits_total": cache.counters.hits,
                "cache_misses_total": cache.counters.misses,
                "cache_evictions_total": cache.counters.evictions,
                "compiles_total": self._compiles,
                "compile_seconds_total": self._compile_s,
                "compiling": len(self._flights),
                "refused_entries": len(self._refused),
                "timeouts_total": self._timeouts,
                "gate_checks_total": self._gate.checks,
                "gate_kills_total": self._gate.kills,
                "masks_total": counters.masks,
                "mask_seconds_total": counters.mask_s,
                "slowest_mask_seconds": counters.slowest_mask_s,
                "failed_total": counters.failed,
            }

    def close(self) -> None:
        """Stop the worker and the lanes; what still waits fails."""
        self._gate.close()
        for lane in self._lanes:
            lane.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            flights, self._flights = self._flights, {}
        for future in (f for waiting in flights.values() for f in waiting):
            _fail(future, RequestFailed("The engine is shutting down."))

    def _fly(self, spec: GrammarSpec, key: bytes) -> None:
        """First leg, on the fast lane: check, print, and compile what needs no gate.

        Large ones are not even read here: that would hold the interpreter against the scheduler's thread.
        """
        if len(spec.spec) > READ_HERE and spec.kind in ("json_schema", "choices") and self._gate.running:
            self._lanes[1].submit(self._gated, spec, key, None)
            return None
        try:
            prepared = self._at_hand(spec, self._prepare(spec, key))
        except OutOfTime:
            self._lanes[1].submit(self._gated, spec, key, None)
            return None
        except RametError as error:
            return self._refuse(key, error)
        except Exception as error:
            return self._land(key, None, _internal(error))
        if prepared.cheap:
            return self._compile(spec, key, prepared)
        self._lanes[1].submit(self._gated, spec, key, prepared)
        return None

    def _gated(self, spec: GrammarSpec, key: bytes, prepared: Prepared | None) -> None:
        try:
            if prepared is None:
                choice: Choice = self._choice
                if choice == "auto" and "xgrammar" not in self._backends:
                    choice = "llguidance"
                prepared = self._gate.prepare(spec, choice, spec.param)
            else:
                self._gate.check(prepared.backend, prepared.kind, prepared.text, spec.param)
            self._backend(prepared.backend)  # imported here: on the next lane, beside answers, that would take a minute
        except RametError as error:
            return self._refuse(key, error)
        except Exception as error:
            return self._land(key, None, _internal(error))
        self._lanes[2].submit(self._compile_aside, spec, key, prepared)
        return None

    def _compile_aside(self, spec: GrammarSpec, key: bytes, prepared: Prepared) -> None:
        if self._busy():
            step_aside()
        self._compile(spec, key, prepared)

    def _compile(self, spec: GrammarSpec, key: bytes, prepared: Prepared) -> None:
        start = self._clock()
        try:
            template = self._backend(prepared.backend).compile(prepared.kind, prepared.text)
        except BackendError as error:
            param = spec.param
            return self._refuse(key, InvalidRequest(f"{param}: {prepared.backend}: {error}", param=param))
        except Exception as error:
            return self._land(key, None, _internal(error))
        places = places_of(prepared.grammar, self._vocab.token_bytes)
        slowly = None if prepared.forces_little else self._pieces
        compiled = CompiledGrammar(template, self._stops, self._stop_row, self._counters, self._budget, places, slowly)
        with self._lock:
            self._compiles += 1
            self._compile_s += self._clock() - start
            self._compiled.put(key, compiled, compiled.n_bytes)
            self._prepared.drop(key)  # kept only from the door to here
        return self._land(key, self._after(spec, compiled), None)

    def _refuse(self, key: bytes, error: RametError) -> None:
        timeout = isinstance(error, GrammarTimeout)
        now = self._clock()
        with self._lock:
            self._timeouts += timeout
            if isinstance(error, InvalidRequest):
                self._refused[key] = _Refusal(error, now + (TIMEOUT_TTL_S if timeout else INVALID_TTL_S))
            if len(self._refused) > _MAX_NEGATIVE:
                self._refused = {k: r for k, r in self._refused.items() if r.until > now}
                while len(self._refused) > _MAX_NEGATIVE // 2:
                    del self._refused[next(iter(self._refused))]
        self._land(key, None, error)

    def _land(self, key: bytes, compiled: Compiled | None, error: BaseException | None) -> None:
        with self._lock:
            waiting = self._flights.pop(key, [])
        for future in waiting:
            if error is not None:
                _fail(future, error)
            elif compiled is not None and future.set_running_or_notify_cancel():
                future.set_result(compiled)

    def _prepare(self, spec: GrammarSpec, key: bytes) -> Prepared:
        with self._lock:
            prepared = self._prepared.get(key)
        if prepared is None:
            prepared = prepare(spec, self._choice, self._limits, HERE_S)
            with self._lock:
                self._prepared.put(key, prepared, len(prepared.text) * _OBJECTS + 200)
        return prepared

    def _at_hand(self, spec: GrammarSpec, prepared: Prepared) -> Prepared:
        """Importing xgrammar takes seconds; until it is there, `auto` gives the same language to llguidance."""
        if self._choice != "auto" or prepared.kind != "ebnf" or spec.kind == "ebnf" or "xgrammar" in self._backends:
            return prepared
        if not prepared.forces_little:
            return prepared  # llguidance gives up where it meets a very long forced text
        with self._lock:
            if self._import is None:
                self._import = self._lanes[1].submit(self._backend, "xgrammar")
        return prepare(spec, "llguidance", self._limits, HERE_S)

    def _backend(self, name: BackendName) -> Backend:
        with self._backend_locks[name]:
            if name not in self._backends:
                self._backends[name] = make_backend(name, self._vocab, self._pieces)
            return self._backends[name]

    def _after(self, spec: GrammarSpec, compiled: CompiledGrammar) -> Compiled:
        """Put the free text before it, where the request reasons first."""
        if spec.after is None:
            return compiled
        with self._marker_lock:
            if len(self._markers) > 64:
                self._markers.clear()
            marker = self._markers.setdefault(spec.after, Marker(self._vocab, spec.after))
        return MarkedCompiled(compiled.cursor, marker, compiled.n_bytes)


def _give_way() -> None:
    """What the gate lets through may still compile for a second: not at the cost of the model's threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _key(spec: GrammarSpec) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(spec)).digest()


def _fail(future: Future[Compiled], error: BaseException) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def _internal(error: Exception) -> RequestFailed:
    return RequestFailed(f"The grammar could not be compiled: {type(error).__name__}: {str(error)[:300]}")
