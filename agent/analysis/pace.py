"""How long a decode-only step of an engine takes, learned online from its windows.

A step takes the time of its weights and contexts, and of the prompt tokens beyond those that it takes along
while it waits for the memory. So in a window that was busy for B seconds the engine computed

    F = a B - S (b . m)

tokens beyond, where S are its steps and m what a decode-only step moves by the work model (1, the rows and
the share of the cache in use where the model is not known). A step takes (b . m) / a seconds, a prompt token
1 / a.

F is the side with the error: an edge cuts a step, whose tokens are booked in the window in which it ends. A
window counts by how large the steps at its edges may have been. Windows without a prompt tell the pace by
themselves, and better. Least squares with forgetting.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.analysis.rates import Sums
from gpuidle.agent.analysis.stepsizes import beyond, edge_tokens, prompt_sizes

MEMORY_S = 180.0
"""After this much busy time a window's weight has fallen to 1/e."""
INTENSITY = 220.0
"""FLOPs a byte at which a step's compute takes as long as its memory: the ridge of current devices times what
kernels reach of each. Only where to begin: it counts as much as EXPECTED_SPREAD says."""
EXPECTED_SPREAD = 0.5
"""Relative standard deviation of the tokens that a step takes along, before anything was seen."""
KNOWN_SPREAD = 1.0
"""The relative standard error up to which a step's time is told."""
EDGE_SPREAD = 0.3
"""What an edge cuts off a decode-only step, as a part of it: standard deviation at both edges together."""
QUIET_SPREAD = 0.02
"""What is believed of quiet windows at most: their batches are others than a window's with prompts."""
TOKEN_SPREAD = 0.25
"""The relative standard error up to which a prompt token's time is told."""
ENOUGH_STEPS = 10.0
"""Steps of quiet windows before they tell something."""
JITTER = 0.3
"""Of a step's time, before anything was seen: as of so many windows as EXPECTED_WINDOWS."""
EXPECTED_WINDOWS = 2.0
_TERMS = 4
_TINY = 1e-9


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The decode-only step of a window."""

    rows: float
    usage: float
    """Share of the KV cache in use."""
    bytes_moved: float | None = None
    """By the work model; None: the model is not known."""
    prompt_bytes_ratio: float = 1.0
    """What a step with a prompt moves to what a decode-only step does: weights of more experts."""
    free_tokens: float = 256.0
    """Prompt tokens that such a step is expected to take along for nothing."""

    tied: float = 1.0
    """How far what a step takes along is believed to be of a decode-only step's time, if it has more prompt
    tokens than that. At 0 its time is that of its tokens alone."""

    def terms(self) -> NDArray[np.float64]:
        """Return what the step's time is linear in."""
        if self.bytes_moved is not None:
            return np.array([self.bytes_moved / 1e9, 0.0, 0.0])
        return np.array([1.0, self.rows, self.usage])


class Told(msgspec.Struct, frozen=True):
    """What is known of a window's steps; None: not yet."""

    step_ns: float | None
    """Time of a decode-only step."""
    spread: float
    """Its relative standard error."""
    token_ns: float | None
    """Time of a prompt token in a step that is full of them."""


class _Quiet:
    """Windows without a prompt, and none that begins in them: B = S (k . m), S with the error."""

    def __init__(self) -> None:
        self._squares: NDArray[np.float64] = np.zeros((_TERMS - 1, _TERMS - 1))
        self._products: NDArray[np.float64] = np.zeros(_TERMS - 1)
        self._seconds = self._steps = self._windows = self._power = 0.0

    def add(self, terms: NDArray[np.float64], steps: int, seconds: float) -> None:
        fade = math.exp(-seconds / MEMORY_S)
        self._squares = self._squares * fade + steps * np.outer(terms, terms)
        self._products = self._products * fade + seconds * terms
        self._power = self._power * fade + seconds**2 / steps
        self._seconds = self._seconds * fade + seconds
        self._steps = self._steps * fade + steps
        self._windows = self._windows * fade + 1.0

    def step_s(self, terms: NDArray[np.float64]) -> tuple[float, float] | None:
        """Return the time of a step and its relative standard error; None without enough windows."""
        if self._steps < ENOUGH_STEPS:
            return None
        # As if one step more had shown that rows and contexts add nothing: further off it is less sure.
        unseen = np.diag(self._squares) / self._steps * (np.arange(_TERMS - 1) > 0)
        solved, errors = _solve(self._squares + np.diag(unseen), self._products)
        time = float(solved @ terms)
        if time <= 0:
            return None
        usual = (JITTER * self._seconds / self._steps) ** 2
        left = max(0.0, self._power - float(solved @ self._products))
        noise = (left + EXPECTED_WINDOWS * usual) / (self._windows + EXPECTED_WINDOWS)
        return time, math.sqrt(noise * max(0.0, float(terms @ errors @ terms))) / time


class DecodePace:
    """The time of a decode-only step of one engine, and of a prompt token, at a window's batch."""

    def __init__(self) -> None:
        self._quiet = _Quiet()
        self._squares: NDArray[np.float64] = np.zeros((_TERMS, _TERMS))
        self._products: NDArray[np.float64] = np.zeros(_TERMS)
        self._free_tokens: float | None = None

    def learn(self, sums: Sums, following: Sums | None, busy_ns: float | None, batch: Batch) -> None:
        """Take a settled window, late prompts given back, the time it was busy, and the window after it.

        Without a measured busy time (None) only windows that had requests all the time teach something.
        """
        steps, firsts, prompts = sums.counted_steps, sums.first_tokens, sums.prefill_tokens
        if busy_ns is None and (sums.chunk_ns > 0 or not sums.always_running):
            return
        busy_ns = float(sums.window_ns) if busy_ns is None else busy_ns
        if steps is None or firsts is None or prompts is None or busy_ns <= 0 or sums.reset:
            return
        quiet = not (firsts or prompts or sums.chunk_steps or sums.chunk_ns)
        if quiet and following is not None and not (following.first_tokens or following.chunk_steps):
            if steps:
                self._quiet.add(batch.terms(), steps, busy_ns / 1e9)
            return
        free = batch.free_tokens if self._free_tokens is None else self._free_tokens
        sizes, more = prompt_sizes(sums), batch.prompt_bytes_ratio
        large = [(tokens, count) for tokens, count in sizes if tokens > free * more]
        full = sum(count for _, count in large)
        others = sum(count for _, count in sizes) - full
        alike = steps - (1 - batch.tied) * full + (more - 1) * min(steps, others + batch.tied * full)
        features = np.concatenate(([busy_ns / 1e9], -batch.terms() * max(0.0, alike)))
        value = beyond(tuple(large), batch.tied * free * more) / 1000.0
        spread = (EDGE_SPREAD * free) ** 2 + edge_tokens(sums)
        spread += 0.0 if following is None else edge_tokens(following)
        weight = 1e6 / spread
        fade = math.exp(-busy_ns / 1e9 / MEMORY_S)
        self._squares = self._squares * fade + weight * np.outer(features, features)
        self._products = self._products * fade + weight * features * value
        solved, _ = self._solved(batch)
        if solved[0] > 0:
            found = 1000.0 * float(solved[1:] @ batch.terms())
            self._free_tokens = min(4.0 * batch.free_tokens, max(0.05 * batch.free_tokens, found))

    def told(self, batch: Batch) -> Told:
        """Return what is known so far for a window of this batch."""
        terms = batch.terms()
        solved, errors = self._solved(batch)
        along = float(solved[1:] @ terms)
        step = self._quiet.step_s(terms)
        if solved[0] > 0 and along > 0:
            slope = np.concatenate(([-1.0 / solved[0]], terms / along))
            spread = math.sqrt(max(0.0, float(slope @ errors @ slope)))
            if step is None or spread < step[1]:
                step = along / float(solved[0]), spread
        if step is not None and step[1] > KNOWN_SPREAD:
            step = None
        known = solved[0] > 0 and float(errors[0, 0]) <= (TOKEN_SPREAD * solved[0]) ** 2
        return Told(
            step_ns=None if step is None else 1e9 * step[0],
            spread=0.0 if step is None else step[1],
            token_ns=1e6 / float(solved[0]) if known else None,
        )

    def _solved(self, batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the terms and their covariance, with what is expected and what quiet windows tell."""
        terms = batch.terms()
        expected = np.concatenate(([0.0], -terms))
        weight = (1000.0 / (EXPECTED_SPREAD * batch.free_tokens)) ** 2
        squares = self._squares + weight * np.outer(expected, expected)
        squares = squares + np.diag(weight * expected**2 * (np.arange(_TERMS) > 1))
        products = self._products - weight * expected * batch.free_tokens / 1000.0
        quiet = self._quiet.step_s(terms)
        if quiet is not None:
            free = batch.free_tokens if self._free_tokens is None else self._free_tokens
            told = np.concatenate(([quiet[0]], -terms))
            squares = squares + (1000.0 / (max(QUIET_SPREAD, quiet[1]) * free)) ** 2 * np.outer(told, told)
        return _solve(squares, products)


def _solve(
    squares: NDArray[np.float64], products: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the terms of least squares, those with the wrong sign as 0, and the covariance of all."""
    use = [i for i in range(len(products)) if squares[i, i] > 0]
    errors: NDArray[np.float64] | None = None
    while True:
        solved = np.zeros(len(products))
        inverse = np.zeros(squares.shape)
        if use:
            part = squares[np.ix_(use, use)]
            scale = np.sqrt(np.diag(part))
            normed = np.linalg.inv(part / np.outer(scale, scale) + _TINY * np.eye(len(use)))
            inverse[np.ix_(use, use)] = normed / np.outer(scale, scale)
            solved = inverse @ products
        errors = inverse if errors is None else errors
        wrong = [i for i in use if solved[i] < 0]
        if not wrong or len(use) == 1:
            return solved, errors
        use.remove(max(wrong))
