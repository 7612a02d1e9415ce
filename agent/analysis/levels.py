"""What one GPU's counters show in decode and in steps that contain a prefill, learned as samples pass.

Both classes are told apart by intensity, x = log(tensor / DRAM). What decode looks like here is not known
beforehand: its batch, its contexts and the rows that fill up tiles move it by a factor of five. But its steps
come in runs of equals, and steps with a prompt do not, or they compute so much that the roofline leaves no
doubt. Samples shorter than steps are pooled to the steps they lie in; longer ones are mixtures.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Labels = NDArray[np.int8]
"""1 contains a prefill, -1 decode, 0 unknown."""

ACTIVE_RATIO = 0.2
"""Less of a sample with work on the GPU says nothing about the work."""
LONG_NS = 15e6
"""Samples from here on often hold several steps."""
MEMORY_S = 15.0
"""After this much busy time what was learned from a sample has fallen to 1/e."""
FLOOR_RATIO = 0.003
"""Added to both activities before the logarithm: counters near 0 are mostly rounding."""
SURE_DECODE, SURE_PREFILL = -0.62, 0.41
"""Intensities at 35 and 60 % of tensor in tensor + DRAM: below the one a sample is no dense prefill,
above the other it is one, whatever was seen before."""
START_DECODE, START_PREFILL = -1.39, 1.16
"""Levels before any was seen: published decode and prefill efficiencies of H100 and A100."""


def intensity(tensor: Floats, dram: Floats) -> Floats:
    """Return log(tensor / DRAM) of two activities in shares of their peaks."""
    found: Floats = np.log((tensor + FLOOR_RATIO) / (dram + FLOOR_RATIO))
    return found


class Segments:
    """Samples pooled to what looks like one step: between dips of activity and jumps of the tensor pipe."""

    GAP = 0.985
    """A sample with less activity holds a gap between steps."""
    JUMP = 0.5
    """Change of log(tensor) from two samples to the next two that begins another step without a gap."""

    def __init__(self, tensor: Floats, dram: Floats, active: Floats, width_ns: NDArray[np.int64]) -> None:
        count = len(tensor)
        gap = active < self.GAP
        first = np.ones(count, dtype=np.bool_)
        first[1:] = gap[1:] | gap[:-1]
        if count > 4:
            first |= self._jumps(tensor)
        self.of_sample = np.cumsum(first) - 1
        begin = np.flatnonzero(first)

        def total(values: Floats | NDArray[np.int64]) -> Floats:
            found: Floats = np.add.reduceat(values.astype(np.float64), begin)
            return found

        self.width_ns = total(width_ns)
        self.busy_ns = total(active * width_ns)
        share = np.maximum(self.busy_ns, ACTIVE_RATIO * self.width_ns)
        self.tensor = total(tensor * width_ns) / share
        self.x = intensity(self.tensor, total(dram * width_ns) / share)
        self.samples = np.diff(np.append(begin, count))
        self.whole = ~gap[begin]
        """Without a gap inside."""
        self.usable = self.busy_ns >= ACTIVE_RATIO * self.width_ns

    def _jumps(self, tensor: Floats) -> NDArray[np.bool_]:
        pairs = np.log(tensor[1:] + tensor[:-1] + 2 * FLOOR_RATIO)
        change = np.zeros(len(tensor) + 1)
        change[2:-2] = np.abs(pairs[2:] - pairs[:-2])
        here = change[:-1]
        sharp: NDArray[np.bool_] = (here > self.JUMP) & (here >= change[1:])
        sharp[1:] &= here[1:] >= here[:-1]
        return sharp


class ShortSamples:
    """Labels samples shorter than LONG_NS: decode ends where runs of equal segments end."""

    BIN = 0.05
    LOWEST, BINS = -6.0, 240
    DENSE = 0.08
    """A bin belongs to decode if it holds this share of the fullest one."""
    DECODE_WITHIN, PREFILL_BEYOND = 0.2, 0.3
    """Distance from the last dense bin; between the two is unknown."""
    EQUAL, EQUAL_SAMPLE = 0.08, 0.2
    """Segments as far apart in x are equals: for long ones, and more for one sample of noise."""
    EDGE_SAMPLES = 2
    """A segment of no more samples, between the two classes, may hold both."""
    SEVERAL_NS = 100e6
    """A level that stays for so long is a run where no gaps are seen: a step that is not dense reads each
    byte of the memory about once, which takes less."""

    def __init__(self) -> None:
        self._runs = np.zeros(self.BINS)
        """Busy seconds by x, of segments in runs of equals."""
        # Sums of x and its busy seconds; what is published counts as half a second and a second.
        self._decode = (0.5 * START_DECODE, 0.5)
        self._prefill = (START_PREFILL, 1.0)
        self._tail = np.zeros((2, 0))
        """x and samples of the last two segments."""

    def classify(self, tensor: Floats, dram: Floats, active: Floats, width_ns: NDArray[np.int64]) -> Labels:
        """Label each sample and learn from it."""
        parts = Segments(tensor, dram, active, width_ns)
        edge = self._learn(parts)
        label = np.where(
            parts.x > edge + self.PREFILL_BEYOND, 1, np.where(parts.x <= edge + self.DECODE_WITHIN, -1, 0)
        )
        label[~parts.usable] = 0
        found: Labels = self._halved(parts, label.astype(np.int8))[parts.of_sample]
        return found

    def _halved(self, parts: Segments, label: Labels) -> Labels:
        """Label a sample between the two classes by which of its neighbours fills more of it."""
        before, after = label[:-2], label[2:]
        here, left, right = parts.tensor[1:-1], parts.tensor[:-2], parts.tensor[2:]
        decode, prefill = np.where(before < 0, left, right), np.where(before < 0, right, left)
        between = (before * after < 0) & (decode < prefill)
        between &= (parts.samples[1:-1] <= self.EDGE_SAMPLES) & parts.usable[1:-1]
        found = label.copy()
        found[1:-1][between] = np.where(2 * here > decode + prefill, 1, -1)[between]
        return found

    def _learn(self, parts: Segments) -> float:
        """Take the segments in and return where decode ends."""
        # A gap in a sample of its own lies between steps; where samples are as long as steps each holds one.
        alone = ~parts.whole
        alone[1:] &= parts.whole[:-1]
        alone[:-1] &= parts.whole[1:]
        kept = parts.usable & ~alone
        x, seconds = parts.x[kept], parts.busy_ns[kept] / 1e9
        equal = self._in_runs(x, parts.width_ns[kept], parts.samples[kept].astype(np.float64))
        self._runs *= np.exp(-seconds.sum() / MEMORY_S)
        place = np.clip((x - self.LOWEST) / self.BIN, 0, self.BINS - 1).astype(np.int64)
        self._runs += np.bincount(place[equal], seconds[equal], self.BINS)
        edge = self._edge()
        decode = x <= edge + self.DECODE_WITHIN
        self._decode = _moved(self._decode, x[decode], seconds[decode])
        self._prefill = _moved(self._prefill, x[~decode], seconds[~decode])
        return edge

    def _in_runs(self, x: Floats, width_ns: Floats, samples: Floats) -> NDArray[np.bool_]:
        """Say which segments belong to three or more equals, the last of the window before included."""
        before = self._tail.shape[1]
        x_all, size = np.concatenate([self._tail, np.stack([x, samples])], axis=1)
        self._tail = np.stack([x_all[-2:], size[-2:]])
        near = self.EQUAL + self.EQUAL_SAMPLE / np.sqrt(np.minimum(size[1:], size[:-1]))
        same = np.abs(np.diff(x_all)) < near
        three = same[1:] & same[:-1]
        found = np.zeros(len(x_all), dtype=np.bool_)
        for shift in range(3):
            found[shift : shift + len(three)] |= three
        return (width_ns > self.SEVERAL_NS) | found[before:]

    def _edge(self) -> float:
        """Return the highest x that runs of equals reach below the middle of the two classes."""
        middle = (self._decode[0] / self._decode[1] + self._prefill[0] / self._prefill[1]) / 2
        below = int((min(middle, SURE_PREFILL) - self.LOWEST) / self.BIN)
        smooth = np.convolve(self._runs, np.ones(3), "same")[:below]
        if not smooth.any():
            return min(middle, SURE_DECODE)
        dense = np.flatnonzero(smooth >= self.DENSE * smooth.max())
        return self.LOWEST + self.BIN * float(dense[-1] + 1)


def _moved(sums: tuple[float, float], x: Floats, seconds: Floats) -> tuple[float, float]:
    seen = float(seconds.sum())
    past = float(np.exp(-seen / MEMORY_S))
    return sums[0] * past + float(x @ seconds), sums[1] * past + seen


PERCENTS = 132
"""Bins of one per cent of the peak: all that a counter can say."""


def _faded(seconds_by_percent: Floats, values: Floats, seconds: Floats) -> Floats:
    """Return the histogram with the values in it and the older ones faded."""
    place = np.clip(values * 100, 0, PERCENTS - 1).astype(np.int64)
    past = np.exp(-seconds.sum() / MEMORY_S)
    found: Floats = seconds_by_percent * past + np.bincount(place, seconds, PERCENTS)
    return found


class LongSamples:
    """Labels samples that hold several steps by the share of a prefill in them.

    With T of a sample, T_d of decode and T_p of a dense prefill, a share of (T - T_d) / (T_p - T_d) is the
    least that contains a prefill: small prompts reach less than T_p. Dense prefills rest DRAM as well; a
    sample that does not is a decode of many rows, or holds small prompts: unknown.
    """

    DECODE_QUANTILE, PREFILL_QUANTILE, DRAM_QUANTILE = 0.2, 0.9, 0.7
    """Of samples that are no dense prefill, of the rest, of DRAM in the former: where nearly all are mixtures
    these are the purest."""
    DECODE_BELOW, PREFILL_ABOVE = 0.2, 0.6
    DRAM_RESTS = 0.2

    def __init__(self) -> None:
        one = np.ones(1)
        none = np.zeros(PERCENTS)
        self._low = _faded(none, 0.15 * one, 0.05 * one)
        self._high = _faded(none, 0.42 * one, 0.3 * one)
        self._dram = _faded(none, 0.58 * one, 0.05 * one)

    def classify(self, tensor: Floats, dram: Floats, active: Floats, width_ns: NDArray[np.int64]) -> Labels:
        """Label each sample and learn from it."""
        usable = active >= ACTIVE_RATIO
        share = np.maximum(active, ACTIVE_RATIO)
        pipe, moved = tensor / share, dram / share
        seconds = active * width_ns / 1e9
        low = usable & (intensity(pipe, moved) < SURE_DECODE)
        high = usable & ~low
        self._low = _faded(self._low, pipe[low], seconds[low])
        self._high = _faded(self._high, pipe[high], seconds[high])
        self._dram = _faded(self._dram, moved[low], seconds[low])
        decode = _quantile(self._low, self.DECODE_QUANTILE)
        dense = _quantile(self._high, self.PREFILL_QUANTILE)
        least = (pipe - decode) / max(dense - decode, 0.05)
        rests = 1 - moved / _quantile(self._dram, self.DRAM_QUANTILE)
        contains = (least > self.PREFILL_ABOVE) & (rests > self.DRAM_RESTS)
        label = np.where(contains, 1, np.where((least < self.DECODE_BELOW) & low, -1, 0))
        label[~usable] = 0
        return label.astype(np.int8)


def _quantile(histogram: Floats, of: float) -> float:
    sums = np.cumsum(histogram)
    return (float(np.searchsorted(sums, of * sums[-1])) + 0.5) / 100
