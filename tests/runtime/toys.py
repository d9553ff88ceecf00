"""Toys for the tests of the frontends: a byte tokenizer, and a scheduler that says what a test tells it to."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from typing import Any

from runtime.messages import Abort, Finish, FromScheduler, Output, Outputs, Reply, Submit, SubmitMany, Usage

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
