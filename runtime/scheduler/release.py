"""Every ending of a request goes through here: stop, length, abort, error, deadline, retraction."""

from __future__ import annotations

from runtime.errors import RametError
from runtime.messages import Finish, Hints, Output
from runtime.request import Phase, Request
from runtime.scheduler.state import State


def release(state: State, request: Request, *, keep: bool = True, hints: Hints | None = None) -> None:
    """Give back the row, the lease and every page. What was computed stays in the tree, unless not `keep`.
    `hints`: what the request says of its return, once it is really over.

    Steps in flight may still name the row; commit drops it by its generation, and the device runs in order, so
    the pages may be given out from now on.
    """
    slot = request.slot
    if slot:
        rows = state.rows
        lease, pages = request.lease, rows.row_pages(slot)
        n_kept = max(int(rows.done[slot]), lease.n_tokens)
        state.to_phase(request, Phase.ENDED)
        state.cache.finish(lease, rows.row_tokens(slot), pages, n_kept, keep=keep, hints=hints)
        request.lease = None
        request.charged = int(rows.known[slot])
        rows.give_back(request)
    elif request in state.queue:
        state.queue.remove(request)
    request.phase = Phase.ENDED
    request.attempt += 1


def end(state: State, request: Request, finish: Finish, output: Output | None = None, *, keep: bool = True) -> None:
    """Release the request and tell its client. `output`: the last tokens, sent with the finish."""
    known = int(state.rows.known[request.slot]) if request.slot else request.known
    request.tally.completion += max(0, known - request.gen_start - request.n_owed)
    request.tally.forced -= request.n_owed  # never said
    over = finish.reason in ("stop", "length")
    release(state, request, keep=keep, hints=request.submit.hints if over else None)
    state.live.pop(request.rid, None)
    usage = request.usage(state.now)
    count(state, finish)
    prompt = output.prompt_logprobs if output else None
    if prompt is None and request.prompt_logprobs:
        prompt = tuple(request.prompt_logprobs)
    state.out.add(
        request.sink,
        Output(
            rid=request.rid,
            tokens=output.tokens if output else (),
            logprobs=output.logprobs if output else None,
            prompt_logprobs=prompt,
            finish=finish,
            segment=request.segment,
            usage=usage,
        ),
    )


def fail(state: State, request: Request, error: Exception, *, keep: bool = True) -> None:
    """End one request with an error; the loop goes on."""
    end(state, request, finish_of(error), keep=keep)


def finish_of(error: Exception) -> Finish:
    """The finish that tells a client about an error."""
    if isinstance(error, RametError):
        return Finish(reason="error", message=str(error), status=error.status, param=error.param)
    return Finish(reason="error", message=f"{type(error).__name__}: {error}", status=500)


def count(state: State, finish: Finish) -> None:
    stats = state.stats
    if finish.reason == "abort":
        stats.aborted += 1
    elif finish.reason == "error":
        stats.failed += 1
    else:
        stats.finished += 1
