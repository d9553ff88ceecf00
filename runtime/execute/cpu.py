"""The CPU as a device: one worker thread with a FIFO queue, so that launching never waits for computing.

Everything that touches torch runs on that thread; the kernels release the GIL while they compute.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")
BEGIN_S = 1e-3  # how long a launch waits at most for an idle device to begin


class CpuQueue:
    """Runs work in the order it was submitted, on its own thread, in inference mode."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = False
        self._begun = threading.Lock()  # let go of when an idle device takes work: for whoever gave it
        self._begun.acquire()
        self._thread = threading.Thread(target=self._run, name="ramet-device", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Queue `work`, which handles its own errors.

        A device that has nothing to do needs the GIL to begin, which a caller that goes on with its own work would keep
        for longer than the beginning takes.
        """
        idle = self._idle
        self._begun.acquire(blocking=False)  # what an earlier caller did not wait for
        self._work.put(work)
        if idle:
            self._begun.acquire(timeout=BEGIN_S)

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the worker and wait for its value (or raise what it raised)."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.submit(work)
        return future.result()

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self.n_threads)
        with torch.inference_mode():
            while (work := self._next()) is not None:
                work()
                del work  # a waiting worker must not keep the last step's tensors alive

    def _next(self) -> Callable[[], None] | None:
        self._idle = self._work.empty()
        work = self._work.get()
        self._idle = False
        try:
            self._begun.release()
        except RuntimeError:
            return work  # nobody waited for the last beginning either
        return work


def default_threads() -> int:
    """Physical cores this process may use; OMP_NUM_THREADS, where set, wins."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_core_of(cpu) for cpu in usable}
    return max(1, len(cores))


def _core_of(cpu: int) -> tuple[str, str]:
    """(package, core) of a logical CPU; its own number where the system does not say."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (topology / "physical_package_id").read_text().strip(), (topology / "core_id").read_text().strip()
    except OSError:
        return "", str(cpu)
