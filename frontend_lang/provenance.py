"""Where every token of a branch came from: a cache, a prefill, the model, or a grammar; and in which request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from frontend_lang.context import Context, Span
from frontend_lang.record import Event, common_prefix
from runtime.messages import Ids

KINDS = ("unread", "reused", "copied", "prefilled", "generated", "forced")
UNREAD, REUSED, COPIED, PREFILLED, GENERATED, FORCED = range(len(KINDS))
Labels = npt.NDArray[np.int32]  # kind and request of each token, as 8 * request + kind


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of a branch's story whose tokens came from one place. Times are those of the request, 0.0 if unread."""

    text: str
    kind: str
    name: str
    n_tokens: int
    start_s: float = 0.0
    end_s: float = 0.0
    line: int = 0


def stretches(
    branch: str, context: Context, events: Sequence[Event], token_bytes: Callable[[int], bytes]
) -> list[Stretch]:
    """The branch's own story, in order. `events`: its requests and those of its branches, in order of their start."""
    ids = _all_ids(context, events, token_bytes)
    labels = _labels(branch, ids, context.spans, events)
    out: list[Stretch] = []
    at, skip = context.base + context.silent, len(context.carried.encode())
    for made, group in groupby(context.spans, key=lambda span: bool(span.ids)):
        spans = list(group)
        if made:
            for span in spans:
                out += _generated(span, labels[span.at : span.at + len(span.ids)], events, token_bytes)
                at, skip = span.at + len(span.ids), 0
        else:
            end = _next_generated(context.spans, spans[-1], len(ids))
            out += _literal(spans, ids[at:end], labels[at:end], skip, events, token_bytes)
            at, skip = end, 0
    return out


def _all_ids(context: Context, events: Sequence[Event], token_bytes: Callable[[int], bytes]) -> Ids:
    """The committed ids, and those by which requests (a select's, a branch's) read the open text after them."""
    ids, text = np.asarray(context.ids, np.int32), context.open_text.encode()
    best = ids
    for event in events:
        if not text or len(event.prompt) <= len(best) or common_prefix(event.prompt, ids) < len(ids):
            continue
        n, rest = len(ids), text
        while n < len(event.prompt) and rest and rest.startswith(token_bytes(int(event.prompt[n]))):
            rest = rest.removeprefix(token_bytes(int(event.prompt[n])))
            n += 1
        best = event.prompt[:n] if n > len(best) else best
    return best


def _next_generated(spans: Sequence[Span], last: Span, end: int) -> int:
    """Where the generated ids after the literal `last` begin, or `end`."""
    index = next(i for i, span in enumerate(spans) if span is last)
    return next((span.at for span in spans[index + 1 :] if span.ids), end)


def _labels(branch: str, ids: Ids, spans: Sequence[Span], events: Sequence[Event]) -> Labels:
    made = np.full(len(ids), PREFILLED, np.int32)
    for span in (span for span in spans if span.ids):
        made[span.at : span.at + len(span.ids)] = GENERATED
        for place in span.forced:
            if place < len(span.ids):
                made[span.at + place] = FORCED
    labels = np.full(len(ids), -1, np.int32)
    for number, event in enumerate(events):
        n_same = common_prefix(event.prompt, ids)
        read = _from_prompt(event, n_same)
        _set(labels, 0, 8 * number + read)
        if n_same == len(event.prompt) and event.branch == branch:
            end = min(len(ids), n_same + len(event.output))
            _set(labels, n_same, 8 * number + made[n_same:end])
    return labels


def _from_prompt(event: Event, n: int) -> Labels:
    """Kinds of the first `n` tokens of a prompt: reused whole pages, then a copied tail, then what was computed."""
    usage = event.usage
    scale = len(event.prompt) / usage.prompt_tokens if usage.prompt_tokens else 1.0  # text backends count otherwise
    cached, copied = int(usage.cached_tokens * scale), int(usage.copied_tokens * scale)
    kinds = np.full(n, PREFILLED, np.int32)
    kinds[:cached] = COPIED
    kinds[: max(0, cached - copied)] = REUSED
    return kinds


def _set(labels: Labels, start: int, values: Labels) -> None:
    """Write where nothing is written yet."""
    part = labels[start : start + len(values)]
    np.copyto(part, values, where=part < 0)


def _generated(
    span: Span, labels: Labels, events: Sequence[Event], token_bytes: Callable[[int], bytes]
) -> Iterator[Stretch]:
    runs = list(_runs(labels))
    for start, end in runs:
        text = b"".join(map(token_bytes, span.ids[start:end])).decode("utf-8", "replace")
        yield _stretch(span.text if len(runs) == 1 else text, int(labels[start]), span.name, end - start, events)


def _literal(
    spans: Sequence[Span],
    ids: Ids,
    labels: Labels,
    skip: int,
    events: Sequence[Event],
    token_bytes: Callable[[int], bytes],
) -> Iterator[Stretch]:
    """Literal spans share tokens at their joins: labels go by bytes. `skip`: bytes that belong to the parent."""
    sizes = [len(token_bytes(int(token))) for token in ids]
    by_byte = np.repeat(labels, sizes)[skip:]
    first = np.zeros(len(by_byte) + skip, np.int32)
    first[np.cumsum([0, *sizes[:-1]])[: len(sizes)].astype(int)] = 1 if sizes else 0
    first = first[skip:]
    at = 0
    for span in spans:
        data = span.text.encode()
        mine = np.full(len(data), -1, np.int32)
        mine[: len(by_byte[at : at + len(data)])] = by_byte[at : at + len(data)]
        for start, end in _runs(mine):
            while 0 < start < len(data) and data[start] & 0xC0 == 0x80:  # never cut a character
                start += 1
            while end < len(data) and data[end] & 0xC0 == 0x80:
                end += 1
            n_tokens = int(first[at + start : at + end].sum())
            yield _stretch(data[start:end].decode("utf-8", "replace"), int(mine[start]), span.name, n_tokens, events)
        at += len(data)


def _runs(labels: Labels) -> Iterator[tuple[int, int]]:
    """(start, end) of every run of equal labels."""
    if not len(labels):
        return
    cuts = np.flatnonzero(np.diff(labels)) + 1
    yield from zip([0, *cuts.tolist()], [*cuts.tolist(), len(labels)], strict=True)


def _stretch(text: str, label: int, name: str, n_tokens: int, events: Sequence[Event]) -> Stretch:
    if label < 0:
        return Stretch(text, KINDS[UNREAD], name, n_tokens)
    event = events[label // 8]
    return Stretch(text, KINDS[label % 8], name, n_tokens, event.start_s, event.end_s, event.line)
