"""The last Frame an exporter got, and what of it may still be shown."""

from __future__ import annotations

from typing import NamedTuple

from gpuidle.agent.model import Frame
from gpuidle.exporters.catalogue import MetricPoints, points
from gpuidle.exporters.histograms import HistogramPoints, histogram_points

STALE_AFTER_S = 10.0
STOPPED_AFTER_S = 60.0


class Latest(NamedTuple):
    """The last Frame and when it came (CLOCK_MONOTONIC)."""

    frame: Frame
    received_ns: int

    def age_s(self, now_ns: int) -> float:
        """Return the age in seconds."""
        return max(0, now_ns - self.received_ns) / 1e9

    def stale(self, now_ns: int) -> bool:
        """Return whether the values of the moment are too old to be shown.

        The limit is 10 s, or three intervals of the source where that is more.
        """
        return self.age_s(now_ns) > max(STALE_AFTER_S, 3 * self.frame.interval_ns / 1e9)

    def stopped(self, now_ns: int) -> bool:
        """Return whether frames have stopped, so that the process should be started again.

        The limit is 60 s, or three intervals of the source where that is more. The first Frame does not tell
        the interval: after it alone nothing is said to have stopped.
        """
        interval_s = self.frame.interval_ns / 1e9
        return interval_s > 0 and self.age_s(now_ns) > max(STOPPED_AFTER_S, 3 * interval_s)


def frame_points(latest: Latest | None, now_ns: int) -> list[MetricPoints | HistogramPoints]:
    """Return the metrics of the last Frame; of a stale one the counters and histograms only."""
    if latest is None:
        return []
    found = _points_of(latest.frame)
    if latest.stale(now_ns):
        return [entry for entry in found if entry.metric.kind in {"counter", "histogram"}]
    return found


_newest: tuple[Frame, list[MetricPoints | HistogramPoints]] | None = None
"""Both exporters show the same Frame: its points are found once."""


def _points_of(frame: Frame) -> list[MetricPoints | HistogramPoints]:
    global _newest  # noqa: PLW0603 - one assignment, atomic; a race costs time only
    newest = _newest
    if newest is None or newest[0] is not frame:
        newest = _newest = (frame, [*points(frame), *histogram_points(frame)])
    return newest[1]
