"""How long a decode-only step of an engine takes, learned online from its windows.

In a window that was busy for B seconds with R requests running, U of the KV cache in use and prompts of P
tokens in n requests the engine made

    S m = B (a - b R - c U) - x F        with F = P e^(-kn/P)

steps, where m is the traffic of a decode step by the work model (1 where the model is not known; only then b
and c are used), and F the prompt tokens beyond the k a step that cost nothing beside the weights (sizes
spread exponentially). Least squares with forgetting gives a even where no window is free of prompts. S is
the side with the error: a busy window is as long as any other, and how many steps fit beside its prompts is
what varies. Windows without prompts decide alone as soon as there are some.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.analysis.rates import Sums

MEMORY_S = 180.0
"""After this much busy time a window's weight has fallen to 1/e."""
FREE_TOKENS = 120.0
"""Prompt tokens that a step takes along while it waits for the weights: half of what the ridge of current
devices allows, since sizes spread wider than an exponential (fitted on simulated traces)."""
_TERMS = 4
_WELL_POSED = 1e-7
BLOCK_S = 4.0
ENOUGH_STEPS = 10.0
"""Steps of windows without prompts before they alone decide."""
ENOUGH_BLOCKS = 3.0
"""Blocks with prompts before their regression is believed."""


def _running(sums: Sums) -> float:
    known = [value for value in sums.running if value is not None]
    return sum(known) / len(known) if known else 1.0


def _usage(sums: Sums) -> float:
    known = [value for value in sums.kv_usage_ratio if value is not None]
    return sum(known) / len(known) if known else 0.0


class _Fit:
    """Sums of least squares with forgetting: steps' traffic on busy time, batch, context and prompts."""

    def __init__(self) -> None:
        self.steps = 0.0
        self.rows = 0.0
        self.running = self.usage = 0.0
        """The most that was seen."""
        self._squares: NDArray[np.float64] = np.zeros((_TERMS, _TERMS))
        self._products: NDArray[np.float64] = np.zeros(_TERMS)
        self._solved: NDArray[np.float64] | None = None

    def add(self, features: NDArray[np.float64], moved: float, steps: float) -> None:
        weight = self._weight(features, moved)
        fade = math.exp(-float(features[0]) * weight / MEMORY_S)
        self._squares = self._squares * fade + weight * np.outer(features, features)
        self._products = self._products * fade + weight * features * moved
        self.steps = self.steps * fade + steps
        self.rows = self.rows * fade + 1
        self.running = max(self.running, -float(features[1]) / float(features[0]))
        self.usage = max(self.usage, -float(features[2]) / float(features[0]))
        self._solved = None

    def _weight(self, features: NDArray[np.float64], moved: float) -> float:
        """Weigh windows by their decode share, squared: what fills the rest is known roughly only."""
        if self.rows < ENOUGH_BLOCKS:
            return 1.0
        alone = float(features[:3] @ self.solved()[:3])
        return min(1.0, max(0.02, moved / alone)) ** 2 if alone > 0 else 1.0

    def solved(self) -> NDArray[np.float64]:
        """Return the terms that the windows determine; those that come out with the wrong sign are 0."""
        if self._solved is not None:
            return self._solved
        use = [i for i in range(_TERMS) if self._squares[i, i] > 0]
        while True:
            solved = np.zeros(_TERMS)
            part = self._squares[np.ix_(use, use)]
            scale = np.sqrt(np.diag(part))
            normed = part / np.outer(scale, scale) + _WELL_POSED * np.eye(len(use))
            solved[use] = np.linalg.solve(normed, self._products[use] / scale) / scale
            wrong = [i for i in use if i and solved[i] < 0]
            if not wrong:
                self._solved = solved
                return solved
            use.remove(wrong[0])


class DecodePace:
    """The time of one decode-only step of one engine at a window's batch and context."""

    def __init__(self) -> None:
        self._pure = _Fit()
        """Windows without a prompt, and none that begins in them."""
        self._all = _Fit()
        """Blocks of windows with prompts in them: an edge cuts a step, so short ones are put together."""
        self._block: NDArray[np.float64] = np.zeros(_TERMS)
        self._block_moved = 0.0
        self._block_steps = 0

    def learn(self, sums: Sums, following: Sums | None, busy_ns: float, traffic: float | None = None) -> None:
        """Take a settled window, late prompts given back, the time it was busy, and the window after it.

        `traffic` is what a decode-only step of this window moves, in any unit that stays the same; None: not
        known. Windows in which steps may have run that the engine does not count teach nothing.
        """
        steps, firsts, prompts = sums.counted_steps, sums.first_tokens, sums.prefill_tokens
        if not steps or firsts is None or prompts is None or busy_ns <= 0 or sums.reset:
            return
        if sums.chunk_ns > 0 or not sums.always_running:
            self._block, self._block_moved, self._block_steps = np.zeros(_TERMS), 0.0, 0
            return
        seconds = busy_ns / 1e9
        known = 0.0 if traffic is not None else 1.0
        parts = max(firsts + sums.chunk_steps, 1e-9)
        beyond = prompts * math.exp(-FREE_TOKENS * parts / prompts) if prompts else 0.0
        features = np.array(
            [
                seconds,
                -seconds * _running(sums) * known,
                -seconds * _usage(sums) * known,
                -beyond / 1000.0,
            ]
        )
        moved = steps * (traffic or 1.0)
        if following is not None and not (
            firsts or prompts or sums.chunk_steps or following.first_tokens or following.chunk_steps
        ):
            self._pure.add(features, moved, steps)
        self._block = self._block + features
        self._block_moved += moved
        self._block_steps += steps
        if self._block[0] >= BLOCK_S:
            self._all.add(self._block, self._block_moved, self._block_steps)
            self._block, self._block_moved, self._block_steps = np.zeros(_TERMS), 0.0, 0

    def step_ns(self, sums: Sums, traffic: float | None = None) -> float | None:
        """Return the time of a decode-only step at this window's batch; None before it can be told."""
        if self._pure.steps >= ENOUGH_STEPS:
            fit = self._pure
        elif self._all.rows >= ENOUGH_BLOCKS:
            fit = self._all
        else:
            return None
        solved = fit.solved()
        per_second = float(solved[0])
        if traffic is None:
            # No further than a quarter beyond what was seen: a line fitted to small batches runs into 0.
            running, usage = min(_running(sums), 1.25 * fit.running), min(_usage(sums), 1.25 * fit.usage)
            slower = float(solved[1]) * running + float(solved[2]) * usage
            per_second = max(per_second - slower, 0.25 * per_second)
        return (traffic or 1.0) * 1e9 / per_second if per_second > 0 else None
