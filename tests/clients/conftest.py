"""These tests need what `make clients` installs; a test without its client is not collected."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

NEEDS = {
    "test_frameworks.py": ("agents", "dspy", "instructor", "langchain_openai", "litellm", "pydantic_ai"),
    "test_benchmarks.py": ("sglang", "vllm"),
    "test_kv_consumers.py": ("sglang", "vllm"),
    "test_openapi.py": ("schemathesis",),
}
collect_ignore = [name for name, modules in NEEDS.items() if not all(find_spec(module) for module in modules)]
if not find_spec("sglang") and "SGLANG_PYTHON" not in os.environ:
    collect_ignore.append("test_sglang_frontend.py")
if not shutil.which("claude"):
    collect_ignore.append("test_claude_code.py")
