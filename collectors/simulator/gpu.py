"""What the hardware of a simulated node would tell: fast counters, power and energy, from the steps.

Every quantity is the integral of something that is constant within a step and within a gap, so a counter
over any stretch is a difference of two integrals, exact however steps and samples lie. Noise is put on the
fast counters alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.model import RATIO_STEP, CounterSeries, GpuProcess, GpuReading, Rung, column, rate_column
from gpuidle.agent.physics.peaks import DevicePeaks
from gpuidle.collectors.simulator.batch import Step
from gpuidle.collectors.simulator.clocks import Clocks
from gpuidle.collectors.simulator.scenario import SECOND_NS, GpuSpec

Floats = NDArray[np.float64]

START_ENERGY_JOULES = 1_000_000.0
"""What the card had used before the simulation began."""

COUNTER_NOISE = 0.01
"""Standard deviation of the relative error of a fast counter."""

ATTENTION_SHARE = 0.3
ATTENTION_PIPE = 0.5
ATTENTION_BYTES = 1.3
"""A layer as fast counters see it: its first part computes less and moves more than the rest."""


class Integrals(NamedTuple):
    """Integrals since the start of the simulation, one row a moment."""

    active_ns: Floats
    """With work on the GPU."""
    resident_ns: Floats
    """With a warp on the SMs."""
    pipe_ns: Floats
    """Tensor pipe busy."""
    read_bytes: Floats
    write_bytes: Floats
    power_ns: Floats
    """Share of the range from loaded idle to the power limit, times its duration."""
    capped_ns: Floats
    """Share by which a power cap lowered the clock, times its duration."""


class Timeline:
    """The integrals of one engine's steps on one of its GPUs; keeps `keep_ns` of history."""

    def __init__(self, keep_ns: int, layers: int = 1, rank: int = 0) -> None:
        self._keep_ns = keep_ns
        self._rank = rank
        self._layers = layers
        self._steps: list[Step] = []
        self._base = np.zeros(len(Integrals._fields))
        """Of the steps that were forgotten."""
        self._knots: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self._sums: Floats = np.zeros((1, len(self._base)))
        self._asked: dict[bytes, Integrals] = {}
        """Answers of this tick: the ranks of one engine ask the same."""

    def advance(self, steps: Sequence[Step], pending: Step | None, until_ns: int) -> None:
        """Take the steps that ended by `until_ns`, and the one that is under way."""
        self._asked.clear()
        self._steps.extend(steps)
        oldest_ns = until_ns - self._keep_ns
        gone = 0
        while gone < len(self._steps) and self._steps[gone].end_ns <= oldest_ns:
            gone += 1
        if gone:
            self._base = self._base + self._amounts(self._steps[:gone]).sum(axis=0)
            del self._steps[:gone]
        known = self._steps if pending is None else [*self._steps, pending]
        ends = self._base + np.cumsum(self._amounts(known), axis=0)
        # Two knots a segment: what had been reached stands at its start as well.
        pieces = [piece for step in known for piece in step.segments(self._rank)]
        self._knots = np.array([t for piece in pieces for t in piece[:2]], dtype=np.int64)
        self._sums = np.empty((2 * len(pieces), len(self._base)))
        self._sums[1::2] = ends
        self._sums[0::2] = np.vstack([self._base[None, :], ends[:-1]])[: len(pieces)]

    def _amounts(self, steps: Sequence[Step]) -> Floats:
        rows = []
        for step in steps:
            cost = step.on(self._rank)
            whole = (
                cost.active_ns,
                cost.resident_ns,
                cost.pipe_ns,
                cost.read_bytes,
                cost.write_bytes,
                cost.power_share * cost.active_ns,
                (1.0 - cost.capped_ratio) * cost.active_ns,
            )
            rows += [[part * value for value in whole] for _, _, part in step.segments(self._rank)]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(Integrals._fields))

    def fine(self, moments: NDArray[np.int64]) -> Integrals:
        """Return the integrals with the layers in them: attention moves bytes, the rest of a layer computes.

        Over whole layers nothing changes; within one the first ATTENTION_SHARE of it has ATTENTION_PIPE times
        the mean use of the pipe and ATTENTION_BYTES times that of DRAM.
        """
        base = self.at(moments)
        if not len(self._knots):
            return base
        step = np.searchsorted(self._knots, moments, side="right") - 1
        inside = (step >= 0) & (step % 2 == 0) & (step < len(self._knots) - 1)
        step = np.where(inside, step, 0)
        begin, end = self._knots[step], self._knots[np.minimum(step + 1, len(self._knots) - 1)]
        layers = np.maximum(1, self._layers)
        place = np.where(inside, (moments - begin) / np.maximum(1, end - begin) * layers % 1.0, 0.0)
        amounts = (self._sums[np.minimum(step + 1, len(self._knots) - 1)] - self._sums[step]) / layers

        def swing(early: float) -> Floats:
            late = (1 - early * ATTENTION_SHARE) / (1 - ATTENTION_SHARE)
            first = np.minimum(place, ATTENTION_SHARE)
            return first * early + (place - first) * late - place

        return base._replace(
            pipe_ns=base.pipe_ns + amounts[:, 2] * swing(ATTENTION_PIPE),
            read_bytes=base.read_bytes + amounts[:, 3] * swing(ATTENTION_BYTES),
        )

    def at(self, moments: NDArray[np.int64]) -> Integrals:
        """Return the integrals at these moments, which lie within the history."""
        if not len(self._knots):
            return Integrals(*(np.full(len(moments), value) for value in self._base))
        key = moments.tobytes()
        known = self._asked.get(key)
        if known is None:
            known = Integrals(*(np.interp(moments, self._knots, sums) for sums in self._sums.T))
            self._asked[key] = known
        return known


class Sampling(msgspec.Struct, frozen=True):
    """Fast counters: where they are said to come from, and how often."""

    rung: Rung
    hz: float
    noise: float = COUNTER_NOISE
    """Standard deviation of the relative error of tensor and DRAM."""

    @property
    def period_ns(self) -> int:
        """Width of one sample."""
        return round(SECOND_NS / self.hz)


class Card:
    """One GPU of the node. `timelines` are of its engines: none, one, or those that share it."""

    def __init__(
        self,
        index: int,
        spec: GpuSpec,
        peaks: DevicePeaks,
        timelines: Sequence[Timeline],
        *,
        clocks: Clocks,
        seed: int,
    ) -> None:
        self.hw_id = f"GPU-{(0x51D10000 + 256 * seed + index) & 0xFFFFFFFF:08x}-0000-4000-8000-{index:012x}"
        self._index = index
        self._spec = spec
        self._peaks = peaks
        self._timelines = timelines
        self._clocks = clocks
        self._sm_clock_hz = int(peaks.sheet_clock_hz or spec.sm_clock_max_hz)
        self._rng = np.random.default_rng((seed & 0xFFFFFFFF, index))
        self._sampled_ns = 0

    def reading(self, now_ns: int, base_ns: int, processes: tuple[GpuProcess, ...]) -> GpuReading:
        """Return what the driver says at `now_ns` of the simulation, which began at `base_ns`.

        `busy_ratio` is of the last second and in whole percents, as NVML gives it; power is the mean of
        that second; energy is exact, in whole millijoules. `memory_busy_ratio` reads 1.6 times the
        bandwidth, as observed on real cards: it is not bandwidth.
        """
        spec = self._spec
        second_ago = max(0, now_ns - SECOND_NS)
        passed_ns = max(1, now_ns - second_ago)
        capped = 0.0
        if not self._timelines:
            busy = memory_busy = 0.0
            energy = spec.bare_watts * now_ns / SECOND_NS
            watts = spec.bare_watts
        else:
            then = _added(
                [each.at(np.array([second_ago, now_ns], dtype=np.int64)) for each in self._timelines]
            )
            capped = float(then.capped_ns[1] - then.capped_ns[0]) / passed_ns
            busy = float(then.active_ns[1] - then.active_ns[0]) / passed_ns
            moved = float(then.read_bytes[1] - then.read_bytes[0] + then.write_bytes[1] - then.write_bytes[0])
            memory_busy = min(1.0, 1.6 * moved / (self._peaks.memory_bytes_per_s * passed_ns / SECOND_NS))
            span = spec.power_limit_watts - spec.loaded_watts
            energy = (spec.loaded_watts * now_ns + span * float(then.power_ns[1])) / SECOND_NS
            watts = spec.loaded_watts + span * float(then.power_ns[1] - then.power_ns[0]) / passed_ns
        clock = self._clocks.at(self._index, now_ns)
        events: tuple[str, ...] = () if busy else ("gpu_idle",)
        events += (clock.event,) if clock.event else ()
        events += ("power_cap",) if capped else ()
        return GpuReading(
            hw_id=self.hw_id,
            index=self._index,
            name=spec.name,
            read_ns=base_ns + now_ns,
            compute_capability=spec.compute_capability,
            memory_total_bytes=spec.memory_total_bytes,
            memory_used_bytes=sum(process.used_memory_bytes or 0 for process in processes),
            power_watts=round(watts, 3),
            power_limit_watts=spec.power_cap_watts or spec.power_limit_watts,
            energy_joules=round(START_ENERGY_JOULES + energy, 3),
            temperature_celsius=float(round(30 + 40 * watts / spec.power_limit_watts)),
            sm_clock_hz=round(self._sm_clock_hz * clock.ratio * (1.0 - capped)),
            sm_clock_max_hz=spec.sm_clock_max_hz,
            memory_clock_hz=spec.memory_clock_hz,
            memory_clock_max_hz=spec.memory_clock_hz,
            copy_bytes_per_s=None
            if spec.copied_bandwidth_ratio is None
            else spec.copied_bandwidth_ratio * self._peaks.memory_bytes_per_s,
            clock_events=events,
            busy_ratio=round(busy, 2),
            memory_busy_ratio=round(memory_busy, 2),
            processes=processes,
        )

    def samples(self, sampling: Sampling, until_ns: int, base_ns: int) -> CounterSeries | None:
        """Return the samples that ended since the last call and by `until_ns`; None: there are none."""
        width = sampling.period_ns
        first = self._sampled_ns // width
        last = until_ns // width
        if last <= first:
            return None
        edges = np.arange(first, last + 1, dtype=np.int64) * width
        self._sampled_ns = int(edges[-1])
        count = len(edges) - 1
        if not self._timelines:
            passed = Integrals(*np.zeros((len(Integrals._fields), count)))
        else:
            passed = Integrals(*map(np.diff, _added([each.fine(edges) for each in self._timelines])))
        live = self._clocks.mean(self._index, edges) * (1.0 - passed.capped_ns / width)
        noise = sampling.noise
        pipe_noise = self._rng.normal(1.0, noise, count)
        dram_noise = self._rng.normal(1.0, noise, count) * (SECOND_NS / width)
        return CounterSeries(
            hw_id=self.hw_id,
            rung=sampling.rung,
            end_ns=column(edges[1:] + base_ns, "i8"),
            width_ns=column(np.full(count, width), "i8"),
            gr_active=_ratio(passed.active_ns / width),
            sm_active=_ratio(passed.resident_ns / width),
            tensor_active=_ratio(passed.pipe_ns / width * pipe_noise),
            dram_read_bytes_per_s=rate_column(passed.read_bytes * dram_noise),
            dram_write_bytes_per_s=rate_column(passed.write_bytes * dram_noise),
            sm_clock_hz=rate_column(float(self._sm_clock_hz) * live),
        )


def _added(parts: Sequence[Integrals]) -> Integrals:
    """Return what several engines did together."""
    return parts[0] if len(parts) == 1 else Integrals(*(sum(sums) for sums in zip(*parts, strict=True)))


def _ratio(values: Floats) -> NDArray[np.uint16]:
    ratios: NDArray[np.uint16] = column(np.rint(np.clip(values, 0.0, 1.0) / RATIO_STEP), "u2")
    return ratios
