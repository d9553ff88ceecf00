"""Ids of tool calls, and calls in a form that compares."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterable
from typing import Any

_ALPHABET = (string.ascii_letters + string.digits).encode()
_LETTERS = bytes(_ALPHABET[byte % len(_ALPHABET)] for byte in range(256))


def random_id(n: int = 24) -> str:
    """`n` random letters and digits."""
    return secrets.token_bytes(n).translate(_LETTERS).decode()


def new_call_id(*, short: bool = False) -> str:
    """`call_` and 24 characters; nine characters where the model's template insists on that."""
    return random_id(9) if short else f"call_{random_id()}"


def canonical_calls(calls: Iterable[tuple[str, dict[str, Any]]]) -> list[list[str]]:
    """Names and arguments, equal for equal calls however their JSON was spaced."""
    return [[name, json.dumps(arguments, sort_keys=True)] for name, arguments in calls]
