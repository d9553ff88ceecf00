"""Adjustments of late samples: made after the step before has been committed, so they see the true last token."""

from __future__ import annotations

import numpy as np

from runtime.request import Request
from runtime.scheduler.batch import Planned
from runtime.scheduler.grammar import fill_mask, next_forced
from runtime.scheduler.release import fail
from runtime.scheduler.sampling import build_adjust
from runtime.scheduler.state import State
from runtime.step import Adjust


def late_adjusts(state: State, planned: Planned) -> list[Adjust]:
    """One adjustment for each late sample of the plan. Rows that have ended meanwhile get none of their own."""
    rows, frame = state.rows, planned.frame
    if frame.all_late and not planned.pieces and planned.epoch == rows.epoch and not rows.n_overrides:
        return [_adjust(state, request, j) for j, request in enumerate(frame.requests)]
    late = np.flatnonzero(planned.plan.late)
    slots = planned.sample_slots[late]
    live = rows.gen[slots] == planned.sample_gens[late]
    override = rows.override[slots]
    out = []
    for j, slot, alive, told in zip(late.tolist(), slots.tolist(), live.tolist(), override.tolist(), strict=True):
        if not alive:
            out.append(Adjust(j))
        elif told:
            out.append(Adjust(j, forced=int(rows.tokens[slot, planned.plan.counter[j]])))
        else:
            out.append(_adjust(state, rows.request(slot), j))
    return out


def _adjust(state: State, request: Request, sample: int) -> Adjust:
    """What this sample's logits get. A grammar that gives up ends its request, and the sample is ignored."""
    mask = None
    if request.grammar is not None:
        try:
            forced = next_forced(state, request)
            if forced is not None:
                return Adjust(sample, forced=forced)
            mask = fill_mask(request)
        except Exception as err:
            fail(state, request, err)
            return Adjust(sample)
        if request.penalties is None and not state.rows.static[request.slot]:
            return Adjust(sample, mask=mask)
    return build_adjust(
        sample,
        request.params,
        n_said=int(state.rows.known[request.slot]) - request.gen_start,
        end_ids=state.eos,
        penalties=request.penalties,
        mask=mask,
    )
