"""What can go wrong in a program. Each error says which program, which branch and which source line."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import RametError

_HERE = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Where:
    """The place in the user's source that asked for something."""

    program: str = "?"
    branch: str = "main"
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        at = f"{Path(self.file).name}:{self.line}" if self.file else "unknown line"
        return f"program {self.program!r}, branch {self.branch!r}, {at}"


def caller() -> tuple[str, int]:
    """File and line of the nearest frame outside this package."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back  # type: ignore[assignment]
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)


def raised_at(error: BaseException) -> tuple[str, int]:
    """File and line of the innermost frame outside this package that `error` went through."""
    found = ("", 0)
    trace = error.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_HERE):
            found = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found


class ProgramError(RametError):
    """Base of the errors of programs. `where` is the place, `message` the plain sentence."""

    status = 400
    kind = "program_error"

    def __init__(self, message: str, where: Where | None = None) -> None:
        self.message = message
        self.where = where or Where()
        super().__init__(f"{message} ({self.where})" if where else message)

    def place(self, where: Where) -> None:
        """Say where it happened, if that was not known yet: constructs do not know their program."""
        if not self.where.line:
            self.where = where
            self.args = (f"{self.message} ({where})", *self.args[1:])


class InvalidPiece(ProgramError):
    """Something of a wrong type or value was given to a construct."""


class UnknownVariable(ProgramError, KeyError):
    """A name was read that no gen, select or tool of this branch defines."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0])


class InvalidChoices(InvalidPiece):
    """Choices that are missing, empty or duplicated."""


class InvalidSchema(InvalidPiece):
    """A type, regex or schema that cannot be turned into a grammar."""


class ScopeClosed(ProgramError):
    """A state was extended after its scope had ended."""


class NotReady(ProgramError):
    """A value was read inside an async program without awaiting it."""


class GenerationFailed(ProgramError):
    """The runtime could not finish a request of this branch; the cause is chained."""


class IncompleteValue(ProgramError):
    """The text of a typed gen does not form a value: it was cut by max_tokens or a stop. `text` holds it."""

    def __init__(self, message: str, where: Where | None = None, *, text: str = "") -> None:
        super().__init__(message, where)
        self.text = text


class ToolFailed(ProgramError):
    """A tool raised (only where the program asked for `on_error="raise"`)."""


class DeadlineExceeded(ProgramError):
    """A deadline of the run, scope or gen passed before the value was there."""


class BranchCancelled(ProgramError):
    """The branch was cancelled: it lost a race, or its scope ended with an error."""


class Unsupported(ProgramError):
    """The backend cannot express this construct."""


class BackendLost(ProgramError):
    """The server or engine is gone."""
