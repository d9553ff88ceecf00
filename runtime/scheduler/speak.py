"""What follows from a token that a request has said: grammar, stops, length, jumps, the next segment, its output."""

from __future__ import annotations

import logging

from runtime.errors import ContextLengthExceeded, RequestFailed
from runtime.messages import Finish, Output, TokenLogprob, unpack_ids
from runtime.request import Phase, Request
from runtime.scheduler.batch import Planned
from runtime.scheduler.grammar import accept, count_jump, forced_run, last_token, owe_forced, start_grammar
from runtime.scheduler.release import end, fail
from runtime.scheduler.sampling import PenaltyState
from runtime.scheduler.state import State
from runtime.scheduler.stops import StopMatcher

log = logging.getLogger("ramet.scheduler")


def prepare_segment(state: State, request: Request) -> None:
    """Stops and penalties of the request's current segment. Its grammar is started apart."""
    params = request.params
    eos = state.eos if not params.ignore_eos or request.grammar is not None else frozenset()
    request.stops = StopMatcher.of(params, eos)
    tokens = state.rows.row_tokens(request.slot) if request.slot else request.tokens
    request.penalties = PenaltyState(tokens) if params.needs_last_token else None


class Speaker:
    """Handles committed tokens one by one, for rows that need it."""

    def __init__(self, state: State) -> None:
        self.state = state

    def hear(self, request: Request, token: int, logprob: TokenLogprob | None, planned: Planned) -> None:
        """`token` was sampled and is in the row's tokens already; tell the client and decide what comes next."""
        prompt = self._due_prompt_logprobs(request) if request.prompt_logprobs else None
        said, scores, verdict = self._hear_owed(request, n_after=1) if request.n_owed else ([], (), None)
        try:
            if verdict is None:
                said.append(token)
                scores += (logprob,) if logprob is not None else ()
                self._move_on(request, token)
                if len(said) == 1 and not scores and not prompt and self._goes_on(request, token):
                    self.state.out.say((request,), said)
                    return
                verdict = self._ending(request, token)
                if verdict is None:
                    jumped = self._jump(request, planned)
                    verdict = self._verdict_of_jump(request, jumped)
                    said += jumped
                    self._foresee_the_end(request)
        except Exception as err:  # a fault of one request's grammar is not the others'
            if not isinstance(err, RequestFailed):
                log.exception("Request %r failed at a token.", request.rid)
            fail(self.state, request, err)
            return
        output = Output(
            rid=request.rid,
            tokens=tuple(said),
            logprobs=scores or None,
            prompt_logprobs=prompt,
            segment=request.segment,
        )
        if verdict is None:
            self.state.out.add(request.sink, output)
        else:
            self.finish_segment(request, verdict[0], verdict[1], output)

    def _due_prompt_logprobs(self, request: Request) -> tuple[TokenLogprob, ...] | None:
        """The prompt's logprobs, once, with the first token."""
        if not request.prompt_logprobs:
            return None
        due = tuple(request.prompt_logprobs)
        request.prompt_logprobs.clear()
        return due

    def _move_on(self, request: Request, token: int) -> None:
        """What follows the text takes its newest token in."""
        if request.penalties is not None:
            request.penalties.push(token)
        if request.grammar is not None:
            accept(request, token)

    def _goes_on(self, request: Request, token: int) -> bool:
        """Whether a grammar is all there is to look at, and is known to want more text, none of which it forces."""
        rows, slot, stops = self.state.rows, request.slot, request.stops
        if request.grammar is None or request.phase is not Phase.DECODE or stops is None:
            return False
        if not stops.only_eos or token in stops.eos_ids or rows.closing[slot] or rows.known[slot] >= rows.limit[slot]:
            return False
        goes_on: bool = request.grammar.cursor.goes_on(unforced=self.state.config.jump_forward)
        return goes_on

    def _ending(self, request: Request, token: int) -> tuple[Finish, int] | None:
        """The finish that the row's newest token brings, and how many last tokens spell a stop; None to go on."""
        state = self.state
        assert request.stops is not None
        stop = request.stops.push(token, state.visible_bytes(request, token))
        if stop is not None:
            return Finish(reason="stop", matched=stop.matched), stop.n_drop
        return self._at_the_end(request, int(state.rows.known[request.slot]))

    def _at_the_end(self, request: Request, known: int) -> tuple[Finish, int] | None:
        """The finish of a complete grammar, or of the length."""
        if request.grammar is not None and request.grammar.cursor.done:
            return Finish(reason="stop"), 0
        if known >= self.state.rows.limit[request.slot]:
            return Finish(reason="length"), 0
        return None

    def _foresee_the_end(self, request: Request) -> None:
        """Where the token in flight must complete the grammar, nothing is planned behind it."""
        rows, slot = self.state.rows, request.slot
        if request.grammar is None or not slot:
            return
        in_flight = rows.kv[slot] >= rows.known[slot]
        ends = request.phase is Phase.DECODE and in_flight and last_token(request) is not None
        rows.set_closing(slot, int(rows.closing[slot]) + 1 if request.grammar.cursor.near_end and not ends else 0)
        if ends:
            self.state.to_phase(request, Phase.DRAIN)
        elif request.phase is Phase.DRAIN and not in_flight:
            self.state.to_phase(request, Phase.PREFILL)  # it came in smaller pieces

    # -- jump-forward ------------------------------------------------------------------------------------------

    def _jump(self, request: Request, planned: Planned) -> list[int]:
        """What the grammar forces next, written behind the row's tokens; `known` does not count it yet."""
        state, rows, slot = self.state, self.state.rows, request.slot
        if request.grammar is None:
            return []
        tokens = forced_run(state, request, mixed=bool(planned.pieces) or bool(state.prefill))
        if not tokens:
            return []
        at = int(rows.known[slot])
        rows.tokens[slot, at : at + len(tokens)] = tokens
        if request.params.logprobs:  # said when the forward has given them
            sampling = bool(rows.kv[slot] >= at)
            owe_forced(state, request, tokens)
            if sampling:
                rows.set_override(slot)
            state.to_phase(request, Phase.PREFILL)
            return []
        return tokens

    def _hear_owed(
        self, request: Request, n_after: int
    ) -> tuple[list[int], tuple[TokenLogprob, ...], tuple[Finish, int] | None]:
        """Forced tokens that stand before the last `n_after` known ones, their logprobs, and the finish they bring.

        What comes after a stop was computed for nothing: it is neither said nor counted.
        """
        n, request.n_owed = request.n_owed, 0
        if not n:
            return [], (), None
        rows, slot = self.state.rows, request.slot
        end_at = int(rows.known[slot]) - n_after
        tokens = rows.tokens[slot, end_at - n : end_at].tolist()
        scores = tuple(request.owed_logprobs)
        request.owed_logprobs.clear()
        verdict, n_said = None, 0
        assert request.stops is not None
        for token in tokens:
            n_said += 1
            stop = request.stops.push(token, self.state.visible_bytes(request, token))
            if stop is not None:
                verdict = Finish(reason="stop", matched=stop.matched), stop.n_drop
                break
        verdict = verdict or self._at_the_end(request, end_at)
        if verdict is not None:
            unsaid = n - n_said + n_after
            request.tally.completion -= unsaid
            request.tally.forced -= n - n_said
            verdict = verdict[0], verdict[1] + unsaid if verdict[1] >= 0 else -1
        return tokens[:n_said], scores[:n_said], verdict

    def end_by_length(self, request: Request) -> None:
        """Everything known is computed and nothing more may be sampled."""
        said, scores, verdict = self._hear_owed(request, n_after=0)
        finish, n_drop = verdict or (Finish(reason="length"), 0)
        self.finish_segment(
            request, finish, n_drop, Output(rid=request.rid, tokens=tuple(said), logprobs=scores or None)
        )

    def _verdict_of_jump(self, request: Request, tokens: list[int]) -> tuple[Finish, int] | None:
        """Run the stop rules over forced tokens; those after a stop are not said.

        The sample in flight, if there is one, is overridden with the first of them, the rest is a row of its own.
        """
        if not tokens:
            return None
        state, rows, slot = self.state, self.state.rows, request.slot
        sampling = rows.kv[slot] >= rows.known[slot]  # a step in flight samples what is now known
        verdict = self._follow(request, tokens)
        count_jump(state, request, len(tokens))
        if verdict is None:
            if sampling:
                rows.set_override(slot)
            if request.phase is Phase.DECODE and state.runs_decode:
                rows.set_run(slot)
            else:
                state.to_phase(request, Phase.PREFILL)
        return verdict

    def _follow(self, request: Request, tokens: list[int]) -> tuple[Finish, int] | None:
        """Take forced tokens in up to the first that ends the segment; those behind it are dropped from `tokens`."""
        rows, slot, stops = self.state.rows, request.slot, request.stops
        assert stops is not None
        if stops.only_eos and stops.eos_ids.isdisjoint(tokens):  # only the last can end it
            for token in tokens:
                self._move_on(request, token)
            rows.known[slot] += len(tokens)
            return self._at_the_end(request, int(rows.known[slot]))
        for n, token in enumerate(tokens, 1):
            rows.known[slot] += 1
            self._move_on(request, token)
            verdict = self._ending(request, token)
            if verdict is not None:
                del tokens[n:]
                return verdict
        return None

    # -- segments and endings ----------------------------------------------------------------------------------

    def finish_segment(self, request: Request, finish: Finish, n_drop: int, output: Output) -> None:
        """The current segment is over: end the request, or append the next segment's tokens and go on."""
        keep_stop = request.params.include_stop_str and isinstance(finish.matched, str)
        drop = 0 if keep_stop else n_drop
        if not request.segments_left or not self._can_cut(request, drop):
            end(self.state, request, finish, output)
            return
        self.state.out.add(
            request.sink,
            Output(
                rid=request.rid,
                tokens=output.tokens,
                logprobs=output.logprobs,
                prompt_logprobs=output.prompt_logprobs or self._due_prompt_logprobs(request),
                finish=finish,
                segment=request.segment,
            ),
        )
        self._next_segment(request, drop)

    def _can_cut(self, request: Request, n_drop: int) -> bool:
        """False where the stop begins inside a token, or in pages that others may read already."""
        rows, slot = self.state.rows, request.slot
        cut, leaf = int(rows.known[slot]) - n_drop, request.lease.leaf
        shown = int(rows.published[slot]) + (leaf.n_tokens if leaf is not None else 0)
        return n_drop >= 0 and cut >= max(shown, request.gen_start)

    def _next_segment(self, request: Request, n_drop: int) -> None:
        """Cut the stop, append the next literal, and generate again in the same row."""
        state, rows, slot = self.state, self.state.rows, request.slot
        segment = request.next_segment()
        request.segment += 1
        request.tally.completion += int(rows.known[slot]) - request.gen_start
        literal = unpack_ids(segment.tokens)
        known = int(rows.known[slot]) - n_drop
        end_at = known + len(literal)
        request.params = segment.params
        request.gen_start = end_at
        if end_at >= state.limits.max_len:  # refused as a prompt of this length is: nothing is cut in silence
            rows.known[slot], request.gen_start = known, known
            fail(state, request, ContextLengthExceeded(end_at, state.limits.max_len, param="segments"))
            return
        rows.tokens[slot, known:end_at] = literal
        rows.known[slot] = end_at
        state.charge(request, len(literal))
        self._rewind(request, min(known, end_at - 1))
        start_grammar(state, request, segment.grammar)
        rows.set_params(request, state.config.seed + request.num)
        prepare_segment(state, request)
        state.to_phase(request, Phase.PREFILL)

    def _rewind(self, request: Request, most: int) -> None:
        """Forget what is in flight; at least one token must be computed again to give logits."""
        rows, slot = self.state.rows, request.slot
        request.attempt += 1
        rows.renew(request)
        rows.done[slot] = min(int(rows.done[slot]), most)
        rows.kv[slot] = rows.done[slot]
        request.high_water = min(request.high_water, int(rows.done[slot]))
        rows.high[slot] = request.high_water
