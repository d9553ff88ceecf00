"""How much prefill a step may carry while streams run: an online model of step time."""

from __future__ import annotations

FORGET = 0.98
MARGIN = 0.92  # part of the allowed stretch that is planned for: steps vary
_RIDGE = 1e-3


class StepTimeModel:
    """Least squares of seconds on (1, query tokens, KV tokens read), with older steps forgotten.

    Scaled so that all three features are of order one; coefficients are kept non-negative, because a step with
    more work never takes less time.
    """

    TOKENS, KV = 1e-3, 1e-5

    def __init__(self) -> None:
        self._xx = [[_RIDGE * (i == j) for j in range(3)] for i in range(3)]
        self._xy = [0.0, 0.0, 0.0]
        self._coef: tuple[float, float, float] | None = None
        self.n_seen = 0
        self.most_tokens = 0  # of any step observed

    def observe(self, n_tokens: int, kv_read: int, seconds: float) -> None:
        """A step of `n_tokens` query tokens that read `kv_read` tokens of KV took `seconds`."""
        x = (1.0, n_tokens * self.TOKENS, kv_read * self.KV)
        for i in range(3):
            row = self._xx[i]
            for j in range(3):
                row[j] = FORGET * row[j] + x[i] * x[j]
            row[i] += _RIDGE * (1 - FORGET)
            self._xy[i] = FORGET * self._xy[i] + x[i] * seconds
        self._coef = None
        self.n_seen += 1
        self.most_tokens = max(self.most_tokens, n_tokens)

    def predict(self, n_tokens: int, kv_read: int) -> float:
        """Seconds such a step would take; 0 before the first observation."""
        a, b, c = self.coefficients()
        return a + b * n_tokens * self.TOKENS + c * kv_read * self.KV

    def coefficients(self) -> tuple[float, float, float]:
        if self._coef is None:
            self._coef = _non_negative(self._xx, self._xy)
        return self._coef


def _non_negative(xx: list[list[float]], xy: list[float]) -> tuple[float, float, float]:
    """Solve the normal equations, dropping features whose coefficient comes out negative."""
    active = [0, 1, 2]
    while active:
        solved = _solve([[xx[i][j] for j in active] for i in active], [xy[i] for i in active])
        worst = min(range(len(active)), key=lambda k: solved[k])
        if solved[worst] >= 0:
            out = [0.0, 0.0, 0.0]
            for i, value in zip(active, solved, strict=True):
                out[i] = value
            return out[0], out[1], out[2]
        del active[worst]
    return 0.0, 0.0, 0.0


def _solve(a: list[list[float]], b: list[float]) -> list[float]:
    """Gaussian elimination with pivoting; the ridge keeps the matrix regular."""
    n = len(b)
    m = [[*row, value] for row, value in zip(a, b, strict=True)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(m[r][i]))
        m[i], m[pivot] = m[pivot], m[i]
        for r in range(i + 1, n):
            f = m[r][i] / m[i][i]
            for c in range(i, n + 1):
                m[r][c] -= f * m[i][c]
    x = [0.0] * n
    for i in range(n - 1, -1, -1):
        x[i] = (m[i][n] - sum(m[i][c] * x[c] for c in range(i + 1, n))) / m[i][i]
    return x


def prefill_budget(
    model: StepTimeModel,
    *,
    n_decode: int,
    kv_read: int,
    kv_prefill: int = 0,
    max_step_tokens: int,
    inflation: float,
    floor: int,
    warm_up: int = 8,
    watched: bool = True,
) -> int:
    """Prefill tokens a step may carry so that streams wait at most `inflation` times a decode-only step.

    Full chunks when nothing streams, or nobody reads along (not `watched`); never less than `floor`, so prompts
    always move; `floor` too until the model has seen a few steps.
    """
    room = max_step_tokens - n_decode
    if n_decode == 0 or not watched or room <= 0:
        return max(room, 0)
    floor = min(floor, room)
    if model.n_seen < warm_up:
        return floor
    base = model.predict(n_decode, kv_read)
    per_token = model.coefficients()[1] * model.TOKENS
    spare = MARGIN * (inflation - 1.0) * base - (model.predict(n_decode, kv_read + kv_prefill) - base)
    known = 2 * max(model.most_tokens, floor)  # never more than twice what has been seen: the model is linear
    free = spare / per_token if per_token > 0 else known
    return max(floor, int(min(room, known, free)))


def water_fill(sizes: list[int], budget: int, cap: int) -> list[int]:
    """Split `budget`: nobody gets more than asked or `cap`, small demands are met first, the rest is even."""
    shares = [0] * len(sizes)
    left = budget
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    for done, i in enumerate(order):
        shares[i] = min(sizes[i], cap, left // (len(order) - done))
        left -= shares[i]
    return shares
