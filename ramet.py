"""Ramet: a radix-tree prefix-caching runtime for agentic LLM workloads.

    import ramet as rt
    with rt.Engine(model="smollm2-135m") as engine:
        print(engine.generate("The capital of France is", max_tokens=8).text)

Names are loaded when they are first used, so importing this module is quick.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

PACKAGES = ("radix", "kernels", "runtime", "frontend_lang")

# public name -> the module that defines it
_EXPORTS = {
    "Engine": "runtime.engine",
    "GenerateResult": "runtime.engine",
    "EngineConfig": "runtime.config",
    "ServerConfig": "runtime.config",
    "SamplingParams": "runtime.params",
    "GrammarSpec": "runtime.messages",
    "Hints": "runtime.messages",
    "Usage": "runtime.messages",
    "RametError": "runtime.errors",
    "InvalidRequest": "runtime.errors",
    "ContextLengthExceeded": "runtime.errors",
    "NotFound": "runtime.errors",
    "QueueFull": "runtime.errors",
    "Unavailable": "runtime.errors",
    "RequestFailed": "runtime.errors",
    "RequestAborted": "runtime.errors",
    "RequestTimeout": "runtime.errors",
    "ModelLoadError": "runtime.errors",
    "BackendUnavailable": "runtime.errors",
    "ZmqClient": "runtime.serve.zmq_client",
    "AsyncZmqClient": "runtime.serve.zmq_client",
    "function": "frontend_lang.function",
    "Program": "frontend_lang.function",
    "Result": "frontend_lang.function",
    "State": "frontend_lang.state",
    "gen": "frontend_lang.constructs",
    "select": "frontend_lang.constructs",
    "raw": "frontend_lang.constructs",
    "tool": "frontend_lang.tools",
    "call": "frontend_lang.tools",
    "Tool": "frontend_lang.tools",
    "ToolResult": "frontend_lang.tools",
    "ProgramError": "frontend_lang.errors",
    "HttpBackend": "frontend_lang.http",
    "OpenAIBackend": "frontend_lang.openai",
}

__all__ = ["__version__", *_EXPORTS]


def _check_packages(home: Path) -> None:
    """Raise ImportError if one of our packages would be imported from somewhere else than `home`."""
    for name in PACKAGES:
        spec = find_spec(name)
        places = list(spec.submodule_search_locations or ()) if spec else []
        if spec is not None and not places and spec.origin:
            places = [spec.origin]
        if home not in [Path(place).resolve().parent for place in places]:
            raise ImportError(_shadowed(name, places, home))


def _shadowed(name: str, places: list[str], home: Path) -> str:
    if not places:
        return f"Ramet's package {name!r} is missing from {home}; install ramet again."
    from importlib.metadata import packages_distributions

    owners = [owner for owner in packages_distributions().get(name, []) if owner != "ramet"]
    whose = f"the distribution {owners[0]!r}" if owners else "something else"
    return (
        f"`import {name}` finds {places[0]}, which belongs to {whose}, not to Ramet (whose own is {home / name}). "
        f"Ramet cannot run beside it: use a virtual environment of its own, "
        f"or remove or rename the other {name!r} (also a folder of that name where Python was started)."
    )


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'ramet' has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def main() -> None:
    """The command `ramet`."""
    from runtime.cli import main as cli

    cli()


_check_packages(Path(__file__).resolve().parent)

if TYPE_CHECKING:  # for editors and type checkers: the same names as in _EXPORTS
    from frontend_lang.constructs import gen as gen
    from frontend_lang.constructs import raw as raw
    from frontend_lang.constructs import select as select
    from frontend_lang.errors import ProgramError as ProgramError
    from frontend_lang.function import Program as Program
    from frontend_lang.function import Result as Result
    from frontend_lang.function import function as function
    from frontend_lang.http import HttpBackend as HttpBackend
    from frontend_lang.openai import OpenAIBackend as OpenAIBackend
    from frontend_lang.state import State as State
    from frontend_lang.tools import Tool as Tool
    from frontend_lang.tools import ToolResult as ToolResult
    from frontend_lang.tools import call as call
    from frontend_lang.tools import tool as tool
    from runtime.config import EngineConfig as EngineConfig
    from runtime.config import ServerConfig as ServerConfig
    from runtime.engine import Engine as Engine
    from runtime.engine import GenerateResult as GenerateResult
    from runtime.errors import BackendUnavailable as BackendUnavailable
    from runtime.errors import ContextLengthExceeded as ContextLengthExceeded
    from runtime.errors import InvalidRequest as InvalidRequest
    from runtime.errors import ModelLoadError as ModelLoadError
    from runtime.errors import NotFound as NotFound
    from runtime.errors import QueueFull as QueueFull
    from runtime.errors import RametError as RametError
    from runtime.errors import RequestAborted as RequestAborted
    from runtime.errors import RequestFailed as RequestFailed
    from runtime.errors import RequestTimeout as RequestTimeout
    from runtime.errors import Unavailable as Unavailable
    from runtime.messages import GrammarSpec as GrammarSpec
    from runtime.messages import Hints as Hints
    from runtime.messages import Usage as Usage
    from runtime.params import SamplingParams as SamplingParams
    from runtime.serve.zmq_client import AsyncZmqClient as AsyncZmqClient
    from runtime.serve.zmq_client import ZmqClient as ZmqClient
