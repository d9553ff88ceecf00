"""The service: once per spec, off the caller's thread, bounded, and never wrong about a timeout."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import pytest

from runtime.errors import InvalidRequest, RequestFailed
from runtime.grammar import service as module
from runtime.grammar.gate import Gate, GrammarTimeout
from runtime.grammar.limits import Limits
from runtime.grammar.places import Atlas
from runtime.grammar.prepare import prepare
from runtime.grammar.protocol import Compiled, Vocabulary
from runtime.grammar.service import READ_HERE, CompileService
from runtime.messages import GrammarSpec
from tests.grammar.toolkit import schema_spec

NEEDS_GATE = GrammarSpec(kind="ebnf", spec='root ::= "yes" | "no"')


class StubGate:
    """Stands where the worker process would: refuses, times out or lets pass as told. Counts."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.checks = self.kills = 0
        self.open = threading.Event()
        self.open.set()

    def check(self, *_: Any) -> None:
        self.checks += 1
        self.open.wait(30)
        if self.error is not None:
            raise self.error

    running = False

    def warm(self, _: Any) -> None:
        pass

    def close(self) -> None:
        self.open.set()


@pytest.fixture
def make(vocab: Vocabulary) -> Iterator[Callable[..., CompileService]]:
    made: list[CompileService] = []

    def build(gate: Any = None, **options: Any) -> CompileService:
        made.append(CompileService(vocab, gate=gate or StubGate(), **options))
        return made[-1]

    yield build
    for service in made:
        service.close()


def object_with(key: str) -> GrammarSpec:
    return schema_spec({"type": "object", "properties": {key: {"type": "string"}}, "required": [key]})


def test_one_compilation_serves_all_who_ask_at_once(make: Callable[..., CompileService]) -> None:
    gate = StubGate()
    service = make(gate, backend="xgrammar")
    gate.open.clear()
    futures = [service.compile_async(NEEDS_GATE) for _ in range(8)]
    gate.open.set()
    assert all(f.result(30).cursor().can_stop is False for f in futures)
    assert gate.checks == 1
    assert service.stats()["compiles_total"] == 1


def test_asking_never_blocks(make: Callable[..., CompileService]) -> None:
    gate = StubGate()
    service = make(gate, backend="xgrammar")
    gate.open.clear()
    slow = service.compile_async(NEEDS_GATE)
    quick = service.compile_async(object_with("a"))  # on the other lane
    assert quick.result(30)
    assert not slow.done()


def test_the_second_time_is_a_hit(make: Callable[..., CompileService]) -> None:
    service = make(backend="llguidance")
    first = service.compile_async(object_with("a")).result(30)
    again = service.compile_async(object_with("a"))
    assert again.done()
    assert again.result() is first
    assert service.stats()["cache_hits_total"] == 1


def test_a_cancelled_waiter_leaves_the_others_their_result(make: Callable[..., CompileService]) -> None:
    gate = StubGate()
    service = make(gate, backend="xgrammar")
    gate.open.clear()
    first, second = service.compile_async(NEEDS_GATE), service.compile_async(NEEDS_GATE)
    assert first.cancel()
    gate.open.set()
    assert second.result(30)


def test_the_cache_is_bounded_in_bytes(make: Callable[..., CompileService]) -> None:
    service = make(backend="llguidance", cache_bytes=1 << 20)
    for i in range(20):
        service.compile_async(object_with(f"k{i}")).result(30)
    stats = service.stats()
    assert stats["cache_bytes"] <= 1 << 20
    assert stats["cache_entries"] < 20
    assert stats["cache_evictions_total"] == 20 - stats["cache_entries"]


def test_a_refusal_is_remembered_for_a_while(make: Callable[..., CompileService]) -> None:
    now = [100.0]
    service = make(StubGate(InvalidRequest("no", param="ebnf")), backend="xgrammar", clock=lambda: now[0])
    for elapsed, checks in ((0, 1), (1, 1), (module.INVALID_TTL_S + 1, 2)):
        now[0] = 100.0 + elapsed
        with pytest.raises(InvalidRequest):
            service.compile_async(NEEDS_GATE).result(30)
        assert service._gate.checks == checks


def test_a_timeout_is_not_remembered_as_invalid(make: Callable[..., CompileService]) -> None:
    now = [100.0]
    gate = StubGate(GrammarTimeout("late", param="ebnf", code="grammar_timeout"))
    service = make(gate, backend="xgrammar", clock=lambda: now[0])
    with pytest.raises(GrammarTimeout):
        service.compile_async(NEEDS_GATE).result(30)
    gate.error = None
    now[0] += module.TIMEOUT_TTL_S + 0.1
    assert service.compile_async(NEEDS_GATE).result(30)
    assert service.stats()["timeouts_total"] == 1


def test_the_negative_cache_is_bounded(make: Callable[..., CompileService]) -> None:
    service = make()
    futures: list[Future[Compiled]] = []
    for i in range(module._MAX_NEGATIVE + 100):
        futures.append(service.compile_async(schema_spec({"type": f"no-type-{i}"})))
    wait(futures, 60)
    assert all(isinstance(f.exception(), InvalidRequest) for f in futures)
    assert service.stats()["refused_entries"] <= module._MAX_NEGATIVE


def test_validate_refuses_at_the_door_without_a_backend(make: Callable[..., CompileService]) -> None:
    service = make()
    service.validate(object_with("a"))
    with pytest.raises(InvalidRequest, match="'/pattern'"):
        service.validate(schema_spec({"type": "string", "pattern": "("}))
    assert service.stats()["compiles_total"] == 0


def test_closing_fails_what_still_waits(make: Callable[..., CompileService]) -> None:
    gate = StubGate()
    service = make(gate, backend="xgrammar")
    gate.open.clear()
    futures = [service.compile_async(GrammarSpec(kind="ebnf", spec=f'root ::= "{i}"')) for i in range(3)]
    service.close()
    wait(futures, 30)
    assert isinstance(futures[-1].exception(), RequestFailed)


def test_auto_does_not_wait_for_the_import_of_xgrammar(make: Callable[..., CompileService]) -> None:
    service = make(backend="auto")
    release = threading.Event()
    service._lanes[1].submit(release.wait, 30)  # the import stands behind this
    spec = object_with("early")
    assert type(service.compile_async(spec).result(30).template).__name__ == "_LlguidanceTemplate"
    release.set()
    service.warm().result(60)
    late = service.compile_async(object_with("late")).result(30)
    assert type(late.template).__name__ == "_XgrammarTemplate"


@pytest.fixture(scope="module")
def gate(vocab: Vocabulary) -> Iterator[Gate]:
    gate = Gate(vocab, timeout_s=20.0)
    yield gate
    gate.close()


def test_the_worker_passes_what_is_fine(gate: Gate) -> None:
    gate.check("llguidance", "lark", "start: /[a-z]{3}/\n", "regex")
    gate.check("xgrammar", "ebnf", 'root ::= "a"', "ebnf")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("root ::= root", "no text can match"),
        ("root ::= missing", "not defined"),
        ('root ::= "a" other', "not defined"),
        ("root ::= (", "refuses"),
    ],
)
def test_the_worker_refuses_what_is_not(gate: Gate, text: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        gate.check("xgrammar", "ebnf", text, "ebnf")


def test_the_worker_reads_large_grammars_too(gate: Gate) -> None:
    """Same text, same refusal as in this process, which is left alone meanwhile."""
    props = {f"field_{i}": {"type": "string", "maxLength": 9} for i in range(300)}
    spec = schema_spec({"type": "object", "properties": props, "required": list(props)})
    found, own = gate.prepare(spec, "auto", "json_schema"), prepare(spec, "auto", Limits())
    assert (found.backend, found.kind, found.text) == (own.backend, own.kind, own.text)
    with pytest.raises(InvalidRequest, match="at '/properties/x/type'") as caught:
        gate.prepare(schema_spec({"properties": {**props, "x": {"type": "no"}}}), "auto", "json_schema")
    assert caught.value.param == "json_schema"


def test_a_large_grammar_goes_to_the_worker_where_there_is_one(vocab: Vocabulary) -> None:
    service = CompileService(vocab, "llguidance")
    try:
        service.warm().result(60)
        service._lanes[1].submit(lambda: None).result(60)  # the worker is there
        words = [f"word number {i}" for i in range(600)]
        future = service.compile_async(GrammarSpec(kind="choices", spec=json.dumps(words)))
        cursor = future.result(60).cursor()
        assert service.stats()["gate_checks_total"] == 1
        assert all(cursor.accept(token) for token in service._pieces.split(b"word number 599"))
        assert cursor.done
    finally:
        service.close()


def test_a_hanging_compilation_is_killed_and_the_next_one_works(vocab: Vocabulary) -> None:
    slow = "root ::= " + " ".join(["[a-z]{1,900}"] * 12)
    gate = Gate(vocab, timeout_s=0.5)
    try:
        gate.warm("xgrammar")
        started = time.monotonic()
        with pytest.raises(GrammarTimeout) as caught:
            gate.check("xgrammar", "ebnf", slow, "ebnf")
        assert time.monotonic() - started < 10
        assert caught.value.code == "grammar_timeout"
        assert gate.kills == 1
        gate.check("llguidance", "lark", "start: /[a-z]{3}/\n", "regex")
    finally:
        gate.close()


def test_a_dead_worker_is_replaced(gate: Gate) -> None:
    gate.warm("llguidance")
    assert gate._process is not None
    gate._process.kill()
    gate._process.wait()
    gate.check("llguidance", "lark", "start: /[a-z]{3}/\n", "regex")


def test_the_worker_needs_no_torch(gate: Gate) -> None:
    gate.warm("xgrammar")
    assert gate._process is not None
    with open(f"/proc/{gate._process.pid}/maps") as maps:
        assert "libtorch" not in maps.read()


def test_specs_differ_by_whitespace_and_marker(make: Callable[..., CompileService]) -> None:
    service = make(backend="llguidance")
    plain = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    specs = [schema_spec(plain), schema_spec(plain, whitespace="flexible"), schema_spec(plain, after="</think>")]
    compiled = [service.compile_async(s).result(30) for s in specs]
    assert len({id(c) for c in compiled}) == 3
    assert json.loads(specs[0].spec) == plain


def test_a_large_schema_read_by_the_worker_has_its_places(vocab: Vocabulary) -> None:
    """Else every mask of it would be asked of its engine again."""
    service = CompileService(vocab)
    service.warm().result()
    service._lanes[1].submit(lambda: None).result()  # the worker is ready
    large = {"anyOf": [{"type": "object", "properties": {f"key_{i}": {"const": "x" * 200}}} for i in range(40)]}
    spec = schema_spec(large)
    assert len(spec.spec) > READ_HERE
    checks = service.stats()["gate_checks_total"]
    compiled: Any = service.compile_async(spec).result()
    assert service.stats()["gate_checks_total"] == checks + 1
    assert isinstance(compiled.places, Atlas)
    assert compiled.slowly is None
    service.close()
