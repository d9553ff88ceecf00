"""POST /v1/completions: text in, text out, or token ids; one prompt or many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from runtime.errors import InvalidRequest
from runtime.generate import Delta, Stream
from runtime.messages import Finish, Submit, TokenLogprob, Usage
from runtime.serve.agent_hints import hints_of
from runtime.serve.answers import now
from runtime.serve.call_ids import random_id
from runtime.serve.context import Serving
from runtime.serve.openai_shapes import CompletionLogprobs, add_usage, finish_reason, usage_object
from runtime.serve.prompts import Prompt, read_prompts
from runtime.serve.sampling import SamplingFields, answer_grammar, sampling_params, spaced
from runtime.serve.streams import AnswerStream, Feed, OpenAIWords, read_all
from runtime.serve.trace import Trace, trace_of
from runtime.serve.wire import DONE, around, event, json_response, read

DEFAULT_MAX_TOKENS = 16
HOLE = "\0"


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """The body. Unknown keys are ignored; null means unset."""

    prompt: Any
    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_cached_tokens_details: bool | None = None


def routes(serving: Serving) -> list[BaseRoute]:
    """The endpoint, bound to one served model."""

    async def completions(request: Request) -> Response:
        body = await read(request, CompletionRequest)
        trace = trace_of(request)
        model = serving.check_model(body.model)
        _check(body)
        prompts, _ = read_prompts(body.prompt, serving.tokenizer, "prompt")
        n = serving.check_batch(len(prompts), body.n)
        submits = _submits(body, prompts, trace)
        writer = _Writer(serving, body, model, prompts, n, Stream(serving.generator, submits, n, "prompt"), trace)
        if not body.stream:
            await read_all(request, writer.feed, writer.collect)
            return json_response(writer.whole())
        return AnswerStream(writer.feed, writer, trace)

    return [Route("/v1/completions", completions, methods=["POST"])]


def _check(body: CompletionRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options goes with stream=true only.", param="stream_options")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of must equal n: answers are not ranked here.", param="best_of")
    if body.suffix:
        raise InvalidRequest("suffix is not supported: this model does not fill in the middle.", param="suffix")
    if body.logprobs is not None and body.logprobs < 0:
        raise InvalidRequest(f"logprobs must be 0 or more; got {body.logprobs}.", param="logprobs")


def _submits(body: CompletionRequest, prompts: Sequence[Prompt], trace: Trace) -> list[Submit]:
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = sampling_params(body, limit, logprobs=body.logprobs is not None, top_logprobs=body.logprobs)
    grammar = spaced(answer_grammar(body), body.whitespace)
    return [
        Submit(
            rid="",
            tokens=prompt.packed,
            params=params,
            grammar=grammar,
            namespace=trace.caller.namespace(body.cache_salt or body.extra_key),
            client=trace.caller.digest,
            group=trace.caller.digest,
            priority=body.priority or 0,
            hints=hints_of(body.hints),
            timeout_s=body.timeout_s,
            prompt_logprobs_from=0 if body.echo and body.logprobs is not None else None,
            stream=bool(body.stream),
        )
        for prompt in prompts
    ]


class _Choice:
    """One answer being written; `logprobs` covers the echoed prompt too."""

    def __init__(self, index: int, prompt: Prompt, n_logprobs: int | None, writer: _Writer) -> None:
        self.index = index
        self.prompt = prompt
        self.text = writer.echo_of(prompt)
        self.logprobs = None if n_logprobs is None else CompletionLogprobs(writer.tokenizer)
        self.begun = False  # its first piece, echo included, is sent
        self.frame: tuple[bytes, bytes] | None = None  # of an event that brings text alone
        self.finish: Finish | None = None
        self.n_tokens = 0
        self.usage = Usage()


class _Writer(OpenAIWords):
    """Writes one answer object, or its chunks."""

    def __init__(
        self,
        serving: Serving,
        body: CompletionRequest,
        model: str,
        prompts: Sequence[Prompt],
        n: int,
        stream: Stream,
        trace: Trace,
    ) -> None:
        self.tokenizer = serving.tokenizer
        self._body = body
        self._n = n
        self.feed: Feed[Delta] = Feed(stream, self._note)
        self._trace = trace
        self._head = {"id": f"cmpl-{random_id()}", "object": "text_completion", "created": now(), "model": model}
        self._choices = [_Choice(i * n + j, p, body.logprobs, self) for i, p in enumerate(prompts) for j in range(n)]
        options = body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats and options.include_usage)

    def echo_of(self, prompt: Prompt) -> str:
        return prompt.shown(self.tokenizer) if self._body.echo else ""

    def collect(self, delta: Delta) -> None:
        """News of an answer that will be given whole."""
        self._choices[delta.index].text += delta.text

    def _note(self, delta: Delta) -> Delta:
        choice = self._choices[delta.index]
        if self._body.stream and len(delta.token_ids) > delta.n_early:
            self._trace.tokens(len(delta.token_ids) - delta.n_early)
        choice.n_tokens += len(delta.token_ids)
        if choice.logprobs is not None:
            choice.logprobs.add(_entries(delta))
        if delta.finish is not None:
            choice.finish = delta.finish
            choice.usage = delta.usage or Usage(prompt_tokens=len(choice.prompt.ids))
            self._trace.finished(delta.finish, choice.usage)
        return delta

    @property
    def _usage(self) -> Usage:
        """Each prompt once, all answers' tokens."""
        firsts = self._choices[:: self._n]
        prompts = [
            Usage(
                prompt_tokens=len(c.prompt.ids),
                cached_tokens=c.usage.prompt_cached,
                hints_honoured=c.usage.hints_honoured,
            )
            for c in firsts
        ]
        answers = [Usage(completion_tokens=c.n_tokens, forced_tokens=c.usage.forced_tokens) for c in self._choices]
        return add_usage([*prompts, *answers])

    def whole(self) -> dict[str, Any]:
        """The answer, when all of it is there."""
        choices = [self._part(c, c.text, c.logprobs.take() if c.logprobs else None) for c in self._choices]
        return {**self._head, "choices": choices, "usage": usage_object(self._usage), **self._sglext()}

    # -- chunks ------------------------------------------------------------------------------------------

    def opening(self) -> Iterable[bytes]:
        return ()

    def pieces(self, delta: Delta) -> Iterable[bytes]:
        """At most one chunk: the delta's text, before the first of it the echoed prompt."""
        choice, text = self._choices[delta.index], delta.text
        if not choice.begun:
            choice.begun = True
            text = choice.text + text
        if delta.finish is None and choice.logprobs is None and not self._usage_always:
            if not text:
                return ()
            before, after = choice.frame or self._frame(choice)
            return (before + orjson.dumps(text) + after,)
        if text or delta.finish is not None or (choice.logprobs and choice.logprobs.pending):
            return (event(self._chunk(choice, text)),)
        return ()

    def frame(self) -> tuple[bytes, bytes] | None:
        choice = self._choices[0]
        bare = choice.begun and choice.logprobs is None and not self._usage_always
        return choice.frame or self._frame(choice) if bare else None

    def closing(self) -> Iterable[bytes]:
        """Usage if asked for, the end mark."""
        usage = event({**self._head, "choices": [], "usage": usage_object(self._usage)}) if self._usage_at_end else b""
        return (usage, DONE) if usage else (DONE,)

    def _frame(self, choice: _Choice) -> tuple[bytes, bytes]:
        choice.frame = around(event({**self._head, "choices": [self._part(choice, HOLE, None)]}), HOLE)
        return choice.frame

    def _chunk(self, choice: _Choice, text: str) -> dict[str, Any]:
        part = self._part(choice, text, choice.logprobs.take() if choice.logprobs else None)
        chunk: dict[str, Any] = {**self._head, "choices": [part]}
        if choice.finish is not None:
            chunk |= self._sglext()
        if self._usage_always:
            chunk["usage"] = usage_object(self._usage)
        return chunk

    def _part(self, choice: _Choice, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        part: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(choice.finish),
        }
        if choice.finish is not None:
            part["matched_stop"] = choice.finish.matched
        return part

    def _sglext(self) -> dict[str, Any]:
        if not self._body.return_cached_tokens_details:
            return {}
        return {"sglext": {"cached_tokens_details": {"device": self._usage.cached_tokens, "host": 0}}}


def _entries(delta: Delta) -> list[TokenLogprob]:
    return [*(delta.prompt_logprobs or ()), *(delta.logprobs or ())]
