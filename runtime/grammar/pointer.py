"""JSON pointers (RFC 6901)."""

from __future__ import annotations

import re
from typing import Any

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


def escape(key: str) -> str:
    """A key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def lookup(document: Any, pointer: str, otherwise: Any = None) -> Any:
    """What a JSON pointer points at."""
    place = document
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and key in place:
            place = place[key]
        elif isinstance(place, list) and _INDEX.fullmatch(key) and int(key) < len(place):
            place = place[int(key)]
        else:
            return otherwise
    return place
