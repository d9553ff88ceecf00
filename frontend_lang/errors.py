"""What can go wrong in a program. Each error says which program, which branch and which source line."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.errors import RametError

_HERE = str(Path(__file__).parent)
_STDLIB = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))


def _ours(file: str) -> bool:
    """Whether it is a file of this package or of Python's own library: never the place where a user did something."""
    if file.startswith((_HERE, "<frozen ")):
        return True
    return file.startswith(_STDLIB) and "site-packages" not in file and "dist-packages" not in file


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
    """File and line of the user's nearest frame."""
    frame = sys._getframe(1)
    while frame is not None and _ours(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)


def raised_at(error: BaseException) -> tuple[str, int]:
    """File and line of the user's innermost frame that `error` went through."""
    found = ("", 0)
    trace = error.__traceback__
    while trace is not None:
        if not _ours(trace.tb_frame.f_code.co_filename):
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
            known = self.where if self.where.program != "?" else where
            self.where = replace(where, program=known.program, branch=known.branch)
            self.args = (f"{self.message} ({self.where})", *self.args[1:])


class InvalidPiece(ProgramError):
    """Something of a wrong type or value was given to a construct."""


def check_text(text: str, what: str, where: Where | None = None) -> None:
    """Raises InvalidPiece for text that cannot be written as UTF-8, which no tokenizer takes."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        bad = text[error.start]
        raise InvalidPiece(f"{what} has a lone surrogate, {bad!a}, at {error.start}: it is no text.", where) from None


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
