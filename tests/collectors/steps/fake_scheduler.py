"""A scheduler in the shapes that vLLM's has had, small enough to see what each step must be."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from gpuidle.collectors.steps import vllm_plugin


@dataclass
class Request:
    request_id: str
    num_prompt_tokens: int
    outputs: int = 0
    num_computed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.outputs

    @property
    def num_output_tokens(self) -> int:
        return self.outputs


@dataclass
class Plan:
    """What one step schedules: tokens by request, drafts among them, who was preempted for it."""

    tokens: dict[str, int]
    drafts: dict[str, int] = field(default_factory=dict)
    preempt: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    sampled: dict[str, int] | None = None
    """Tokens that each request makes; by default one for each that is through its prompt."""


def scheduler_class(shape: str) -> type[Any]:
    """Return a fresh class with the shape of "0.8.5", "0.10" or "0.32"."""

    class Scheduler:
        def __init__(self, rank: int = 0, *, vllm_config: object = None) -> None:
            parallel = SimpleNamespace(data_parallel_rank=rank)
            self.vllm_config = vllm_config or SimpleNamespace(parallel_config=parallel)
            self.requests: dict[str, Request] = {}
            self.running: list[Request] = []
            self.waiting: list[Request] = []
            self.plan = Plan({})
            self.finished_req_ids: set[str] = set()
            self.seen: set[str] = set()

        def add(self, name: str, prompt: int) -> None:
            self.requests[name] = Request(name, prompt)
            self.waiting.append(self.requests[name])

        def schedule(self) -> Any:
            plan = self.plan
            for name in plan.preempt:
                request = self.requests[name]
                self.running.remove(request)
                self.waiting.append(request)
                request.num_computed_tokens = 0
            running = [name for name in plan.tokens if self.requests[name] in self.running]
            admitted = [name for name in plan.tokens if name not in running]
            new = [name for name in admitted if name not in self.seen]
            resumed = [name for name in admitted if name in self.seen]
            for name in admitted:
                self.waiting.remove(self.requests[name])
                self.running.append(self.requests[name])
            self.seen |= set(new)
            output = SimpleNamespace(
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=n, num_computed_tokens=self.requests[n].num_computed_tokens)
                    for n in new
                ],
                scheduled_cached_reqs=self._cached([*running, *resumed], set(resumed)),
                num_scheduled_tokens=dict(plan.tokens),
                total_num_scheduled_tokens=sum(plan.tokens.values()),
                scheduled_spec_decode_tokens={n: [-1] * k for n, k in plan.drafts.items()},
                finished_req_ids=self.finished_req_ids | set(plan.finished),
            )
            self.finished_req_ids = set()
            if shape == "0.32":
                output.preempted_req_ids = set(plan.preempt)
            for name, tokens in plan.tokens.items():
                self.requests[name].num_computed_tokens += tokens
            return output

        def _cached(self, names: list[str], resumed: set[str]) -> Any:
            requests = [self.requests[name] for name in names]
            if shape == "0.8.5":
                return [
                    SimpleNamespace(
                        req_id=r.request_id,
                        resumed_from_preemption=r.request_id in resumed,
                        num_computed_tokens=r.num_computed_tokens,
                    )
                    for r in requests
                ]
            cached = SimpleNamespace(
                req_ids=names, num_computed_tokens=[r.num_computed_tokens for r in requests]
            )
            if shape == "0.32":
                cached.resumed_req_ids = resumed
                cached.num_output_tokens = [r.outputs for r in requests]
            else:
                cached.resumed_from_preemption = [name in resumed for name in names]
            return cached

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            output, sampled = scheduler_output, model_runner_output
            outputs = []
            for name in output.num_scheduled_tokens:
                made = sampled.sampled_token_ids[sampled.req_id_to_index[name]]
                request = self.requests.get(name)
                if made and request is not None:
                    request.outputs += len(made)
                    rejected = len(output.scheduled_spec_decode_tokens.get(name, ())) + 1 - len(made)
                    if name in output.scheduled_spec_decode_tokens:
                        request.num_computed_tokens -= rejected
                    outputs.append(SimpleNamespace(new_token_ids=made))
            group = SimpleNamespace(outputs=outputs)
            return group if shape == "0.8.5" else {0: group}

        def finish(self, name: str) -> None:
            self.running.remove(self.requests.pop(name))
            self.finished_req_ids.add(name)

    class Throttled(Scheduler):
        def schedule(self, throttle_prefills: bool = False) -> Any:
            return super().schedule()

    made = Throttled if shape == "0.32" else Scheduler
    vllm_plugin.wrap(made)
    return made


def result(scheduler: Any, plan: Plan) -> Any:
    """What the model would give for a plan that was scheduled."""
    names = list(plan.tokens)
    made = plan.sampled
    if made is None:
        known = scheduler.requests
        made = {
            name: int(known[name].num_computed_tokens >= known[name].num_tokens)
            for name in names
            if name in known
        }
    return SimpleNamespace(
        sampled_token_ids=[[7] * made.get(name, 0) for name in names],
        req_id_to_index={name: at for at, name in enumerate(names)},
    )


def step(scheduler: Any, plan: Plan) -> Any:
    """Run one step through to its end."""
    scheduler.plan = plan
    output = scheduler.schedule()
    time.sleep(0)
    return scheduler.update_from_output(output, result(scheduler, plan))
