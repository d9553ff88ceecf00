"""The gate's process: compiles a grammar and walks through it, so that what hangs or swells does so here.

    python -m runtime.grammar.worker

Talks msgpack in length-prefixed frames: `Setup` first, then a `Job` at a time, a `Verdict` for each. Ends when its
standard input ends. Imports a backend when a job first needs it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import struct
import sys
import time
from typing import IO, Literal

import msgspec

from runtime.errors import InvalidRequest
from runtime.grammar.backends import Backend, BackendError, BackendName, TextKind, make_backend
from runtime.grammar.limits import Limits
from runtime.grammar.pieces import Pieces
from runtime.grammar.prepare import Choice, prepare
from runtime.grammar.probe import walk
from runtime.grammar.protocol import Vocabulary, mask_words
from runtime.grammar.standins import import_xgrammar_alone
from runtime.messages import GrammarSpec

_LENGTH = struct.Struct("<I")


class Started(msgspec.Struct, frozen=True):
    """The worker's first word: from here on it ends with who started it, so it may be stopped."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    token_bytes: list[bytes]
    vocab_size: int
    stop_ids: list[int]
    control_ids: list[int]
    memory_bytes: int  # what a compilation may add to the address space

    def vocabulary(self) -> Vocabulary:
        return Vocabulary(tuple(self.token_bytes), self.vocab_size, tuple(self.stop_ids), frozenset(self.control_ids))


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A text to compile and walk through; or, with `spec`, what to prepare first for one of `choice`. With neither:
    only import the backend."""

    backend: BackendName
    kind: TextKind | None = None
    text: str = ""
    spec: GrammarSpec | None = None
    choice: Choice = "auto"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`backend`, `kind`, `text`, `forces_little`: what a spec was prepared to. `param`: of a spec that was refused."""

    outcome: Literal["ok", "ready", "invalid", "empty", "slow", "memory", "died", "refused"]
    message: str = ""
    compile_s: float = 0.0
    backend: BackendName | None = None
    kind: TextKind | None = None
    text: str = ""
    forces_little: bool = False
    grammar: bytes = b""  # pickled, where it is not too large to read in a few milliseconds
    param: str | None = None


def send(stream: IO[bytes], message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """One frame; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


_PR_SET_PDEATHSIG = 1
_MAX_GRAMMAR = 32 << 10  # bytes
MASK_LIMIT_S = 0.05
WORST_MASK_S = 0.5


class _Judge:
    def __init__(self, setup: Setup) -> None:
        self._vocab = setup.vocabulary()
        self._pieces = Pieces(self._vocab)
        self._memory_bytes = setup.memory_bytes
        self._backends: dict[str, Backend] = {}

    def judge(self, job: Job) -> Verdict:
        if job.spec is not None:
            return self._prepare(job.spec, job.choice)
        backend = self._backend(job.backend)
        if job.kind is None:
            return Verdict(outcome="ready")
        return self._try(backend, job.kind, job.text)

    def _backend(self, name: BackendName) -> Backend:
        if name not in self._backends:
            if name == "xgrammar":
                import_xgrammar_alone()
            self._backends[name] = make_backend(name, self._vocab, self._pieces)
            _bound_memory(self._memory_bytes)
        return self._backends[name]

    def _prepare(self, spec: GrammarSpec, choice: Choice) -> Verdict:
        """Read, normalise, print; compile what is not known to be cheap."""
        try:
            prepared = prepare(spec, choice, Limits())
        except InvalidRequest as error:
            return Verdict(outcome="refused", message=str(error), param=error.param)
        except MemoryError:
            return Verdict(outcome="memory")
        verdict = Verdict(outcome="ok")
        if not prepared.cheap:
            verdict = self._try(self._backend(prepared.backend), prepared.kind, prepared.text)
        if verdict.outcome != "ok":
            return msgspec.structs.replace(verdict, backend=prepared.backend)
        return msgspec.structs.replace(
            verdict,
            backend=prepared.backend,
            kind=prepared.kind,
            text=prepared.text,
            forces_little=prepared.forces_little,
            grammar=data if len(data := pickle.dumps(prepared.grammar)) <= _MAX_GRAMMAR else b"",
        )

    def _try(self, backend: Backend, kind: TextKind, text: str) -> Verdict:
        start = time.perf_counter()
        try:
            template = backend.compile(kind, text)
            compile_s = time.perf_counter() - start
            found = walk(template, mask_words(self._vocab.vocab_size), self._vocab.stop_ids)
        except MemoryError:
            return Verdict(outcome="memory")
        except (BackendError, RuntimeError) as error:
            memory = "bad_alloc" in str(error)
            return Verdict(outcome="memory" if memory else "invalid", message=str(error)[-300:])
        if found.dead:
            return Verdict(outcome="slow" if found.failure else "empty", message=found.failure or "")
        if found.slow_s > MASK_LIMIT_S or found.worst_s > WORST_MASK_S:
            return Verdict(outcome="slow", message=f"a mask took {found.worst_s * 1e3:.0f} ms")
        return Verdict(outcome="ok", compile_s=compile_s)


def _bound_memory(extra: int) -> None:
    """Limit the address space to what is mapped now plus `extra`. Only where the system can (Linux)."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + extra, hard))


def _end_with_parent() -> None:
    """Die when the thread that started us dies, even while we are stopped and cannot see our input end (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    _end_with_parent()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not land between the frames
    send(replies, Started())
    setup = receive(sys.stdin.buffer)
    if setup is None:
        return 0
    judge = _Judge(msgspec.msgpack.decode(setup, type=Setup))
    while (data := receive(sys.stdin.buffer)) is not None:
        send(replies, judge.judge(msgspec.msgpack.decode(data, type=Job)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
