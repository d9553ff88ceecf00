"""The scheduler process: loads the model, runs the scheduler, and ends with its parent.

Started by `runtime.process` as `python -m runtime.child FOLDER PARENT`, with a `Start` as JSON on standard input.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from runtime.errors import BackendUnavailable, InvalidRequest, ModelLoadError, NotFound, RametError
from runtime.link import BEAT_S, Beat, Failed, Hello, ProcessEnd, Ready, SocketFolder, Start, Stop
from runtime.logs import setup_logging

if TYPE_CHECKING:
    from runtime.build import Parts

log = logging.getLogger("ramet.scheduler")

EXIT_DIED = 70
PR_SET_PDEATHSIG = 1
CANNOT_LOAD = (ModelLoadError, BackendUnavailable, InvalidRequest, NotFound)


def main(argv: list[str]) -> int:
    """Run until told to stop (0), the scheduler dies (70), or the parent is gone."""
    folder, parent = SocketFolder(argv[0]), int(argv[1])
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent drains first, then says Stop
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent held signals while it made us
    faulthandler.enable()
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=Start)
    setup_logging(start.log_format, start.log_level)
    link = ProcessEnd(folder)
    try:
        return _run(start, link, parent)
    finally:
        link.close()


def die_with(parent: int) -> None:
    """Be killed by the kernel when the parent's thread ends (Linux); `_serve` also watches the parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before we asked
        raise SystemExit(EXIT_DIED)


def _run(start: Start, link: ProcessEnd, parent: int) -> int:
    try:
        module, _, name = start.parts.partition(":")
        parts: Parts = getattr(import_module(module), name)(start.engine)
    except RametError as err:
        known = isinstance(err, CANNOT_LOAD)
        link.send(Failed(error=type(err).__name__ if known else "ModelLoadError", message=str(err)))
        return 2
    runner = parts.runner
    link.send(Ready(spec=runner.spec, n_pages=runner.n_pages, page_size=runner.page_size))
    if parts.grammar is not None:
        parts.grammar.warm()  # its compiler takes seconds to import: now, not in the first request
    gc.freeze()  # the collector need never look at the model again
    died = threading.Event()
    thread = threading.Thread(target=_turn, args=(parts, died), name="ramet-scheduler", daemon=True)
    thread.start()
    _serve(parts, link, died, parent)
    if died.is_set():
        return EXIT_DIED
    parts.scheduler.stop(drain=False)
    thread.join()
    parts.close()
    return 0


def _turn(parts: Parts, died: threading.Event) -> None:
    try:
        parts.scheduler.run()
    except BaseException:
        log.exception("The scheduler died.")
        died.set()


def _serve(parts: Parts, link: ProcessEnd, died: threading.Event, parent: int) -> None:
    """Hand messages to the scheduler and beat, until Stop, death or the parent's end."""
    scheduler = parts.scheduler
    next_beat = 0.0
    while not died.is_set() and os.getppid() == parent:
        if (now := time.monotonic()) >= next_beat:
            _, trouble = scheduler.health()
            link.send(Beat(turn=scheduler.last_turn, busy=scheduler.busy, trouble=trouble))
            next_beat = now + BEAT_S
        message = link.receive(min(BEAT_S, max(0.001, next_beat - now)))
        if isinstance(message, Stop):
            return
        if message is not None and not isinstance(message, Hello):
            scheduler.receive(message, link.send)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
