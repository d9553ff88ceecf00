"""The native CPU backend: C++ kernels for the instruction set at hand, chosen once at start.

Activations are float32 whatever the weights are, unless the caller's tensors are narrower. Quantised weights stay
as the model file has them (groups of 32) and meet activations quantised to int8 in the same groups; the integer
sums are exact and the groups are added in order, so the law of `Ops` holds bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.base import AttnMeta, DecoderLayer, FusedDecoder, KVStore, LayerSpec, Linear, QuantizedWeight
from kernels.build import BuildError, load_extension
from kernels.kv8 import stored_dim
from kernels.sampling import LogitAdjust, Samples, SamplingRows
from kernels.steps import DecoderEnds, Drawn, LateChanges, StepArrays

_QUANTIZED = ("Q4_0", "Q4_1", "Q8_0")
_GROUP = 32


def make_ops(device: torch.device) -> NativeOps:
    """The backend for this machine. Raises RuntimeError if it cannot be built or `device` is no CPU."""
    if device.type != "cpu":
        raise RuntimeError("the native kernels run on the CPU only")
    return NativeOps()


def load() -> NativeOps | None:
    """The backend, or None where it cannot be built."""
    try:
        return NativeOps()
    except BuildError:
        return None


class NativeOps:
    """Implements `Ops`, `QuantizedOps`, `FusedOps` and `WholeStepOps`. Holds the current step's plans, so one a runner.

    `variant` is one of the extension's names (default: RAMET_KERNEL_VARIANT, or the best this CPU runs), `threads` the
    size of the team (default: torch's number of threads when the first kernel runs).
    """

    name = "native"
    default_dtype = torch.float32

    def __init__(self, *, variant: str | None = None, threads: int | None = None) -> None:
        self._native: Any = load_extension()
        self.variant = variant or os.environ.get("RAMET_KERNEL_VARIANT") or self._native.variants()[0]
        self._threads = threads
        self._made: Any = None
        self._meta: AttnMeta | None = None
        self._plans: dict[tuple[int, int], Any] = {}

    @property
    def _backend(self) -> Any:
        if self._made is None:
            self._made = self._native.Backend(self.variant, self._threads or torch.get_num_threads())
        return self._made

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return NativeLinear(self._backend, self._backend.pack(weight, bias))

    def quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None = None) -> Linear | None:
        n_out, n_in = weight.shape
        if weight.qtype not in _QUANTIZED or n_in % _GROUP:
            return None
        return NativeLinear(
            self._backend, self._backend.pack_quantized(weight.data.contiguous(), weight.qtype, n_out, n_in, bias)
        )

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return weight[ids]

    def embedding_of(self, layer: Linear) -> Callable[[Tensor], Tensor] | None:
        """The layer's own packed weight read row by row: an embedding that takes no memory."""
        if not isinstance(layer, NativeLinear):
            return None
        return lambda ids: self._backend.embed(layer.weight, ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._backend.rms_norm(x, None, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._backend.rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._backend.silu_mul(gate_up)

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        at = positions.int()
        return self._backend.rope(q, at, cos_sin), self._backend.rope(k, at, cos_sin)

    def plan(self, meta: AttnMeta, spec: LayerSpec) -> None:
        self._plan(meta, spec)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, kv: KVStore, meta: AttnMeta, spec: LayerSpec
    ) -> Tensor:
        return self._backend.attend(
            q, k, v, kv.k[layer], kv.v[layer], meta.slots, meta.copy_src, meta.copy_dst,
            self._plan(meta, spec), spec.n_kv_heads, spec.scale, spec.soft_cap,
        )  # fmt: skip

    def kv_bytes_read(self, meta: AttnMeta, spec: LayerSpec, kv: KVStore) -> int:
        """Bytes of keys and values that one layer's attention reads in this step."""
        per_key = 2 * spec.n_kv_heads * stored_dim(spec.head_dim, kv.k[0].dtype) * kv.k[0].element_size()
        return int(self._plan(meta, spec).keys_read) * per_key

    def draw(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """What `kernels.sampling.draw` does, without ordering or logarithms over the whole vocabulary."""
        return self._backend.draw(
            logits, rows.temperature.contiguous(), rows.top_k.contiguous(), rows.top_p.contiguous(),
            rows.min_p.contiguous(), rows.seed.contiguous(), rows.counter.contiguous(),
        )  # fmt: skip

    def sample(
        self,
        logits: Tensor,
        rows: SamplingRows,
        adjusts: Sequence[tuple[int, LogitAdjust]] = (),
        *,
        want_logprob: Tensor | None = None,
        n_top: int = 0,
    ) -> Samples:
        """What `kernels.sampling.sample` does, in one call: penalties, mask, draw and report, row by row."""
        wanted = torch.zeros(len(logits), dtype=torch.bool) if want_logprob is None else want_logprob
        return Samples(
            *self._backend.choose(
                logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.counter,
                adjusts, wanted, n_top,
            )
        )  # fmt: skip

    def report(self, logits: Tensor, tokens: Tensor, wanted: Tensor, n_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """What `kernels.sampling.report` does, without a table of the whole vocabulary's log-probabilities."""
        logprobs, top_ids, top_logprobs = self._backend.report(logits, tokens, wanted, n_top)
        return logprobs, top_ids, top_logprobs

    def decoder(self, layers: Sequence[DecoderLayer], eps: float, cos_sin: Tensor) -> NativeDecoder | None:
        """All layers as one native call, or None where a layer is of a kind that it does not know."""
        if not all(isinstance(part, NativeLinear) for layer in layers for part in layer.linears):
            return None
        return NativeDecoder(self._native, self._backend, self._plan, layers, eps, cos_sin)

    def whole_step(self, decoder: FusedDecoder, ends: DecoderEnds) -> NativeStep | None:
        """From token ids to tokens drawn as one native call, or None where it does not know a part's kind."""
        if not isinstance(decoder, NativeDecoder):
            return None
        if not (isinstance(ends.embedding, NativeLinear) and isinstance(ends.head, NativeLinear)):
            return None
        return NativeStep(decoder, ends.embedding.weight, ends.final_norm, ends.head.weight)

    def _plan(self, meta: AttnMeta, spec: LayerSpec) -> Any:
        """The step's cut into tiles; the layers of one kind share it."""
        if self._meta is not meta:
            self._meta, self._plans = meta, {}
        key = (spec.n_heads // spec.n_kv_heads, spec.window)
        if key not in self._plans:
            self._plans[key] = self._native.plan(
                meta.qo_indptr, meta.kv_indptr, meta.kv_indices, meta.kv_lens, meta.share_indptr, meta.share_n_pages,
                meta.page_size, *key,
            )  # fmt: skip
        return self._plans[key]


class NativeLinear:
    """x [tokens, in] -> [tokens, out] in x's dtype; the weight is packed for this machine."""

    def __init__(self, backend: Any, weight: Any) -> None:
        self._backend = backend
        self.weight = weight

    @property
    def n_bytes(self) -> int:
        """Bytes of the packed weight and bias: what a product with one row reads."""
        return int(self.weight.n_bytes)

    def __call__(self, x: Tensor) -> Tensor:
        return self._backend.linear(self.weight, x)


class NativeDecoder:
    """Embedded tokens in, the residual stream after the last layer out, in one call that releases the GIL."""

    def __init__(
        self,
        native: Any,
        backend: Any,
        plan: Callable[[AttnMeta, LayerSpec], Any],
        layers: Sequence[DecoderLayer],
        eps: float,
        cos_sin: Tensor,
    ) -> None:
        self._plan = plan
        self._specs = list(dict.fromkeys(layer.spec for layer in layers))
        self._spec_of = [self._specs.index(layer.spec) for layer in layers]
        self.native = native.Decoder(backend, eps, cos_sin)
        self._kv: KVStore | None = None
        for layer in layers:
            weights = [part.weight for part in layer.linears]  # type: ignore[attr-defined]
            spec = layer.spec
            self.native.add(
                layer.norm_before_attention, weights[0], layer.q_norm, layer.k_norm, weights[1],
                layer.norm_before_mlp, weights[2], weights[3],
                spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.scale, spec.soft_cap, spec.window,
            )  # fmt: skip

    def use(self, kv: KVStore) -> None:
        """Read and write `kv` from now on."""
        if kv is not self._kv:
            self.native.use(kv.k, kv.v)
            self._kv = kv

    def __call__(self, embedded: Tensor, meta: AttnMeta, kv: KVStore) -> Tensor:
        """embedded [tokens, hidden] -> hidden states [tokens, hidden] before the final norm, float32."""
        hidden = embedded.float().clone(memory_format=torch.contiguous_format)
        distinct = [self._plan(meta, spec) for spec in self._specs]
        plans = [distinct[i] for i in self._spec_of]
        self.use(kv)
        self.native.run(hidden, meta.positions, meta.slots, meta.copy_src, meta.copy_dst, plans)
        return hidden


class NativeStep:
    """A step's arrays in, its samples out, in one call; the GIL is held only to read the one and hand out the other."""

    def __init__(self, decoder: NativeDecoder, embedding: Any, final_norm: Tensor, head: Any) -> None:
        self._decoder = decoder
        decoder.native.between(embedding, final_norm, head)

    def expect(self, late: npt.NDArray[np.bool_]) -> LateChanges:
        changes: LateChanges = self._decoder.native.expect(late)
        return changes

    def __call__(
        self,
        arrays: StepArrays,
        token_table: Tensor,
        kv: KVStore,
        adjusts: Sequence[tuple[int, LogitAdjust]] = (),
        n_top: int = 0,
        late: LateChanges | None = None,
    ) -> Drawn:
        self._decoder.use(kv)
        return Drawn(*self._decoder.native.step(arrays, token_table, kv.page_size, adjusts, n_top, late))
