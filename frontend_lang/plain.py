"""Programs by our server's plain `/generate`, as any client calls it: one request a generation, all ids each time.

For what stands in front of a server and lets nothing else through. Ids stay ids and prefixes are found in the cache,
but nothing is held under a handle, and a chain is a request a link.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx

from frontend_lang.backend import Piece
from runtime.errors import Unavailable
from runtime.generate import error_of
from runtime.messages import Finish, GrammarSpec, Hints, Submit, TokenLogprob, Usage, unpack_ids
from runtime.params import SamplingParams

_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_NOT_SAMPLING = ("logprobs", "top_logprobs", "include_stop_str")


async def answer(client: httpx.AsyncClient, request: Submit) -> AsyncGenerator[Piece, None]:
    """One request's pieces. Raises what the server said, or Unavailable."""
    async with client.stream("POST", "/generate", json=_body(request)) as reply:
        if reply.status_code != 200:
            raise _refusal(reply.status_code, await reply.aread())
        if not request.stream:
            yield _piece(request, json.loads(await reply.aread()), {})
            return
        seen: dict[str, Any] = {}
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            told = json.loads(line[6:])
            if "error" in told:
                raise _refusal(int(told["error"].get("code") or 500), line[6:].encode())
            yield _piece(request, told, seen)
            seen = told
        if not seen or seen["meta_info"]["finish_reason"] is None:
            raise Unavailable("The server closed the stream before its end.")


async def scores(client: httpx.AsyncClient, request: Submit) -> AsyncGenerator[Piece, None]:
    """The tokens asked for, each as the last of a prompt of its own, all in one message."""
    ids = unpack_ids(request.tokens).tolist()
    body = {
        "input_ids": [[*ids[:n], token] for n, token in request.scores],
        "logprob_start_len": [n for n, _ in request.scores],
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 0},
        "hints": _hints(request.hints),
    }
    reply = await client.post("/generate", json=body)
    if reply.status_code != 200:
        raise _refusal(reply.status_code, reply.content)
    told = reply.json()
    found = tuple(_logprob(one["meta_info"]["input_token_logprobs"][-1], ()) for one in told)
    usage = _usage(told[0]["meta_info"])
    yield Piece(prompt_logprobs=found, finish=Finish(reason="length"), usage=usage)


def _body(request: Submit) -> dict[str, Any]:
    params = request.params
    return {
        "input_ids": unpack_ids(request.tokens).tolist(),
        "sampling_params": {**_sampling(params), **_grammar(request.grammar)},
        "stream": request.stream,
        "return_logprob": params.logprobs,
        "logprob_start_len": -1,
        "top_logprobs_num": params.top_logprobs,
        "hints": _hints(request.hints),
        "timeout_s": request.timeout_s,
    }


def _sampling(params: SamplingParams) -> dict[str, Any]:
    fields = ((name, getattr(params, name)) for name in params.__struct_fields__ if name not in _NOT_SAMPLING)
    given = {_NAMES.get(name, name): list(value) if isinstance(value, tuple) else value for name, value in fields}
    given["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    given["no_stop_trim"] = params.include_stop_str
    return given


def _grammar(grammar: GrammarSpec | None) -> dict[str, Any]:
    if grammar is None:
        return {}
    if grammar.kind == "choices":
        return {"ebnf": "root ::= " + " | ".join(json.dumps(choice) for choice in json.loads(grammar.spec))}
    return {grammar.kind: grammar.spec}


def _hints(hints: Hints) -> dict[str, Any]:
    names = ("program_id", "parent_id", "expect_return_s", "final", "expected_fanout", "depth")
    return {name: getattr(hints, name) for name in names}


def _piece(request: Submit, told: Mapping[str, Any], seen: Mapping[str, Any]) -> Piece:
    """What is new since `seen`: every answer holds everything so far."""
    meta, n_ids = told["meta_info"], len(seen.get("output_ids", ()))
    finish = _finish(request, meta["finish_reason"])
    return Piece(
        text=told["text"][len(seen.get("text", "")) :],
        token_ids=tuple(told["output_ids"][n_ids:]),
        logprobs=tuple(_logprobs(meta, n_ids)),
        finish=finish,
        usage=None if finish is None else _usage(meta),
    )


def _finish(request: Submit, reason: Mapping[str, Any] | None) -> Finish | None:
    """Without a stop of its own, an answer that stopped names its last token, which a finished grammar's is no stop."""
    if reason is None:
        return None
    matched = reason.get("matched")
    if isinstance(matched, int) and matched not in request.params.stop_token_ids:
        matched = None
    return Finish(reason=reason["type"], matched=matched, message=reason.get("message"))


def _logprobs(meta: Mapping[str, Any], start: int) -> list[TokenLogprob]:
    entries = meta.get("output_token_logprobs", ())[start:]
    tops = meta.get("output_top_logprobs", [()] * len(entries))[-len(entries) :] if entries else ()
    return [_logprob(entry, top) for entry, top in zip(entries, tops, strict=True)]


def _logprob(entry: Any, tops: Any) -> TokenLogprob:
    return TokenLogprob(entry[1], entry[0], tuple(one[1] for one in tops), tuple(one[0] for one in tops))


def _usage(meta: Mapping[str, Any]) -> Usage:
    prompt, cached = int(meta["prompt_tokens"]), int(meta["cached_tokens"])
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=int(meta["completion_tokens"]),
        cached_tokens=cached,
        prefilled_tokens=prompt - cached,
    )


def _refusal(status: int, body: bytes) -> Exception:
    try:
        problem = json.loads(body)["error"]
        text, param = str(problem["message"]), problem.get("param")
    except (ValueError, KeyError, TypeError):
        text, param = f"The server answered {status}: {body[:200]!r}", None
    return error_of(Finish(reason="error", message=text, status=status, param=param))
