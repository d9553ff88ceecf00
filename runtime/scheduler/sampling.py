"""What changes a row's logits: penalties, bias, banned ends, masks. Values only; nothing here touches a device."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from runtime.params import SamplingParams
from runtime.step import Adjust

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
_GROW = 64


class PenaltyState:
    """Counts of the tokens of one request, kept as tokens come; survives retraction.

    Repetition penalty sees prompt and output, frequency and presence only output, as in the common APIs.
    """

    def __init__(self, prompt: I32, output: Iterable[int] = ()) -> None:
        self._index: dict[int, int] = {}
        self._ids = np.zeros(_GROW, np.int32)
        self._counts = np.zeros(_GROW, np.float32)
        for token in np.unique(prompt).tolist():
            self._slot(token)
        for token in output:
            self.push(token)

    def push(self, token: int) -> None:
        """One more output token."""
        at = self._slot(token)  # may replace the arrays: look them up afterwards
        self._counts[at] += 1

    def terms(self, params: SamplingParams) -> tuple[I32, I32, F32]:
        """(ids for the repetition penalty, ids and values to add)."""
        n = len(self._index)
        ids, counts = self._ids[:n].copy(), self._counts[:n]
        rep = ids if params.repetition_penalty != 1.0 else ids[:0]
        said = counts > 0
        values = -(params.frequency_penalty * counts[said] + params.presence_penalty)
        return rep, ids[said], values.astype(np.float32)

    def _slot(self, token: int) -> int:
        at = self._index.get(token)
        if at is None:
            at = self._index[token] = len(self._index)
            if at == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[at] = token
        return at


def static_terms(params: SamplingParams, n_said: int, end_ids: Iterable[int]) -> tuple[I32, F32] | None:
    """Ids and values to add that do not depend on what was said: the bias, and ends banned below min_tokens."""
    ids = list(params.logit_bias)
    values = list(params.logit_bias.values())
    if n_said < params.min_tokens:
        ends = sorted(set(end_ids) | set(params.stop_token_ids))
        ids += ends
        values += [-np.inf] * len(ends)
    if not ids:
        return None
    return np.array(ids, np.int32), np.array(values, np.float32)


def build_adjust(
    sample: int,
    params: SamplingParams,
    *,
    n_said: int,
    end_ids: Iterable[int],
    penalties: PenaltyState | None = None,
    mask: I32 | None = None,
) -> Adjust:
    """Everything that changes one sample's logits. Under a mask, ends are banned in the mask or not at all."""
    static = static_terms(params, n_said if mask is None else params.min_tokens, end_ids)
    if mask is not None and n_said < params.min_tokens:
        mask = ban_in_mask(mask, set(end_ids) | set(params.stop_token_ids))
    if penalties is None:
        ids, values = static if static is not None else (None, None)
        return Adjust(sample, add_ids=ids, add_values=values, mask=mask)
    rep, ids, values = penalties.terms(params)
    if static is not None:
        ids = np.concatenate((ids, static[0]))
        values = np.concatenate((values, static[1]))
    return Adjust(sample, rep, params.repetition_penalty, ids, values, mask)


def ban_in_mask(mask: I32, ids: Iterable[int]) -> I32:
    """`mask` without `ids`; unchanged where nothing else would be left, so a finished grammar may end."""
    words = mask.view(np.uint32).copy()
    for token in ids:
        words[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
    return words.view(np.int32) if words.any() else mask
