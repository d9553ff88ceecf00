"""A backend without a model: a toy tokenizer, answers that depend on the prompt alone, a cache that counts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from frontend_lang.backend import Abilities, Piece
from runtime.errors import InvalidRequest
from runtime.messages import Finish, GrammarSpec, Submit, TokenLogprob, Usage, unpack_ids
from runtime.params import SamplingParams

WORDS = ("red", "blue", "cat", "dog", "sun", "moon")
MERGES = (
    "the",
    "ing",
    " the",
    "an",
    "er",
    "A:",
    " YES",
    "YES",
    " NO",
    "NO",
    "nik",
    "  ",
    "\n\n",
    *WORDS,
    *(f" {w}" for w in WORDS),
)
SPECIALS = {"<|end|>": 0, "<|begin|>": 1, "<|doc|>": 2}
_SPLIT = re.compile(r" ?[A-Za-z]+:?| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s")


class ToyTokenizer:
    """Words first, then the longest known piece, else one character: joins change tokens as with real vocabularies."""

    def __init__(self) -> None:
        self.pieces = [*SPECIALS, *MERGES]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}

    def encode(self, text: str) -> list[int]:
        assert not any(special in text for special in SPECIALS), "special tokens must not reach plain encoding"
        return [self._id(piece) for word in _SPLIT.findall(text) for piece in self._cut(word)]

    def _cut(self, word: str) -> list[str]:
        out, at = [], 0
        while at < len(word):
            piece = max((m for m in MERGES if word.startswith(m, at)), key=len, default=word[at])
            out.append(piece)
            at += len(piece)
        return out

    def _id(self, piece: str) -> int:
        if piece not in self.ids:
            self.ids[piece] = len(self.pieces)
            self.pieces.append(piece)
        return self.ids[piece]

    def text(self, ids: Any) -> str:
        return "".join(self.pieces[i] for i in ids)


class FakeBackend:
    """Implements the Backend protocol. `messages` holds every message sent, `live` the requests still running."""

    def __init__(self, *, n_words: int = 3, able: Abilities | None = None) -> None:
        self.name, self.model = "fake", "toy"
        self.able = able or Abilities()
        self.tokenizer = ToyTokenizer()
        self.specials: Mapping[str, int] = SPECIALS
        self.stop_ids = frozenset({0})
        self.bos_ids: tuple[int, ...] = (2,)
        self.n_words = n_words
        self.messages: list[list[Submit]] = []
        self.live: set[str] = set()
        self.aborted: list[str] = []
        self.encoded: list[str] = []
        self.generated: list[str] = []
        self.seen: list[tuple[int, ...]] = []
        self.hold: dict[str, asyncio.Event] = {}  # branch -> its requests wait
        self.fail: Exception | None = None
        self.fail_branch: str | None = None
        self.answers: dict[str, str] = {}  # end of prompt -> answer

    @property
    def requests(self) -> list[Submit]:
        return [request for message in self.messages for request in message]

    async def encode(self, text: str) -> Sequence[int]:
        self.encoded.append(text)
        return self.tokenizer.encode(text)

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.pieces[token].encode()

    async def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        roles = [message["role"] for message in messages]
        if "tool" in roles:
            raise InvalidRequest("no tool role here", param="messages")
        out = "" if roles and roles[0] == "system" else "<|begin|>system\nbe kind<|end|>\n"
        out += "".join(f"<|begin|>{m['role']}\n{m['content']}<|end|>\n" for m in messages)
        return out + ("<|begin|>assistant\n" if add_generation_prompt else "")

    def submit(self, requests: Sequence[Submit]) -> list[AsyncIterator[Piece]]:
        if self.fail is not None:
            raise self.fail
        for request in requests:
            if not request.tokens:
                raise InvalidRequest("The prompt is empty.", param="prompt")
        self.messages.append(list(requests))
        return [self._serve(request) for request in requests]

    async def _serve(self, request: Submit) -> AsyncIterator[Piece]:
        self.live.add(request.rid)
        try:
            async for piece in self._answer(request):
                yield piece
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.append(request.rid)
            raise
        finally:
            self.live.discard(request.rid)

    async def _answer(self, request: Submit) -> AsyncIterator[Piece]:
        branch = request.rid.split("/")[1]
        await asyncio.sleep(0)
        if branch in self.hold:
            await self.hold[branch].wait()
        if branch == self.fail_branch:
            yield Piece(finish=Finish(reason="error", message="the step failed", status=500))
            return
        ids = [int(i) for i in unpack_ids(request.tokens)]
        n_prompt, cached = len(ids), self._cached(ids)
        yield Piece(prompt_logprobs=tuple(self._score(ids[:n], token) for n, token in request.scores))
        stages = [(request.params, request.grammar), *((s.params, s.grammar) for s in request.segments)]
        n_out = 0
        for index, (params, grammar) in enumerate(stages):
            if index:
                ids += [int(i) for i in unpack_ids(request.segments[index - 1].tokens)]
            out, finish = self._generate(ids, params, grammar)
            kept, whole = self._kept(out, finish)
            ids += kept
            n_out += len(out)
            self.seen.append(tuple(ids[:-1]) if out else tuple(ids))  # nobody has read the last token yet
            last = index == len(stages) - 1 or not whole
            usage = Usage(
                prompt_tokens=n_prompt,
                completion_tokens=n_out,
                cached_tokens=cached,
                prefilled_tokens=n_prompt - cached,
            )
            text = self._shown(out, params, finish)
            self.generated.append(text)
            for piece in self._pieces(out, text, finish, index, usage if last else None):
                yield piece
                await asyncio.sleep(0)
            if last:
                return

    def _kept(self, out: list[int], finish: Finish) -> tuple[list[int], bool]:
        """(ids that stay before the next segment, False if a stop string began inside a token)."""
        if not isinstance(finish.matched, str):
            return (out[:-1] if out and out[-1] in self.stop_ids else out), True
        at = self.tokenizer.text(out).index(finish.matched)
        n = next(n for n in range(len(out) + 1) if len(self.tokenizer.text(out[:n])) >= at)
        return out[:n], len(self.tokenizer.text(out[:n])) == at

    def _pieces(self, out: list[int], text: str, finish: Finish, index: int, usage: Usage | None) -> list[Piece]:
        half = len(text) // 2
        return [
            Piece(text=text[:half], token_ids=tuple(out[:1]), segment=index),
            Piece(text=text[half:], token_ids=tuple(out[1:]), segment=index, finish=finish, usage=usage),
        ]

    def _shown(self, out: list[int], params: SamplingParams, finish: Finish) -> str:
        text = self.tokenizer.text(i for i in out if i not in self.stop_ids)
        return text.split(finish.matched)[0] if isinstance(finish.matched, str) else text

    def _generate(
        self, ids: list[int], params: SamplingParams, grammar: GrammarSpec | None
    ) -> tuple[list[int], Finish]:
        if params.max_tokens == 0:
            return [], Finish(reason="length")
        prompt = self.tokenizer.text(ids)
        scripted = next((a for end, a in self.answers.items() if prompt.endswith(end)), None)
        key = f"{ids}/{params.seed if params.temperature else ''}"
        if scripted is not None:
            text = scripted
        elif grammar is not None:
            text = _instance(grammar, _draw(key, 1000))
        else:
            text = "".join(" " + WORDS[_draw(f"{key}/{i}", len(WORDS))] for i in range(self.n_words))
        out = self.tokenizer.encode(text)[: params.max_tokens]
        for stop in params.stop:
            for n in range(1, len(out) + 1):
                if stop in self.tokenizer.text(out[:n]):
                    return out[:n], Finish(reason="stop", matched=stop)
        if len(out) == params.max_tokens:
            return out, Finish(reason="length")
        return [*out, 0], Finish(reason="stop")

    def _score(self, ids: list[int], token: int) -> TokenLogprob:
        return TokenLogprob(token, -1.0 - _draw(str([*ids, token]), 1000) / 250)

    def _cached(self, ids: list[int]) -> int:
        best = 0
        for other in self.seen:
            n = 0
            while n < min(len(ids) - 1, len(other)) and ids[n] == other[n]:
                n += 1
            best = max(best, n)
        return best


def _draw(key: str, n: int) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "little") % n


def _instance(grammar: GrammarSpec, draw: int) -> str:
    """Some text that the grammar allows."""
    if grammar.kind == "choices":
        choices = json.loads(grammar.spec)
        return str(choices[draw % len(choices)])
    if grammar.kind == "regex":
        return str(draw % 10)
    schema = json.loads(grammar.spec)
    return json.dumps(_value(schema, schema, draw))


def _value(schema: Any, root: Any, draw: int) -> Any:
    if "$ref" in schema:
        return _value(root["$defs"][schema["$ref"].split("/")[-1]], root, draw)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][draw % len(schema["enum"])]
    if "anyOf" in schema:
        return _value(schema["anyOf"][draw % len(schema["anyOf"])], root, draw)
    kind = schema.get("type")
    if kind == "object":
        return {key: _value(value, root, draw + i) for i, (key, value) in enumerate(schema["properties"].items())}
    if kind == "array":
        return [_value(schema["items"], root, draw + i) for i in range(2)]
    return {"string": WORDS[draw % len(WORDS)], "integer": draw % 10, "number": draw / 10, "boolean": draw % 2 == 0}[
        kind
    ]
