"""The in-process engine: a model, its scheduler in a thread, and nothing else to run.

with Engine(model="smollm2-135m") as engine:
    print(engine.generate("The capital of France is", max_tokens=8).text)
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import difflib
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from runtime.build import Parts, build
from runtime.client import LocalClient
from runtime.config import DEFAULT_MODEL, EngineConfig
from runtime.errors import InvalidRequest, Unavailable
from runtime.generate import Completion, Delta, Generator, Stream
from runtime.messages import GrammarSpec, Hints, NamespaceKey, Submit, TokenLogprob, Usage
from runtime.params import SamplingParams, shown
from runtime.prompt import Prompt, grammar_of, is_one, sampling, to_ids
from runtime.text.chat import ChatRenderer, template_variables

T = TypeVar("T")
DEFAULT_MAX_TOKENS = 128
SETTLE_S = 5.0  # for calls that were failed by the end to notice it


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """One answer. `token_ids` are raw: a final EOS or stop token is among them, but not in `text`.

    `finish_reason` is stop, length or abort; `matched_stop` the stop string or stop token id, None for EOS.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    matched_stop: str | int | None
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    index: int = 0


class Engine:
    """A model in this process. Every method may be called from any thread.

    `options` are EngineConfig's fields (or give a whole `config`). A prompt is text, token ids or chat messages;
    a list of prompts is answered by a list, and with n > 1 every prompt takes n places in it.

    Raises ModelLoadError when the model cannot be loaded, InvalidRequest (naming the parameter) for what a
    request gets wrong, before it is queued, and Unavailable once the scheduler is dead or closed.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, config: EngineConfig | None = None, **options: Any) -> None:
        self._open(build(_config(model, config, options)))

    @classmethod
    def from_parts(cls, parts: Parts) -> Engine:
        """An engine over parts built elsewhere (another runner, a toy tokenizer)."""
        engine = cls.__new__(cls)
        engine._open(parts)
        return engine

    def _open(self, parts: Parts) -> None:
        self._parts = parts
        self._closed = threading.Event()
        self.config = parts.config
        self.spec = parts.runner.spec
        self.tokenizer = parts.tokenizer
        self.chat_renderer = ChatRenderer(parts.tokenizer)
        self._client = LocalClient(parts.scheduler, stall_s=parts.config.stall_s)
        self.generator = Generator(
            self._client,
            parts.tokenizer,
            self.spec,
            parts.config,
            check_grammar=parts.grammar.validate if parts.grammar is not None else None,
        )
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ramet-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the scheduler; what still runs ends with Unavailable. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self.close)
        self._client.close()
        self._parts.close()
        asyncio.run_coroutine_threadsafe(_end_loop(), self._loop)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._loop.close()

    # -- generate ----------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str, params: SamplingParams | None = None, **options: Any) -> GenerateResult: ...

    @overload
    def generate(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> Any: ...

    def generate(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> Any:
        """Answer a prompt (a GenerateResult) or a list of prompts, planned together (a list of them).

        Sampling options are SamplingParams' fields; without `params`, `max_tokens` is 128 unless given. Further:
        `n`; one of `json_schema`, `regex`, `ebnf`, `choices`, `json_object`, `grammar`; `rid`, `salt` (a cache
        namespace), `hints`, `group`, `priority`, `timeout_s`, `prompt_logprobs_from`, and for messages `tools`
        and the template's own variables in `chat_template_kwargs`.
        """
        return self._wait(self.agenerate(prompt, params, **options))

    async def agenerate(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> Any:
        """`generate` for asyncio; cancelling it aborts the request."""
        n = options.pop("n", 1)
        single = is_one(prompt)
        submits = [self.submit_of(one, params, **options) for one in ([prompt] if single else prompt)]
        answers = await self.generator.complete_many(submits, n=n)
        results = [_result(answer) for group in answers for answer in group]
        return results[0] if single and n == 1 else results

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[Delta]:
        """The answer as it comes, one Delta a step. Leaving the loop early (or `close()`) aborts the request."""
        return _SyncStream(self, *self._stream_args(prompt, params, options))

    def astream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> AsyncIterator[Delta]:
        """`stream` for asyncio."""
        submit, n = self._stream_args(prompt, params, options)
        return self.generator.stream(submit, n=n)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> GenerateResult:
        """The assistant's next message in a chat, rendered by the model's own template."""
        return self.generate(list(messages), params, **options)

    def submit_of(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        rid: str = "",
        salt: str = "",
        hints: Hints | None = None,
        group: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        prompt_logprobs_from: int | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        grammar: GrammarSpec | None = None,
        json_schema: Any = None,
        regex: str | None = None,
        ebnf: str | None = None,
        choices: Sequence[str] | None = None,
        json_object: bool = False,
        **options: Any,
    ) -> Submit:
        """The request that `generate` would send for one prompt."""
        if params is None:
            options = {"max_tokens": DEFAULT_MAX_TOKENS, **options}
        return Submit(
            rid=rid,
            tokens=to_ids(
                prompt, self.tokenizer, self.chat_renderer, tools=tools, **template_variables(chat_template_kwargs)
            ),
            params=sampling(params, options),
            grammar=grammar_of(
                grammar, json_schema=json_schema, regex=regex, ebnf=ebnf, choices=choices, json_object=json_object
            ),
            namespace=NamespaceKey(salt=salt),
            hints=hints or Hints(),
            group=group,
            priority=priority,
            timeout_s=timeout_s,
            prompt_logprobs_from=prompt_logprobs_from,
        )

    # -- control -----------------------------------------------------------------------------------------

    def abort(self, rid: str | None = None) -> int:
        """Cancel the request with this `rid`, or everything; the number of requests hit."""
        if rid is not None and not isinstance(rid, str):
            raise InvalidRequest(f"rid must be a string; got {shown(rid)}.", param="rid")
        return self.generator.abort_all() if rid is None else self.generator.abort(rid)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of scheduler, cache and pool."""
        return self.call("stats")

    def flush(self) -> Any:
        """Forget every cached prefix that no running request holds."""
        return self.call("flush")

    def call(self, op: str, **args: Any) -> Any:
        """A control call to the scheduler by name."""
        return self._wait(self.generator.call(op, **args))

    # -- inside ------------------------------------------------------------------------------------------

    def _stream_args(
        self, prompt: Prompt, params: SamplingParams | None, options: dict[str, Any]
    ) -> tuple[Submit, int]:
        n = options.pop("n", 1)
        if not is_one(prompt):
            raise InvalidRequest("stream takes one prompt; use generate for a list of them.", param="prompt")
        return self.submit_of(prompt, params, **options), n

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the engine's loop and wait for it; Ctrl-C cancels it, which aborts its requests."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("This method blocks; inside the engine's own callbacks use its async form.")
        if self._closed.is_set():
            work.close()
            raise Unavailable("The engine is closed.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


class _SyncStream(Iterator[Delta]):
    """A Stream read from outside its loop."""

    def __init__(self, engine: Engine, submit: Submit, n: int) -> None:
        self._news: queue.SimpleQueue[Delta | BaseException | None] = queue.SimpleQueue()
        stream = engine.generator.stream(submit, n=n)
        if engine._closed.is_set():
            raise Unavailable("The engine is closed.")
        self._pump = asyncio.run_coroutine_threadsafe(_pump(stream, self._news), engine._loop)

    def __next__(self) -> Delta:
        item = self._news.get()
        if isinstance(item, Delta):
            return item
        self._news.put(None)  # asked again after the end, it ends again
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Abort what still runs."""
        self._pump.cancel()

    def __del__(self) -> None:
        if pump := getattr(self, "_pump", None):
            pump.cancel()


async def _pump(stream: Stream, news: queue.SimpleQueue[Delta | BaseException | None]) -> None:
    """Move Deltas into `news`, then the end: None, or the error that ended the stream."""
    end: BaseException | None = None
    try:
        async for delta in stream:
            news.put(delta)
    except BaseException as err:
        end = None if isinstance(err, asyncio.CancelledError) else err
    finally:
        stream.close()
        news.put(end)


async def _end_loop() -> None:
    """Let every waiting call see its end, then stop the loop."""
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, late = await asyncio.wait(others, timeout=SETTLE_S)
        for task in late:
            task.cancel()
    loop.call_soon(loop.stop)


def _result(answer: Completion) -> GenerateResult:
    return GenerateResult(
        text=answer.text,
        token_ids=answer.token_ids,
        finish_reason=answer.finish.reason,
        matched_stop=answer.finish.matched,
        usage=answer.usage,
        logprobs=answer.logprobs,
        prompt_logprobs=answer.prompt_logprobs,
        index=answer.index,
    )


def _config(model: str, config: EngineConfig | None, options: dict[str, Any]) -> EngineConfig:
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise InvalidRequest(f"The engine has no option {name!r}.{hint}", param=name)
    if config is None:
        return EngineConfig(model=model, **options)
    if not isinstance(config, EngineConfig):
        raise InvalidRequest(f"config must be of type EngineConfig; got {shown(config)}.", param="config")
    return dataclasses.replace(config, **options)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not made for every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
