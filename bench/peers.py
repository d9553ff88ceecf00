"""Ramet and its peers on the same work, alternating in one run.

    python -m bench.peers_setup                  # once: builds and installs the peers
    python -m bench.peers [--peers llama vllm transformers] [--workload single ...] [--rounds 2]

Every peer is a process of its own and gets the same number of threads: Ramet twice (its default, which keeps the GGUF's
blocks, and bfloat16), llama.cpp with the same GGUF, vLLM and transformers with the same weights expanded to bfloat16.
Prompts differ from round to round, so no round is answered from the last one's cache; the best round counts. Writes
bench/results/peers.md and two PNG plots (`pip install matplotlib`).
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from rich.console import Console

from bench import peers_report
from bench.peer_batches import TransformersPeer
from bench.peers_setup import bf16_model, default_root, llama_server, python_of
from runtime.bench.measure import alternate
from runtime.bench.remote import RemoteServer, Target
from runtime.bench.workloads import WORKLOADS, Workload
from runtime.models.loader import resolve_model

START_S = 400
SLOW_ROUNDS = 1  # a workload that takes a peer this long is run on it once
SLOW_S = 40.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=default_root(), help="where bench.peers_setup put the peers")
    parser.add_argument("--peers", nargs="*", default=["llama", "vllm", "transformers"])
    parser.add_argument("--workload", action="append", choices=tuple(WORKLOADS), help="default: all of them")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget", type=float, default=3600.0, metavar="S", help="begin nothing new after S seconds")
    parser.add_argument("--out", type=Path, default=peers_report.RESULTS)
    asked = parser.parse_args()
    works = [WORKLOADS[name] for name in asked.workload or WORKLOADS]
    about = peers_report.machine(asked.threads)
    slow = Slow(time.monotonic() + asked.budget)
    with ExitStack() as stack:
        targets = start(stack, asked.root, asked.peers, asked.threads)
        figures = alternate(targets, works, asked.rounds, Console(stderr=True), slow.can_run)
    peers_report.write(asked.out, figures, [one.name for one in targets], about)


class Slow:
    """Remembers what took a peer long, so that it is not repeated, and when time is up."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._began: dict[tuple[str, str], float] = {}
        self._last: tuple[str, str] | None = None
        self._long: set[tuple[str, str]] = set()

    def can_run(self, target: Target, work: Workload, turn: int) -> bool:
        now, key = time.monotonic(), (target.name, work.name)
        if self._last is not None and now - self._began[self._last] > SLOW_S:
            self._long.add(self._last)
        self._last = None
        if isinstance(target, TransformersPeer) and work.name in ("json", "burst"):
            return False  # it has no grammars, and no second request before the first is done
        if now > self._deadline or (turn >= SLOW_ROUNDS and key in self._long):
            return False
        self._began[key], self._last = now, key
        return True


def start(stack: ExitStack, root: Path, names: Sequence[str], threads: int) -> list[Target]:
    """Every peer that was asked for, up and warm."""
    gguf, folder = resolve_model("smollm2-135m"), bf16_model(root)
    script = str(Path(sys.executable).with_name("ramet"))
    ramet = [script, "serve", "--threads", str(threads), "--log-level", "warning"]
    makers = {
        peers_report.DEFAULT: (*ramet, "--model", str(gguf)),
        peers_report.BF16: (*ramet, "--model", str(folder), "--dtype", "bfloat16"),
    }
    if "llama" in names:
        command = (str(llama_server(root)), "-m", str(gguf), "-t", str(threads), "-np", "16", "-c", "32768")
        makers["llama.cpp Q4_1"] = command
    if "vllm" in names:
        command = (str(python_of(root, "vllm")), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder))
        makers["vLLM bf16"] = (*command, "--dtype", "bfloat16", "--max-model-len", "4096")
    targets: list[Target] = []
    started = []
    for name, words in makers.items():  # all at once, then one after the other until they answer
        port = free_port()
        command = [*words, "--host", "127.0.0.1", "--port", str(port)]
        started.append((name, f"http://127.0.0.1:{port}", *stack.enter_context(server(command, threads))))
    for name, url, process, log in started:
        try:
            wait_for(name, process, url + "/v1/models", log)
        except RuntimeError as error:
            if name in (peers_report.DEFAULT, peers_report.BF16):
                raise
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        targets.append(RemoteServer(name, url))
    if "transformers" in names:
        worker = TransformersPeer("transformers bf16", python_of(root, "transformers"), folder, "bfloat16", threads)
        targets.append(stack.enter_context(worker))
    for target in targets:
        target.complete("Warm up, please.", 8)
    return targets


@contextmanager
def server(command: list[str], threads: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server process and its log, ended on the way out. Idle ones must not spin."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    env |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            yield process, log.fileno()
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(name: str, process: subprocess.Popen[bytes], url: str, log: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            end = os.pread(log, 1 << 20, 0)[-3000:].decode("utf-8", "replace")
            raise RuntimeError(f"{name} ended with status {process.returncode}:\n{end}")
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass  # not up yet
        time.sleep(0.3)
    raise RuntimeError(f"{name} did not come up within {START_S} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
