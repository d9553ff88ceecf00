"""A scheduler over a fake device, driven step by step; what requests said is collected by id."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from runtime.config import EngineConfig
from runtime.execute.fake import FakeRunner, fake_spec
from runtime.messages import (
    Abort,
    Call,
    Finish,
    FromScheduler,
    Outputs,
    Reply,
    Segment,
    Submit,
    SubmitMany,
    TokenLogprob,
    Usage,
    pack_ids,
)
from runtime.params import SamplingParams
from runtime.scheduler import Scheduler
from runtime.step import Runner

GREEDY = {"temperature": 0.0, "ignore_eos": True}


@dataclass
class Said:
    """What one request has said so far."""

    tokens: list[int] = field(default_factory=list)
    segments: list[list[int]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    finish: Finish | None = None
    usage: Usage | None = None
    arrived: list[float] = field(default_factory=list)  # clock at each output with tokens


class Clock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class World:
    """`World(n_pages=16).ask("a", prompt, max_tokens=4); world.run(); world.said["a"].tokens`."""

    def __init__(
        self,
        *,
        overlap: bool = True,
        runner: Runner | None = None,
        vocab_size: int = 64,
        context_length: int = 512,
        n_pages: int = 64,
        page_size: int = 4,
        max_running: int = 8,
        eos_ids: tuple[int, ...] = (1,),
        grammar: Any = None,
        token_bytes: Iterable[bytes] | None = None,
        special_ids: frozenset[int] = frozenset(),
        clock: Callable[[], float] | None = None,
        **config: Any,
    ) -> None:
        self.clock = clock or Clock()
        self.runner = runner or FakeRunner(
            fake_spec(vocab_size, context_length, eos_ids),
            n_pages=n_pages,
            page_size=page_size,
            max_running=max_running,
        )
        options: dict[str, Any] = {"max_step_tokens": 64, "chunk_tokens": 32, "audit": True, **config}
        self.config = EngineConfig(overlap=overlap, max_running=self.runner.max_running, **options)
        names = [bytes([97 + t % 26]) for t in range(self.runner.spec.vocab_size)]
        self.scheduler = Scheduler(
            self.config,
            self.runner,
            token_bytes=list(token_bytes) if token_bytes is not None else names,
            special_ids=special_ids,
            grammar=grammar,
            clock=self.clock,
        )
        self.said: dict[str, Said] = {}
        self.replies: dict[int, Reply] = {}
        self.n_turns = 0

    @property
    def state(self) -> Any:
        return self.scheduler.state

    def sink(self, message: FromScheduler) -> None:
        if isinstance(message, Reply):
            self.replies[message.id] = message
            return
        assert isinstance(message, Outputs)
        for output in message.items:
            said = self.said.setdefault(output.rid, Said())
            assert said.usage is None, f"{output.rid} said something after its end"
            while len(said.segments) <= output.segment:
                said.segments.append([])
            said.tokens += output.tokens
            said.segments[output.segment] += output.tokens
            said.logprobs += output.logprobs or ()
            said.prompt_logprobs += output.prompt_logprobs or ()
            if output.tokens:
                said.arrived.append(self.clock())
            if output.finish is not None:
                said.finishes.append(output.finish)
            if output.usage is not None:
                said.finish, said.usage = output.finish, output.usage

    def ask(self, rid: str, prompt: Iterable[int], **options: Any) -> Submit:
        """Submit a request; sampling options and Submit's fields may be mixed."""
        submit = make_submit(rid, prompt, **options)
        self.scheduler.receive(submit, self.sink)
        return submit

    def ask_together(self, *submits: Submit) -> None:
        self.scheduler.receive(SubmitMany(items=submits), self.sink)

    def abort(self, rid: str | None = None, **kwargs: Any) -> None:
        self.scheduler.receive(Abort(rid=rid, **kwargs), self.sink)

    def call(self, op: str, **args: Any) -> Any:
        number = len(self.replies) + 1
        self.scheduler.receive(Call(id=number, op=op, args=args), self.sink)
        self.scheduler.step()
        reply = self.replies[number]
        if reply.error is not None:
            raise RuntimeError(reply.error)
        return reply.value

    def turn(self, n: int = 1) -> bool:
        """Turn the loop; whether it had anything to do at the last turn."""
        worked = False
        for _ in range(n):
            worked = self.scheduler.step()
            self.n_turns += 1
        return worked

    def run(self, limit: int = 5000) -> World:
        """Turn until nothing is left to do. A loop that has nothing to do now sleeps: time passes."""
        for _ in range(limit):
            if not self.scheduler.busy:
                self.check_idle()
                return self
            if not self.turn() and isinstance(self.clock, Clock):
                self.clock.now += 0.001
        raise AssertionError(f"still busy after {limit} turns: {self.scheduler.stats()}")

    def check_idle(self) -> None:
        """With nobody running, every page is free or in the tree, and none is held."""
        self.scheduler.state.cache.begin_plan(self.state.step, self.clock())
        stats = self.state.cache.stats()
        assert stats["request"] == 0, stats
        assert stats["protected"] == 0, stats
        assert stats["free"] + stats["tree"] == stats["n_pages"], stats
        assert self.state.rows.n_used == 0
        self.state.audit()

    def tokens(self, rid: str) -> list[int]:
        return self.said[rid].tokens


SUBMIT_FIELDS = set(Submit.__struct_fields__) - {"rid", "tokens", "params", "segments"}


def make_submit(
    rid: str, prompt: Iterable[int], *, segments: Iterable[tuple[Iterable[int], dict[str, Any]]] = (), **options: Any
) -> Submit:
    """Greedy and without EOS unless told otherwise."""
    fields = {k: options.pop(k) for k in list(options) if k in SUBMIT_FIELDS}
    return Submit(
        rid=rid,
        tokens=pack_ids(list(prompt)),
        params=SamplingParams(**{**GREEDY, **options}),
        segments=tuple(make_segment(tokens, **params) for tokens, params in segments),
        **fields,
    )


def make_segment(tokens: Iterable[int], *, grammar: Any = None, **params: Any) -> Segment:
    return Segment(tokens=pack_ids(list(tokens)), params=SamplingParams(**{**GREEDY, **params}), grammar=grammar)


def alone(prompt: Iterable[int], *, overlap: bool = False, world: dict[str, Any] | None = None, **options: Any) -> Said:
    """What a request says with the whole machine for itself."""
    w = World(overlap=overlap, **{"n_pages": 256, **(world or {})})
    w.ask("alone", prompt, **options)
    return w.run().said["alone"]
