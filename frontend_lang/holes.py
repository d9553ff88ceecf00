"""Stand-ins for values that a trace does not know yet."""

from __future__ import annotations

from typing import Any, NoReturn

from frontend_lang.ir import Text

OPEN, CLOSE = "\ue010", "\ue011"


class DataDependent(Exception):
    """The program needs a value to go on: the trace ends here."""


class Hole(str):
    """An unknown value that may be put into text, and nothing else. Whatever would look at it ends the trace."""

    label: str

    def __new__(cls, label: str) -> Hole:
        hole = super().__new__(cls, f"{OPEN}{label}{CLOSE}")
        hole.label = label
        return hole

    def _stop(self, *_: Any, **__: Any) -> NoReturn:
        raise DataDependent(f"it looks at {self.label!r}")

    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = _stop
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _stop
    __int__ = __float__ = __index__ = _stop
    startswith = endswith = find = index = split = splitlines = count = _stop
    isdigit = isalpha = partition = _stop

    def __getattr__(self, name: str) -> NoReturn:
        raise DataDependent(f"it looks at {self.label}.{name}")

    def __format__(self, spec: str) -> str:
        return str.__str__(self)

    def strip(self, *_: Any) -> Hole:
        return self

    lower = upper = title = capitalize = lstrip = rstrip = strip


def parts(text: Text) -> list[Text | str]:
    """The constant texts and the labels of the holes (as plain strings) that a text is made of."""
    out: list[Text | str] = []
    rest = text.text
    while OPEN in rest:
        before, _, rest = rest.partition(OPEN)
        label, _, rest = rest.partition(CLOSE)
        if before:
            out.append(Text(before, text.special))
        out.append(label)
    if rest:
        out.append(Text(rest, text.special))
    return out


def readable(text: str) -> str:
    """Holes as {name}."""
    return text.replace(OPEN, "{").replace(CLOSE, "}")
