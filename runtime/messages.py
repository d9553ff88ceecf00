"""What travels between a frontend and the scheduler: msgspec structs, over ZMQ or an in-process queue.

Token ids travel as little-endian int32 bytes (`pack_ids`, `unpack_ids`). Times are `time.monotonic()`
seconds of this host. A frontend makes `rid`s unique; the client's own id, if any, stays in the frontend.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.params import SamplingParams

Ids = npt.NDArray[np.int32]
FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "choices", "structural_tag"]


def pack_ids(ids: Any) -> bytes:
    """Token ids (sequence or int array) as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> Ids:
    """The inverse of `pack_ids`; the array is read-only and shares the bytes."""
    return np.frombuffer(data, dtype="<i4")


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the answer must match. `spec` is canonical text: JSON for schemas, choices and tags."""

    kind: GrammarKind
    spec: str
    after: str | None = None  # free text until this marker (the end of thinking), then the grammar
    whitespace: Literal["fixed", "flexible"] = "fixed"

    @property
    def param(self) -> str:
        """What an error of this grammar names."""
        return self.kind if self.kind in get_args(GrammarKind) else "grammar"


class Hints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Soft, bounded advice of an agent to the scheduler; a reply says which were honoured."""

    program_id: str | None = None
    parent_id: str | None = None
    priority: int = 0  # larger runs first
    expect_return_s: float | None = None  # a tool runs: keep my tail this long
    final: bool = False  # the program is done: its private tail is the first to go
    retain_ttl_s: float | None = None
    retain_priority: int = 0
    expected_fanout: int = 0
    depth: int = 0  # so many further steps of the program extend my tail, one after the other


class NamespaceKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests share cached KV only inside one namespace."""

    adapter: int = 0
    salt: str = ""
    media: str = ""


class Segment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A continuation inside one request: append these ids, then generate again."""

    tokens: bytes
    params: SamplingParams
    grammar: GrammarSpec | None = None


class Submit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="submit"):
    """One request. `tokens` is the whole prompt; the radix cache finds what is already computed."""

    rid: str
    tokens: bytes
    params: SamplingParams = SamplingParams()
    grammar: GrammarSpec | None = None
    namespace: NamespaceKey = NamespaceKey()
    hints: Hints = Hints()
    client: str = ""  # fair-queueing key (an API key's digest, a DSL program's id)
    group: str = ""  # aborted together
    priority: int = 0
    timeout_s: float | None = None
    arrival: float = 0.0
    prompt_logprobs_from: int | None = None  # score prompt tokens from this position on
    scores: tuple[tuple[int, int], ...] = ()  # (n, token): its log-probability after n prompt tokens, in order of n
    segments: tuple[Segment, ...] = ()
    stream: bool = True  # False: nobody reads along, so a frontend may hand on outputs late and together


class SubmitMany(msgspec.Struct, frozen=True, tag="submit_many"):
    """Requests that arrive together, so siblings are planned together."""

    items: tuple[Submit, ...]


class Abort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """Cancel by exact id, by group, or everything of this frontend."""

    rid: str | None = None
    group: str | None = None
    everything: bool = False
    reason: str = "aborted by the client"


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="call"):
    """A control call: stats, flush, audit, tree, server_info, pause, resume."""

    id: int
    op: str
    args: dict[str, Any] = {}


ToScheduler = Submit | SubmitMany | Abort | Call


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token's log-probability (None: no distribution, the first prompt token), the best others, and those of the
    request's `logprob_ids` in their order."""

    token: int
    logprob: float | None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    id_logprobs: tuple[float, ...] = ()


class Finish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request (or a segment of it) ended. `matched`: the stop string or stop token id, None for EOS."""

    reason: FinishReason
    matched: str | int | None = None
    message: str | None = None
    status: int | None = None  # HTTP status of an error
    param: str | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request cost. cached = reused whole pages + copied or adopted tail, in tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    copied_tokens: int = 0
    prefilled_tokens: int = 0
    forced_tokens: int = 0
    retractions: int = 0
    reasoning_tokens: int = 0  # of the completion; counted by the frontend, which knows the tags
    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    miss: str | None = None  # why the rest of the prompt was not cached
    hints_honoured: tuple[str, ...] = ()

    @property
    def prompt_cached(self) -> int:
        """What was cached of the prompt alone: the beginning that a grammar forces is looked up with it."""
        return min(self.cached_tokens, self.prompt_tokens)


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step (or several) gave one request. `usage` comes with the finish."""

    rid: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish: Finish | None = None
    segment: int = 0  # which segment the tokens belong to; finish on the last ends the request
    usage: Usage | None = None


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Everything one commit has for one frontend."""

    items: tuple[Output, ...]


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="reply"):
    """The answer to a Call."""

    id: int
    value: Any = None
    error: str | None = None


FromScheduler = Outputs | Reply
