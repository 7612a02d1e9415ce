"""Engines that share their GPUs: kernels of n contexts take turns, so each of n steps at once runs at 1/n.

Turns are far shorter than steps, so a step that runs beside others makes even progress. Every nanosecond of
the GPU belongs to one of the steps: their parts of a stretch are whole numbers that sum to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpuidle.agent.model import Cause, Phase
from gpuidle.collectors.simulator.batch import Step, apportion
from gpuidle.collectors.simulator.costs import STEP_CAUSES
from gpuidle.collectors.simulator.engine import Engine
from gpuidle.collectors.simulator.truth import Split, phase_of, work_causes


class Stretch(NamedTuple):
    """A time in which the same steps ran on the GPU."""

    start_ns: int
    end_ns: int
    parts: tuple[tuple[Step, int], ...]
    """Steps and their own ns in it; none: the GPU was idle."""
    idle: Cause


class Sharing:
    """The engines of one set of GPUs, driven together, and the split of the GPUs' time."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._now_ns = 0
        self._left: dict[int, int] = {}
        """By step: the work that is left."""
        self._causes: dict[int, list[int]] = {}
        """By step: the causes of that work."""

    def advance(self, until_ns: int) -> tuple[list[list[Step]], Split]:
        """Run until `until_ns`: steps that ended, by engine, and where the time of each GPU went."""
        done: list[list[Step]] = [[] for _ in self._engines]
        phases: dict[Phase, int] = {}
        causes: dict[Cause, int] = {}

        def add(phase: Phase, cause: Cause, ns: int) -> None:
            if ns:
                phases[phase] = phases.get(phase, 0) + ns
                causes[cause] = causes.get(cause, 0) + ns

        while True:
            stretch = self._stretch(until_ns)
            for step, ns in stretch.parts:
                for cause, part in zip(STEP_CAUSES, self._take(step, ns), strict=True):
                    add(phase_of(step), cause, part)
            if not stretch.parts:
                add("idle", stretch.idle, stretch.end_ns - stretch.start_ns)
            ended = self._complete(done)
            if self._now_ns == until_ns and not ended:
                return done, Split(phases, causes)

    def _stretch(self, until_ns: int) -> Stretch:
        """Go on to the next moment at which something begins or ends."""
        now_ns = self._now_ns
        pending = [step for engine in self._engines if (step := engine.peek(until_ns)) is not None]
        running = [step for step in pending if step.start_ns <= now_ns]
        moments = [until_ns]
        for step in pending:
            moments += [t for t in (step.ready_ns, step.start_ns) if t > now_ns]
        for step in running:
            self._left.setdefault(id(step), step.cost.active_ns)
            self._causes.setdefault(id(step), work_causes(step.cost))
        if running:
            moments.append(now_ns + len(running) * min(self._left[id(step)] for step in running))
        end_ns = min(moments)
        parts = []
        each, more = divmod(end_ns - now_ns, max(1, len(running)))
        for place, step in enumerate(running):
            own = each + (place < more)
            self._left[id(step)] -= own
            step.pieces = [*step.pieces, (now_ns, end_ns, own)] if own else step.pieces
            parts.append((step, own))
        ready = any(step.ready_ns <= now_ns for step in pending)
        self._now_ns = end_ns
        return Stretch(now_ns, end_ns, tuple(parts), "host_gap" if ready else "no_request")

    def _complete(self, done: list[list[Step]]) -> bool:
        ended = False
        for engine, steps in zip(self._engines, done, strict=True):
            step = engine.pending
            if step is not None and self._left.get(id(step)) == 0:
                ended = True
                step.end_ns = self._now_ns
                del self._left[id(step)], self._causes[id(step)]
                engine.complete(step)
                steps.append(step)
        return ended

    def _take(self, step: Step, ns: int) -> list[int]:
        left = self._causes[id(step)]
        taken = apportion(left, ns) if ns else [0] * len(left)
        self._causes[id(step)] = [whole - part for whole, part in zip(left, taken, strict=True)]
        return taken
