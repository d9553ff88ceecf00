"""The running requests as a table: one numpy column a property, one line a slot.

Slot s is also the row of the device's token table; slot 0 is scratch. Planning and commit index these columns
with an array of slots, so their cost does not grow with Python work per row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.params import SamplingParams
from runtime.request import Request

I32 = npt.NDArray[np.int32]
DEFAULT_TOP_P = 1.0


class RowTable:
    """Columns `[n_rows + 1]`; `tokens` and `pages` are two-dimensional and only touched where used."""

    def __init__(self, n_rows: int, max_len: int, page_size: int) -> None:
        n = n_rows + 1
        self.n_rows, self.max_len, self.page_size = n_rows, max_len, page_size
        self.tokens = np.zeros((n, max_len + 1), np.int32)
        self.flat_tokens, self.width = self.tokens.reshape(-1), max_len + 1  # one-dimensional indexing is faster
        self.pages = np.zeros((n, (max_len + page_size - 1) // page_size + 1), np.int32)
        self.requests: list[Request | None] = [None] * n
        self._free = list(range(n_rows, 0, -1))
        self._next_gen = 1
        self.epoch = 0  # goes up whenever rows planned before become stale
        # identity: `gen` is unique for each (request, attempt) that ever had a row; 0 marks an empty slot
        self.gen = np.zeros(n, np.int64)
        self.num = np.zeros(n, np.int64)
        self.attempt = np.zeros(n, np.int64)
        # cursors: done <= kv <= known + depth; where kv >= known, a sample is in flight
        self.known = np.zeros(n, np.int32)  # tokens the host knows
        self.kv = np.zeros(n, np.int32)  # KV planned
        self.done = np.zeros(n, np.int32)  # KV committed
        self.high = np.zeros(n, np.int32)  # most KV committed by earlier attempts and segments
        self.n_pages = np.zeros(n, np.int32)
        self.published = np.zeros(n, np.int32)  # tokens in the tree, whole pages
        self.limit = np.zeros(n, np.int32)  # tokens at which the segment ends by length
        self.gen_start = np.zeros(n, np.int32)
        self.override = np.zeros(n, np.bool_)  # the sample in flight was overridden: its token is known already
        self.n_overrides = 0
        self.run = np.zeros(n, np.bool_)  # decodes, and has more than one known token to compute: it was forced some
        self.n_runs = 0
        # sampling
        self.temperature = np.zeros(n, np.float32)
        self.top_k = np.zeros(n, np.int32)
        self.top_p = np.ones(n, np.float32)
        self.min_p = np.zeros(n, np.float32)
        self.seed = np.zeros(n, np.uint64)
        self.n_top = np.zeros(n, np.int32)
        self.want_logprob = np.zeros(n, np.bool_)
        self.late = np.zeros(n, np.bool_)  # sampling waits for commit
        self.masked = np.zeros(n, np.bool_)  # has a grammar, so it may jump
        self.closing = np.zeros(n, np.int32)  # for how many tokens its grammar has been near its end
        self.n_closing = 0  # rows where that is not 0
        self.static = np.zeros(n, np.bool_)  # has adjustments known at plan time: bias, min_tokens
        # commit
        self.careful = np.zeros(n, np.bool_)  # needs Python at commit: stop strings, grammar, logprobs, segments
        self.eos_stops = np.zeros(n, np.bool_)

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_used(self) -> int:
        return self.n_rows - len(self._free)

    def running(self) -> list[Request]:
        """Every request that holds a row, oldest first."""
        return sorted((r for r in self.requests if r is not None), key=lambda r: r.num)

    def request(self, slot: int) -> Request:
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is empty"
        return request

    def take(self, request: Request, seed: int) -> int:
        """Give the request a slot and copy its tokens there."""
        slot = self._free.pop()
        request.slot = slot
        self.requests[slot] = request
        n = request.known
        self.tokens[slot, :n] = request.tokens[:n]
        self.known[slot] = n
        self.kv[slot] = self.done[slot] = self.n_pages[slot] = self.published[slot] = 0
        self.high[slot] = request.high_water
        self.num[slot] = request.num
        self._name(request)
        self.set_params(request, seed)
        return slot

    def renew(self, request: Request) -> None:
        """Rows planned for this slot before now are stale from here on."""
        self.epoch += 1
        self._name(request)

    def _name(self, request: Request) -> None:
        slot = request.slot
        self.gen[slot] = self._next_gen
        self._next_gen += 1
        self.attempt[slot] = request.attempt
        self.clear_override(slot)

    def set_override(self, slot: int) -> None:
        self.override[slot] = True
        self.n_overrides += 1

    def clear_override(self, slot: int) -> None:
        if self.override[slot]:
            self.override[slot] = False
            self.n_overrides -= 1

    def set_run(self, slot: int) -> None:
        self.n_runs += not self.run[slot]
        self.run[slot] = True

    def clear_run(self, slot: int) -> None:
        if self.run[slot]:
            self.run[slot] = False
            self.n_runs -= 1

    def clear_runs(self) -> None:
        """All of them are planned."""
        self.run[:] = False
        self.n_runs = 0

    def set_closing(self, slot: int, n_tokens: int) -> None:
        self.n_closing += (n_tokens > 0) - int(self.closing[slot] > 0)
        self.closing[slot] = n_tokens

    def set_params(self, request: Request, seed: int) -> None:
        """Columns that follow from the current segment's parameters."""
        slot, p = request.slot, request.params
        self.gen_start[slot] = request.gen_start
        room = self.max_len if p.max_tokens is None else request.gen_start + p.max_tokens
        self.limit[slot] = min(self.max_len, room)
        self.temperature[slot] = p.temperature
        self.top_k[slot] = max(p.top_k, 0)
        self.top_p[slot] = p.top_p
        self.min_p[slot] = p.min_p
        self.seed[slot] = (p.seed if p.seed is not None else seed) % 2**64
        self.want_logprob[slot] = p.logprobs
        self.n_top[slot] = p.top_logprobs if p.logprobs else 0
        self.late[slot] = p.needs_last_token or request.grammar is not None
        self.masked[slot] = request.grammar is not None
        self.set_closing(slot, 0)
        self.static[slot] = bool(p.logit_bias) or p.min_tokens > 0
        self.eos_stops[slot] = not p.ignore_eos
        self.careful[slot] = needs_care(request, p)

    def give_back(self, request: Request) -> None:
        """The request leaves its slot, keeping its tokens."""
        slot = request.slot
        self.epoch += 1
        request.known = int(self.known[slot])
        request.tokens = self.tokens[slot, : request.known].copy()
        request.high_water = max(request.high_water, int(self.done[slot]))
        request.slot = 0
        self.requests[slot] = None
        self.gen[slot] = 0
        self.clear_override(slot)
        self.set_closing(slot, 0)
        self._free.append(slot)

    def row_tokens(self, slot: int) -> I32:
        return self.tokens[slot, : self.known[slot]]

    def row_pages(self, slot: int) -> I32:
        """The slot's page table: a view; the cache rewrites it when it remaps."""
        return self.pages[slot, : self.n_pages[slot]]

    def add_pages(self, slot: int, pages: I32) -> None:
        n = int(self.n_pages[slot])
        self.pages[slot, n : n + len(pages)] = pages
        self.n_pages[slot] = n + len(pages)


def needs_care(request: Request, p: SamplingParams) -> bool:
    """True when a committed token of this request must be looked at one by one."""
    return bool(
        request.grammar is not None
        or p.stop
        or p.stop_regex
        or p.stop_token_ids
        or p.logprobs
        or p.needs_last_token
        or request.submit.segments
        or request.prompt_logprobs
        or request.scored >= 0
    )
