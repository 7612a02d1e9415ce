"""One engine of a simulated node with what hangs on it: its timelines, its account, how a reader sees it."""

from __future__ import annotations

import json
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.clock import Instant
from gpuidle.agent.model import (
    EngineCounters,
    EngineLimits,
    EngineReading,
    EngineState,
    GpuProcess,
    Parallelism,
    StepSeries,
    column,
)
from gpuidle.collectors.simulator.batch import STEP_TOKENS, Step
from gpuidle.collectors.simulator.clocks import Clocks
from gpuidle.collectors.simulator.costs import SHEET, Clock, Costs
from gpuidle.collectors.simulator.engine import Engine
from gpuidle.collectors.simulator.faults import StepFaults
from gpuidle.collectors.simulator.gpu import Timeline
from gpuidle.collectors.simulator.scenario import SECOND_NS, EngineSpec, Scenario
from gpuidle.collectors.simulator.truth import Account, EngineWork


class Served:
    """One engine. Raises ScenarioError where it cannot be."""

    def __init__(
        self, index: int, spec: EngineSpec, scenario: Scenario, start: Instant, keep_ns: int, clocks: Clocks
    ) -> None:
        self.spec = spec
        self.engine_id = f"vllm:{spec.name}:{index}"
        self.model_text = f"config:{self.engine_id}"
        self.config = json.dumps(dict(spec.config), sort_keys=True)
        self._root_pid = 10_000 + 1_000 * index
        self._start = start
        self._clocks = clocks
        self.costs = Costs(spec, scenario.gpus[spec.gpus[0]])
        seed = f"{scenario.seed}/{self.engine_id}"
        alike = spec.straggler is None and spec.pipeline_stages == 1 and not clocks.differ(spec.gpus)
        self.engine = Engine(
            spec,
            self.costs,
            seed,
            clocks=self._alike if alike else self._each,
            restarts=[restart for restart in scenario.restarts() if restart.engine == spec.name],
            late_ns=scenario.late_ns(spec.name),
        )
        kinds = 1 if alike else len(spec.gpus)
        self.timelines = [Timeline(keep_ns, self.costs.shape.layers, rank) for rank in range(kinds)]
        self.accounts = [Account(rank) for rank in range(kinds)]
        self.faults = StepFaults(scenario.lost_steps(spec.name), seed)
        self.total = EngineWork()

    def _alike(self, _at_ns: int) -> tuple[Clock, ...]:
        return (SHEET,)

    def _each(self, at_ns: int) -> tuple[Clock, ...]:
        return tuple(self._clocks.at(gpu, at_ns) for gpu in self.spec.gpus)

    def kind(self, rank: int) -> int:
        """Return which of the timelines and accounts is that of a rank."""
        return rank if len(self.accounts) > 1 else 0

    @property
    def root_pid(self) -> int:
        """The process of this life of the engine."""
        return self._root_pid + 100 * len(self.engine.lives)

    def worker_pid(self, rank: int) -> int:
        """Return the process that holds the context on the GPU of this rank."""
        return self.root_pid + 2 + rank

    def state(self, now_ns: int) -> EngineState | None:
        """Return whether it serves at `now_ns` of the simulation; None: there is no process."""
        for restart in self.engine.lives[-1:]:
            if now_ns < restart.at_ns + restart.gone_ns:
                return None
            if now_ns < restart.back_ns:
                return "starting"
        return "serving"

    def process(self, rank: int, now_ns: int) -> tuple[GpuProcess, ...]:
        """Return what the driver lists of it on the GPU of this rank."""
        if self.state(now_ns) is None:
            return ()
        return (GpuProcess(pid=self.worker_pid(rank), used_memory_bytes=self.costs.memory_used_bytes),)

    def reading(self, now_ns: int, *, counters: bool, steps: bool) -> EngineReading | None:
        """Return the engine as discovery and its adapter would give it; None: there is none just now."""
        spec = self.spec
        ranks = len(spec.gpus)
        state = self.state(now_ns)
        if state is None:
            return None
        lives = self.engine.lives
        begun_ns = lives[-1].at_ns + lives[-1].gone_ns if lives else 0
        serving = state == "serving"
        return EngineReading(
            engine_id=self.engine_id,
            engine="vllm",
            state=state if counters or steps or not serving else "unobserved",
            read_ns=now_ns + self._start.monotonic_ns,
            version=spec.version,
            root_pid=self.root_pid,
            root_start_ns=self._start.boottime_ns + begun_ns,
            pids=(self.root_pid, self.root_pid + 1, *(self.worker_pid(rank) for rank in range(ranks))),
            model=spec.name,
            model_text=self.model_text,
            role=spec.role,
            parallelism=Parallelism(tensor=spec.tensor_parallel, pipeline=spec.pipeline_stages),
            limits=EngineLimits(
                max_batched_tokens=spec.max_batched_tokens,
                max_sequences=spec.max_sequences,
                kv_block_tokens=spec.kv_block_tokens,
                kv_capacity_tokens=spec.kv_capacity_tokens,
                dtype=str(spec.config.get("torch_dtype", "auto")),
                speculative=spec.speculation is not None,
                async_scheduling=spec.async_scheduling,
            ),
            counters=(self._counters(now_ns),) if counters and serving else None,
        )

    def _counters(self, now_ns: int) -> EngineCounters:
        told = self.engine.told(now_ns)
        drafting = self.spec.speculation is not None
        return EngineCounters(
            rank="0",
            read_ns=now_ns + self._start.monotonic_ns,
            prompt_tokens=told.prompt_tokens,
            computed_prompt_tokens=told.computed_prompt_tokens,
            generated_tokens=told.generated_tokens,
            first_tokens=told.first_tokens,
            time_to_first_token_s=told.time_to_first_token_ns / SECOND_NS,
            inter_token_latency_s=told.inter_token_ns / SECOND_NS,
            counted_steps=told.counted_steps,
            steps_by_tokens=tuple(zip(STEP_TOKENS, accumulate(told.steps_by_tokens), strict=True)),
            requests_running=told.requests_running,
            requests_waiting=told.requests_waiting + self.engine.transferring(now_ns),
            kv_usage_ratio=told.kv_usage_ratio,
            prefix_query_tokens=told.prefix_query_tokens,
            prefix_hit_tokens=told.prefix_hit_tokens,
            preemptions=told.preemptions,
            drafts=told.drafts if drafting else None,
            draft_tokens=told.draft_tokens if drafting else None,
            accepted_tokens=told.accepted_tokens if drafting else None,
            asleep=False,
        )

    def step_series(self, steps: list[Step], base_ns: int) -> StepSeries:
        """Return the steps as columns. Recomputed contexts stand among the prefill tokens."""
        steps, lost = self.faults.kept([step for step in steps if not step.died])
        drafting = self.spec.speculation is not None

        def of(name: str) -> NDArray[np.int64]:
            return column([getattr(step, name) for step in steps], "i8")

        return StepSeries(
            engine_id=self.engine_id,
            source="simulator",
            exact=True,
            lost=lost,
            start_ns=column([step.start_ns + base_ns for step in steps], "i8"),
            end_ns=column([step.end_ns + base_ns for step in steps], "i8"),
            prefill_tokens=of("prefill_tokens"),
            decode_tokens=of("decode_tokens"),
            delivered_tokens=of("delivered_tokens"),
            sequences=of("sequences"),
            kv_tokens=of("kv_tokens"),
            draft_tokens=of("draft_tokens") if drafting else None,
            accepted_tokens=of("accepted_tokens") if drafting else None,
            preemptions=of("preemptions"),
            recomputed_tokens=of("recomputed_tokens"),
        )
