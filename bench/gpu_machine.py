"""The machine a run of the GPU bench has: card, package, sizes of things. A dry run has a CPU in disguise."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.base import Linear
from kernels.flashinfer import FlashInferOps, load_package
from kernels.flashinfer_plan import FlashInferOptions, Shapes
from kernels.fused import fused_for
from runtime.execute.gpu import CudaGpu, Gpu

AT_ONCE = 4  # runs in one captured measurement
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "rope_theta": 500000.0,
}
TINY = _LLAMA | {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen2.5-7b": _LLAMA
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
}


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the measurements are."""

    mixed: tuple[tuple[int, int], ...] = ((1, 1), (1, 33), (1, 700), (1, 2049), (5, 5), (130, 900))
    pages: tuple[int, ...] = (1, 16)
    groups: tuple[int, ...] = (1, 3, 4, 7, 8)
    head_dim: int = 128
    shared_rows: tuple[int, int] = (600, 32)  # keys of each row, pages that rows share
    crowd: tuple[int, ...] = (3000, 5000, *range(100, 130))
    replans: int = 200
    engine_requests: int = 40
    engine_prompt: int = 300
    engine_tokens: int = 24
    models: dict[str, dict[str, Any]] = field(default_factory=lambda: MODELS)
    tiny: dict[str, Any] = field(default_factory=lambda: TINY)
    pool_tokens: int = 300_000
    context: int = 512  # of decoding streams
    rows: tuple[int, ...] = (1, 32, 128, 256)
    steps: int = 60
    settle: int = 40  # tokens of a stream before it is watched
    talk: int = 160  # tokens of a stream whose gaps are watched
    concurrent: int = 512
    prefill: tuple[int, int] = (8, 4096)  # prompts, tokens
    prefix: int = 2048
    burst: tuple[int, int] = (4, 4096)
    streams: int = 32
    shared: int = 8192
    split: tuple[tuple[int, int], ...] = ((1, 2048), (1, 8192), (1, 32000), (32, 2048), (32, 8192), (128, 8192))
    workspace_bytes: int = 384 << 20
    card_bytes: int = 4 << 30
    card_side: int = 8192


def dry_scale() -> Scale:
    """Everything runs, nothing takes long."""
    small = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 64}
    few = {**small, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    return Scale(
        mixed=((1, 1), (1, 20), (3, 9)),
        groups=(1, 7),
        head_dim=64,
        shared_rows=(40, 2),
        crowd=(50, 70, 3),
        replans=12,
        engine_requests=4,
        engine_prompt=20,
        engine_tokens=4,
        models={"llama-3.1-8b": _LLAMA | few},
        tiny=TINY | few,
        pool_tokens=4096,
        context=16,
        rows=(1, 3),
        steps=4,
        settle=4,
        talk=12,
        concurrent=4,
        prefill=(2, 40),
        prefix=48,
        burst=(1, 40),
        streams=2,
        shared=64,
        split=((1, 40), (2, 30)),
        workspace_bytes=1 << 20,
        card_bytes=1 << 20,
        card_side=64,
    )


@dataclass(frozen=True, slots=True)
class Card:
    """The GPU as measured, not as sold."""

    name: str
    capability: str
    memory_gib: float
    read_gb_s: float  # of one large read
    bf16_tflops: float  # of one large product
    torch: str = field(default_factory=lambda: torch.__version__)
    host: str = field(default_factory=platform.node)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the sections run on."""

    gpu: Gpu
    load_package: Callable[[], Any]
    scale: Scale
    deadline: float = float("inf")  # monotonic; long sections stop between their parts

    @property
    def device(self) -> torch.device:
        return self.gpu.torch_device

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def ops(self, kind: type[FlashInferOps] = FlashInferOps) -> FlashInferOps:
        fused = fused_for(self.device)
        return kind(self.device, self.load_package(), fused=fused, capability=self.gpu.capability)

    def attention(self, kv_dtype: torch.dtype, options: FlashInferOptions) -> FlashInferOps:
        """Ready to be planned, for bfloat16 queries."""
        ops = self.ops()
        options = replace(options, workspace_bytes=self.scale.workspace_bytes)
        ops.configure(Shapes(torch.bfloat16, kv_dtype, 32768), options)
        return ops

    def fastest(self, work: Callable[[], Any], repeats: int = 5) -> float:
        """Seconds of the quickest of some runs on the device, after one to warm up. Captured first, so that the host's
        launching is not measured with it."""
        work()
        if self.device.type != "cuda":
            begin = time.perf_counter()
            work()
            return max(1e-9, time.perf_counter() - begin)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(AT_ONCE):
                work()
        best = float("inf")
        for _ in range(repeats + 1):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3 / AT_ONCE)
        return best

    def card(self) -> Card:
        gpu, n_bytes, side = self.gpu, self.scale.card_bytes, self.scale.card_side
        read_s = self.fastest(torch.zeros(n_bytes, dtype=torch.uint8, device=self.device).view(torch.int64).sum)
        square = torch.randn(side, side, device=self.device, dtype=torch.bfloat16)
        product_s = self.fastest(lambda: square @ square)
        return Card(
            name=gpu.name,
            capability=".".join(map(str, gpu.capability)),
            memory_gib=round(gpu.total_bytes / 2**30, 1),
            read_gb_s=n_bytes / read_s / 1e9,
            bf16_tflops=2 * side**3 / product_s / 1e12,
        )


class SteadyOps(FlashInferOps):
    """Products always of the same number of rows, so that cuBLAS always takes the same kernel: then tokens must be
    equal however the steps were batched. Slow; for checks."""

    ROWS = 64

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        def apply(x: Tensor) -> Tensor:
            padded = F.pad(x, (0, 0, 0, -len(x) % self.ROWS))
            return torch.cat([F.linear(part, weight, bias) for part in padded.split(self.ROWS)])[: len(x)]

        return apply


def cuda_machine(deadline: float = float("inf")) -> Machine:
    return Machine(CudaGpu(torch.device("cuda", torch.cuda.current_device())), load_package, Scale(), deadline)


def dry_machine() -> Machine:
    """The tests' stand-ins: every line of the bench runs, no number means anything."""
    from tests.kernels.fake_flashinfer import FakePackage
    from tests.runtime.fake_gpu import FakeGpu

    return Machine(FakeGpu(), FakePackage, dry_scale())
