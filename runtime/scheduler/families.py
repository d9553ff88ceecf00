"""Which agent program started which: the work of sub-agents is booked to the program at the top."""

from __future__ import annotations

from runtime.messages import Hints

MAX_PROGRAMS = 1 << 16


class Families:
    """The programs seen lately, each with the one at its top. A parent that was never seen is nobody's parent."""

    def __init__(self) -> None:
        self._root: dict[str, str] = {}

    def note(self, program: str | None, parent: str | None) -> None:
        """A request of `program` came, which says that `parent` started it. The first word on that counts."""
        if program is None:
            return
        root = self._root.pop(program, None)
        if root is None:
            root = program if parent is None else self._root.get(parent, program)
        self._root[program] = root  # last in order: what was not heard of for long is forgotten first
        if len(self._root) > MAX_PROGRAMS:
            del self._root[next(iter(self._root))]

    def root_of(self, program: str) -> str:
        return self._root.get(program, program)

    def known(self, hints: Hints) -> bool:
        """True where the hints' parent counts: the program's work is booked to another."""
        program = hints.program_id
        return program is not None and self.root_of(program) != program
