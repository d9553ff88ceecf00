"""A killable process in front of the compiler. Threads cannot be cancelled; a process can."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from runtime.errors import InvalidRequest, RequestFailed
from runtime.grammar.backends import BackendName, TextKind
from runtime.grammar.pace import PATIENCE, Busy, replies
from runtime.grammar.prepare import Choice, Prepared
from runtime.grammar.protocol import Vocabulary
from runtime.grammar.worker import Job, Setup, Verdict, receive, send
from runtime.messages import GrammarSpec

START_TIMEOUT_S = 60.0


class GrammarTimeout(InvalidRequest):
    """The grammar took too long to compile. It may still be valid: the machine may have been busy."""


class Gate:
    """One worker, started when first needed, killed when a job exceeds its bounds. Thread-safe; a job at a time."""

    def __init__(
        self,
        vocab: Vocabulary,
        *,
        timeout_s: float = 5.0,
        memory_bytes: int = 2 << 30,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._vocab = vocab
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._memory_bytes = memory_bytes
        self.busy: Busy = lambda: False  # whether streams run, which a job must not slow down
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: set[str] = set()
        self._closed = False
        self.kills = 0
        self.checks = 0

    def warm(self, backend: BackendName) -> None:
        """Start the worker and let it import a backend."""
        with self._lock:
            self._prepare(backend)

    @property
    def running(self) -> bool:
        """Whether there is a worker that needs not be started first."""
        return bool(self._ready)

    def check(self, backend: BackendName, kind: TextKind, text: str, param: str) -> None:
        """Return if the grammar compiles in time and its masks are cheap; else raise InvalidRequest."""
        with self._lock:
            self.checks += 1
            self._prepare(backend)
            verdict = self._ask(Job(backend=backend, kind=kind, text=text), self._timeout_s)
        if verdict is None:
            raise self._late(param)
        _judge(verdict, backend, param)

    def prepare(self, spec: GrammarSpec, choice: Choice, param: str) -> Prepared:
        """Let the worker read the grammar too, which for a large one holds an interpreter for long; what it prepared
        compiles in time and its masks are cheap. Raises InvalidRequest."""
        first: BackendName = "llguidance" if choice == "llguidance" else "xgrammar"
        with self._lock:
            self.checks += 1
            self._prepare(first)
            verdict = self._ask(Job(backend=first, spec=spec, choice=choice), self._timeout_s)
        if verdict is None:
            raise self._late(param)
        if verdict.outcome == "refused":
            raise InvalidRequest(verdict.message, param=verdict.param)
        _judge(verdict, verdict.backend or first, param)
        assert verdict.backend is not None
        assert verdict.kind is not None
        return Prepared(
            verdict.backend,
            verdict.kind,
            verdict.text,
            cheap=True,
            grammar=pickle.loads(verdict.grammar) if verdict.grammar else None,  # of our own process
            forces_little=verdict.forces_little,
        )

    def _late(self, param: str) -> GrammarTimeout:
        wall_s = PATIENCE * self._timeout_s
        message = (
            f"{param}: the grammar takes longer than {self._timeout_s:g} s to compile (beside answers, {wall_s:g} s)."
        )
        return GrammarTimeout(message, param=param, code="grammar_timeout")

    def close(self) -> None:
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()  # also ends a job that is being waited for
            process.wait()
        with self._lock:
            self._kill()

    def _prepare(self, backend: BackendName) -> None:
        if self._closed:
            raise RequestFailed("The engine is shutting down.")
        if self._process is None or self._process.poll() is not None:
            self._start()
        if backend not in self._ready:
            verdict = self._ask(Job(backend=backend, kind=None), self._start_timeout_s)
            if verdict is None or verdict.outcome != "ready":
                raise RequestFailed(f"The grammar worker could not start {backend}.")
            self._ready.add(backend)

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._ready.clear()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "runtime.grammar.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        vocab = self._vocab
        self._send(
            Setup(
                token_bytes=list(vocab.token_bytes),
                vocab_size=vocab.vocab_size,
                stop_ids=list(vocab.stop_ids),
                control_ids=sorted(vocab.control_ids),
                memory_bytes=self._memory_bytes,
            )
        )
        assert self._process.stdout is not None
        receive(self._process.stdout)  # Started: before that it must not be stopped

    def _send(self, message: msgspec.Struct) -> bool:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            send(self._process.stdin, message)
        except OSError:
            return False
        return True

    def _ask(self, job: Job, timeout_s: float) -> Verdict | None:
        """The worker's verdict; None if it took too long. A worker that takes too long or dies is replaced."""
        assert self._process is not None
        assert self._process.stdout is not None
        in_time = self._send(job) and replies(self._process, self._process.stdout, timeout_s, self.busy)
        data = receive(self._process.stdout) if in_time else None
        if data is not None:
            return msgspec.msgpack.decode(data, type=Verdict)
        self.kills += 1
        self._kill()
        return Verdict(outcome="died") if in_time else None

    def _kill(self) -> None:
        process, self._process = self._process, None
        self._ready.clear()
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue


def _judge(verdict: Verdict, backend: BackendName, param: str) -> None:
    match verdict.outcome:
        case "invalid":
            raise InvalidRequest(f"{param}: {backend} refuses the grammar: {verdict.message}", param=param)
        case "empty":
            raise InvalidRequest(f"{param}: no text can match the grammar.", param=param)
        case "slow":
            raise InvalidRequest(f"{param}: the grammar is too costly to apply ({verdict.message}).", param=param)
        case "memory" | "died":
            raise InvalidRequest(f"{param}: the grammar takes too much memory to compile, or crashes.", param=param)
