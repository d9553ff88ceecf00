"""What programs and the server's `/lang` door say to each other: one message of requests, one line of JSON a piece."""

from __future__ import annotations

import msgspec

from runtime.messages import Finish, GrammarSpec, Hints, Segment, TokenLogprob, Usage
from runtime.params import SamplingParams


class LangRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request of a program: ids [0, keep) of the sequence `parent`, then `suffix` (int32 bytes)."""

    rid: str
    suffix: bytes
    params: SamplingParams
    parent: str | None = None
    keep: int = 0
    grammar: GrammarSpec | None = None
    hints: Hints = Hints()
    client: str = ""
    prompt_logprobs_from: int | None = None
    scores: tuple[tuple[int, int], ...] = ()
    segments: tuple[Segment, ...] = ()
    timeout_s: float | None = None
    stream: bool = True  # False: nobody reads along, pieces may come late and together


class LangSubmit(msgspec.Struct, frozen=True):
    requests: tuple[LangRequest, ...]


class LangAbort(msgspec.Struct, frozen=True):
    rids: tuple[str, ...]


class LangProblem(msgspec.Struct, frozen=True):
    """Why a request was refused or failed; `status` and `param` as in an HTTP error."""

    message: str
    status: int
    param: str | None = None


class LangNews(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the answer. The first holds the requests' `handles`; each further one is about request `i`."""

    i: int = 0
    handles: tuple[str, ...] = ()
    error: LangProblem | None = None
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish: Finish | None = None
    usage: Usage | None = None  # with the last line of a request
    segment: int = 0
    forced: tuple[int, ...] = ()  # places in `token_ids`
