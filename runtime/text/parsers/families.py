"""One parser for each notation in which models write tool calls."""

from __future__ import annotations

from collections.abc import Collection

from runtime.text.parsers.base import Event
from runtime.text.parsers.pythonic import PythonicCalls
from runtime.text.parsers.sections import JsonCalls, NamedArguments, OneJsonCall
from runtime.text.parsers.tagged import Section, TaggedParser


class HermesParser(TaggedParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen, and our generic prompt."""

    markers = ("<tool_call>",)

    def open(self, marker: str, index: int) -> Section:
        return OneJsonCall(index, "</tool_call>")


class MistralParser(TaggedParser):
    """`[TOOL_CALLS][{…}, {…}]`, and the newer `[TOOL_CALLS]name[ARGS]{…}`."""

    markers = ("[TOOL_CALLS]",)

    def open(self, marker: str, index: int) -> Section:
        return _MistralSection(index)


class _MistralSection(Section):
    def __init__(self, index: int) -> None:
        self._index = index
        self._inner: Section | None = None

    def feed(self, char: str) -> list[Event]:
        if self._inner is None:
            if char.isspace():
                return []
            if char in "[{":
                self._inner = JsonCalls(self._index)
            else:
                self._inner = NamedArguments(self._index, "[ARGS]", cut=("[CALL_ID]",))
        events = self._inner.feed(char)
        self.done, self.pushback = self._inner.done, self._inner.pushback
        return events


class LlamaJsonParser(TaggedParser):
    """`{"name": …, "parameters": {…}}`, several with `;` between, after `<|python_tag|>` or at the very start."""

    markers = ("<|python_tag|>",)

    def __init__(self, known: Collection[str]) -> None:
        super().__init__()
        self._known = frozenset(known)

    def open(self, marker: str, index: int) -> Section:
        return JsonCalls(index)

    def open_bare(self, index: int) -> Section | None:
        return JsonCalls(index, self._known) if self._held.lstrip().startswith("{") else None


class JsonParser(TaggedParser):
    """Calls as plain JSON: one object, a list, or a fenced block. Only the tools' own names count."""

    markers = ("```json", "<tool_call>")

    def __init__(self, known: Collection[str]) -> None:
        super().__init__()
        self._known = frozenset(known)

    def open(self, marker: str, index: int) -> Section:
        return JsonCalls(index, self._known, end="```" if marker == "```json" else "</tool_call>")

    def open_bare(self, index: int) -> Section | None:
        return JsonCalls(index, self._known) if self._held.lstrip()[0] in "{[" else None


class PythonicParser(TaggedParser):
    """`[f(a=1), g()]`: Llama 4, Llama 3.2 and others."""

    markers = ("<|python_start|>", "<|python_end|>")

    def __init__(self, known: Collection[str]) -> None:
        super().__init__()
        self._known = frozenset(known)

    def open(self, marker: str, index: int) -> Section | None:
        return PythonicCalls(index, self._known) if marker == "<|python_start|>" else None

    def open_bare(self, index: int) -> Section | None:
        return PythonicCalls(index, self._known) if self._held.lstrip().startswith("[") else None


class DeepSeekParser(TaggedParser):
    """`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`, and V3's form with a fenced block."""

    markers = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>")

    def open(self, marker: str, index: int) -> Section | None:
        return _DeepSeekSection(index) if marker == "<｜tool▁call▁begin｜>" else None


class _DeepSeekSection(NamedArguments):
    def __init__(self, index: int) -> None:
        super().__init__(index, "<｜tool▁sep｜>", end="<｜tool▁call▁end｜>")

    def name_of(self, head: str) -> str | None:
        if head.strip() != "function" or self._separator == "```json":
            return head.strip()
        self._head, self._separator = "", "```json"  # V3: `function<sep>name\n```json\n{…}\n```<end>`
        self._tail.text = "```" + self._tail.text
        return None
