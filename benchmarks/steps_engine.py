"""A real vLLM engine in one process whose plugin is switched on and off by blocks of steps: their CPU time.

Run by `steps_cost.py --vllm PYTHON` with the interpreter that has vLLM:

    PYTHON benchmarks/steps_engine.py SECONDS

The engine, its scheduler and the model run in one thread on one core. Two blocks of steps in random order,
one with the plugin and one with vLLM's own methods, are a pair: of each the median CPU time of a whole step,
of what is not the model's forward pass, and of the two calls of the scheduler that the plugin wraps. Then the
plugin's own part, by a clock around it. Prints JSON.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any

ROOT = Path(__file__).parents[1]
SEQUENCES, PROMPT, OUTPUT = 16, 8, 1900
BLOCK = 8
"""Steps of a block, of which the first is left out."""


class Meter:
    """Sums the CPU time of this thread inside of some calls."""

    def __init__(self) -> None:
        self.spent_ns = 0

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method, measured."""

        @wraps(method)
        def measured(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent_ns += time.thread_time_ns() - begin

        return measured


def make_engine() -> Any:
    arguments = import_module("vllm.engine.arg_utils").EngineArgs(
        model=str(ROOT / "tests/live/tiny-llama"), load_format="dummy", dtype="bfloat16", max_model_len=2048,
        max_num_seqs=SEQUENCES, max_num_batched_tokens=256, num_gpu_blocks_override=1024, block_size=32,
        enforce_eager=True, hf_overrides={"num_hidden_layers": 1}, distributed_executor_backend="uni",
    )  # fmt: skip
    return import_module("vllm.v1.engine.llm_engine").LLMEngine.from_engine_args(arguments)


def fill(engine: Any, serial: int) -> None:
    """Give the engine its sequences and take them through their prompts."""
    parameters = import_module("vllm").SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=0)
    for at in range(SEQUENCES):
        prompt = {"prompt_token_ids": [random.randrange(3, 512) for _ in range(PROMPT)]}
        engine.add_request(f"{serial}-{at}", prompt, parameters)
    for _ in range(20):
        engine.step()


def block(engine: Any, model: Meter, scheduling: Meter) -> list[float]:
    """Return medians of microseconds of CPU a step: all, without the model, of the scheduler's two calls."""
    took = []
    for _ in range(BLOCK):
        begin, modelled, scheduled = time.thread_time_ns(), model.spent_ns, scheduling.spent_ns
        engine.step()
        whole = time.thread_time_ns() - begin
        took.append((whole, whole - model.spent_ns + modelled, scheduling.spent_ns - scheduled))
    return [statistics.median(each) / 1000 for each in zip(*took[1:], strict=True)]


def main() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sys.path[:0] = [str(ROOT / ".editable")]
    from gpuidle.collectors.steps import vllm_plugin

    scheduler_class = import_module("vllm.v1.core.sched.scheduler").Scheduler
    names = ("schedule", "update_from_output")
    methods = {False: {name: getattr(scheduler_class, name) for name in names}}
    vllm_plugin.wrap(scheduler_class)
    methods[True] = {name: getattr(scheduler_class, name) for name in names}
    engine = make_engine()
    core = engine.engine_core.engine_core
    model, scheduling = Meter(), Meter()
    for name in ("execute_model", "sample_tokens"):
        setattr(core.model_executor, name, model.around(getattr(core.model_executor, name)))

    def turn(*, on: bool) -> None:
        # On the instance: a class that changes makes Python look up anew all that it had specialised.
        for name, method in methods[on].items():
            setattr(core.scheduler, name, MethodType(scheduling.around(method), core.scheduler))

    pairs = []
    serial = 0
    end = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end:
        fill(engine, serial)
        serial += 1
        for _ in range((OUTPUT - 100) // (2 * BLOCK)):
            took = {}
            for on in random.sample((True, False), 2):
                turn(on=on)
                took[on] = block(engine, model, scheduling)
            pairs.append([*took[True], *took[False]])
        while engine.has_unfinished_requests():
            engine.step()
    # The plugin's own part: its methods less those that they call, and less what the clocks take.
    outer, inner, clock = Meter(), Meter(), Meter()
    timed = type("Timed", (), {name: inner.around(method) for name, method in methods[False].items()})
    vllm_plugin.wrap(timed)
    for name in names:
        setattr(core.scheduler, name, MethodType(outer.around(getattr(timed, name)), core.scheduler))
    nothing = clock.around(int)
    fill(engine, serial)
    own = []
    for _ in range(600):
        before = outer.spent_ns - inner.spent_ns
        engine.step()
        own.append((outer.spent_ns - inner.spent_ns - before) / 1000)
        nothing()
    own = [each - 2 * clock.spent_ns / len(own) / 1000 for each in own]
    print(json.dumps({"sequences": SEQUENCES, "pairs": pairs, "own": own}))


if __name__ == "__main__":
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_PLUGINS="",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPUIDLE_STEPS_DIR"] = folder
        main()
