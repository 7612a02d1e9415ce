"""How long a decode-only step takes just now: what is learned of an engine, corrected by the windows around.

What `pace` learns holds for minutes, and by the batch. On a host that others use as well, steps get slower
and faster within seconds. How far the pace strays, and how alike it is in windows near each other, is
learned; where it does not stray, what is known stays as it is. It is for engines whose busy time no counter
measures: theirs is all the time while requests run.

Where it does, a window with prompts is better read by itself: with prompt tokens that take k decode-only
steps each, S steps with P prompt tokens last as long as S + k P decode-only ones, whatever the pace.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import msgspec

from gpuidle.agent.analysis.pace import Told
from gpuidle.agent.analysis.rates import Sums
from gpuidle.agent.analysis.stepsizes import decode_rows

REACH_NS = 10**9
"""Windows so far away are asked. To younger ones prompts may still be given back."""
EDGE_STEPS = 0.4
"""What a window's edges add to its steps or cut off: standard deviation."""
ALIKE_ROWS = 0.3
"""Batches are compared as they are up to this difference of the logarithms of their rows;"""
ROWS_SPREAD = 0.5
"""beyond, a step's time may differ by so much of it."""
USUAL_DRIFT, USUAL_STRAY = 0.1, 0.05
"""How alike and how unlike windows near each other are, before anything was seen:"""
USUAL_PAIRS, USUAL_WINDOWS = 10.0, 10.0
"""as of so many."""
MOST_SQUARE = 0.25
"""A window that is further off its neighbours counts as this square of the relative difference."""
LEAST_DRIFT = 0.05
"""With less drift what is known tells more than a window's own tokens."""
MEMORY = 200.0
"""After so many windows a window's weight has fallen to 1/e."""
ENOUGH_PROMPTS = 4.0
"""Windows with prompts before they tell something."""
PROMPT_SPREAD = 0.3
"""What is believed of a prompt token's time at most: prompts are not alike."""


class Near(msgspec.Struct, frozen=True):
    """A window without a prompt."""

    end_ns: int
    steps: int
    busy_ns: float
    rows: float
    told_ns: float | None
    """A step's time by what was known."""

    @property
    def deviation(self) -> float | None:
        """By how much its steps were slower than what was known, as a logarithm."""
        if not self.steps or not self.told_ns or self.busy_ns <= 0:
            return None
        return math.log(self.busy_ns / self.steps / self.told_ns)


def near(sums: Sums, told_ns: float | None) -> Near:
    """Return a quiet window as what others are compared with."""
    return Near(sums.end_ns, sums.counted_steps or 0, float(sums.window_ns), decode_rows(sums), told_ns)


def quiet(sums: Sums, following: Sums | None) -> bool:
    """Return whether only decodes ran, all the time, and no step with a prompt began at the end."""
    if sums.reset or sums.prefill_tokens is None or sums.first_tokens is None or not sums.always_running:
        return False
    if sums.prefill_tokens or sums.first_tokens or sums.chunk_steps or sums.chunk_ns or following is None:
        return False
    return not (following.first_tokens or following.chunk_steps or following.chunk_ns)


class Here(msgspec.Struct, frozen=True):
    """What is known of a window's steps; None: not yet."""

    step_ns: float | None
    """Time of a decode-only step."""
    spread: float
    """Its relative standard error."""
    token_ns: float | None
    """Time of a prompt token in a step that is full of them."""
    token_steps: float | None = None
    """Time of a prompt token in decode-only steps, where it tells more than the pace does."""
    token_spread: float = PROMPT_SPREAD
    """Its relative standard error."""


class LocalPace:
    """The windows without a prompt of the last second, and how far the pace strays within one."""

    def __init__(self) -> None:
        self._past: deque[Near] = deque()
        self._pairs, self._alike = USUAL_PAIRS, USUAL_PAIRS * USUAL_DRIFT**2
        self._windows, self._unlike = USUAL_WINDOWS, USUAL_WINDOWS * USUAL_STRAY**2
        self._prompts = self._tokens = self._product = self._power = 0.0

    def learn(self, window: Near) -> None:
        """Take a quiet window that settled.

        Windows side by side share a step that their edge cuts: those one further apart are compared.
        """
        while self._past and self._past[0].end_ns <= window.end_ns - REACH_NS:
            self._past.popleft()
        fade = math.exp(-1 / MEMORY)
        one, other = window.deviation, self._past[-2].deviation if len(self._past) > 1 else None
        if one is not None and other is not None:
            self._pairs = self._pairs * fade + 1
            self._alike = self._alike * fade + one * other
        around = _mean(self._past, window.rows)
        if around is not None and window.steps and window.busy_ns > 0:
            off = math.log(window.busy_ns / window.steps / around[0])
            noise = around[1] + (EDGE_STEPS / window.steps) ** 2
            self._windows = self._windows * fade + 1
            self._unlike = self._unlike * fade + min(MOST_SQUARE, off**2) - noise
        self._past.append(window)

    def learn_prompts(self, sums: Sums, here: Here) -> None:
        """Take a window with prompts: by how many decode-only steps its prompt tokens made it longer."""
        steps, tokens = sums.counted_steps, sums.prefill_tokens
        if not steps or not tokens or here.step_ns is None or sums.reset or not sums.always_running:
            return
        longer = sums.window_ns / here.step_ns - steps
        weight = 1 / (EDGE_STEPS**2 + (steps * here.spread) ** 2)
        fade = math.exp(-1 / MEMORY)
        self._prompts = self._prompts * fade + 1
        self._tokens = self._tokens * fade + weight * tokens**2
        self._product = self._product * fade + weight * tokens * longer
        self._power = self._power * fade + weight * longer**2

    def told(self, known: Told, rows: float, end_ns: int, ahead: Iterable[Near] = ()) -> Here:
        """Return what is known, corrected for a window of `rows` that ends at `end_ns`.

        `ahead` are the quiet windows after it.
        """
        drift = max(0.0, self._alike) / self._pairs
        step_ns, far = known.step_ns, known.spread**2 + drift
        around = _mean([n for n in (*self._past, *ahead) if abs(n.end_ns - end_ns) <= REACH_NS], rows)
        if around is not None:
            near_ns, noise = around[0], around[1] + max(0.0, self._unlike) / self._windows
            if step_ns is None:
                step_ns, far = near_ns, noise
            else:
                step_ns *= (near_ns / step_ns) ** (far / (far + noise))
                far *= noise / (far + noise)
        if drift < LEAST_DRIFT**2 or self._prompts < ENOUGH_PROMPTS or self._product <= 0:
            return Here(step_ns, math.sqrt(far), known.token_ns)
        slope = self._product / self._tokens
        left = max(1.0, (self._power - slope * self._product) / (self._prompts - 1))
        spread = max(PROMPT_SPREAD, math.sqrt(left / self._tokens) / slope)
        return Here(step_ns, math.sqrt(far), known.token_ns, slope, spread)


def _mean(windows: Iterable[Near], rows: float) -> tuple[float, float] | None:
    """Return the time of a step in these windows, and its relative variance; None without steps.

    Those of other batches are asked if there are no others.
    """
    apart = [(abs(math.log(max(near.rows, 1.0) / max(rows, 1.0))), near) for near in windows]
    alike = [(away, near) for away, near in apart if away <= ALIKE_ROWS]
    for part in (alike, apart):
        steps, busy_ns = sum(near.steps for _, near in part), sum(near.busy_ns for _, near in part)
        if steps and busy_ns > 0:
            other = 0.0 if part is alike else (ROWS_SPREAD * max(away for away, _ in part)) ** 2
            return busy_ns / steps, EDGE_STEPS**2 * len(part) / steps**2 + other
    return None
