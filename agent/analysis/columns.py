"""Columns of series that follow each other in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.model import CounterSeries, StepSeries


def whole(series: Sequence[StepSeries] | Sequence[CounterSeries], name: str) -> NDArray[Any]:
    """Return a column of all the series in one; that of a single one is not copied.

    Every series must have it. Most windows lie in one series, and copies are dear where rows are few.
    """
    only: NDArray[Any]
    if len(series) == 1:
        only = getattr(series[0], name)
        return only
    return np.concatenate([getattr(each, name) for each in series])


def known(series: Sequence[StepSeries] | Sequence[CounterSeries], name: str) -> bool:
    """Whether every one of the series has the column."""
    if len(series) == 1:
        return getattr(series[0], name) is not None
    return all(getattr(each, name) is not None for each in series)
