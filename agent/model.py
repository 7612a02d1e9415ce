"""The vocabulary: what was read (Snapshot), what was concluded (Frame), why something is absent (Problem).

Everything here is immutable. An absent value is `None`, never 0 and never NaN; each absence that a user
could mend has a Problem that says how. Units stand in the field names. Durations and tokens are integers,
so that sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 1
"""Version of Snapshot and Frame as they stand in files and in NDJSON."""

Phase = Literal["prefill", "decode", "mixed", "idle", "unknown"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "mixed", "idle", "unknown")

Cause = Literal[
    "useful",
    "padding",
    "throttled_power",
    "throttled_thermal",
    "throttled_other",
    "memory_bound",
    "communication",
    "latency",
    "host_gap",
    "no_request",
    "waiting_peer",
    "unallocated",
    "starting",
    "suspended",
    "foreign",
    "unattributed",
    "unobserved",
]
CAUSES: tuple[Cause, ...] = (
    "useful",
    "padding",
    "throttled_power",
    "throttled_thermal",
    "throttled_other",
    "memory_bound",
    "communication",
    "latency",
    "host_gap",
    "no_request",
    "waiting_peer",
    "unallocated",
    "starting",
    "suspended",
    "foreign",
    "unattributed",
    "unobserved",
)
ESTIMABLE: tuple[Cause, ...] = CAUSES[: CAUSES.index("unallocated")]
"""Causes that may be an estimate; the rest is read off the node or says that nothing is known."""

Evidence = Literal["measured", "estimated", "unknown"]
Rung = Literal["cupti_pm", "nvml_gpm", "dcgm", "nvml", "engine"]
RUNGS: tuple[Rung, ...] = ("cupti_pm", "nvml_gpm", "dcgm", "nvml", "engine")
Role = Literal["unified", "prefill", "decode"]
Basis = Literal["flops", "tensor_pipe"]
EngineState = Literal["starting", "serving", "asleep", "unobserved"]

RATIO_STEP = 2e-5
"""Size of one step of the ratios in a CounterSeries: uint16 covers 0 to 1.31."""

RATE_BITS = 16
"""Bits of mantissa that the rates in a CounterSeries keep: as fine as RATIO_STEP at full scale."""

ClockEvent = Literal[
    "gpu_idle",
    "applications_clocks",
    "power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
    "display_clocks",
    "board_limit",
    "reliability",
]
"""Why a GPU's clock is not at its maximum (NVML's clock event reasons)."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why something is absent or doubtful, and what would mend it.

    `source` is who says it ("nvml", "discovery", "vllm"), `kind` a stable word for programs, `subject` the
    `hw_id`, `engine_id` or address concerned ("" is the node itself).
    """

    source: str
    kind: str
    message: str
    remedy: str = ""
    subject: str = ""


CheckStatus = Literal["ok", "limited", "broken"]
"""ok: as good as it gets here. limited: a right, a setting or a place keeps something better away.
broken: what should work does not."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that `gpuidle doctor` looked at: what was found, and what would mend it.

    `id` is stable ("nvml.library"; docs/doctor.md lists them all), `subject` as in a Problem.
    """

    id: str
    subject: str = ""
    status: CheckStatus
    found: str
    remedy: str = ""


# --------------------------------------------------------------------------------------------------------
# Columns


def column(values: object, dtype: str) -> NDArray[Any]:
    """Return `values` as a C-contiguous, little-endian, read-only array of `dtype` (such as "<i8")."""
    array = np.ascontiguousarray(np.asarray(values, dtype=np.dtype(dtype).newbyteorder("<")))
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def rate_column(values: object) -> NDArray[np.float64]:
    """Return rates (>= 0) as a float64 column, rounded once to `RATE_BITS` bits after the leading one.

    The relative error is at most 2**-(RATE_BITS + 1) = 8e-6, below any counter's own; the bits cut off
    are noise that no compressor can take, and would double the size of a recording.
    """
    bits = np.array(values, dtype="<f8").reshape(-1).view(np.uint64)
    cut = np.uint64(52 - RATE_BITS)
    half = np.uint64(1) << (cut - np.uint64(1))
    rounded = ((bits + half) >> cut) << cut
    array: NDArray[np.float64] = rounded.view("<f8")
    array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False)
class StepSeries:
    """Forward passes of one engine core, one row a step, in order of `end_ns`.

    All columns are int64 of the same length, times in CLOCK_MONOTONIC nanoseconds; an unknown column is
    None. `start_ns` is max(submission, end of the step before), so that steps are disjoint.
    """

    engine_id: str
    source: str
    """Who saw the steps: "plugin", "fpm", "mmap", "uprobe", "counters", "simulator"."""
    exact: bool
    """Whether every column is exact (a forward-pass stream) or reconstructed."""
    lost: int
    """Steps known to be missing from this series."""
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    prefill_tokens: NDArray[np.int64] | None = None
    """Prompt tokens computed in the step, also those of a preempted request that are computed again."""
    decode_tokens: NDArray[np.int64] | None = None
    """Decode rows scheduled in the step (k+1 a sequence under speculation)."""
    delivered_tokens: NDArray[np.int64] | None = None
    """Tokens handed out by the step."""
    sequences: NDArray[np.int64] | None = None
    kv_tokens: NDArray[np.int64] | None = None
    """Tokens of context before the step's own, summed over the sequences."""
    draft_tokens: NDArray[np.int64] | None = None
    accepted_tokens: NDArray[np.int64] | None = None
    preemptions: NDArray[np.int64] | None = None
    recomputed_tokens: NDArray[np.int64] | None = None
    """Those of `prefill_tokens` that were computed before and lost to a preemption: not useful."""
    rank: str = field(default="0", kw_only=True)
    """The engine core (data-parallel rank) that made the steps, as in `EngineCounters.rank`."""

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.end_ns)


@dataclass(frozen=True, eq=False)
class CounterSeries:
    """Fast counters of one GPU, one row a sample.

    `end_ns` is CLOCK_MONOTONIC, `width_ns` the sample's own length. Ratios are uint16 in steps of
    `RATIO_STEP`, rates float64 of `rate_column`. An unknown column is None; an absent row is left out.
    """

    hw_id: str
    rung: Rung
    end_ns: NDArray[np.int64]
    width_ns: NDArray[np.int64]
    gr_active: NDArray[np.uint16] | None = None
    """Share of the sample with work on the GPU."""
    sm_active: NDArray[np.uint16] | None = None
    tensor_active: NDArray[np.uint16] | None = None
    """Share of cycles with the tensor pipe busy, at the clock of the moment."""
    dram_read_bytes_per_s: NDArray[np.float64] | None = None
    dram_write_bytes_per_s: NDArray[np.float64] | None = None
    dram_bytes_per_s: NDArray[np.float64] | None = None
    """Read and written together, from rungs that cannot tell the two apart."""
    sm_clock_hz: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.end_ns)


# --------------------------------------------------------------------------------------------------------
# What was read


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """The machine a session was read on."""

    hostname: str
    boot_id: str = ""
    gpuidle_version: str = ""
    simulated: bool = False
    """Whether the node exists only in the simulator: said on every screen."""


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds a context on a GPU."""

    pid: int
    """As the driver gives it: a PID of the host's namespace."""
    used_memory_bytes: int | None = None
    sm_busy_ratio: float | None = None
    """Share of the driver's last sample period with a kernel of this process resident. It is not load."""
    sm_busy_stale: bool = False
    """Whether `sm_busy_ratio` is an old sample: some drivers give what was true ten seconds ago."""


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """One device (a GPU, or a MIG instance of one) as its driver describes it, at `read_ns`."""

    hw_id: str
    """The driver's UUID, the only name that is stable and unique."""
    index: int
    name: str
    read_ns: int
    vendor: str = "nvidia"
    parent_hw_id: str | None = None
    instance_id: int | None = None
    """The driver's id of the GPU instance on its parent, for MIG instances; used again after it is gone."""
    driver_version: str | None = None
    compute_capability: str | None = None
    """Such as "9.0"."""
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    """Since the driver was loaded."""
    temperature_celsius: float | None = None
    sm_clock_hz: int | None = None
    sm_clock_max_hz: int | None = None
    memory_clock_hz: int | None = None
    memory_clock_max_hz: int | None = None
    copy_bytes_per_s: float | None = None
    """What a long copy reached on it, reads plus writes, when `calibrate` measured it; None: it never did."""
    clock_events: tuple[str, ...] | None = None
    """Why the clock is not at its maximum; see ClockEvent."""
    busy_ratio: float | None = None
    """Share of the driver's last sample period with a kernel resident. It is not load."""
    memory_busy_ratio: float | None = None
    """Share of that period in which memory was touched. It is not bandwidth."""
    processes: tuple[GpuProcess, ...] | None = None
    """None where they cannot be listed, and on a GPU that is split into instances, which have their own."""
    error_counts: dict[str, int] | None = None
    """Errors that the driver reported while gpuidle was watching, by kind ("xid_79", "ecc_double_bit")."""


class Parallelism(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine spreads a model; sizes of the groups."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine was told or tells of itself; None is not known."""

    max_batched_tokens: int | None = None
    """The token budget of a step (chunk budget)."""
    max_sequences: int | None = None
    kv_block_tokens: int | None = None
    kv_capacity_tokens: int | None = None
    dtype: str | None = None
    """Of the activations, as the engine names it ("bfloat16", "auto")."""
    kv_dtype: str | None = None
    quantization: str | None = None
    speculative: bool | None = None
    async_scheduling: bool | None = None
    """Whether the host prepares a step while the one before runs; False: it does so between them."""


class EngineCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one engine core (one data-parallel rank), at `read_ns`. Totals since its start.

    None: the engine does not tell, or was not asked in this reading.
    """

    rank: str
    """The engine's own label of the core ("0")."""
    read_ns: int
    prompt_tokens: int | None = None
    """Prompt tokens finished, cached ones included."""
    computed_prompt_tokens: int | None = None
    """Prompt tokens that were computed here (no prefix hit, no transfer)."""
    generated_tokens: int | None = None
    """Tokens handed out, the first of each request included."""
    first_tokens: int | None = None
    """Requests that got their first token: a prefill made it."""
    time_to_first_token_s: float | None = None
    """Sum over those requests."""
    inter_token_latency_s: float | None = None
    """Sum of the times between the tokens of a request, or between what its steps gave, over all of them."""
    counted_steps: int | None = None
    """Steps that the engine counted: those with output only."""
    steps_by_tokens: tuple[tuple[int, int], ...] | None = None
    """Of them, those of at most so many tokens: (tokens, steps) in rising order, a cumulative histogram. A
    step's tokens are those handed out and the whole prompts that it ended."""
    requests_running: int | None = None
    requests_waiting: int | None = None
    kv_usage_ratio: float | None = None
    prefix_query_tokens: int | None = None
    prefix_hit_tokens: int | None = None
    preemptions: int | None = None
    drafts: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    estimated_flops_per_gpu: float | None = None
    """The engine's own estimate; None where it is switched off."""
    asleep: bool | None = None


class EngineReading(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: its processes, what it serves, and its counters if it gave any at `read_ns`."""

    engine_id: str
    """Stable over restarts: made of the engine's name, its model and its place on the node."""
    engine: str
    """Such as "vllm"."""
    state: EngineState
    read_ns: int
    url: str | None = None
    version: str | None = None
    root_pid: int | None = None
    root_start_ns: int | None = None
    """Start of the root process in CLOCK_BOOTTIME: another start is another engine."""
    pids: tuple[int, ...] = ()
    """All processes of the engine, in the namespace of `GpuProcess.pid`."""
    model: str | None = None
    """The served name."""
    model_path: str | None = None
    model_text: str | None = None
    """Key into `Snapshot.texts`."""
    role: Role = "unified"
    parallelism: Parallelism = Parallelism()
    limits: EngineLimits = EngineLimits()
    granularity: Literal["step", "request"] = "step"
    """When token counters move: at each step, or only when a request ends."""
    steps_reliable: bool = True
    """False where several front ends each count their share of a step."""
    namespace: str | None = None
    """Kubernetes namespace of its pod; None outside a cluster, and where it may not be read."""
    pod: str | None = None
    """Name of its pod; None likewise, and for a pod that uses the node's host name."""
    counters: tuple[EngineCounters, ...] | None = None
    """One row a core; None: unobserved."""


class CollectorRun(msgspec.Struct, frozen=True, kw_only=True):
    """How one collector did in one tick."""

    collector: str
    duration_ns: int
    ok: bool


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What one collector read in one tick; readings are put together into a Snapshot."""

    gpus: tuple[GpuReading, ...] | None = None
    engines: tuple[EngineReading, ...] = ()
    steps: tuple[StepSeries, ...] = ()
    counters: tuple[CounterSeries, ...] = ()
    texts: dict[str, str] = {}
    problems: tuple[Problem, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was read in one tick: raw, immutable, and enough for replay on another machine."""

    version: int = SCHEMA_VERSION
    sequence: int
    monotonic_ns: int
    """When the tick was due to end, CLOCK_MONOTONIC."""
    boottime_ns: int
    wall_ns: int
    """For people and exporters; never subtracted."""
    lateness_ns: int = 0
    missed_ticks: int = 0
    node: Node
    gpus: tuple[GpuReading, ...] | None = None
    """None: no GPU source answered. (): one answered, and there is no GPU."""
    engines: tuple[EngineReading, ...] = ()
    steps: tuple[StepSeries, ...] = ()
    counters: tuple[CounterSeries, ...] = ()
    texts: dict[str, str] = {}
    """Model configurations (JSON text) by key, so that replay needs nothing of the node."""
    problems: tuple[Problem, ...] = ()
    runs: tuple[CollectorRun, ...] = ()


# --------------------------------------------------------------------------------------------------------
# What was concluded


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A number with its error: low <= value <= high, how it was got, and over which window."""

    value: float
    low: float
    high: float
    evidence: Evidence
    window_ns: int
    source: str
    """The rung, or "engine", or "work model"."""


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Phases of one window in nanoseconds; the five sum to `window_ns`.

    `prefill_low_ns` and `prefill_high_ns` bound the prefill-containing time (prefill + mixed).
    """

    window_ns: int
    prefill_ns: int = 0
    decode_ns: int = 0
    mixed_ns: int = 0
    idle_ns: int = 0
    unknown_ns: int = 0
    prefill_low_ns: int = 0
    prefill_high_ns: int = 0
    evidence: Evidence = "unknown"

    def of(self, phase: Phase) -> int:
        """Return the nanoseconds of one phase."""
        value: int = getattr(self, f"{phase}_ns")
        return value


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """What the hardware could do: dense FLOP/s of the dtype in use, bytes/s of its memory."""

    dtype: str
    flops_per_s: float
    memory_bytes_per_s: float
    sheet_clock_hz: float | None = None
    source: str
    """The table's row, or "formula" (flagged)."""


class GpuFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One device in one frame. Windows are settled: late tokens have arrived."""

    hw_id: str
    index: int
    name: str
    vendor: str = "nvidia"
    parent_hw_id: str | None = None
    rung: Rung
    """The best counter that served this window."""
    window_ns: int
    """The settled window that `causes_ns` and `phases` cover; 0 before the first one."""
    causes_ns: dict[str, int]
    """The ledger of the window, every cause named, summing to `window_ns`."""
    estimated_causes: tuple[str, ...] = ()
    """Causes of `causes_ns` that are estimates; the others are measured or follow by subtraction."""
    causes_total_ns: dict[str, int]
    """The same since the agent started: the truth that is exported."""
    estimated_total_ns: dict[str, int] | None = None
    """How much of `causes_total_ns` came from windows in which that cause was an estimate, for each cause
    that can be one; None in sessions of older versions."""
    phases: Shares
    phases_total_ns: dict[str, int]
    reclaimable_total_ns: int | None = None
    idle: dict[str, Figure] = {}
    """By basis: trailing idle-compute ratio. A basis without evidence is left out."""
    tensor_active: Figure | None = None
    sm_active: Figure | None = None
    dram_bandwidth: Figure | None = None
    """DRAM bytes over the sheet's bandwidth."""
    roofline_attained: Figure | None = None
    """Useful FLOP/s over what the roofline allows at this arithmetic intensity."""
    busy: Figure | None = None
    """Share of time with work on the GPU. It is not load."""
    counter_lag_s: Figure | None = None
    """By how much the fast counters' clock is ahead of that of the engine's exact steps, in seconds.

    Estimated: that much was taken out. Unknown: nothing was, and it lies in `low` to `high`. None: nothing to
    compare."""
    peak: Peak | None = None
    price_per_hour: float | None = None
    currency: str = "USD"
    engine_ids: tuple[str, ...] = ()
    """Engines with a process on this device, sorted."""
    process_count: int | None = None
    foreign_process_count: int | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    sm_clock_hz: int | None = None
    sm_clock_max_hz: int | None = None
    memory_busy_ratio: float | None = None
    clock_events: tuple[str, ...] | None = None
    error_counts: dict[str, int] | None = None
    """Errors that the driver reported since the agent started, by kind."""


DURATION_SCALE = 3
"""Scale of `Durations` as OTLP's exponential histograms define it: 2**3 buckets to a power of two."""


class Durations(msgspec.Struct, frozen=True, kw_only=True):
    """How long something took, counted: bucket i holds 2**(i/8) < seconds <= 2**((i+1)/8).

    That is a relative error of at most 4.4 % for a value taken from the middle of its bucket, and every
    power of two is an edge. An int64 of nanoseconds needs 504 buckets at most.
    """

    offset: int
    """i of the first count."""
    counts: tuple[int, ...]
    """Consecutive buckets; the first and the last are above 0."""
    sum_ns: int

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(self.counts)


class EngineFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One engine in one frame; totals count from the agent's start."""

    engine_id: str
    engine: str
    model: str | None
    role: Role
    state: EngineState
    evidence: Evidence
    url: str | None = None
    version: str | None = None
    hw_ids: tuple[str, ...] = ()
    """The devices that its processes hold."""
    namespace: str | None = None
    """Kubernetes namespace of its pod."""
    pod: str | None = None
    """Name of its pod."""
    parallelism: Parallelism = Parallelism()
    window_ns: int = 0
    """The last window read (not settled): of the rates below."""
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    prefill_tokens_total: int | None = None
    """Computed prompt tokens; with first tokens left to the prefill that made them."""
    decode_tokens_total: int | None = None
    """Generated tokens less first tokens."""
    draft_tokens_total: int | None = None
    accepted_tokens_total: int | None = None
    preemptions_total: int | None = None
    useful_flops_total: float | None = None
    """All GPUs of the engine together."""
    executed_flops_total: float | None = None
    steps_total: dict[str, int] = {}
    """By phase, where steps are known."""
    step_durations: dict[str, Durations] = {}
    """By phase, where steps and their tokens are known."""
    phases: Shares
    """The last settled window."""
    requests_running: int | None = None
    requests_waiting: int | None = None
    kv_usage_ratio: float | None = None
    prefix_hit_ratio: float | None = None
    """Of the trailing window; None without a query in it."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the node after one Snapshot. Exporters and the terminal see Frames only."""

    version: int = SCHEMA_VERSION
    sequence: int
    monotonic_ns: int
    wall_ns: int
    node: Node
    interval_ns: int
    """Since the snapshot before; 0 in the first frame."""
    lateness_ns: int = 0
    missed_ticks_total: int = 0
    gpus: tuple[GpuFrame, ...] = ()
    gpu_source: bool = False
    """Whether any GPU source answered: no GPU is not the same as no driver."""
    engines: tuple[EngineFrame, ...] = ()
    problems: tuple[Problem, ...] = ()
    runs: tuple[CollectorRun, ...] = ()


class OutletStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How one outlet of the pipe did since the start."""

    outlet: str
    delivered: int = 0
    dropped: int = 0
    failed: int = 0
    last_error: str = ""
