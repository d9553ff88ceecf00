"""A scheduler that says what it is told, `k` pieces a step: for testing parsers, stops and framing exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from runtime.client import Health
from runtime.config import EngineConfig, ServerConfig
from runtime.errors import Unavailable
from runtime.execute.fake import fake_spec
from runtime.generate import Generator
from runtime.messages import Abort, Finish, Output, Submit, SubmitMany, TokenLogprob, Usage, unpack_ids
from runtime.serve.app import create_app
from runtime.text.stop_regex import StopScanner
from runtime.text.tokenizer import Tokenizer
from runtime.text.vocab import byte_alphabet

SPECIALS = ["<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
EOS = 257  # <|im_end|>
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}",
)


def byte_tokenizer(template: str = CHATML) -> Tokenizer:
    """256 byte tokens and a few special ones."""
    vocab = dict(byte_alphabet())
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return Tokenizer(backend, chat_template=template, eos_ids=[EOS])


def post_scope(path: str) -> dict[str, Any]:
    """What a server hands an application for a posted JSON body."""
    headers = [(b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": path, "root_path": "", "query_string": b"", "headers": headers}


@dataclass(frozen=True)
class Pool:
    n_pages: int = 4096
    page_size: int = 16


class Hold(asyncio.Event):
    """Lets a step go every few milliseconds: an answer that takes its time."""

    async def wait(self) -> bool:
        await asyncio.sleep(0.005)
        return True


@dataclass
class ScriptedClient:
    """Answers every request with `pieces` (or what `script` makes of it), then EOS.

    `fail_at`: the step at which a request fails. `hold`: an event that steps wait for. `error`: how requests
    are refused before their first token.
    """

    tokenizer: Tokenizer
    pieces: Sequence[str | bytes] = ()
    k: int = 1
    script: Callable[[Submit], Sequence[str | bytes]] | None = None
    fail_at: int | None = None
    error: Finish | None = None
    hold: asyncio.Event | None = None
    submits: list[Submit] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    replies: dict[str, Any] = field(default_factory=dict)
    ready: bool = True
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def submit(self, item: Submit | SubmitMany, on_output: Callable[[Output], None]) -> None:
        for one in item.items if isinstance(item, SubmitMany) else (item,):
            self.submits.append(one)
            self._tasks[one.rid] = asyncio.get_running_loop().create_task(self._answer(one, on_output))

    def abort(self, abort: Abort) -> None:
        if abort.rid in self._tasks:
            self.aborts.append(abort.rid)
            self._tasks.pop(abort.rid).cancel()

    def forget(self, rid: str) -> None: ...

    async def call(self, op: str, **args: Any) -> Any:
        self.calls.append((op, args))
        return self.replies.get(op, {})

    def health(self) -> Health:
        return Health(True, self.ready, "" if self.ready else "loading")

    def close(self) -> None: ...

    # -- one request -------------------------------------------------------------------------------------

    async def _answer(self, submit: Submit, on_output: Callable[[Output], None]) -> None:
        n_prompt = len(submit.tokens) // 4
        usage = Usage(prompt_tokens=n_prompt, cached_tokens=n_prompt // 2)
        await asyncio.sleep(0)
        if self.error is not None:
            on_output(Output(rid=submit.rid, finish=self.error, usage=usage))
            return
        first = self._prompt_logprobs(submit)
        said: list[int] = []
        for step, ids in enumerate(self._steps(submit)):
            if self.hold is not None:
                await self.hold.wait()
            await asyncio.sleep(0)
            finish: Finish | None = Finish(reason="length") if submit.params.max_tokens == 0 else None
            if step == self.fail_at:
                finish, ids = Finish(reason="error", status=500, message="the step failed"), []
            taken: list[int] = []
            for token in ids:
                taken.append(token)
                said.append(token)
                if (finish := self._finish(submit, said)) is not None:
                    break
            done = Usage(**{**_as_dict(usage), "completion_tokens": len(said)}) if finish else None
            on_output(
                Output(
                    rid=submit.rid,
                    tokens=tuple(taken),
                    logprobs=tuple(_logprob(submit, t) for t in taken) if submit.params.logprobs else None,
                    prompt_logprobs=first,
                    finish=finish,
                    usage=done,
                )
            )
            first = None
            if finish is not None:
                break
        self._tasks.pop(submit.rid, None)

    def _steps(self, submit: Submit) -> list[list[int]]:
        if submit.params.max_tokens == 0:
            return [[]]
        pieces = self.script(submit) if self.script else self.pieces
        steps: list[list[int]] = []
        for i in range(0, len(pieces), self.k):
            steps.append([t for piece in pieces[i : i + self.k] for t in self._ids(piece)])
        return [*steps, [EOS]] if steps else [[EOS]]

    def _ids(self, piece: str | bytes) -> list[int]:
        return list(piece) if isinstance(piece, bytes) else self.tokenizer.encode(piece, add_special=False)

    def _finish(self, submit: Submit, said: list[int]) -> Finish | None:
        params = submit.params
        if said[-1] == EOS and not params.ignore_eos:
            return Finish(reason="stop")
        if said[-1] in params.stop_token_ids:
            return Finish(reason="stop", matched=said[-1])
        if params.stop or params.stop_regex:
            text = self.tokenizer.decode_bytes(said, skip_special=params.skip_special_tokens)
            hit = StopScanner(params.stop, params.stop_regex).feed(text)
            if hit is not None:
                return Finish(reason="stop", matched=hit.stop.decode())
        return Finish(reason="length") if len(said) == params.max_tokens else None

    def _prompt_logprobs(self, submit: Submit) -> tuple[TokenLogprob, ...] | None:
        start = submit.prompt_logprobs_from
        if start is None:
            return None
        ids = unpack_ids(submit.tokens).tolist()
        scored = [_logprob(submit, token) for token in ids[start:]]
        return tuple([TokenLogprob(ids[0], None), *scored[1:]] if start == 0 else scored)


def _logprob(submit: Submit, token: int) -> TokenLogprob:
    n = submit.params.top_logprobs
    return TokenLogprob(token, -0.5, tuple((token + i) % 256 for i in range(n)), tuple(-0.5 - i for i in range(n)))


def _as_dict(usage: Usage) -> dict[str, Any]:
    return {name: getattr(usage, name) for name in usage.__struct_fields__}


@dataclass
class Served:
    """An app over a scripted scheduler, spoken to in process."""

    client: ScriptedClient
    generator: Generator
    app: Any

    def http(self, **headers: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://ramet", headers=headers, timeout=20)


def serve(
    pieces: Sequence[str | bytes] = ("ok",),
    *,
    k: int = 1,
    template: str = CHATML,
    server: ServerConfig | None = None,
    context: int = 4096,
    **client_options: Any,
) -> Served:
    """An app whose every answer is `pieces`."""
    tokenizer = byte_tokenizer(template)
    spec = fake_spec(vocab_size=tokenizer.vocab_size, context_length=context, eos_ids=(EOS,))
    client = ScriptedClient(tokenizer, pieces, k, **client_options)
    config = EngineConfig(model="fake", context_length=context)
    generator = Generator(client, tokenizer, spec, config)
    return Served(client, generator, create_app(generator, config, server or ServerConfig(), pool=Pool()))


def data_events(text: str) -> list[str]:
    """The payloads of an event stream in which every event is one `data: ` line."""
    assert "\r" not in text
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


__all__ = ["CHATML", "EOS", "Hold", "THINKING", "ScriptedClient", "Served", "Unavailable", "data_events", "serve"]
