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
    """Samples pooled to what looks like one step: between dips of activity and jumps of the intensity."""

    GAP = 0.985
    """A sample with less activity holds a gap between steps."""
    JUMP = 0.5
    """Change of x from two samples to the next two that begins another step without a gap."""

    def __init__(self, tensor: Floats, dram: Floats, active: Floats, width_ns: NDArray[np.int64]) -> None:
        count = len(tensor)
        gap = active < self.GAP
        first = np.ones(count, dtype=np.bool_)
        first[1:] = gap[1:] | gap[:-1]
        if count > 4:
            first |= self._jumps(tensor, dram)
        self.of_sample = np.cumsum(first) - 1
        self.begin = np.flatnonzero(first)

        def total(values: Floats | NDArray[np.int64]) -> Floats:
            found: Floats = np.add.reduceat(values.astype(np.float64), self.begin)
            return found

        self.width_ns = total(width_ns)
        self.busy_ns = total(active * width_ns)
        self.moved = total(dram * width_ns)
        """DRAM traffic, in nanoseconds of its peak."""
        share = np.maximum(self.busy_ns, ACTIVE_RATIO * self.width_ns)
        self.tensor, self.dram = total(tensor * width_ns) / share, self.moved / share
        self.x = intensity(self.tensor, self.dram)
        self.samples = np.diff(np.append(self.begin, count)).astype(np.float64)
        self.usable = self.busy_ns >= ACTIVE_RATIO * self.width_ns
        # A gap in a sample of its own lies between steps; where samples are as long as steps each holds one.
        whole = ~gap[self.begin]
        self.step = self.usable.copy()
        """Not only a gap between two."""
        self.step[1:-1] &= whole[1:-1] | ~(whole[:-2] & whole[2:])
        self.alone = np.zeros(len(whole), dtype=np.bool_)
        """Between two gaps: one step, of which their samples hold the ends."""
        self.alone[1:-1] = whole[1:-1] & ~whole[:-2] & ~whole[2:]
        ends = np.where(whole, 0.0, self.moved) / 2
        self.moved_in_step = self.moved.copy()
        self.moved_in_step[1:] += ends[:-1]
        self.moved_in_step[:-1] += ends[1:]

    def _jumps(self, tensor: Floats, dram: Floats) -> NDArray[np.bool_]:
        pairs = intensity((tensor[1:] + tensor[:-1]) / 2, (dram[1:] + dram[:-1]) / 2)
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
    WITHIN = 0.25
    """Beyond the last dense bin by no more is decode."""
    EQUAL, EQUAL_SAMPLE = 0.05, 0.2
    """Segments as far apart in x are equals: for long ones, and more for one sample of noise."""
    BRIGHT = 0.0
    """A decode with more tensor than DRAM is not one: runs of it may have prefills between them."""
    RUN, SURE_RUN = 3, 4
    """Equals that make a run, and that are decode wherever it was so far."""
    OUTGROWN, OUTGROWN_SAMPLE = 0.1, 1.0
    """By how much the logarithm of a step's DRAM traffic stands out of the decodes around it if it has a
    prompt: of a long step, and more for one of one sample. With experts a small prompt reads more of them,
    and its step is no brighter than a decode."""
    SIZED_SAMPLES = 4
    """Shorter steps tell no size."""
    EDGE_SAMPLES = 2
    """A segment of no more samples, between the two classes, may hold both."""
    APART = 0.05
    """Squared relative distance of the two classes from which on such a segment tells what fills it."""
    SEVERAL_NS = 100e6
    """A level that stays for so long is a run where no gaps are seen: a step that is not dense reads each
    byte of the memory about once, which takes less."""

    def __init__(self) -> None:
        self._runs = np.zeros(self.BINS)
        """DRAM traffic by x, of segments in runs of equals: as much as they have steps, dense or not."""
        # Sums of x and its busy seconds; what is published counts as half a second and a second.
        self._decode = (0.5 * START_DECODE, 0.5)
        self._prefill = (START_PREFILL, 1.0)

    def classify(
        self,
        tensor: Floats,
        dram: Floats,
        active: Floats,
        width_ns: NDArray[np.int64],
        inside: NDArray[np.bool_],
    ) -> Labels:
        """Label each sample; those inside are learned for good, the later ones for this time only."""
        parts = Segments(tensor, dram, active, width_ns)
        middle = (self._decode[0] / self._decode[1] + self._prefill[0] / self._prefill[1]) / 2
        run = self._run_lengths(parts)
        equal = parts.step & ((run >= self.RUN) | (parts.width_ns > self.SEVERAL_NS))
        now = inside[parts.begin]
        seen = now | (parts.begin > np.argmax(inside))
        edge = self._edge(self._with(parts, equal & seen, parts.step & seen), middle)
        self._runs = self._with(parts, equal & now, parts.step & now)
        decode = parts.x <= edge + self.WITHIN
        self._learn(parts, parts.step & now, decode)
        decode |= (run >= self.SURE_RUN) & (parts.x < middle)
        decode[self._outgrown(parts, decode)] = False
        label = np.where(parts.usable, np.where(decode, -1, 1), 0).astype(np.int8)
        found: Labels = self._halved(parts, label)[parts.of_sample]
        return found

    def _run_lengths(self, parts: Segments) -> NDArray[np.int64]:
        """Return how many equals in a row each segment belongs to; what is bright is passed over."""
        found = np.zeros(len(parts.x), dtype=np.int64)
        place = np.flatnonzero(parts.step & (parts.x < self.BRIGHT))
        x, samples = parts.x[place], parts.samples[place]
        near = self.EQUAL + self.EQUAL_SAMPLE / np.sqrt(np.minimum(samples[1:], samples[:-1]))
        run = np.cumsum(np.append(True, np.abs(np.diff(x)) >= near)[: len(x)])
        found[place] = np.bincount(run)[run] if len(x) else 0
        return found

    def _outgrown(self, parts: Segments, decode: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the steps that moved more than decodes on both sides; prompts may come in pairs."""
        place = np.flatnonzero(decode & parts.alone & (parts.samples >= self.SIZED_SAMPLES))
        if len(place) < 5:
            return place[:0]
        size, samples = np.log(parts.moved_in_step[place]), parts.samples[place]
        lesser, shorter = np.minimum(size[1:], size[:-1]), np.minimum(samples[1:], samples[:-1])
        usual = np.maximum(lesser[:-3], lesser[3:])
        least = self.OUTGROWN + self.OUTGROWN_SAMPLE / np.minimum(shorter[:-3], shorter[3:])
        found: NDArray[np.int64] = place[2:-2][size[2:-2] > usual + least]
        return found

    def _with(self, parts: Segments, equal: NDArray[np.bool_], seen: NDArray[np.bool_]) -> Floats:
        """Return the histogram with the segments in it and the older ones faded."""
        place = np.clip((parts.x[equal] - self.LOWEST) / self.BIN, 0, self.BINS - 1).astype(np.int64)
        past = np.exp(-parts.busy_ns[seen].sum() / 1e9 / MEMORY_S)
        found: Floats = self._runs * past + np.bincount(place, parts.moved[equal] / 1e9, self.BINS)
        return found

    def _learn(self, parts: Segments, seen: NDArray[np.bool_], decode: NDArray[np.bool_]) -> None:
        seconds = parts.busy_ns / 1e9
        here, there = seen & decode, seen & ~decode
        self._decode = _moved(self._decode, parts.x[here], seconds[here])
        self._prefill = _moved(self._prefill, parts.x[there], seconds[there])

    def _edge(self, runs: Floats, middle: float) -> float:
        """Return the highest x that runs of equals reach below the middle of the two classes."""
        below = int((min(middle, SURE_PREFILL) - self.LOWEST) / self.BIN)
        smooth = np.convolve(runs, np.ones(3), "same")[:below]
        if not smooth.any():
            return min(middle, SURE_DECODE)
        dense = np.flatnonzero(smooth >= self.DENSE * smooth.max())
        return self.LOWEST + self.BIN * float(dense[-1] + 1)

    def _halved(self, parts: Segments, label: Labels) -> Labels:
        """Label a sample between the two classes by which of its neighbours fills more of it.

        Both counters tell the share, each weighed by how far apart the classes are in it.
        """
        left_decodes = label[:-2] < 0
        reached, whole = np.zeros(len(left_decodes)), np.zeros(len(left_decodes))
        for level in (parts.tensor, parts.dram):
            decode = np.where(left_decodes, level[:-2], level[2:])
            apart = np.where(left_decodes, level[2:], level[:-2]) - decode
            weight = 1 / ((level[:-2] + level[2:]) / 2 + FLOOR_RATIO) ** 2
            reached += weight * apart * (level[1:-1] - decode)
            whole += weight * apart**2
        between = (label[:-2] * label[2:] < 0) & (whole > self.APART)
        between &= (parts.samples[1:-1] <= self.EDGE_SAMPLES) & parts.usable[1:-1]
        found = label.copy()
        alike = (label[:-2] == label[2:]) & ~parts.step[1:-1] & parts.usable[1:-1]
        found[1:-1][alike] = label[:-2][alike]
        found[1:-1][between] = np.where(2 * reached > whole, 1, -1)[between]
        return found


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
    DECODE_BELOW, PREFILL_ABOVE = 0.17, 0.6
    DRAM_RESTS = 0.3

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
