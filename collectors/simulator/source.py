"""The simulator as a Source: Snapshots in real time after a history, or as fast as they are taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from gpuidle.agent.clock import Clock, Instant
from gpuidle.agent.model import Snapshot
from gpuidle.collectors.simulator.node import Visible, simulate
from gpuidle.collectors.simulator.scenario import SECOND_NS, Scenario


class SimulatorSource:
    """Implements `ports.Source` over a scenario.

    The simulation begins `warm_up_ns` before the first Snapshot is asked for, so that a viewer has a history
    at once: the Snapshots of that time come without waiting, the later ones when they are due by `clock`.
    With `paced` off none waits; the clock is then asked for the start alone.
    """

    def __init__(
        self,
        scenario: Scenario,
        clock: Clock,
        *,
        visible: Visible = Visible(),  # noqa: B008 - frozen
        tick_ns: int = SECOND_NS,
        warm_up_ns: int = 0,
        paced: bool = True,
    ) -> None:
        self._scenario = scenario
        self._clock = clock
        self._visible = visible
        self._tick_ns = tick_ns
        self._warm_up_ns = warm_up_ns
        self._paced = paced
        self._closed = False
        self._sleeper: asyncio.Future[None] | None = None

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield Snapshots until the scenario ends or the source is closed.

        Raises:
            ScenarioError: the scenario cannot be, or draws a request that never fits the KV cache.
        """
        now = self._clock.now()
        # A machine that has just booted has no time before its monotonic clock's zero.
        history_ns = min(self._warm_up_ns, now.monotonic_ns)
        start = Instant(*(moment - history_ns for moment in now))
        for snapshot, _truth in simulate(
            self._scenario, visible=self._visible, tick_ns=self._tick_ns, start=start
        ):
            if self._paced and snapshot.monotonic_ns > now.monotonic_ns:
                await self._sleep_until(snapshot.monotonic_ns)
            else:
                await asyncio.sleep(0)  # others of the loop get their turn
            if self._closed:
                return
            yield snapshot

    async def close(self) -> None:
        """Stop yielding, at once: a Snapshot that is waited for is not given any more."""
        self._closed = True
        if self._sleeper is not None:
            self._sleeper.cancel()

    async def _sleep_until(self, due_ns: int) -> None:
        self._sleeper = asyncio.ensure_future(self._clock.sleep_until(due_ns))
        try:
            await asyncio.wait({self._sleeper})
            if not self._closed:
                self._sleeper.result()
        finally:
            self._sleeper.cancel()
            self._sleeper = None
