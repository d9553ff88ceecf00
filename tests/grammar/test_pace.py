"""While streams run the worker has a core for moments only, and it never outlives who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.grammar import pace

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

COUNTS = "import time\nwhile time.process_time() < 0.2: pass\nprint('done', flush=True)"
SLEEPS = "import time\ntime.sleep(60)"
ROOT = Path(__file__).parents[2]
STARTS_A_WORKER = """
import sys, time
from runtime.grammar.gate import Gate
from runtime.grammar.protocol import Vocabulary
gate = Gate(Vocabulary((b"a", b"b", b""), 3, (2,), frozenset({2})))
gate._start()
print(gate._process.pid, flush=True)
time.sleep(60)
"""


def start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


def state_of(pid: int) -> str:
    """One letter: R, S, T (stopped), Z; "" where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return ""


def replies(process: subprocess.Popen[bytes], timeout_s: float, busy: bool) -> tuple[bool, float]:
    assert process.stdout is not None
    begin = time.monotonic()
    found = pace.replies(process, process.stdout, timeout_s, lambda: busy)
    return found, time.monotonic() - begin


def test_beside_streams_it_rests_most_of_the_time_and_still_gets_there() -> None:
    with start(COUNTS) as process:
        found, seconds = replies(process, 20, busy=True)
        assert found
        assert seconds > 0.2 * pace.REST_S / pace.RUN_S / 6, "it had a core for more than it should have"
        assert process.stdout is not None
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.read() == b"done\n"


def test_what_never_replies_is_given_up() -> None:
    for busy in (False, True):
        with start(SLEEPS) as process:
            found, seconds = replies(process, 0.2, busy)
            assert not found
            assert 0.2 <= seconds < 2
            process.kill()


def test_a_dead_worker_is_an_answer() -> None:
    with start(SLEEPS) as process:
        process.kill()
        assert replies(process, 5, busy=True)[0]


def test_a_stopped_worker_dies_with_its_parent() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", STARTS_A_WORKER], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        os.kill(worker, signal.SIGSTOP)
        parent.kill()
    until = time.monotonic() + 10
    while state_of(worker) not in ("", "Z") and time.monotonic() < until:
        time.sleep(0.05)
    assert state_of(worker) in ("", "Z")
