"""Log-probabilities of given ids beside every token: more pairs to score, at places whose logits are there anyway."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.request import Request
from runtime.scheduler.batch import Piece
from runtime.scheduler.frame import Frame
from runtime.step import StepPlan, StepResult

I32 = npt.NDArray[np.int32]
Where = Mapping[int, int]  # sample j, or piece i as ~i -> where its pairs begin among the step's scores
NOWHERE: Where = {}


def probed(plan: StepPlan, frame: Frame, pieces: Sequence[Piece]) -> tuple[StepPlan, Where]:
    """The plan with the pairs that its requests' `logprob_ids` ask for, after all other scores."""
    if not pieces and not (frame.any_careful and frame.want_logprob.any()):
        return plan, NOWHERE
    where: dict[int, int] = {}
    index, target = [plan.score_index], [plan.score_target]
    n = len(plan.score_index)
    for key, request, places in _asked(plan, frame, pieces):
        ids = np.array(request.params.logprob_ids, np.int32)
        where[key] = n
        index.append(np.repeat(places, len(ids)))
        target.append(np.tile(ids, len(places)))
        n += len(places) * len(ids)
    if not where:
        return plan, NOWHERE
    return msgspec.structs.replace(plan, score_index=np.concatenate(index), score_target=np.concatenate(target)), where


def found(result: StepResult, where: Where, key: int, request: Request, k: int = 0) -> tuple[float, ...]:
    """The log-probabilities of a request's ids at the k-th place of a sample or a piece."""
    begin, n = where.get(key), len(request.params.logprob_ids)
    if begin is None:
        return ()
    return tuple(result.score_logprobs[begin + k * n : begin + (k + 1) * n].tolist())


def _asked(plan: StepPlan, frame: Frame, pieces: Sequence[Piece]) -> Iterator[tuple[int, Request, I32]]:
    sampling = [*frame.requests, *(piece.request for piece in pieces if piece.samples)]
    for j, request in enumerate(sampling):
        if request.params.logprob_ids:
            yield j, request, plan.sample_index[j : j + 1]
    at = 0
    for i, piece in enumerate(pieces):
        n = len(piece.score)
        if n and piece.request.params.logprob_ids:
            yield ~i, piece.request, plan.score_index[at : at + n]
        at += n
