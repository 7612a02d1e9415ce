"""What the counters read in each class of steps, at any rate of sampling, from steps with known boundaries.

A sample longer than a step holds a mixture. Whatever a counter integrates, a sample holds the sum over
the steps in it of their parts; with the integral of a step taken as a part per step and a part per nanosecond
(weights are read once a step, the pipe is busy in proportion to time) the parts of each class follow by least
squares. Means over the samples that hold one class alone would be of its longest steps only.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FEWEST_STEPS = 3
"""Of a class: less tells no part per step from one per nanosecond."""
ROOM = 2
"""Samples wanted for each unknown: fewer fit noise."""
KNOWN_RATIO = 0.02
"""A sample with more activity than its steps, by this share of its width, holds work of no known step."""


class ClassMean(msgspec.Struct, frozen=True):
    """A counter over all time of one class of steps."""

    mean: float
    error: float
    """Standard error, by the scatter of the samples around the fit."""


def class_means(
    start_ns: Ints,
    end_ns: Ints,
    classes: NDArray[np.bool_],
    sample_end_ns: Ints,
    sample_width_ns: Ints,
    active: Floats,
    values: Floats,
) -> tuple[ClassMean | None, ClassMean | None]:
    """Return the mean of a counter over the steps where `classes` is False, and over those where it is True.

    Steps are disjoint and in order; samples adjoin. `active` is the share of a sample with work on the GPU,
    `values` the counter's mean in it (a ratio or a rate). Samples with work of no known step are left out.
    None: too few steps of that class, or samples, to tell.
    """
    length = (end_ns - start_ns).astype(np.float64)
    edges = np.append(sample_end_ns - sample_width_ns, sample_end_ns[-1:])
    known = np.abs(active * sample_width_ns - _inside(start_ns, end_ns, length, edges)) <= (
        KNOWN_RATIO * sample_width_ns
    )
    wanted = [which for which in (~classes, classes) if which.sum() >= FEWEST_STEPS]
    if not wanted or known.sum() < ROOM * 2 * len(wanted):
        return None, None
    # A part per nanosecond, and one per step in units of a mean step, so that both weigh alike.
    parts = [
        np.where(which, part, 0.0)
        for which in wanted
        for part in (length, np.full_like(length, length.mean()))
    ]
    rows = np.stack([_inside(start_ns, end_ns, part, edges) for part in parts], axis=1)[known]
    target = (values * sample_width_ns)[known]
    inverse = np.linalg.pinv(rows.T @ rows, rcond=1e-12, hermitian=True)
    solved = inverse @ (rows.T @ target)
    left = target - rows @ solved
    scatter = float(left @ left) / max(1, len(target) - len(parts))
    found: list[ClassMean | None] = []
    for which in (~classes, classes):
        at = next((i for i, other in enumerate(wanted) if np.array_equal(other, which)), None)
        if at is None:
            found.append(None)
            continue
        weight = np.array([part.sum() if i // 2 == at else 0.0 for i, part in enumerate(parts)])
        weight /= length[which].sum()
        variance = scatter * float(weight @ inverse @ weight)
        found.append(ClassMean(float(weight @ solved), float(np.sqrt(max(0.0, variance)))))
    return found[0], found[1]


def _inside(start_ns: Ints, end_ns: Ints, amounts: Floats, edges: Ints) -> Floats:
    """Return how much of the steps' amounts, spread evenly over each, lies between each edge and the next."""
    knots = np.stack([start_ns, end_ns], axis=1).ravel()
    reached = np.cumsum(np.stack([np.zeros_like(amounts), amounts], axis=1).ravel())
    return np.diff(np.interp(edges, knots, reached))
