"""The static check of grammars where requests come in: a bad one is refused before anything is queued.

It needs no engine of grammars and no scheduler, so a frontend in a process of its own can make it. What passes is
remembered. What would hold up a frontend's loop is left to the scheduler's service, which checks all again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from runtime.grammar.limits import Limits
from runtime.grammar.prepare import Choice, prepare
from runtime.grammar.work import HERE_S, OutOfTime
from runtime.messages import GrammarSpec, Submit

MAX_TEXT = 16 * 1024  # bytes of a schema: some ten milliseconds
_REMEMBERED = 1024


class GrammarDoor:
    """Thread-safe."""

    def __init__(self, backend: Choice, check: Callable[[GrammarSpec], None] | None = None) -> None:
        """`check`: what raises InvalidRequest for a grammar that cannot be enforced; a service in the same process
        shares its work this way."""
        self._backend: Choice = backend
        self._check = check or self._prepare
        self._passed: OrderedDict[GrammarSpec, None] = OrderedDict()
        self._lock = threading.Lock()

    def admit(self, submit: Submit) -> None:
        """Raise InvalidRequest, with the JSON pointer of what cannot be enforced."""
        for spec in (submit.grammar, *(segment.grammar for segment in submit.segments)):
            if spec is not None:
                self.check(spec)

    def check(self, spec: GrammarSpec) -> None:
        """`admit` of one grammar."""
        if len(spec.spec) > MAX_TEXT:
            return
        with self._lock:
            if spec in self._passed:
                self._passed.move_to_end(spec)
                return
        with suppress(OutOfTime):  # the service has a process for it
            self._check(spec)
        with self._lock:
            self._passed[spec] = None
            if len(self._passed) > _REMEMBERED:
                self._passed.popitem(last=False)

    def _prepare(self, spec: GrammarSpec) -> None:
        prepare(spec, self._backend, Limits(), HERE_S)
