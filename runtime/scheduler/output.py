"""What a turn has to say, collected and sent as one batch to each frontend."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from runtime.messages import Output, Outputs, Reply
from runtime.request import Request, Sink

log = logging.getLogger("ramet.scheduler")


class OutputBatch:
    """Outputs by sink, in the order they arose."""

    def __init__(self) -> None:
        self._by_sink: dict[Sink, list[Output]] = {}
        self.n_sent = 0
        self.n_lost = 0

    def add(self, sink: Sink, output: Output) -> None:
        items = self._by_sink.get(sink)
        if items is None:
            items = self._by_sink[sink] = []
        items.append(output)

    def say(self, requests: Iterable[Request], tokens: Iterable[int]) -> None:
        """One token of each request, and nothing else to tell of it."""
        by_sink = self._by_sink
        for request, token in zip(requests, tokens, strict=True):
            output = Output(rid=request.submit.rid, tokens=(token,), segment=request.segment)
            items = by_sink.get(request.sink)
            if items is None:
                by_sink[request.sink] = [output]
            else:
                items.append(output)

    def extend(self, sink: Sink, outputs: list[Output]) -> None:
        self._by_sink.setdefault(sink, []).extend(outputs)

    def reply(self, sink: Sink, reply: Reply) -> None:
        """A reply leaves at once, after the outputs that came before it."""
        self.flush()
        sink(reply)

    def flush(self) -> None:
        """Send everything collected."""
        if not self._by_sink:
            return
        batches, self._by_sink = self._by_sink, {}
        for sink, items in batches.items():
            self.n_sent += len(items)
            try:
                sink(Outputs(items=tuple(items)))
            except Exception:  # one frontend's fault is not the others'
                self.n_lost += len(items)
                log.exception("A frontend could not take %d outputs.", len(items))
