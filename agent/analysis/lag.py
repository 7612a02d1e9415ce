"""The lag of a GPU's fast counters behind the engine's steps: estimated from what both show of one load.

Counters are stamped by the GPU or its library, steps by the engine: the two clocks are a constant apart (a
fit that is off, a buffer, a step's end that the host sees late) and drift. For a lag t the counters should
show, up to gain and offset, the time in steps and the tokens a second of the steps, integrated over each
sample moved by t. With white noise on each channel the logarithm of the likelihood is

    L(t) = -n/2 sum over channels of log(1 - r(t)^2),   r: correlation of samples and prediction.

Steps that repeat exactly make L repeat as well: then the lag is known up to a period only, and none is told.
Integrals are exact for any t, so the maximum is found to a part of a sample.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.model import CounterSeries, StepSeries

Floats = NDArray[np.float64]

WIDEST_NS = 10_000_000
"""Samples wider than this hold several steps; windows stay windows."""
REACH_NS = 100_000_000
MOST_REACH = 64
"""Lags are looked for up to this many samples, or REACH_NS, on both sides."""
SAMPLES = 3000
FEWEST_SAMPLES = 250
EXPLAINED = 0.10
"""Of the counters' variance, what the steps must explain at least."""
RIVAL = 0.07
"""A lag that leaves less than this much more of the variance unexplained (as a logarithm) is as good."""
PLACE_NS = 500_000
"""How far apart lags are tried; a sample is cut into two at least."""
FRACTION = 1.5
"""As much more may a lag leave at such a place than at the one between two where its minimum lies."""
CANDIDATES = 6
WIDEST_PEAK = 8
"""Places on each side that may be as good as the best one."""
AGREE_SAMPLES = 1.0
DRIFT = 200e-6
"""The fastest that two clocks of a machine are taken to drift apart."""
AGAIN_NS, LATER_NS = 3 * 10**9, 120 * 10**9
"""When the lag is estimated again: soon at first, then twice as late each time, as the line through the
estimates reaches further. It costs some milliseconds."""
COVERED = 0.98
FORGET_NS = 600 * 10**9


class Estimate(msgspec.Struct, frozen=True):
    """One estimate: counters show at `t + lag_ns` what the engine says of `t`."""

    at_ns: int
    lag_ns: float
    error_ns: float
    """Half of the range of lags that are about as good."""


def estimate(
    steps: Sequence[StepSeries], counters: Sequence[CounterSeries], start_ns: int, end_ns: int
) -> Estimate | None:
    """Return the lag by the data of [start_ns, end_ns); None: too little of it, no likeness, or ambiguous."""
    rows = [s for s in counters if len(s)]
    steps = [s for s in steps if len(s)]
    if not rows or not steps:
        return None
    width = int(np.median(rows[0].width_ns))
    if width > WIDEST_NS:
        return None
    reach = _reach(width)
    begin = max(start_ns, int(steps[0].start_ns[0]) + reach * width)
    end = min(end_ns, begin + SAMPLES * width, int(steps[-1].end_ns[-1]) - reach * width)
    samples = _samples(rows, begin, end)
    steps = [s for s in steps if s.end_ns[-1] > begin - reach * width and s.start_ns[0] < end + reach * width]
    if not steps or samples is None or samples.count * width < COVERED * (end - begin):
        return None
    knots, expected = _expected(steps)
    channels = [(m, sums) for name, m in samples.seen.items() if (sums := expected.get(name)) is not None]
    if not channels:
        return None

    def at(lag: float) -> float:
        moved = np.stack([samples.start, samples.end]) - lag * width
        return sum(_left(m, np.diff(np.interp(moved, knots, sums), axis=0)[0]) for m, sums in channels)

    # As if all samples were as wide as most are: good enough to find where peaks may be.
    # Gaps between steps are short: in a wide sample only a small part of it away from the lag do they match.
    fine = max(2, round(width / PLACE_NS))
    coarse = np.zeros(fine * (2 * reach + 1))
    for part in range(fine):
        wide = samples.start[0] + width * (np.arange(-reach, samples.count + reach + 1) - part / fine)
        left = sum(_left_at_lags(m, np.diff(np.interp(wide, knots, sums))) for m, sums in channels)
        # Place i has the prediction begin i - reach samples after the counters: a lag of reach - i samples.
        coarse[part::fine] = np.asarray(left)[::-1]
    if coarse.min() > 0.5 * math.log(1 - EXPLAINED):
        return None
    found = sorted(_refined(at, place / fine - reach, 1 / fine) for place in _candidates(coarse))
    if not found or found[0][0] > math.log(1 - EXPLAINED):
        return None
    (best, lag), rivals = found[0], found[1:]
    if any(left <= best + RIVAL and abs(other - lag) > 1 for left, other in rivals):
        return None
    breadth = _breadth(coarse, fine * reach + round(fine * lag))
    if breadth is None:
        return None
    return Estimate((begin + end) // 2, lag * width, breadth * width / fine)


def _reach(width_ns: int) -> int:
    return min(MOST_REACH, max(8, REACH_NS // width_ns))


def _candidates(coarse: Floats) -> list[int]:
    """Return the minima that may be the best one at a fraction of a sample, the most likely first."""
    inner = coarse[1:-1]
    places = 1 + np.flatnonzero((inner <= coarse[:-2]) & (inner <= coarse[2:]))
    likely = places[coarse[places] <= coarse.min() + FRACTION]
    return [int(place) for place in likely[np.argsort(coarse[likely], kind="stable")][:CANDIDATES]]


def _breadth(coarse: Floats, place: int) -> float | None:
    """Return how far from a minimum lags are about as good, in places; None: too far to be of use."""
    if not WIDEST_PEAK < place < len(coarse) - 1 - WIDEST_PEAK:
        return None
    near = coarse[place - WIDEST_PEAK : place + WIDEST_PEAK + 1] <= coarse[place] + RIVAL
    if near[0] or near[-1]:
        return None
    as_good = np.flatnonzero(near) - WIDEST_PEAK
    return max(0.5, float(np.abs(as_good).max()))


class _Samples(msgspec.Struct, frozen=True):
    """Counters between two moments; `seen` is normal, by the quantity that the steps tell of it."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    seen: dict[str, Floats]

    @property
    def count(self) -> int:
        return len(self.end)


def _samples(rows: Sequence[CounterSeries], start_ns: int, end_ns: int) -> _Samples | None:
    rows = [s for s in rows if s.end_ns[-1] > start_ns and s.end_ns[0] - s.width_ns[0] < end_ns]
    if not rows:
        return None
    end = np.concatenate([s.end_ns for s in rows])
    start = end - np.concatenate([s.width_ns for s in rows])
    first, last = int(np.searchsorted(start, start_ns)), int(np.searchsorted(end, end_ns, side="right"))
    if last - first < FEWEST_SAMPLES:
        return None
    found: dict[str, Floats] = {}
    for name, column in (("busy", "gr_active"), ("tokens", "tensor_active")):
        values = [getattr(s, column) for s in rows]
        if any(value is None for value in values):
            continue
        means = np.concatenate(values)[first:last].astype(np.float64)
        spread = float(means.std())
        if spread > 1e-3 * float(means.mean()):
            found[name] = (means - means.mean()) / spread
    return _Samples(start[first:last], end[first:last], found)


def _expected(steps: Sequence[StepSeries]) -> tuple[NDArray[np.int64], dict[str, Floats]]:
    """Return the edges of the steps and the sums up to each of busy time and of tokens computed."""
    start = np.concatenate([s.start_ns for s in steps])
    end = np.concatenate([s.end_ns for s in steps])
    knots = np.stack([start, end], axis=1).ravel()

    def sums(amounts: NDArray[np.int64]) -> Floats:
        total = np.cumsum(amounts).astype(np.float64)
        return np.stack([total - amounts, total], axis=1).ravel()

    found = {"busy": sums(end - start)}
    if all(s.prefill_tokens is not None and s.decode_tokens is not None for s in steps):
        prefill = np.concatenate([s.prefill_tokens for s in steps if s.prefill_tokens is not None])
        decode = np.concatenate([s.decode_tokens for s in steps if s.decode_tokens is not None])
        found["tokens"] = sums(prefill + decode)
    return knots, found


def _left_at_lags(measured: Floats, predicted: Floats) -> Floats:
    """Return log(1 - r^2) for each place of the samples in the longer prediction; `measured` is normal."""
    count = len(measured)
    products = np.correlate(predicted, measured, "valid") / count
    first = np.append(0.0, np.cumsum(predicted))
    second = np.append(0.0, np.cumsum(predicted**2))
    mean = (first[count:] - first[:-count]) / count
    spread = np.sqrt(np.maximum(0.0, (second[count:] - second[:-count]) / count - mean**2))
    flat = spread <= 1e-3 * np.abs(mean)
    like = np.divide(products, spread, out=np.zeros(len(products)), where=~flat)
    left: Floats = np.log(np.maximum(1e-6, 1.0 - np.clip(like, 0.0, 1.0) ** 2))
    return left


def _left(measured: Floats, predicted: Floats) -> float:
    """Return log(1 - r^2) of samples and prediction one by one; `measured` is normal."""
    mean = float(predicted.mean())
    around = predicted - mean
    square = float(around @ around)
    if square <= (1e-3 * mean) ** 2 * len(predicted):
        return 0.0
    like = float(measured @ around) / math.sqrt(square * len(predicted))
    return math.log(max(1e-6, 1.0 - min(1.0, max(0.0, like)) ** 2))


def _refined(at: Callable[[float], float], lag: float, place: float) -> tuple[float, float]:
    """Return what the best lag within a place of `lag` leaves, and that lag in samples.

    Halves of a place, then the parabola through three of them.
    """
    lags = [lag + place * half / 2 for half in range(-2, 3)]
    values = [at(each) for each in lags]
    low = min(range(1, len(lags) - 1), key=lambda i: values[i])
    before, middle, after = values[low - 1 : low + 2]
    bend = before - 2 * middle + after
    shift = 0.0 if bend <= 0 else max(-1.0, min(1.0, 0.5 * (before - after) / bend))
    return min(values), lags[low] + place / 2 * shift


class LagTrack:
    """The lag of one GPU's counters as windows settle. It is removed only once estimates agree."""

    def __init__(self) -> None:
        self._known: deque[Estimate] = deque(maxlen=8)
        self._odd: Estimate | None = None
        """The last one, where it agrees with none before it."""
        self._due_ns = 0
        self._pause_ns = AGAIN_NS
        self.width_ns = 0
        """Of a sample; 0: nothing was tried yet."""

    def learn(self, steps: Sequence[StepSeries], counters: Sequence[CounterSeries], start_ns: int) -> None:
        """Estimate the lag from `start_ns` on, if that is due; `counters` are of one rung."""
        if start_ns < self._due_ns or not counters or not steps:
            return
        width_ns = int(counters[-1].width_ns[-1])
        if width_ns > WIDEST_NS:
            return
        self.width_ns = width_ns
        found = estimate(steps, counters, start_ns, start_ns + (SAMPLES + 1) * self.width_ns)
        if self._known and start_ns - self._known[-1].at_ns > FORGET_NS:
            self._known.clear()
        if found is not None:
            self._take(found)
        if self.clear or found is None:
            self._pause_ns = min(LATER_NS, 2 * self._pause_ns)
        else:
            self._pause_ns = AGAIN_NS
        self._due_ns = start_ns + self._pause_ns

    def _take(self, found: Estimate) -> None:
        if self._known and self._agree(self._known[-1], found):
            self._known.append(found)
            self._odd = None
        elif self._odd is not None and self._agree(self._odd, found):
            self._known.clear()  # the clocks were set, or the first estimates were wrong
            self._known.extend((self._odd, found))
            self._odd = None
        elif self._known:
            self._odd = found
        else:
            self._known.append(found)

    def _agree(self, one: Estimate, other: Estimate) -> bool:
        drift_ns = DRIFT * abs(other.at_ns - one.at_ns)
        allowed = AGREE_SAMPLES * self.width_ns + one.error_ns + other.error_ns + drift_ns
        return abs(one.lag_ns - other.lag_ns) <= allowed

    @property
    def clear(self) -> bool:
        """Whether two estimates in a row agree and none has disagreed since."""
        return len(self._known) >= 2 and self._odd is None

    def at(self, moment_ns: int) -> tuple[float, float] | None:
        """Return the lag at a moment and its error, ns; None while it is not clear.

        From four estimates on a line through them follows the drift, if they lie on one.
        """
        if not self.clear:
            return None
        lags = np.array([each.lag_ns for each in self._known])
        errors = float(np.median([each.error_ns for each in self._known]))
        if len(lags) < 4:
            return float(lags[-1]), errors
        middle = float(np.median(lags))
        times = np.array([(each.at_ns - self._known[-1].at_ns) / 1e9 for each in self._known])
        slope, level = np.polyfit(times, lags, 1)
        off_line = float(np.abs(lags - level - slope * times).max())
        if off_line > 0.3 * float(np.abs(lags - middle).max()) or abs(slope) > DRIFT * 1e9:
            return middle, errors  # they scatter: there is no drift to see
        ahead = (moment_ns - self._known[-1].at_ns) / 1e9
        return float(level + slope * ahead), errors

    @property
    def reach_ns(self) -> int:
        """How far lags are looked for: what is not clear may be off by this much."""
        return _reach(self.width_ns) * self.width_ns if self.width_ns else 0
