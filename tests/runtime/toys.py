"""Toys for the tests of the frontends: a byte tokenizer, and a scheduler that says what a test tells it to."""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from runtime.build import Parts
from runtime.config import EngineConfig
from runtime.errors import ModelLoadError
from runtime.execute.fake import fake_spec
from runtime.messages import (
    Abort,
    Call,
    Finish,
    FromScheduler,
    Output,
    Outputs,
    Reply,
    Submit,
    SubmitMany,
    Usage,
    unpack_ids,
)
from runtime.pull import embedded_path
from runtime.text.tokenizer import Tokenizer

EOS = 256


class ByteTokenizer:
    """One id a byte, and EOS."""

    def __init__(self) -> None:
        self.token_bytes = [bytes([i]) for i in range(256)] + [b"<eos>"]
        self.vocab_size = len(self.token_bytes)
        self.special_ids = frozenset([EOS])
        self.eos_ids = (EOS,)
        self.chat_template: str | None = None
        self.named_templates: dict[str, str] = {}
        self.bos_token, self.eos_token = "", "<eos>"

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        hidden = self.special_ids if skip_special else frozenset()
        return b"".join(self.token_bytes[i] for i in ids if i not in hidden).decode(errors="replace")


class ToldScheduler:
    """A scheduler loop whose words a test puts into its mouth, from any thread."""

    def __init__(self) -> None:
        self.last_turn = time.monotonic()
        self.busy = False
        self.got: list[Any] = []
        self.arrived: queue.Queue[Any] = queue.Queue()
        self._todo: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._sinks: dict[Any, Callable[[FromScheduler], None]] = {}
        self.auto: Callable[[Submit], None] | None = None  # answers every request by itself

    @property
    def aborted(self) -> list[str | None]:
        return [message.rid for message in self.got if isinstance(message, Abort)]

    def health(self) -> tuple[bool, str]:
        return True, ""

    def receive(self, msg: Any, sink: Callable[[FromScheduler], None]) -> None:
        self.got.append(msg)
        for item in msg.items if isinstance(msg, SubmitMany) else (msg,):
            self._sinks[item.rid if isinstance(item, Submit) else getattr(item, "id", None)] = sink
            self.arrived.put(item)
            if self.auto is not None and isinstance(item, Submit):
                self.auto(item)

    def say(
        self, rid: str, text: str | bytes = "", *, finish: Finish | None = None, eos: bool = False, **more: Any
    ) -> None:
        """Emit one Output for `rid`; `finish` ends the request."""
        ids = (*(text.encode() if isinstance(text, str) else text), *((EOS,) if eos else ()))
        usage = more.pop("usage", Usage(prompt_tokens=1, completion_tokens=len(ids)) if finish else None)
        output = Output(rid=rid, tokens=ids, finish=finish, usage=usage, **more)
        self._todo.put(lambda: self._sinks[rid](Outputs(items=(output,))))

    def end(self, rid: str, text: str = "", reason: Any = "stop") -> None:
        self.say(rid, text, eos=reason == "stop", finish=Finish(reason=reason))

    def reply(self, call: int, value: Any = None, error: str | None = None) -> None:
        self._todo.put(lambda: self._sinks[call](Reply(id=call, value=value, error=error)))

    def die(self, why: str) -> None:
        def raise_it() -> None:
            raise RuntimeError(why)

        self._todo.put(raise_it)

    def run(self) -> None:
        while (job := self._todo.get()) is not None:
            job()

    def stop(self, drain: bool = False) -> None:
        self._todo.put(None)


class EchoScheduler:
    """A scheduler that repeats each prompt, one token a turn.

    A prompt with `~` in it takes 20 ms a token; `!die` raises out of the loop, `!stall` keeps it busy without a turn.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self.last_turn = time.monotonic()
        self._inbox: queue.Queue[tuple[Any, Callable[[FromScheduler], None]] | None] = queue.Queue()
        self._live: dict[str, tuple[deque[int], Callable[[FromScheduler], None]]] = {}
        self._stop = False

    @property
    def busy(self) -> bool:
        return bool(self._live)

    def health(self) -> tuple[bool, str]:
        return True, ""

    def receive(self, msg: Any, sink: Callable[[FromScheduler], None]) -> None:
        self._inbox.put((msg, sink))

    def stop(self, drain: bool = False) -> None:
        self._inbox.put(None)

    def run(self) -> None:
        while not self._stop:
            self.last_turn = time.monotonic()
            self._ingest(block=not self._live)
            self._turn()

    def _ingest(self, block: bool) -> None:
        while True:
            try:
                entry = self._inbox.get(block, timeout=0.2 if block else None)
            except queue.Empty:
                return
            block = False
            if entry is None:
                self._stop = True
                return
            self._take(*entry)

    def _take(self, msg: Any, sink: Callable[[FromScheduler], None]) -> None:
        if isinstance(msg, Abort):
            if live := self._live.pop(msg.rid or "", None):
                live[1](Outputs(items=(Output(rid=msg.rid or "", finish=Finish(reason="abort"), usage=Usage()),)))
        elif isinstance(msg, Call):
            known = msg.op == "stats"
            sink(Reply(id=msg.id, value={"running": len(self._live)} if known else None, error=None if known else "no"))
        else:
            for item in msg.items if isinstance(msg, SubmitMany) else (msg,):
                self._live[item.rid] = (deque(unpack_ids(item.tokens).tolist()), sink)

    def _turn(self) -> None:
        for rid, (left, sink) in list(self._live.items()):
            text = b"".join(self._token_bytes[token] for token in left)
            if b"!die" in text:
                raise RuntimeError("told to die")
            if b"!stall" in text:
                time.sleep(3600)
            if b"~" in text:
                time.sleep(0.02)
            token = left.popleft()
            finish = None if left else Finish(reason="length")
            usage = None if left else Usage(prompt_tokens=1, completion_tokens=1)
            if finish is not None:
                del self._live[rid]
            sink(Outputs(items=(Output(rid=rid, tokens=(token,), finish=finish, usage=usage),)))


class ToyRunner:
    """What a process tells of its model, with no model."""

    n_pages, page_size, max_running = 64, 16, 8

    def __init__(self, vocab_size: int, path: str = "") -> None:
        spec = fake_spec(vocab_size=vocab_size, context_length=4096, eos_ids=(EOS,))
        self.spec = dataclasses.replace(spec, path=path)

    def close(self) -> None:
        pass


def echo_parts(config: EngineConfig) -> Parts:
    """Parts for a scheduler process that echoes bytes; `model` may ask it to fail."""
    if config.model == "broken":
        raise ModelLoadError("The shard model-00002.safetensors is cut short.")
    if config.model == "slow":
        time.sleep(600)
    if config.model == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    tokenizer = ByteTokenizer()
    scheduler = EchoScheduler(tokenizer.token_bytes)
    return Parts(config, ToyRunner(257), tokenizer, scheduler)  # type: ignore[arg-type]


def echo_words(config: EngineConfig) -> Parts:
    """`echo_parts` with the tokenizer of the embedded model, as a server needs it."""
    echo_parts(config)
    path = str(embedded_path("smollm2-135m"))
    tokenizer = Tokenizer.from_model(path)
    scheduler = EchoScheduler(tokenizer.token_bytes)
    return Parts(config, ToyRunner(tokenizer.vocab_size, path), tokenizer, scheduler)  # type: ignore[arg-type]
