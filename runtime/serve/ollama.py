"""/api/…: the Ollama API over the same turns. Streams are lines of JSON, and streaming is its default."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from runtime.errors import InvalidRequest
from runtime.messages import GrammarSpec, Submit
from runtime.params import SamplingParams
from runtime.serve.answers import Answers, AnswerState, News
from runtime.serve.context import Caller, Serving
from runtime.serve.errors import as_ramet_error, message_of
from runtime.serve.prompts import read_prompts
from runtime.serve.sampling import GrammarFields, answer_grammar, as_stops, canonical, no_grammar, spaced
from runtime.serve.streams import AnswerStream, read_all
from runtime.serve.tools import read_choice, read_tools
from runtime.serve.trace import trace_of
from runtime.serve.turn import PlannedTurn, Turn, plan_turn
from runtime.serve.wire import dumps, json_response, read
from runtime.text.parsers.base import CallEnd, PlainParser, Text, Thought
from runtime.text.parsers.reasoning import Start

LINES = "application/x-ndjson"
NO_LIMIT = (-1, -2)  # num_predict: for ever, or to the end of the context


class OllamaOptions(GrammarFields, kw_only=True):
    """`options`. Those about loading and memory are ignored; fields of a grammar, which the body has, are refused."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class _OllamaBody(GrammarFields, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    format: Any = None
    options: OllamaOptions | None = None
    think: bool | str | None = None


class OllamaChatRequest(_OllamaBody, kw_only=True):
    """The body of /api/chat. Without messages it only asks whether the model is there."""

    messages: list[Any] | None = None
    tools: Any = None


class OllamaGenerateRequest(_OllamaBody, kw_only=True):
    """The body of /api/generate. `raw`: the prompt as it is, without the chat template."""

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """The body of /api/show."""

    model: str | None = None
    name: str | None = None


def routes(serving: Serving) -> list[BaseRoute]:
    """Chat, generate, and what is served."""

    async def chat(request: Request) -> Response:
        body = await read(request, OllamaChatRequest)
        model = serving.check_model(_untagged(serving, body.model))
        if not body.messages:
            return json_response(_loaded(model, {"message": {"role": "assistant", "content": ""}}))
        planned = plan_turn(serving, _chat_turn(body, trace_of(request).caller))
        return await _answer(request, _Writer(model, _open(serving, planned, request), chat=True), body.stream)

    async def generate(request: Request) -> Response:
        body = await read(request, OllamaGenerateRequest)
        model = serving.check_model(_untagged(serving, body.model))
        if body.suffix or body.images:
            name = "suffix" if body.suffix else "images"
            raise InvalidRequest(f"{name} is not supported: this model continues text.", param=name)
        if not body.prompt:
            return json_response(_loaded(model, {"response": ""}))
        planned = _plan_generate(serving, body, trace_of(request).caller)
        return await _answer(request, _Writer(model, _open(serving, planned, request), chat=False), body.stream)

    async def tags(request: Request) -> Response:
        return json_response({"models": [_card(serving)]})

    async def show(request: Request) -> Response:
        body = await read(request, OllamaShowRequest)
        serving.check_model(_untagged(serving, body.model or body.name))
        return json_response(_details(serving))

    async def told_version(request: Request) -> Response:
        return json_response({"version": version("ramet")})

    return [
        Route("/api/chat", chat, methods=["POST"]),
        Route("/api/generate", generate, methods=["POST"]),
        Route("/api/tags", tags, methods=["GET"]),
        Route("/api/ps", tags, methods=["GET"]),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/version", told_version, methods=["GET"]),
    ]


def _untagged(serving: Serving, name: str | None) -> str | None:
    """A name without Ollama's `:latest`."""
    return name.removesuffix(":latest") if name and name != serving.served_name else name


def _open(serving: Serving, planned: PlannedTurn, request: Request) -> Answers:
    return Answers(serving, planned, 1, trace_of(request))


async def _answer(request: Request, writer: _Writer, stream: bool | None) -> Response:
    if stream is False:
        await read_all(request, writer.answers.feed)
        return json_response(writer.whole())
    return AnswerStream(writer.answers.feed, writer, trace_of(request), LINES.encode())


# -- requests --------------------------------------------------------------------------------------------------


def _chat_turn(body: OllamaChatRequest, caller: Caller) -> Turn:
    tools = read_tools(body.tools)
    for i, message in enumerate(body.messages or ()):
        if isinstance(message, dict) and message.get("images"):
            raise InvalidRequest("This model reads text only.", param=f"messages[{i}].images")
    return Turn(
        messages=body.messages,
        params=_params(body.options or OllamaOptions()),
        caller=caller,
        tools=tools,
        choice=read_choice(None, tools),
        answer=answer_grammar(body, ("format", _format(body.format))),
        whitespace=body.whitespace,
        template_args=_thinking(body.think),
        stream=body.stream is not False,
    )


def _plan_generate(serving: Serving, body: OllamaGenerateRequest, caller: Caller) -> PlannedTurn:
    params, answer = _params(body.options or OllamaOptions()), answer_grammar(body, ("format", _format(body.format)))
    if not body.raw:
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": body.prompt}]
        args = _thinking(body.think)
        return plan_turn(
            serving,
            Turn(
                messages=messages,
                params=params,
                caller=caller,
                answer=answer,
                whitespace=body.whitespace,
                template_args=args,
                stream=body.stream is not False,
            ),
        )
    [prompt], _ = read_prompts(body.prompt, serving.tokenizer, "prompt")
    submit = Submit(
        rid=serving.generator.new_rid(),
        tokens=prompt.packed,
        params=params,
        grammar=spaced(answer, body.whitespace),
        namespace=caller.namespace(),
        client=caller.digest,
        group=caller.digest,
        stream=body.stream is not False,
    )
    return PlannedTurn(submit, body.prompt or "", prompt.ids, PlainParser, None, False, Start.ANSWERING)


def _params(options: OllamaOptions) -> SamplingParams:
    no_grammar(options, "beside options", "options.")
    names = (
        ("temperature", "temperature"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("seed", "seed"),
        ("repeat_penalty", "repetition_penalty"),
        ("presence_penalty", "presence_penalty"),
        ("frequency_penalty", "frequency_penalty"),
    )
    given = {ours: value for theirs, ours in names if (value := getattr(options, theirs)) is not None}
    params = SamplingParams(**given, stop=as_stops(options.stop))
    return params if options.num_predict in (None, *NO_LIMIT) else replace(params, max_tokens=options.num_predict)


def _format(value: Any) -> GrammarSpec | None:
    if value is None or value == "":
        return None
    if value == "json":
        return GrammarSpec(kind="json_object", spec="{}")
    if isinstance(value, dict):
        return GrammarSpec(kind="json_schema", spec=canonical(value))
    raise InvalidRequest('format must be "json" or a JSON Schema.', param="format")


def _thinking(think: bool | str | None) -> dict[str, Any]:
    return {} if think is None else {"enable_thinking": bool(think)}


# -- answers ---------------------------------------------------------------------------------------------------


class _Writer:
    """Writes one answer, whole or as lines."""

    def __init__(self, model: str, answers: Answers, *, chat: bool) -> None:
        self.answers = answers
        self._model = model
        self._chat = chat
        self._state: AnswerState = answers.states[0]

    def whole(self) -> dict[str, Any]:
        parsed = self._state.parsed
        calls = [_call(self._state, i) for i, call in enumerate(parsed.calls) if call.complete]
        return {**self._line(parsed.text, parsed.thought, calls), **self._end()}

    def opening(self) -> Iterable[bytes]:
        return ()

    def pieces(self, item: News) -> Iterable[bytes]:
        """A line a piece."""
        for event in item.events:
            match event:
                case Text(text):
                    yield dumps({**self._line(text), "done": False}) + b"\n"
                case Thought(text):
                    yield dumps({**self._line("", text), "done": False}) + b"\n"
                case CallEnd(index) if item.state.parsed.calls[index].complete:
                    yield dumps({**self._line("", calls=[_call(item.state, index)]), "done": False}) + b"\n"

    def frame(self) -> tuple[bytes, bytes] | None:
        return None

    def closing(self) -> Iterable[bytes]:
        """The line that is done."""
        yield dumps({**self._line(""), **self._end()}) + b"\n"

    def last_words(self, error: Exception) -> bytes:
        return dumps({"error": message_of(as_ramet_error(error))}) + b"\n"

    def _line(self, text: str, thought: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        head = {"model": self._model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
        extra: dict[str, Any] = {"thinking": thought} if thought else {}
        if not self._chat:
            return {**head, "response": text, **extra}
        if calls:
            extra["tool_calls"] = calls
        return {**head, "message": {"role": "assistant", "content": text, **extra}}

    def _end(self) -> dict[str, Any]:
        usage, timing = self.answers.usage, self._state.usage
        return {
            "done": True,
            "done_reason": "length" if self._state.reason == "length" else "stop",
            "total_duration": _ns(timing.total_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(max(0.0, timing.first_token_s - timing.queue_s)),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(max(0.0, timing.total_s - timing.first_token_s)),
        }


def _call(state: AnswerState, index: int) -> dict[str, Any]:
    call = state.parsed.calls[index]
    return {
        "id": state.call_ids[index],
        "function": {"name": call.name, "arguments": msgspec.json.decode(call.arguments)},
    }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _loaded(model: str, answer: dict[str, Any]) -> dict[str, Any]:
    """What an empty request is answered with: the model is there."""
    return {"model": model, "created_at": _date(time.time()), **answer, "done": True, "done_reason": "load"}


# -- what is served --------------------------------------------------------------------------------------------


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _card(serving: Serving) -> dict[str, Any]:
    return {
        "name": serving.served_name,
        "model": serving.served_name,
        "modified_at": _date(serving.created),
        "size": serving.spec.weight_bytes,
        "digest": "",
        "details": _family(serving),
    }


def _family(serving: Serving) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf" if serving.spec.path.endswith(".gguf") else "safetensors",
        "family": serving.spec.name,
        "families": [serving.spec.name],
        "parameter_size": "",
        "quantization_level": serving.spec.dtype,
    }


def _details(serving: Serving) -> dict[str, Any]:
    thinking = [] if serving.think is None else ["thinking"]
    return {
        "modelfile": "",
        "parameters": "",
        "template": serving.renderer.source,
        "details": _family(serving),
        "model_info": {"general.architecture": "ramet", "ramet.context_length": serving.context_length},
        "capabilities": ["completion", "tools", *thinking],
        "modified_at": _date(serving.created),
    }
