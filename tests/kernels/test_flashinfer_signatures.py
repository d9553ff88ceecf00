"""Every call we make of FlashInfer, bound to the real package's signatures: a wrong keyword name shows without a GPU.

Needs the package on the path (`make planner` sees to that), otherwise it is skipped with that reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.base import LayerSpec
from kernels.flashinfer import FlashInferOps
from kernels.flashinfer_plan import FlashInferOptions, Shapes
from tests.kernels.attention_cases import make_problem
from tests.kernels.fake_flashinfer import FakePackage
from tests.kernels.test_flashinfer import shared_problem

pytestmark = [
    pytest.mark.planner,
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None,
        reason="flashinfer is not installed (pip install 'ramet[gpu]')",
    ),
]
CPU = torch.device("cpu")


class Recorder:
    """The stand-in for the package, which notes what each of its names is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._package = FakePackage()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._package, name)

        def noted(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            made = real(*args, **options)
            return self._watched(name, made) if name.endswith("Wrapper") else made

        return noted

    def _watched(self, name: str, wrapper: Any) -> Any:
        for method in ("plan", "run"):
            setattr(wrapper, method, self._noting(f"{name}.{method}", getattr(wrapper, method)))
        return wrapper

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            return function(*args, **options)

        return noted


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """All kinds of calls: decode and prefill, eager and captured, cut, split, cascading, fa3."""
    recorder, spec = Recorder(), LayerSpec(4, 2, 64, 0.125)
    lens = [(1, 20), (1, 40), (1, 90), (1, 50), (3, 120)]
    for options in (
        FlashInferOptions(split_tokens=16, workspace_bytes=1 << 20),
        FlashInferOptions(batch_invariant=False, workspace_bytes=1 << 20),
        FlashInferOptions(prefill="fa3", workspace_bytes=1 << 20),
    ):
        ops = FlashInferOps(CPU, recorder, options=options, capability=(9, 0))
        ops.configure(Shapes(torch.float32, torch.float32, max_context=256))
        problem = shared_problem(spec, 16, lens, n_shared=2)
        ops.attend(0, problem.q, problem.k, problem.v, problem.kv, problem.meta, spec)
        decode = make_problem(spec, [(1, 90), (1, 7)], 16)
        ops.plan_graph(decode.meta, decode.meta, spec)
        ops.attend(0, decode.q, decode.k, decode.v, decode.kv, decode.meta, spec)
    return recorder.calls


def real(name: str) -> Any:
    """The package's own thing of that name. A plan() that only hands its options on stands for what takes them."""
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(Path.home() / ".cache"))
    package = importlib.import_module("flashinfer")
    head, _, method = name.partition(".")
    found = getattr(package, head)
    if not method:
        return found
    return getattr(found, "_plan_impl", found.plan) if method == "plan" else getattr(found, method)


def test_every_call_fits_the_package(calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
    names = {name for name, _, _ in calls}
    decode, prefill = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
    of_wrappers = {f"{one}{part}" for one in (decode, prefill) for part in ("", ".plan", ".run")}
    assert names == of_wrappers | {"merge_state_in_place"}
    for name, args, options in calls:
        self_too = () if "." not in name else (None,)
        inspect.signature(real(name)).bind(*self_too, *args, **options)  # raises TypeError for what does not fit


def test_what_does_not_fit_would_show() -> None:
    with pytest.raises(TypeError, match="fixed_split"):
        inspect.signature(real("BatchDecodeWithPagedKVCacheWrapper.plan")).bind(None, *[0] * 7, fixed_split=4)
