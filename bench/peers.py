"""Ramet and its peers on the same work, alternating in one run.

    python -m bench.peers [--llama /path/to/llama-server] [--transformers bfloat16] [--rounds 2] [--quick]

Ramet and llama.cpp are started here as servers on 127.0.0.1 and spoken to through the OpenAI completions API, both
with the same GGUF file; transformers runs in this process with the same weights expanded. Every round runs a
workload on each peer in turn, prompts differ from round to round so that no round is answered from the last one's
cache, and the best round counts. Writes bench/results/peers.md and one SVG.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
from rich.progress import Progress

from bench.svg import line_chart
from runtime.models.loader import resolve_model

RESULTS = Path(__file__).parent / "results"
WORDS = ("amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "harbor", "island", "juniper", "kelp", "pine")


@dataclass
class Reply:
    """One answer: when it was asked for, and when each piece of text came."""

    asked: float
    text: str = ""
    times: list[float] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


class Peer(Protocol):
    name: str

    def ask(self, prompt: str, max_tokens: int) -> Reply: ...


class HttpPeer:
    """A server with the OpenAI completions API."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._client = httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=64))

    def ask(self, prompt: str, max_tokens: int) -> Reply:
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        reply = Reply(time.perf_counter())
        with self._client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{self.name}: {response.status_code} {response.read()[:300]!r}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:]).get("choices") or [{}]
                    reply.text += choices[0].get("text") or ""
                    reply.times.append(time.perf_counter())
        return reply


class TransformersPeer:
    """transformers' own generate, one prompt at a time."""

    def __init__(self, gguf: Path, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(threads)
        self.name = f"transformers {dtype}"
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        self._model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype)
        ).eval()

    def ask(self, prompt: str, max_tokens: int) -> Reply:
        reply = Reply(time.perf_counter())
        ids = self._tokenizer(prompt, return_tensors="pt").input_ids
        seen: list[float] = []

        class Clock:
            def put(self, value: object) -> None:
                seen.append(time.perf_counter())

            def end(self) -> None: ...

        with self._torch.inference_mode():
            self._model.generate(
                ids, max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False, streamer=Clock()
            )
        reply.times = seen[1:]  # the first is the prompt
        return reply


# -- workloads: a peer and a round's number in, a figure out ------------------------------------------------------


def text_of(n_words: int, salt: str) -> str:
    """About 1.3 tokens a word; no two salts share a beginning."""
    return salt + " " + " ".join(WORDS[(i * 7 + len(salt) * 3 + i // 16) % 12] for i in range(n_words))


def together(peer: Peer, prompts: Sequence[str], max_tokens: int) -> tuple[float, list[Reply]]:
    """Seconds until all are answered."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(lambda prompt: peer.ask(prompt, max_tokens), prompts))
    return time.perf_counter() - begin, replies


def single(peer: Peer, turn: str) -> float:
    reply = peer.ask(text_of(40, turn), 65)
    return (len(reply.times) - 1) / (reply.times[-1] - reply.times[0])


def prefill(peer: Peer, turn: str) -> float:
    reply = peer.ask(text_of(390, turn), 1)
    return 512 / (reply.times[0] - reply.asked)


def fanout(peer: Peer, turn: str) -> float:
    prefix = text_of(1200, turn)
    return together(peer, [f"{prefix}\nQuestion {i}: what now?" for i in range(16)], 16)[0]


def agents(peer: Peer, turn: str) -> float:
    system = text_of(450, turn)
    begin = time.perf_counter()

    def run(agent: int) -> None:
        context = f"{system}\nAgent {agent}."
        for step in range(6):
            context += peer.ask(context, 24).text + "\n" + text_of(40, f"{turn} tool {agent} {step}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    return time.perf_counter() - begin


def unshared(peer: Peer, turn: str) -> float:
    return together(peer, [text_of(150, f"{i} {turn}") for i in range(12)], 24)[0]


def burst(peer: Peer, turn: str) -> float:
    """The worst gap of two running streams while a long prompt comes in, over their median gap."""
    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(peer.ask, text_of(30, f"{turn} {i}"), 100) for i in range(2)]
        time.sleep(0.3)
        pool.submit(peer.ask, text_of(900, f"late {turn}"), 1).result()
        gaps = [gap for stream in streams for gap in stream.result().gaps]
    return max(gaps) / statistics.median(gaps)


@dataclass(frozen=True)
class Workload:
    name: str
    unit: str
    run: Callable[[Peer, str], float]
    more_is_better: bool = False
    alone: bool = False  # one request at a time, so a library without a server can run it too


WORKLOADS = (
    Workload("decode, 1 stream", "tok/s", single, True, True),
    Workload("prefill of 512", "tok/s", prefill, True, True),
    Workload("16-way fan-out over 1.6k tokens", "s", fanout),
    Workload("4 agents × 6 turns", "s", agents),
    Workload("12 prompts, nothing shared", "s", unshared),
    Workload("worst gap under a prefill burst", "× median", burst),
)


# -- running ---------------------------------------------------------------------------------------------------------


@contextmanager
def server(command: list[str], url: str, ready: str) -> Iterator[None]:
    """A server process, up once `ready` answers 200, ended on the way out."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(process, url + ready)
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server of {url} ended with status {process.returncode}")
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass  # not up yet
        time.sleep(0.3)
    raise RuntimeError(f"{url} did not come up")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(stack: ExitStack, asked: argparse.Namespace, model: Path) -> list[Peer]:
    threads, peers = str(asked.threads), []
    for options in asked.ramet or [""]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "runtime.cli", "serve", "--model", str(model), "--port", str(port)]
        stack.enter_context(server([*command, "--threads", threads, *options.split()], url, "/health"))
        peers.append(HttpPeer(f"Ramet {options}".strip(), url))
    if asked.llama:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [asked.llama, "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "-t", threads]
        stack.enter_context(server([*command, "-np", "16", "-c", "32768", "--no-webui"], url, "/health"))
        peers.append(HttpPeer("llama.cpp", url))
    if asked.transformers:
        peers.append(TransformersPeer(model, asked.transformers, asked.threads))
    return peers


Figures = dict[str, dict[str, float]]


def measure(peers: Sequence[Peer], workloads: Sequence[Workload], rounds: int) -> Figures:
    figures: Figures = {work.name: {} for work in workloads}
    with Progress() as progress:
        task = progress.add_task("rounds", total=rounds * len(workloads) * len(peers))
        for turn in range(rounds):
            for work in workloads:
                for peer in peers:
                    if work.alone or isinstance(peer, HttpPeer):
                        value = work.run(peer, f"{turn}{work.name[:4]}")
                        best = max if work.more_is_better else min
                        old = figures[work.name].get(peer.name, value)
                        figures[work.name][peer.name] = best(value, old)
                    progress.advance(task)
    return figures


def report(figures: Figures, peers: Sequence[Peer], workloads: Sequence[Workload], about: str) -> str:
    first, others = peers[0].name, [peer.name for peer in peers[1:]]
    lines = [about, "", "| workload | unit | " + " | ".join(peer.name for peer in peers) + " | best peer / Ramet |"]
    lines.append("|---|---|" + "---|" * (len(peers) + 1))
    for work in workloads:
        row = figures[work.name]
        rivals = [row[name] for name in others if name in row and not name.startswith("Ramet")]
        if rivals:
            ratio = row[first] / max(rivals) if work.more_is_better else min(rivals) / row[first]
            verdict = f"{ratio:.2f} ×"
        else:
            verdict = "–"
        cells = " | ".join(f"{row[peer.name]:.2f}" if peer.name in row else "–" for peer in peers)
        lines.append(f"| {work.name} | {work.unit} | {cells} | {verdict} |")
    return "\n".join([*lines, "", "A ratio above 1 says that Ramet is ahead."])


def machine(threads: int) -> str:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    model = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "CPU")
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    wide = " ".join(flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if flag in flags)
    return f"{model} ({wide}), {threads} threads, load before the run {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="an embedded model's name or a GGUF file")
    parser.add_argument("--ramet", action="append", help="options of one Ramet server; give it again for another")
    parser.add_argument("--llama", help="a built llama-server")
    parser.add_argument("--transformers", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="the first two workloads only")
    asked = parser.parse_args()
    about, workloads = machine(asked.threads), WORKLOADS[:2] if asked.quick else WORKLOADS
    with ExitStack() as stack:
        peers = start(stack, asked, resolve_model(asked.model))
        figures = measure(peers, workloads, asked.rounds)
    RESULTS.mkdir(exist_ok=True)
    text = report(figures, peers, workloads, about)
    (RESULTS / "peers.md").write_text(text + "\n")
    lines = {
        peer.name: [
            (i + 1.0, figures[w.name][peer.name]) for i, w in enumerate(workloads) if peer.name in figures[w.name]
        ]
        for peer in peers
    }
    (RESULTS / "peers.svg").write_text(line_chart("Peers (workload number)", "workload", "tok/s or s", lines))
    print(text)


if __name__ == "__main__":
    main()
