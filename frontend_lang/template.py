"""Chat roles, piece by piece: what the model's own template writes before and after each message.

The template is rendered with markers for contents and cut at them, so any template works that puts messages
one after another. Contents never pass through the template: generated ids stay ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frontend_lang.backend import Backend
from frontend_lang.errors import Unsupported
from runtime.errors import InvalidRequest

_FALLBACK = {"tool": "user"}  # templates that know no tool role read the result as the user's


def _mark(index: int) -> str:
    return f"\ue000{index}\ue001"


class ChatPieces:
    """The pieces of one backend's template, remembered by the sequence of roles."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._opened: dict[tuple[str, ...], str] = {}
        self._closed: dict[tuple[str, ...], str] = {}

    async def open(self, roles: tuple[str, ...]) -> str:
        """Text from the end of the closed message before to the content of the last of `roles`."""
        if roles not in self._opened:
            self._opened[roles] = await self._find_open(roles)
        return self._opened[roles]

    async def close(self, roles: tuple[str, ...]) -> str:
        """Text that ends the last of `roles`."""
        if roles not in self._closed:
            text = await self._render(roles)
            self._closed[roles] = _after(text, len(roles) - 1)
        return self._closed[roles]

    async def _find_open(self, roles: tuple[str, ...]) -> str:
        before, role = roles[:-1], roles[-1]
        if role == "assistant" and before:  # what the template itself puts before an answer
            text = await self._render(before, prompt=True)
            gap = _after(text, len(before) - 1)
        else:
            text = await self._render(roles)
            gap = text[: text.index(_mark(len(before)))]
            gap = _after(gap, len(before) - 1) if before else gap
        closed = await self.close(before) if before else ""
        return gap[_common(gap, closed) :]

    async def _render(self, roles: tuple[str, ...], *, prompt: bool = False) -> str:
        messages: list[Mapping[str, Any]] = [{"role": role, "content": _mark(i)} for i, role in enumerate(roles)]
        try:
            text = await self._backend.render(messages, prompt)
        except InvalidRequest as error:
            plain = tuple(_FALLBACK.get(role, role) for role in roles)
            if plain == roles:
                raise Unsupported(f"The model's chat template refuses the roles {list(roles)}: {error}") from error
            return await self._render(plain, prompt=prompt)
        last = _mark(len(roles) - 1)
        if last not in text:
            plain = tuple(_FALLBACK.get(role, role) for role in roles)
            if plain == roles:
                raise Unsupported(f"The model's chat template leaves out the role {roles[-1]!r}.")
            return await self._render(plain, prompt=prompt)
        return text


def _after(text: str, index: int) -> str:
    mark = _mark(index)
    return text[text.rindex(mark) + len(mark) :]


def _common(a: str, b: str) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
