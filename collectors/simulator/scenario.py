"""What a simulated node is made of: GPUs, engines and who asks them for what. Plain frozen data.

Times are nanoseconds since the start of the simulation, sizes tokens. Everything random is drawn from
`Scenario.seed`, so that a scenario is one run and no other.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpuidle.agent.model import Role
from gpuidle.collectors.simulator.options import SECOND_NS as SECOND_NS  # noqa: PLC0414 - part of this
from gpuidle.collectors.simulator.options import (
    ClockSpell,
    Fault,
    Handover,
    LateTokens,
    LostSteps,
    Restart,
    Speculation,
    Straggler,
)
from gpuidle.collectors.simulator.options import ScenarioError as ScenarioError  # noqa: PLC0414


class Request(msgspec.Struct, frozen=True):
    """One request: it arrives, its prompt is computed but for the cached prefix, it gets its tokens."""

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    prefix_hit_tokens: int = 0
    """Leading prompt tokens whose KV is cached already; less than `prompt_tokens`."""
    transferred_tokens: int = 0
    """Those after them whose KV came from another engine (see Handover)."""

    def __post_init__(self) -> None:
        if self.arrival_ns < 0 or self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ScenarioError(f"a request needs a time, a prompt and an output: {self}")
        known = self.prefix_hit_tokens + self.transferred_tokens
        if min(self.prefix_hit_tokens, self.transferred_tokens) < 0 or known >= self.prompt_tokens:
            raise ScenarioError(f"a prefix hit leaves at least one prompt token to compute: {self}")


class Sizes(msgspec.Struct, frozen=True):
    """A kind of request: prompt and output are drawn evenly from the two ranges, ends included."""

    prompt: tuple[int, int]
    output: tuple[int, int]
    prefix_hit_ratio: float = 0.0
    weight: float = 1.0
    """How often this kind is drawn, relative to the others of its mix."""


Mix = tuple[Sizes, ...]


class Listed(msgspec.Struct, frozen=True):
    """These requests, in order of arrival."""

    requests: tuple[Request, ...]

    def __post_init__(self) -> None:
        times = [request.arrival_ns for request in self.requests]
        if times != sorted(times):
            raise ScenarioError("listed requests stand in order of arrival")


class Poisson(msgspec.Struct, frozen=True):
    """Independent users: exponential times between arrivals, from `start_ns` until `stop_ns`."""

    per_second: float
    mix: Mix
    start_ns: int = 0
    stop_ns: int | None = None


class Burst(msgspec.Struct, frozen=True):
    """`count` requests at one moment."""

    at_ns: int
    count: int
    mix: Mix

    def __post_init__(self) -> None:
        if self.count < 1 or self.at_ns < 0:
            raise ScenarioError(f"a burst has requests, and a time: {self}")


class Cycle(msgspec.Struct, frozen=True):
    """The same parts again every `period_ns`, for ever; what no part fills is an idle spell."""

    period_ns: int
    parts: tuple[Poisson | Burst | Listed, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ScenarioError("a cycle without parts never comes to a request")
        for part in self.parts:
            if isinstance(part, Poisson):
                last: int | None = part.stop_ns
            elif isinstance(part, Burst):
                last = part.at_ns
            else:
                last = part.requests[-1].arrival_ns if part.requests else 0
            if last is None or last > self.period_ns:
                raise ScenarioError(f"a part of a cycle ends within its period: {part}")


class ClosedLoop(msgspec.Struct, frozen=True):
    """`users` who each wait for their answer, think, and ask again, from `start_ns` until `stop_ns`."""

    users: int
    mix: Mix
    think_ns: int = 0
    start_ns: int = 0
    stop_ns: int | None = None


OpenArrivals = Listed | Poisson | Burst | Cycle
Arrivals = OpenArrivals | ClosedLoop


class GpuSpec(msgspec.Struct, frozen=True):
    """One card. Peaks come from the table of peaks by name and memory size."""

    name: str = "NVIDIA H100 80GB HBM3"
    memory_total_bytes: int = 81_559 << 20
    compute_capability: str = "9.0"
    power_limit_watts: float = 700.0
    bare_watts: float = 70.0
    """With no process on the card."""
    loaded_watts: float = 126.0
    """With weights loaded and nothing to do: 0.18 of the limit, as measured on H100."""
    sm_clock_max_hz: int = 1_980_000_000
    memory_clock_hz: int = 2_619_000_000
    reachable_bandwidth_ratio: float = 0.93
    """Of the sheet's bandwidth, what the best copy reaches: time that DRAM needs is counted at this rate."""
    copied_bandwidth_ratio: float | None = None
    """Of the sheet's bandwidth, what `calibrate` once found on this card; None: nobody asked it."""
    power_cap_watts: float | None = None
    """A limit below `power_limit_watts` that someone set: steps that would draw more run at the SM clock
    that fits it (what they draw beyond `loaded_watts` goes with the clock squared). None: no cap."""

    def __post_init__(self) -> None:
        cap = self.power_cap_watts
        if cap is not None and not self.loaded_watts < cap <= self.power_limit_watts:
            raise ScenarioError(f"a power cap lies between loaded idle and the limit: {cap} W")


class EngineSpec(msgspec.Struct, frozen=True):
    """One engine that serves one model on its own GPUs, scheduling as vLLM V1 does.

    The efficiencies are shares of the sheet's peaks that the kernels reach: 0.45 of compute in prefill
    and 0.6 of bandwidth in decode are the medians published for a 70B BF16 model on H100.
    """

    name: str
    config: Mapping[str, object]
    """The model's config.json."""
    gpus: tuple[int, ...]
    """Indices of the GPUs it holds; their number is the tensor-parallel size times `pipeline_stages`."""
    arrivals: tuple[Arrivals, ...] = ()
    max_batched_tokens: int = 2048
    max_sequences: int = 256
    kv_block_tokens: int = 16
    kv_blocks: int = 2048
    compute_efficiency: float = 0.45
    memory_efficiency: float = 0.6
    tile_rows: int = 64
    """Rows of the tensor instruction: fewer tokens are padded to it."""
    host_gap_ns: int = 300_000
    """From the end of a step, or from an arrival, to the next step: the GPU has nothing to do."""
    launch_ns: int = 500_000
    """Inside every step: launches and tails, with the GPU active and neither pipe nor memory busy."""
    collective_latency_ns: int = 11_000
    """Of one all-reduce; two a layer where tensor-parallel."""
    link_bytes_per_s: float = 120e9
    """What an all-reduce reaches on the link."""
    link_points: tuple[tuple[float, float], ...] = ()
    """Measured instead: (bytes, ns) of one all-reduce, rising; between them on logarithmic scales."""
    jitter: float = 0.02
    """Standard deviation of the part by which a step takes longer than its model says; never shorter."""
    version: str = "0.32.0"
    speculation: Speculation | None = None
    pipeline_stages: int = 1
    """Stages that divide the layers, each on as many GPUs, in the order of `gpus`. A GPU works in its part
    of a step and waits for the others' in the rest: the bubble, `waiting_peer`."""
    microbatches: int = 1
    """Parts of a step that follow each other through the stages, each of which reads the weights: a stage
    works m of the m + stages - 1 parts of a step's time."""
    async_scheduling: bool = False
    """The next step is scheduled while one runs: `host_gap_ns` shows only where it is longer than the step,
    and requests that come during a step wait for the one after the next."""
    straggler: Straggler | None = None
    role: Role = "unified"
    hands_to: Handover | None = None
    """For role "prefill": where its requests go on."""

    def __post_init__(self) -> None:
        if not self.gpus or len(set(self.gpus)) != len(self.gpus):
            raise ScenarioError(f"{self.name}: an engine holds one GPU or more, each once")
        if min(self.max_batched_tokens, self.max_sequences, self.kv_blocks, self.kv_block_tokens) < 1:
            raise ScenarioError(f"{self.name}: limits are at least 1")
        if not (0 < self.compute_efficiency <= 1 and 0 < self.memory_efficiency <= 1):
            raise ScenarioError(f"{self.name}: an efficiency is more than 0 and at most 1")
        if min(self.host_gap_ns, self.launch_ns, self.collective_latency_ns, self.jitter) < 0:
            raise ScenarioError(f"{self.name}: a delay is not negative")
        if min(self.pipeline_stages, self.microbatches) < 1 or len(self.gpus) % self.pipeline_stages:
            raise ScenarioError(
                f"{self.name}: stages have as many GPUs each, and microbatches are at least 1"
            )
        if self.straggler is not None and self.straggler.rank >= len(self.gpus):
            raise ScenarioError(f"{self.name}: the straggler is a rank that is not there")
        if (self.role == "prefill") != (self.hands_to is not None):
            raise ScenarioError(f"{self.name}: a prefill engine, and no other, hands its requests on")
        if self.role == "prefill" and any(isinstance(kind, ClosedLoop) for kind in self.arrivals):
            raise ScenarioError(f"{self.name}: users of a prefill engine do not wait for an answer")

    @property
    def tensor_parallel(self) -> int:
        """Ranks that divide each matrix."""
        return len(self.gpus) // self.pipeline_stages

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of context that fit at once."""
        return self.kv_blocks * self.kv_block_tokens


class Scenario(msgspec.Struct, frozen=True):
    """A node. A GPU that no engine holds stands there unallocated."""

    seed: int
    gpus: tuple[GpuSpec, ...]
    engines: tuple[EngineSpec, ...]
    duration_ns: int | None = None
    """None: for ever."""
    hostname: str = "simulated"
    shared_gpus: bool = False
    """Engines may hold the same GPUs: their kernels take turns, so that each of n steps at once runs at 1/n
    of its speed. Engines that share hold all their GPUs together."""
    clocks: tuple[ClockSpell, ...] = ()
    """Times in which an SM clock is not the sheet's; of several the first that holds."""
    faults: tuple[Fault, ...] = ()
    """What is wrong with what the reader of the node is given to see; the truth is told beside it all the
    same. A Restart is an event of the node."""

    def __post_init__(self) -> None:
        held = [index for engine in self.engines for index in engine.gpus]
        if any(not 0 <= index < len(self.gpus) for index in held):
            raise ScenarioError(f"an engine holds a GPU that is not there: {held}")
        if len(set(held)) != len(held) and not self.shared_gpus:
            raise ScenarioError(f"two engines hold one GPU: {held}")
        for engine in self.engines:
            if len({self.gpus[index] for index in engine.gpus}) > 1:
                raise ScenarioError(f"{engine.name}: the GPUs of one engine are alike")
        self._check_names()
        self._check_shared()
        if any(not 0 <= spell.gpu < len(self.gpus) for spell in self.clocks):
            raise ScenarioError("a clock is of a GPU that is not there")
        back: dict[str, int] = {}
        for restart in self.restarts():
            if restart.at_ns < back.get(restart.engine, 0):
                raise ScenarioError(f"{restart.engine}: restarts again before it is back")
            back[restart.engine] = restart.back_ns

    def _check_names(self) -> None:
        by_name = {engine.name: engine for engine in self.engines}
        named = [getattr(fault, "engine", None) for fault in self.faults]
        if any(name is not None and name not in by_name for name in named):
            raise ScenarioError(f"a fault is of an engine that is not there: {named}")
        if any((getattr(fault, "gpu", None) or 0) >= len(self.gpus) for fault in self.faults):
            raise ScenarioError("a fault is of a GPU that is not there")
        for engine in self.engines:
            if engine.hands_to is not None:
                peer = by_name.get(engine.hands_to.engine)
                if peer is None or peer.role != "decode":
                    raise ScenarioError(f"{engine.name}: hands its requests to a decode engine of the node")

    def _check_shared(self) -> None:
        places = [set(engine.gpus) for engine in self.engines]
        restarting = {restart.engine for restart in self.restarts()}
        for engine in self.engines:
            mine = set(engine.gpus)
            if sum(bool(mine & place) for place in places) < 2:
                continue
            if any(mine & place and mine != place for place in places):
                raise ScenarioError(f"{engine.name}: engines that share a GPU share all of them")
            if engine.pipeline_stages > 1 or engine.straggler or engine.name in restarting:
                raise ScenarioError(f"{engine.name}: on shared GPUs no pipeline, straggler or restart")

    def restarts(self) -> list[Restart]:
        """Return the restarts in order."""
        found = [fault for fault in self.faults if isinstance(fault, Restart)]
        return sorted(found, key=lambda restart: restart.at_ns)

    def lost_steps(self, engine: str) -> list[LostSteps]:
        """Return how steps of this engine get lost."""
        return [f for f in self.faults if isinstance(f, LostSteps) and f.engine in (None, engine)]

    def late_ns(self, engine: str) -> int:
        """Return by how much this engine's counters are late."""
        late = [f.late_ns for f in self.faults if isinstance(f, LateTokens) and f.engine in (None, engine)]
        return max(late, default=0)


LLAMA_3_70B: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""The shape of Llama-3-70B: 70.6e9 parameters, 320 KiB of KV a token in bf16."""

LLAMA_3_8B: Mapping[str, object] = {
    **LLAMA_3_70B,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
"""The shape of Llama-3-8B."""


def demo(seed: int = 0) -> Scenario:
    """Two H100s that serve a 70B model in bf16, in a cycle of 40 s: prefill, decode, mixed, nothing.

    The weights are 141 GB, 70.6 GB on each card of 85.5 GB, which leaves some 5.5 GB a card for KV: 2,112
    blocks of 16 tokens, 33,792 tokens of context in all. Long prompts with one token out are prefill,
    then short prompts with long outputs are decode, then both at once; each part is asked for in the
    first nine of its ten seconds, so that the next one starts on an engine that has nothing left to do.
    """
    long_prompts = (Sizes(prompt=(2500, 3500), output=(1, 1)),)
    chats = (Sizes(prompt=(40, 120), output=(140, 225)),)
    both = (Sizes(prompt=(1200, 2400), output=(40, 80), prefix_hit_ratio=0.25),)
    bursts = tuple(Burst(at_ns=second * SECOND_NS, count=5, mix=long_prompts) for second in (0, 3, 6))
    cycle = Cycle(
        period_ns=40 * SECOND_NS,
        parts=(
            *bursts,
            Burst(at_ns=10 * SECOND_NS, count=24, mix=chats),
            *(Burst(at_ns=20 * SECOND_NS + i * 4 * SECOND_NS // 5, count=2, mix=both) for i in range(11)),
        ),
    )
    engine = EngineSpec(
        name="llama-3-70b", config=LLAMA_3_70B, gpus=(0, 1), arrivals=(cycle,), kv_blocks=2112
    )
    return Scenario(seed=seed, gpus=(GpuSpec(), GpuSpec()), engines=(engine,))
