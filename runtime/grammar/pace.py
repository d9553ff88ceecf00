"""Grammars compile on what a model's threads leave of the cores while streams run.

A low priority is not enough: whoever is let on a core keeps it until the system's next tick, which is a quarter of a
model's step, and the threads that work together on it wait for the one that lost its core. What the system counts as
idle gives way at once when such a thread wakes, but gets in where it yields; so the worker is stopped in between.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO

RUN_S, REST_S = 0.002, 0.004  # while streams run: the worker's moment, and the model's
LOOK_S = 0.02  # how soon it is noticed that streams run
PATIENCE = 6  # times its own bound a worker may take on a clock that does not stop while it rests
LEAST = 19  # of niceness

Busy = Callable[[], bool]


def step_aside(pid: int = 0) -> None:
    """From now on this process, or for 0 the calling thread, takes what others leave of a core (Linux).

    For good: only a privileged process could take it back. On a machine with a core to spare it is as fast as before.
    """
    if sys.platform != "linux":
        return
    try:
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    except OSError:  # a sandbox may forbid it
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid or threading.get_native_id(), LEAST)


def replies(process: subprocess.Popen[bytes], stream: IO[bytes], timeout_s: float, busy: Busy) -> bool:
    """Whether `stream` can be read before the worker has computed for `timeout_s`, or PATIENCE times that has passed.
    Where it cannot the worker may be left stopped."""
    deadline, left, aside = time.monotonic() + PATIENCE * timeout_s, timeout_s, False
    while left > 0 and time.monotonic() < deadline:
        paced = busy() and hasattr(signal, "SIGSTOP")
        if paced and not aside:
            step_aside(process.pid)
            aside = True
        before = _clock(process.pid if paced else 0)
        if _ready(stream, min(left, RUN_S if paced else LOOK_S)):
            return True
        if paced and _rests(process, stream):
            return True
        left -= _clock(process.pid if paced else 0) - before
    return False


def _clock(pid: int) -> float:
    """CPU seconds of a process, where the system tells (Linux); else, and for 0, those on the wall."""
    if not pid or sys.platform != "linux":
        return time.monotonic()
    try:
        return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid(3) makes it
    except OSError:
        return 0.0  # it has died, which its stream will tell


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
