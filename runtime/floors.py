"""Per-namespace eviction floors: tokens that a cache salt keeps cached while others have some to give."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from radix import Namespace
from runtime.errors import InvalidRequest

EXAMPLE = '{"team-a": 65536}'


def parse_floors(text: str | None) -> dict[str, int]:
    """Salt -> tokens. Raises InvalidRequest for anything but a JSON object of whole numbers from 0."""
    if text is None:
        return {}
    try:
        floors = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"cache_floors is not JSON ({error}); write {EXAMPLE}.", param="cache_floors") from None
    if not isinstance(floors, dict):
        raise InvalidRequest(f"cache_floors must be a JSON object such as {EXAMPLE}.", param="cache_floors")
    for salt, tokens in floors.items():
        if type(tokens) is not int or tokens < 0:
            raise InvalidRequest(
                f"cache_floors[{salt!r:.40}] must be a number of tokens from 0; got {tokens!r:.40}.",
                param="cache_floors",
            )
    return floors


def floor_pages(floors: Mapping[str, int], page_size: int) -> Callable[[Namespace], int]:
    """How many pages a namespace keeps.

    A server puts the digest of the API key and a slash before the client's salt, so what counts is the part
    after the first slash: the floor of "team-a" is kept for each key's "team-a" by itself.
    """
    pages = {salt: -(-tokens // page_size) for salt, tokens in floors.items()}

    def of(namespace: Namespace) -> int:
        salt = namespace.salt
        exact = pages.get(salt)
        return pages.get(salt.partition("/")[2], 0) if exact is None else exact

    return of
