"""What the ladder asks of a counter rung: series of counters, and for each device why there are none.

A rung knows one way to read hardware counters (GPM, a dcgm-exporter, CUPTI). It gathers in a thread or a
process of its own and hands over what it has when it is asked, so that a slow source never delays a tick.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from gpuidle.agent.model import CounterSeries, GpuReading, Problem, Rung

RungState = Literal["serving", "starting", "unsupported", "refused", "busy", "lost", "failed", "dead"]
"""How a rung stands with one device.

- serving: series come.
- starting: nothing is wrong, and no whole window has been seen yet.
- unsupported: this device or driver cannot do it, whatever the user does.
- refused: a right or a setting is missing; `remedy` names it.
- busy: another tool holds the counters.
- lost: it worked, and now the source is silent (gone, hanging, restarting).
- failed: the source answers, and not as it should; `message` has its words.
- dead: the source answers with numbers that another counter contradicts. Only the ladder says this.
"""


class RungStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How one rung stands with one device; `message` and `remedy` as in a Problem, empty while it serves."""

    rung: Rung
    hw_id: str
    state: RungState
    message: str = ""
    remedy: str = ""


class RungReading(msgspec.Struct, frozen=True, kw_only=True):
    """What a rung gathered since it was last asked."""

    series: tuple[CounterSeries, ...] = ()
    """At most one a device, in order of time; a sample is handed over once."""
    status: tuple[RungStatus, ...] = ()
    """One row for each device asked for."""
    problems: tuple[Problem, ...] = ()
    """What is to be told besides the status: readings thrown away, samples lost."""


class CounterRung(Protocol):
    """One way to read hardware counters. It starts to gather when it is first asked."""

    @property
    def name(self) -> Rung:
        """Its rung."""
        ...

    def read(self, now_ns: int, devices: Sequence[GpuReading]) -> RungReading:
        """Hand over what was gathered for `devices`, at once (some milliseconds), whatever the source does.

        `now_ns` is CLOCK_MONOTONIC and `end_ns` of the series is of the same clock. `devices` are those that
        are there at this tick: GPUs without instances, and MIG instances (`parent_hw_id` is set) without
        their parents. A device that is new is taken up, one that is gone is let go of. Never raises for
        what a source did.
        """
        ...

    def close(self) -> None:
        """Stop gathering and let go of the source, within a second; called once, from the reading thread."""
        ...
