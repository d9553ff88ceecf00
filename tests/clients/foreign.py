"""Runs a program of SGLang or vLLM in this process, unmodified: `python -m tests.clients.foreign MODULE ARGS...`

SGLang's package imports torchvision for pictures, which a text benchmark never touches and whose builds without CUDA
are not on PyPI; an empty module stands in for it.
"""

from __future__ import annotations

import importlib.machinery
import runpy
import sys
import types
from importlib.util import find_spec
from typing import Any

NAME = "torchvision"


class _Empty(types.ModuleType):
    """A package in which every public name is an empty class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == NAME else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def stand_in() -> None:
    """Let imports of torchvision succeed; transformers has looked before, and goes on without it."""
    if find_spec(NAME) is None:
        from transformers.utils import import_utils

        import_utils.is_torchvision_available()
        import_utils.is_torchvision_v2_available()
        sys.meta_path.append(_Finder())  # type: ignore[arg-type]


def vllm_bench() -> None:
    """`vllm bench serve` without the engine's command line around it."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())


if __name__ == "__main__":
    module, *sys.argv[1:] = sys.argv[1:]
    stand_in()
    if module == "vllm-bench-serve":
        vllm_bench()
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
