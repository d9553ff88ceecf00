"""What the model has read on one branch: committed token ids, then open text.

Laws: `ids` only grows; generated ids enter it as they were sampled and are never turned to text and
back; only open text (template text after the last word border) is tokenised again when more text follows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from frontend_lang.codec import Codec
from frontend_lang.ir import Text

SETTLE_CHARS = 64  # shorter open text is not worth cutting


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of a branch's story: literal text (`ids` empty) or generated ids with their text.

    `at`: where among the branch's ids the generated ones begin. `forced`: which of them a grammar forced, by place.
    """

    text: str
    ids: tuple[int, ...] = ()
    name: str = ""
    special: bool = False
    forced: frozenset[int] = frozenset()
    at: int = 0


class Context:
    """Committed ids and open text of one branch, with the story since its beginning."""

    __slots__ = ("_codec", "_open", "base", "carried", "ids", "read", "silent", "spans")

    def __init__(self, codec: Codec, bos: Sequence[int] = ()) -> None:
        self._codec = codec
        self.ids = array("i", bos)
        self.read = array("i")  # what the model has surely read or written: a copy, to check `ids` against
        self.base = 0  # ids that were there when the story began
        self.carried = ""  # open text that was there
        self.silent = 0  # ids at the beginning that stand for no text of the story
        self._open: list[Text] = []
        self.spans: list[Span] = []

    @property
    def open_text(self) -> str:
        return "".join(piece.text for piece in self._open)

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)

    def fork(self) -> Context:
        """An independent copy; its story starts here."""
        child = Context(self._codec)
        child.ids = self.ids[:]
        child.read = self.read
        child.base, child.carried = len(self.ids), self.open_text
        child._open = list(self._open)
        return child

    def begin(self, ids: Sequence[int]) -> None:
        """Start with ids that no text of the program stands for."""
        self.ids.extend(ids)
        self.silent += len(ids)

    async def add(self, text: str, *, special: bool = False, name: str = "") -> None:
        """Append literal text (`name`: the variable it is the value of)."""
        if not text:
            return
        self.spans.append(Span(text, special=special, name=name))
        self._open.append(Text(text, special))
        if sum(len(piece.text) for piece in self._open) > SETTLE_CHARS:
            await self.settle()

    async def settle(self) -> None:
        """Commit the ids that no later text can change."""
        units, rest = await self._codec.settled(self._open)
        self.ids.extend(await self._codec.encode_units(units))
        self._open = [Text(rest)] if rest else []

    async def prompt(self, suffix: str = "") -> array[int]:
        """All ids, the open text (joined with `suffix`) tokenised at its end."""
        pieces = [*self._open, Text(suffix)] if suffix else self._open
        return self.ids + array("i", await self._codec.encode(pieces))

    async def commit(self) -> array[int]:
        """Close the open text: a generation follows, and a border with it. Returns the ids."""
        self.ids.extend(await self._codec.encode(self._open))
        self._open.clear()
        return self.ids

    def extend(self, ids: Sequence[int], text: str, *, name: str = "", forced: Iterable[int] = ()) -> None:
        """Append generated ids, exactly as sampled. The open text must be committed."""
        assert not self._open, "generated ids follow committed ids"
        self.spans.append(Span(text, tuple(ids), name=name, forced=frozenset(forced), at=len(self.ids)))
        self.ids.extend(ids)
        self.read = self.ids[:]

    async def splice(self, spans: Sequence[Span]) -> None:
        """Append another branch's story: its text as text, its generated ids as ids."""
        for span in spans:
            if span.ids:
                await self.commit()
                self.extend(span.ids, span.text, name=span.name, forced=span.forced)
            else:
                await self.add(span.text, special=span.special, name=span.name)
