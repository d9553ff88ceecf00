"""POST and PUT /generate: SGLang's native API. Streams are cumulative, as its clients expect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from runtime.generate import Delta, Stream
from runtime.messages import Finish, TokenLogprob, Usage
from runtime.serve.context import Serving
from runtime.serve.live import Claim
from runtime.serve.native_request import Batch, GenerateRequest, Item, read_batch
from runtime.serve.streams import AnswerStream, Feed, OpenAIWords, read_all
from runtime.serve.trace import Trace, trace_of
from runtime.serve.wire import DONE, event, json_response, read
from runtime.text.parsers.reasoning import start_of

TAIL_IDS = 16  # of the prompt: enough to see whether it opens or closes a thought


def routes(serving: Serving) -> list[BaseRoute]:
    """The endpoint, bound to one served model."""

    async def generate(request: Request) -> Response:
        body = await read(request, GenerateRequest)
        trace = trace_of(request)
        job = GenerateJob(serving, read_batch(serving, body, trace.caller), trace)
        if not body.stream:
            await read_all(request, job.feed)
            return json_response(job.whole())
        return AnswerStream(job.feed, _Events(job), trace)

    return [Route("/generate", generate, methods=["POST", "PUT"])]


class _Events(OpenAIWords):
    """A job's chunks as server-sent events."""

    def __init__(self, job: GenerateJob) -> None:
        self._job = job

    def opening(self) -> Iterable[bytes]:
        return ()

    def pieces(self, delta: Delta) -> Iterable[bytes]:
        return (event(self._job.chunk(delta)),)

    def closing(self) -> Iterable[bytes]:
        return (DONE,)


class GenerateJob:
    """One /generate request: read `feed` to its end, then `whole`, or a `chunk` a Delta. Also the ZMQ door's."""

    def __init__(self, serving: Serving, batch: Batch, trace: Trace) -> None:
        self._serving = serving
        self._batch = batch
        self._trace = trace
        generator = serving.generator
        self._streams = batch.items[0].submit.stream
        self._rids = [generator.new_rid() for _ in batch.items]
        names = batch.names or self._rids
        submits = [replace(item.submit, rid=rid) for item, rid in zip(batch.items, self._rids, strict=True)]
        stream = Stream(generator, submits, batch.n, "text")
        self.feed: Feed[Delta] = Feed(stream, self._note, self._claimed)
        self.states = [
            _State(serving, batch, item, name, j)
            for item, name in zip(batch.items, names, strict=True)
            for j in range(batch.n)
        ]

    def _claimed(self) -> Claim:
        names = self._batch.names or ()
        return self._serving.live.claim(self._trace.caller.digest, names, self._rids if names else ())

    def _note(self, delta: Delta) -> Delta:
        if delta.token_ids and self._streams:
            self._trace.tokens(len(delta.token_ids))
        self.states[delta.index].add(delta)
        if delta.finish is not None:
            self._trace.finished(delta.finish, self.states[delta.index].usage)
        return delta

    def whole(self) -> Any:
        """One object, or a list where the client sent one (or asked for n)."""
        answers = [state.answer(self._trace) for state in self.states]
        return answers if self._batch.is_list else answers[0]

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Everything so far of the answer that has news."""
        answer = self.states[delta.index].answer(self._trace)
        return {**answer, "index": delta.index} if self._batch.is_list else answer


class _State:
    """One answer being written."""

    def __init__(self, serving: Serving, batch: Batch, item: Item, name: str, sample: int) -> None:
        self._serving = serving
        self._batch = batch
        self._item = item
        self._name = name if batch.n == 1 else f"{name}_{sample}"
        self._text = ""
        self._ids: list[int] = []
        self._input: list[TokenLogprob] = []
        self._output: list[TokenLogprob] = []
        self._finish: Finish | None = None
        self._n_thought = 0
        self.usage = Usage(prompt_tokens=len(item.prompt.ids))

    def add(self, delta: Delta) -> None:
        self._text += delta.text
        self._ids += delta.token_ids
        self._input += delta.prompt_logprobs or ()
        self._output += delta.logprobs or ()
        if delta.finish is not None:
            self._finish = delta.finish
            self.usage = delta.usage or self.usage
            self._n_thought = self._count_thought()

    def _count_thought(self) -> int:
        serving = self._serving
        if serving.think is None:
            return 0
        tail = serving.tokenizer.decode(self._item.prompt.ids[-TAIL_IDS:], skip_special=False)
        return serving.n_thought(self._ids, start_of(tail, serving.think))

    def answer(self, trace: Trace) -> dict[str, Any]:
        usage = self.usage
        meta: dict[str, Any] = {
            "id": self._name,
            "finish_reason": self._reason(),
            "prompt_tokens": len(self._item.prompt.ids),
            "completion_tokens": len(self._ids),
            "cached_tokens": usage.cached_tokens,
            "cached_tokens_details": {"device": usage.cached_tokens, "host": 0},
            "cache_miss": usage.miss,
            "e2e_latency": trace.age(),
            "weight_version": "default",
            "num_retractions": usage.retractions,
            "reasoning_tokens": self._n_thought,
            "forced_tokens": usage.forced_tokens,
        }
        if usage.hints_honoured:
            meta["hints_honoured"] = usage.hints_honoured
        if self._item.submit.params.logprobs:
            meta |= self._logprobs()
        return {"text": self._text, "output_ids": list(self._ids), "meta_info": meta}

    def _reason(self) -> dict[str, Any] | None:
        finish = self._finish
        if finish is None:
            return None
        if finish.reason == "stop":
            matched = finish.matched
            if matched is None and self._ids and self._ids[-1] in self._serving.spec.eos_ids:
                matched = self._ids[-1]
            return {"type": "stop", "matched": matched}
        if finish.reason == "length":
            return {"type": "length", "length": len(self._ids)}
        return {"type": "abort", "message": finish.message or "aborted", "status_code": finish.status, "err_type": None}

    def _logprobs(self) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "input_token_logprobs": [self._triple(one.logprob, one.token) for one in self._input],
            "output_token_logprobs": [self._triple(one.logprob, one.token) for one in self._output],
            "output_token_logprobs_length": len(self._output),
        }
        if self._batch.top:
            meta["input_top_logprobs"] = self._tops(self._input)
            meta["output_top_logprobs"] = self._tops(self._output)
        if self._item.submit.params.logprob_ids:
            meta["input_token_ids_logprobs"] = self._probes(self._input)
            meta["output_token_ids_logprobs"] = self._probes(self._output)
        return meta

    def _tops(self, entries: Sequence[TokenLogprob]) -> list[list[list[Any]] | None]:
        return [
            None
            if one.logprob is None
            else [self._triple(lp, t) for t, lp in zip(one.top_ids, one.top_logprobs, strict=True)]
            for one in entries
        ]

    def _probes(self, entries: Sequence[TokenLogprob]) -> list[list[list[Any]] | None]:
        ids = self._item.submit.params.logprob_ids
        return [
            None if one.logprob is None else [self._triple(lp, t) for t, lp in zip(ids, one.id_logprobs, strict=True)]
            for one in entries
        ]

    def _triple(self, logprob: float | None, token: int) -> list[Any]:
        text = self._serving.tokenizer.decode([token], skip_special=False) if self._batch.text_in_logprobs else None
        return [logprob, token, text]
