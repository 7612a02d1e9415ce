"""What a device reaches in practice, learned from steps as they pass.

A step takes overhead + a x (memory seconds at the sheet's bandwidth) where memory binds it, and overhead +
b x (compute seconds at the sheet's peak) where compute does. Three numbers, fitted by least squares with
exponential forgetting; those that the steps seen do not determine stay unknown.
"""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

_CLEAR = 2.0
"""A step counts for one side only where that side takes this many times the other's seconds."""
_WELL_POSED = 1e-4


class Reachable(msgspec.Struct, frozen=True):
    """The fit: shares of the sheet's figures, and seconds a step. None: not determined yet.

    While the overhead is None it could not be told apart, and the shares contain it: they are lower bounds.
    """

    bandwidth_share: float | None
    peak_share: float | None
    overhead_s: float | None
    steps: float
    """Effective number of steps behind the fit."""


class ReachableFit(msgspec.Struct, frozen=True, eq=False):
    """Sums of least squares in the order overhead, memory, compute. Immutable: `observe` returns anew."""

    memory: float = 2000.0
    """Steps after which a step's weight has fallen to 1/e."""
    _squares: NDArray[np.float64] | None = None
    _products: NDArray[np.float64] | None = None
    _steps: float = 0.0

    def observe(self, memory_s: object, compute_s: object, seconds: object) -> ReachableFit:
        """Take in steps: their bounds at the sheet's figures, and the seconds they took (> 0)."""
        m = np.atleast_1d(np.asarray(memory_s, dtype=np.float64))
        c = np.atleast_1d(np.asarray(compute_s, dtype=np.float64))
        t = np.atleast_1d(np.asarray(seconds, dtype=np.float64))
        memory_bound, compute_bound = m > _CLEAR * c, c > _CLEAR * m
        used = (memory_bound | compute_bound) & (t > 0)
        if not used.any():
            return self
        rows = np.stack([np.ones_like(t), np.where(memory_bound, m, 0), np.where(compute_bound, c, 0)])[
            :, used
        ]
        count = rows.shape[1]
        # relative errors matter: each row is divided by its own time
        rows, target = rows / t[used], np.ones(count)
        age = np.exp(-np.arange(count - 1, -1, -1) / self.memory)
        squares, products = (rows * age) @ rows.T, (rows * age) @ target
        fade = float(np.exp(-count / self.memory))
        if self._squares is not None and self._products is not None:
            squares, products = squares + fade * self._squares, products + fade * self._products
        return replace(
            self, _squares=squares, _products=products, _steps=float(age.sum()) + fade * self._steps
        )

    def result(self) -> Reachable:
        """Solve for what is determined. A negative overhead is set to 0 and the rest fitted again."""
        if self._squares is None or self._products is None:
            return Reachable(None, None, None, 0.0)
        squares, products = self._squares, self._products
        seen = [index for index in (1, 2) if squares[index, index] > 0]
        solved = _solve(squares, products, [0, *seen])
        overhead = solved.get(0)
        if overhead is None or overhead < 0:
            overhead = None if overhead is None else 0.0
            solved = _solve(squares, products, seen)
        shares = [1 / solved[index] if solved.get(index, 0) > 0 else None for index in (1, 2)]
        return Reachable(shares[0], shares[1], overhead, self._steps)


def _solve(squares: NDArray[np.float64], products: NDArray[np.float64], which: list[int]) -> dict[int, float]:
    """Solve the normal equations of these unknowns; nothing where they are (nearly) dependent."""
    part = squares[np.ix_(which, which)]
    scale = np.sqrt(np.diag(part))
    normed = part / np.outer(scale, scale)
    if not which or np.linalg.eigvalsh(normed)[0] < _WELL_POSED:
        return {}
    values = np.linalg.solve(normed, products[which] / scale) / scale
    return {index: float(value) for index, value in zip(which, values, strict=True)}
