"""These tests need the frameworks that `make clients` installs; without them there is nothing to collect."""

from __future__ import annotations

import os
from importlib.util import find_spec

FRAMEWORKS = ("agents", "instructor", "langchain_openai", "litellm", "pydantic_ai")

collect_ignore = [] if all(find_spec(name) for name in FRAMEWORKS) else ["test_frameworks.py"]
if not find_spec("sglang") and "SGLANG_PYTHON" not in os.environ:
    collect_ignore.append("test_sglang_frontend.py")
