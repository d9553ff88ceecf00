"""Names at the runtime: short and unique, however a program calls its functions and branches."""

from __future__ import annotations

import hashlib

MAX_CHARS = 80  # two of them and a number stay below the runtime's limit of an id


def short_id(name: str) -> str:
    """`name` itself; if it is long or holds half a character, its beginning and a digest of the whole."""
    clean = name.encode("utf-8", "replace").decode()
    if len(name) <= MAX_CHARS and clean == name:
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{clean[:MAX_CHARS]}~{digest}"
