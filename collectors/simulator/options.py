"""What a simulated node may have beside its requests: speculation, pipelines, slow clocks, faults.

All of it is off unless a scenario says otherwise, and then nothing changes by a bit. Times are nanoseconds
since the start of the simulation. Everything random is drawn from the scenario's seed, by streams of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from gpuidle.agent.model import Cause, ClockEvent

SECOND_NS = 1_000_000_000


class ScenarioError(ValueError):
    """A scenario that cannot be: the message names the engine or GPU and what does not fit."""


class Speculation(msgspec.Struct, frozen=True):
    """Drafts that the model verifies: each decoding sequence brings k of them, and so k + 1 rows a step.

    A step that hands out a token drafts for the next one. Prompts are computed without. What is accepted
    beyond a request's last token is thrown away, but counted as accepted, as vLLM counts it.
    """

    acceptance: tuple[float, ...]
    """By position: the chance that a draft is accepted once those before it were. Its length is k."""
    draft_config: Mapping[str, object] | None = None
    """config.json of the draft model, which runs k times at the end of a step; None: drafts cost no time on
    the GPU (n-grams). Its work is executed and never useful."""
    draft_launch_ns: int = 50_000
    """Launches of one pass of the draft model."""

    def __post_init__(self) -> None:
        if not self.acceptance or not all(0 <= chance <= 1 for chance in self.acceptance):
            raise ScenarioError(f"speculation needs a chance from 0 to 1 for each draft: {self.acceptance}")


class Straggler(msgspec.Struct, frozen=True):
    """One rank of a tensor-parallel group whose kernels take longer; its peers spin in the collective."""

    rank: int
    """Place in `EngineSpec.gpus`."""
    slower: float
    """At least 1: how many times as long its kernels take."""

    def __post_init__(self) -> None:
        if self.slower < 1 or self.rank < 0:
            raise ScenarioError(f"a straggler is a rank that is slower: {self}")


class Handover(msgspec.Struct, frozen=True):
    """A prefill engine's requests go on in a decode engine, once their KV has been moved there.

    The prefill engine makes one token. The decode engine gets the KV of the prompt but for its last token,
    which it computes again, and makes all tokens, as vLLM's connectors do.
    """

    engine: str
    """Name of the decode engine."""
    bytes_per_s: float = 20e9
    """At which the KV moves."""
    latency_ns: int = 2_000_000

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.latency_ns < 0:
            raise ScenarioError(f"a handover takes time: {self}")


class ClockSpell(msgspec.Struct, frozen=True):
    """A time in which a GPU's SM clock is not the sheet's, with the reason that the driver tells."""

    gpu: int
    clock_ratio: float
    """Of the sheet clock. Compute is slower by it, memory is not."""
    event: ClockEvent = "sw_thermal"
    start_ns: int = 0
    stop_ns: int | None = None

    def __post_init__(self) -> None:
        if not 0.1 <= self.clock_ratio <= 1.2:
            raise ScenarioError(f"a clock is 0.1 to 1.2 of the sheet's: {self}")

    def holds(self, at_ns: int) -> bool:
        """Whether the clock is this at `at_ns`."""
        return self.start_ns <= at_ns and (self.stop_ns is None or at_ns < self.stop_ns)


def throttle_of(event: str) -> Cause:
    """Return the cause under which the ledger books a slow clock with this reason."""
    if event in ("power_cap", "hw_power_brake"):
        return "throttled_power"
    return "throttled_thermal" if event in ("sw_thermal", "hw_thermal") else "throttled_other"


CounterColumn = Literal[
    "gr_active",
    "sm_active",
    "tensor_active",
    "dram_read_bytes_per_s",
    "dram_write_bytes_per_s",
    "sm_clock_hz",
]


class BadCounter(msgspec.Struct, frozen=True):
    """Fast counters that lie: dead ones read 0, frozen ones repeat the last value before `start_ns`."""

    kind: Literal["dead", "frozen"] = "dead"
    columns: tuple[CounterColumn, ...] = ("tensor_active",)
    gpu: int | None = None
    """None: all of them."""
    start_ns: int = 0
    stop_ns: int | None = None


class MissingSamples(msgspec.Struct, frozen=True):
    """Samples of the fast counters that are not there, each by chance."""

    share: float
    """Of the samples, 0 to 1; 1: a hole."""
    gpu: int | None = None
    start_ns: int = 0
    stop_ns: int | None = None


class CounterClock(msgspec.Struct, frozen=True):
    """The fast counters' clock is not the engine's: samples are stamped too late, more so every second."""

    lag_ns: int = 0
    """Negative: too early."""
    drift_ppm: float = 0.0
    gpu: int | None = None


class LostSteps(msgspec.Struct, frozen=True):
    """Steps that are not in the stream of exact steps, each by chance."""

    share: float
    engine: str | None = None
    """None: of every engine."""
    told: bool = True
    """Whether the reader knows how many were lost (`StepSeries.lost`)."""
    start_ns: int = 0
    stop_ns: int | None = None


class LateTokens(msgspec.Struct, frozen=True):
    """The engine's own counters are so much behind its steps: a busy front end."""

    late_ns: int
    engine: str | None = None


class Restart(msgspec.Struct, frozen=True):
    """An engine dies with all its requests and comes back as another process, its counters at 0.

    Requests that come before it serves again are refused. The work of the step that died is executed and
    not useful: padding.
    """

    engine: str
    at_ns: int
    gone_ns: int = 3 * SECOND_NS
    """Without a process."""
    loading_ns: int = 10 * SECOND_NS
    """Then, with its memory taken, before it serves."""

    @property
    def back_ns(self) -> int:
        """When it serves again."""
        return self.at_ns + self.gone_ns + self.loading_ns


Fault = BadCounter | MissingSamples | CounterClock | LostSteps | LateTokens | Restart
