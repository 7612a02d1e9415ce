"""What the analyzer keeps of each engine and each GPU between snapshots. Bounded by the windows kept."""

from __future__ import annotations

from collections import deque

import msgspec

from gpuidle.agent.analysis.fastphase import Levels
from gpuidle.agent.analysis.hostgap import HostGap
from gpuidle.agent.analysis.lag import LagTrack
from gpuidle.agent.analysis.links import LinkFit
from gpuidle.agent.analysis.localpace import LocalPace
from gpuidle.agent.analysis.pace import DecodePace
from gpuidle.agent.analysis.pipeclue import PipeClue
from gpuidle.agent.analysis.rates import PromptSizes, Sums
from gpuidle.agent.analysis.reclaim import Known
from gpuidle.agent.analysis.referee import Claims
from gpuidle.agent.analysis.zeros import Zeros
from gpuidle.agent.model import (
    CAUSES,
    ESTIMABLE,
    PHASES,
    CounterSeries,
    Durations,
    EngineReading,
    GpuReading,
    Problem,
    Rung,
    Shares,
    StepSeries,
)

NOTHING = Shares(window_ns=0)


class Settled(msgspec.Struct, frozen=True):
    """One settled window of a GPU, for trailing integrals. Times in ns of the window, bytes, FLOPs."""

    end_ns: int
    observed_ns: int
    active_ns: float | None
    tensor_cycles_ns: float | None
    """Tensor-active time at the sheet's clock."""
    sm_ns: float | None
    dram_bytes: float | None
    useful_ns: tuple[float, float, float] | None
    """Low, estimate, high: useful FLOPs over the dense peaks, in ns."""
    bound_ns: float | None
    """What the roofline allows for the window's work."""


class GpuTrack(msgspec.Struct):
    """One device."""

    reading: GpuReading
    """The last one; static facts only once the device is lost."""
    last_seen_ns: int
    causes_total_ns: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    phases_total_ns: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    causes_ns: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    estimated: tuple[str, ...] = ()
    estimated_total_ns: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(ESTIMABLE, 0))
    window_ns: int = 0
    shares: Shares = NOTHING
    rung: Rung = "nvml"
    trailing: deque[Settled] = msgspec.field(default_factory=deque)
    useful_debt_ns: float = 0.0
    """Useful time booked by tokens that the pipe had not room for in their windows."""
    decode_pipe_ratio: float | None = None
    """Tensor-active share of busy time in windows that were decode alone."""
    prompt_rate_ns: tuple[float, float] = (0.0, 0.0)
    """Useful time of prompts, and the time in steps that contained them; what is old fades."""
    prompt_talk_ratio: float = 0.0
    """Time of the messages that a prompt's tokens add, to their useful time."""
    reclaimable_total_ns: int | None = None
    gains: Known = {}
    levels: Levels = msgspec.field(default_factory=Levels)
    counters: deque[CounterSeries] = msgspec.field(default_factory=deque)
    counted_ns: int | None = None
    """End of the last sample; None: no fast counter was seen."""
    sample_ns: int = 0
    """Width of the last sample."""
    zeros: Zeros = msgspec.field(default_factory=Zeros)
    claims: deque[Claims] = msgspec.field(default_factory=deque)
    """Of the trailing window, where one engine is on the device."""
    verdicts: tuple[Problem, ...] = ()
    judged_ns: int = 0
    judged_of: tuple[str, str | None, int | None] | None = None
    lag: LagTrack = msgspec.field(default_factory=LagTrack)
    lag_ns: float = 0.0
    """By how much the counters' clock is taken to be ahead of the engine's; 0 while that is not clear."""
    links: LinkFit = LinkFit()
    """How long messages between ranks take over what they usually do."""


class EngineTrack(msgspec.Struct):
    """One engine."""

    reading: EngineReading
    """The last one."""
    last_seen_ns: int
    counted: EngineReading | None = None
    """The last one with counters."""
    last_sums: Sums | None = None
    cadence_ns: int = 0
    """Time between its last two readings with counters: ten ticks where only the whole page is given."""
    sums: deque[Sums] = msgspec.field(default_factory=deque)
    """Windows that are not settled yet, late prompts given back."""
    sizes: PromptSizes = msgspec.field(default_factory=PromptSizes)
    prefix: deque[tuple[int, int, int]] = msgspec.field(default_factory=deque)
    """(end_ns, queries, hits) of the trailing window."""
    prefix_last: tuple[int, int] | None = None
    steps: deque[StepSeries] = msgspec.field(default_factory=deque)
    step_ranks: set[str] = msgspec.field(default_factory=set)
    """Cores that gave steps."""
    cores: dict[str, EngineTrack] = {}
    """By core, where the engine is data-parallel: each is settled as an engine of its own."""
    pace: DecodePace = msgspec.field(default_factory=DecodePace)
    local: LocalPace = msgspec.field(default_factory=LocalPace)
    pipe: PipeClue = msgspec.field(default_factory=PipeClue)
    pace_ns: float | None = None
    """Time of a decode-only step in the last settled window that told it."""
    gap: HostGap = msgspec.field(default_factory=HostGap)
    prompt_token_ns: float | None = None
    """Time of a prompt token in chunks that ran alone."""
    shares: Shares = NOTHING
    steps_total: dict[str, int] = {}
    step_durations: dict[str, Durations] = {}
    prefill_total: int | None = None
    decode_total: int | None = None
    draft_total: int | None = None
    accepted_total: int | None = None
    preemptions_total: int | None = None
    flops_total: float | None = None
    estimates: deque[tuple[int, float]] = msgspec.field(default_factory=lambda: deque(maxlen=64))
    """(read_ns, FLOPs per GPU) of the engine's own estimate, the latest ones."""


class Pending(msgspec.Struct, frozen=True):
    """A window between two snapshots that waits for late tokens and for the steps after it."""

    start_ns: int
    end_ns: int
    observed_ns: int
    gpus: dict[str, GpuReading] | None
    """Readings at its end; None: no GPU source answered."""
    busy_before: dict[str, float]
    """The driver's busy shares at its start."""
    engines: dict[str, EngineReading]
