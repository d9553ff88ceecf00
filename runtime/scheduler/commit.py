"""Taking a step's results in: cursors, tokens, stops, outputs. Arrays for all rows, Python only for rows with news."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from runtime.errors import RequestFailed
from runtime.messages import TokenLogprob
from runtime.request import Phase, Request
from runtime.scheduler.batch import Planned
from runtime.scheduler.probes import found
from runtime.scheduler.release import fail
from runtime.scheduler.speak import Speaker
from runtime.scheduler.state import State
from runtime.step import StepResult

I64 = npt.NDArray[np.int64]
PUBLISH_EVERY = 16  # steps between looks for decoded pages to publish
PUBLISH_TOKENS = 64  # decoded tokens are given to the tree in runs of at least this many


class Committer:
    """Commits one step after the other."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._speaker = Speaker(state)

    def commit(self, planned: Planned, result: StepResult) -> None:
        """Take in what `planned` computed. Rows whose generation is stale are dropped."""
        rows = self.state.rows
        live = None
        if planned.epoch != rows.epoch:
            live = rows.gen[planned.slots] == planned.gens
            live = None if live.all() else live
        self._move_cursors(planned, live)
        if not planned.pieces:
            if live is None and not rows.n_overrides:
                self._commit_decode(planned, result)
            else:
                self._commit_samples(planned, result)
            return
        self._commit_pieces(planned, result)
        self._commit_samples(planned, result)
        self._end_without_sample(planned)

    # -- cursors ---------------------------------------------------------------------------------------------

    def _move_cursors(self, planned: Planned, live: npt.NDArray[np.bool_] | None) -> None:
        """`done` follows `kv` for live rows (None: all are). Some request must get further than ever before."""
        state, rows = self.state, self.state.rows
        slots, kv, high = planned.slots, planned.plan.kv_lens, planned.frame.high
        if live is not None or planned.pieces:
            high = rows.high[slots]
        if live is not None:
            state.stats.rows_stale += int(len(live) - live.sum())
            slots, kv, high = slots[live], kv[live], high[live]
            if not len(slots):
                return
        rows.done[slots] = kv
        if kv[0] <= high[0] and not np.count_nonzero(kv > high):
            assert any(p.recovering for p in planned.pieces), "a step in which no request got further"
        if planned.plan.step % PUBLISH_EVERY == 0:
            for slot in slots[kv - rows.published[slots] >= max(PUBLISH_TOKENS, state.page_size)].tolist():
                self._publish(slot, planned.plan.step)

    def _publish(self, slot: int, step: int) -> None:
        """Give decoded pages to the tree. A chain keeps its own until its next literal: a stop may cut them."""
        state, rows = self.state, self.state.rows
        request = rows.request(slot)
        if request.phase is Phase.PREFILL or request.segments_left:
            return
        first, pages = int(rows.published[slot]) // state.page_size, rows.row_pages(slot)
        before = pages[first:].copy()
        rows.published[slot] = state.cache.publish(
            request.lease, rows.row_tokens(slot), pages, int(rows.done[slot]), step
        )
        if not np.array_equal(before, pages[first:]):
            state.pages_version += 1

    # -- prompt logprobs and first tokens ----------------------------------------------------------------------

    def _commit_pieces(self, planned: Planned, result: StepResult) -> None:
        at = 0
        for i, piece in enumerate(planned.pieces):
            n, request = len(piece.score), piece.request
            live = self.state.rows.gen[piece.slot] == piece.gen
            if live and n:
                self._take_scores(planned, i, result, at)
            if live and piece.samples and not request.tally.first_token_at:
                request.tally.first_token_at = self.state.clock()
            at += n

    def _take_scores(self, planned: Planned, i: int, result: StepResult, at: int) -> None:
        piece = planned.pieces[i]
        request = piece.request
        n_top = request.params.top_logprobs
        for k, token in enumerate(piece.score_tokens.tolist(), at):
            ids = tuple(result.score_top_ids[k, :n_top].tolist())
            values = tuple(result.score_top_logprobs[k, :n_top].tolist())
            of_prompt = piece.score[k - at] < request.n_prompt or request.submit.scores
            scores = request.prompt_logprobs if of_prompt else request.owed_logprobs
            probes = found(result, planned.probes, ~i, request, k - at)
            scores.append(TokenLogprob(token, float(result.score_logprobs[k]), ids, values, probes))
        request.scored = int(piece.score[-1]) + 1

    # -- samples -----------------------------------------------------------------------------------------------

    def _commit_decode(self, planned: Planned, result: StepResult) -> None:
        """A decode step all of whose rows are live: the common case, with the frame's constants."""
        state, frame, tokens = self.state, planned.frame, result.tokens
        rows, counter = state.rows, planned.plan.counter
        assert rows.known[frame.slots[0]] == counter[0], "a sample came back for another position than its row is at"
        rows.flat_tokens[frame.flat + counter] = tokens
        rows.known[frame.slots] = counter + 1
        state.stats.generated += frame.n
        if state.policy.bucketed:
            self._charge(frame.requests)
        said = tokens.tolist()
        if frame.all_careful and not result.failed:
            for j, (request, token) in enumerate(zip(frame.requests, said, strict=True)):
                self._speaker.hear(request, token, _logprob(request, planned, result, j, token), planned)
            return
        if not (planned.drains or frame.any_careful or result.failed) and state.eos.isdisjoint(said):
            state.out.say(frame.requests, said)
            return
        special = (counter >= frame.drain_at) | (state.is_eos[tokens] & frame.eos_stops) | frame.careful
        self._say(planned, result, frame.slots, tokens, special, None)

    def _commit_samples(self, planned: Planned, result: StepResult) -> None:
        """Any step: drop stale samples and those whose token was forced after they were launched."""
        state, rows, slots = self.state, self.state.rows, planned.sample_slots
        live = rows.gen[slots] == planned.sample_gens
        forced = live & rows.override[slots]
        if forced.any():
            for j in np.flatnonzero(forced).tolist():
                self._take_override(rows.request(int(slots[j])), planned, result, j)
            live &= ~forced
        index = np.flatnonzero(live)
        slots, tokens, counter = slots[index], result.tokens[index], planned.plan.counter[index]
        if not len(slots):
            return
        self._append(slots, counter, tokens)
        special = counter + 1 >= rows.limit[slots]
        special |= state.is_eos[tokens] & rows.eos_stops[slots]
        special |= rows.careful[slots]
        self._say(planned, result, slots, tokens, special, index)

    def _take_override(self, request: Request, planned: Planned, result: StepResult, j: int) -> None:
        """The device was told which token it is; what is new is its log-probability."""
        self.state.rows.clear_override(request.slot)
        if request.n_owed and request.params.logprobs:
            token = int(self.state.rows.tokens[request.slot, request.scored])
            logprob = _logprob(request, planned, result, j, token)
            assert logprob is not None
            request.owed_logprobs.append(logprob)
            request.scored += 1

    def _append(self, slots: I64, counter: I64, tokens: npt.NDArray[np.int32]) -> None:
        """Each row's token becomes its next one."""
        rows = self.state.rows
        at = rows.known[slots]
        assert np.count_nonzero(at == counter) == len(at), "a sample came back for another position than its row is at"
        rows.flat_tokens[slots * rows.width + counter] = tokens
        rows.known[slots] = counter + 1
        self.state.stats.generated += len(slots)
        if self.state.policy.bucketed:
            self._charge(map(rows.request, slots.tolist()))

    def _charge(self, requests: Iterable[Request]) -> None:
        """One token of service for the program or client of each."""
        for account, n in Counter(request.account for request in requests).items():
            self.state.queue.charge(account, n)

    def _failed(self, result: StepResult, index: I64 | None) -> set[int]:
        """Places among the live samples of those that could not be sampled."""
        if not result.failed:
            return set()
        if index is None:
            return set(result.failed)
        return {int(i) for i, j in enumerate(index) if int(j) in result.failed}

    def _say(
        self,
        planned: Planned,
        result: StepResult,
        slots: I64,
        tokens: npt.NDArray[np.int32],
        special: npt.NDArray[np.bool_],
        index: I64 | None,
    ) -> None:
        """Outputs: plain rows in one go, the others one by one. `index`: the samples that slots stand for."""
        state, requests = self.state, self.state.rows.requests
        failed = self._failed(result, index)
        if failed:
            special[list(failed)] = True
        plain = slots.tolist()
        said = tokens.tolist()
        news = np.flatnonzero(special).tolist() if np.count_nonzero(special) else []
        todo = [(i, requests[plain[i]]) for i in news]
        if news:
            keep = np.flatnonzero(~special)
            plain, said = slots[keep].tolist(), tokens[keep].tolist()
        state.out.say([requests[slot] for slot in plain], said)
        for i, request in todo:
            assert request is not None
            j = i if index is None else int(index[i])
            if i in failed:
                state.rows.known[request.slot] -= 1
                fail(
                    state, request, RequestFailed("No token could be sampled: all were masked, or the logits are NaN.")
                )
                continue
            token = int(tokens[i])
            self._speaker.hear(request, token, _logprob(request, planned, result, j, token), planned)

    def _end_without_sample(self, planned: Planned) -> None:
        """Requests that wanted no token (max_tokens 0) end with their last piece."""
        for piece in planned.pieces:
            request, rows = piece.request, self.state.rows
            if piece.samples or rows.gen[piece.slot] != piece.gen or request.phase is not Phase.DRAIN:
                continue
            if rows.done[piece.slot] == rows.known[piece.slot]:
                self._speaker.end_by_length(request)


def _logprob(request: Request, planned: Planned, result: StepResult, j: int, token: int) -> TokenLogprob | None:
    if not request.params.logprobs:
        return None
    n = request.params.top_logprobs
    ids = tuple(result.top_ids[j, :n].tolist())
    values = tuple(result.top_logprobs[j, :n].tolist())
    return TokenLogprob(token, float(result.logprobs[j]), ids, values, found(result, planned.probes, j, request))
