"""The answer of the Responses API, whole and as its events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from runtime.serve.answers import Answers, News, now
from runtime.serve.call_ids import random_id
from runtime.serve.errors import as_ramet_error, message_of
from runtime.serve.wire import named_event
from runtime.text.parsers.base import CallArgs, CallEnd, CallStart, Event, Text, Thought

Item = dict[str, Any]


class ResponseWriter:
    """Writes one response. `whole` is right once the answers have finished; `keep` runs before the last event."""

    def __init__(self, head: dict[str, Any], answers: Answers, keep: Callable[[ResponseWriter], None]) -> None:
        self._answers = answers
        self._keep = keep
        self._state = answers.states[0]
        self._head = {
            "id": f"resp_{random_id(32)}",
            "object": "response",
            "created_at": now(),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **head,
        }
        self._items: list[Item] = []
        self._open: _OpenItem | None = None
        self._sequence = 0

    # -- whole -------------------------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        """The finished response."""
        if not self._items:
            self._items = self._finished_items()
        cut = self._state.reason == "length"
        usage = self._answers.usage
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {
                    "reasoning_tokens": usage.reasoning_tokens,
                    "forced_tokens": usage.forced_tokens,
                },
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def message(self) -> dict[str, Any]:
        """The answer as a chat message, for the conversation that goes on."""
        parsed = self._state.parsed
        message: dict[str, Any] = {"role": "assistant", "content": parsed.text}
        done = [(i, c) for i, c in zip(self._state.call_ids, parsed.calls, strict=True) if c.complete]
        if done:
            message["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for i, c in done
            ]
        return message

    def _finished_items(self) -> list[Item]:
        parsed = self._state.parsed
        items: list[Item] = []
        if parsed.thought:
            items.append(_reasoning(parsed.thought))
        if parsed.text or not parsed.calls:
            items.append(_message(parsed.text))
        for call_id, call in zip(self._state.call_ids, parsed.calls, strict=True):
            items.append(_call(call_id, call.name, call.arguments, "completed" if call.complete else "incomplete"))
        return items

    # -- events ------------------------------------------------------------------------------------------

    def opening(self) -> Iterable[bytes]:
        yield self._event("response.created", response=self._head)
        yield self._event("response.in_progress", response=self._head)

    def pieces(self, item: News) -> Iterable[bytes]:
        for one in item.events:
            yield from self._one(one)

    def frame(self) -> tuple[bytes, bytes] | None:
        return None

    def closing(self) -> Iterable[bytes]:
        if not self._items and self._open is None:
            yield from self._start(_message("", "in_progress"))
        yield from self._close()
        final = self.whole()
        self._keep(self)
        yield self._event(
            "response.incomplete" if final["status"] == "incomplete" else "response.completed", response=final
        )

    def last_words(self, error: Exception) -> bytes:
        """The end of a response that failed after it had begun."""
        typed = as_ramet_error(error)
        failure = {"code": typed.code or "server_error", "message": message_of(typed)}
        failed = {**self._head, "status": "failed", "error": failure, "output": self._items}
        return self._event("error", **failure, param=typed.param) + self._event("response.failed", response=failed)

    def _one(self, one: Event) -> Iterator[bytes]:
        match one:
            case Text(text):
                if self._open is None or self._open.kind != "message":
                    yield from self._close()
                    yield from self._start(_message("", "in_progress"))
                yield self._piece("response.output_text.delta", text, content_index=0, logprobs=[])
            case Thought(text):
                if self._open is None or self._open.kind != "reasoning":
                    yield from self._close()
                    yield from self._start(_reasoning(""))
                yield self._piece("response.reasoning_text.delta", text, content_index=0)
            case CallStart(index, name):
                yield from self._close()
                yield from self._start(_call(self._state.call_ids[index], name, "", "in_progress"))
            case CallArgs(_, fragment):
                yield self._piece("response.function_call_arguments.delta", fragment)
            case CallEnd(_):
                yield from self._close()

    def _start(self, item: Item) -> Iterator[bytes]:
        self._open = _OpenItem(item, len(self._items))
        shown = {**item, "content": []} if item["type"] == "message" else item
        yield self._event("response.output_item.added", output_index=self._open.index, item=shown)
        if item["type"] == "message":
            yield self._part("response.content_part.added", "")

    def _piece(self, kind: str, text: str, **extra: Any) -> bytes:
        assert self._open is not None
        self._open.text += text
        return self._event(kind, **self._open.place, **extra, delta=text)

    def _part(self, kind: str, text: str) -> bytes:
        assert self._open is not None
        return self._event(kind, **self._open.place, content_index=0, part=_text_part(text))

    def _close(self) -> Iterator[bytes]:
        """End the open item, if there is one."""
        if self._open is None:
            return
        opened, text = self._open, self._open.text
        if opened.kind == "message":
            yield self._event("response.output_text.done", **opened.place, content_index=0, text=text, logprobs=[])
            yield self._part("response.content_part.done", text)
        elif opened.kind == "function_call":
            name = opened.item["name"]
            yield self._event("response.function_call_arguments.done", **opened.place, name=name, arguments=text)
        else:
            yield self._event("response.reasoning_text.done", **opened.place, content_index=0, text=text)
        item = opened.finished()
        self._items.append(item)
        yield self._event("response.output_item.done", output_index=opened.index, item=item)
        self._open = None

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return named_event({"type": kind, "sequence_number": number, **fields})


class _OpenItem:
    """The output item being streamed."""

    def __init__(self, item: Item, index: int) -> None:
        self.item = item
        self.index = index
        self.text = ""

    @property
    def kind(self) -> str:
        kind: str = self.item["type"]
        return kind

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.item["id"], "output_index": self.index}

    def finished(self) -> Item:
        if self.kind == "message":
            return {**self.item, "status": "completed", "content": [_text_part(self.text)]}
        if self.kind == "function_call":
            return {**self.item, "status": "completed", "arguments": self.text}
        return {**self.item, "content": [{"type": "reasoning_text", "text": self.text}]}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(text: str, status: str = "completed") -> Item:
    return {
        "type": "message",
        "id": f"msg_{random_id()}",
        "role": "assistant",
        "status": status,
        "content": [_text_part(text)],
    }


def _reasoning(text: str) -> Item:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{random_id()}", "summary": [], "content": content}


def _call(call_id: str, name: str, arguments: str, status: str) -> Item:
    return {
        "type": "function_call",
        "id": f"fc_{random_id()}",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }
