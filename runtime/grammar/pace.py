"""Waiting for a worker that may have a core for a moment at a time only while streams run.

A low priority is not enough: where every core is busy, whoever is let on a core keeps it until the system's next tick,
which is a quarter of a model's step, and the threads that work together on it wait for the one that lost its core.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from typing import IO

RUN_S, REST_S = 0.001, 0.012  # while streams run: the worker's moment, and the model's
LOOK_S = 0.02  # how soon it is noticed that streams run
PATIENCE = 2  # times its own bound a worker may take on a clock that does not stop while it rests

Busy = Callable[[], bool]


def replies(process: subprocess.Popen[bytes], stream: IO[bytes], timeout_s: float, busy: Busy) -> bool:
    """Whether `stream` can be read before the worker has run for `timeout_s`, or twice that has passed. Where it cannot
    the worker may be left stopped."""
    deadline, left = time.monotonic() + PATIENCE * timeout_s, timeout_s
    while left > 0 and time.monotonic() < deadline:
        paced = busy() and hasattr(signal, "SIGSTOP")
        start = time.monotonic()
        if _ready(stream, min(left, RUN_S if paced else LOOK_S)):
            return True
        left -= time.monotonic() - start
        if paced and _rests(process, stream):
            return True
    return False


def _rests(process: subprocess.Popen[bytes], stream: IO[bytes]) -> bool:
    """Stop the worker for a moment. True if it has replied before."""
    try:
        os.kill(process.pid, signal.SIGSTOP)
        replied = _ready(stream, REST_S)
        os.kill(process.pid, signal.SIGCONT)
    except ProcessLookupError:
        return True  # it has died: its stream ends
    return replied


def _ready(stream: IO[bytes], seconds: float) -> bool:
    return bool(select.select([stream], [], [], seconds)[0])
