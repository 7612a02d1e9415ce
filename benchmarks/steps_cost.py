"""What the steps cost: the plugin in the engine, the polling of metric files here, and pairs on a real vLLM.

Bars: plugin at most 3 us + 0.15 us a scheduled sequence a step; polling at most 5 % of a core at 1 kHz.

    python benchmarks/steps_cost.py [--vllm PYTHON] [--seconds 120]

With an interpreter that has vLLM, `steps_engine.py` runs an engine in one process and switches the plugin on
and off by blocks of steps: CPU time a step, with a 95 % confidence interval of the difference.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gpuidle.collectors.steps.metric_files import MetricFile  # noqa: E402
from gpuidle.collectors.steps.polling import Follower, Poller  # noqa: E402
from gpuidle.collectors.steps.vllm_plugin import wrap  # noqa: E402

# --------------------------------------------------------------------------------------------------------
# The plugin


class Request:
    """As vLLM's."""

    def __init__(self, prompt: int, tokens: int) -> None:
        self.num_prompt_tokens = prompt
        self._all_token_ids = [7] * tokens

    @property
    def num_tokens(self) -> int:
        """Of prompt and output."""
        return len(self._all_token_ids)


@dataclass
class NewRequestData:
    """As vLLM's."""

    req_id: str
    num_computed_tokens: int


@dataclass
class CachedRequestData:
    """As vLLM's."""

    req_ids: list[str]
    resumed_req_ids: set[str]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]


@dataclass
class SchedulerOutput:
    """As vLLM's."""

    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    finished_req_ids: set[str]
    preempted_req_ids: set[str]


@dataclass
class ModelRunnerOutput:
    """As vLLM's."""

    sampled_token_ids: list[list[int]]
    req_id_to_index: dict[str, int]


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """As vLLM's."""

    request_id: str
    new_token_ids: list[int]


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """As vLLM's."""

    outputs: list[EngineCoreOutput] = []


class Scheduled:
    """A scheduler that does nothing, with the signatures of vLLM 0.32: only the plugin's part takes time."""

    def __init__(self, sequences: int, *, prompts: int = 0, new: int = 0, drafts: int = 0) -> None:
        names = [f"cmpl-{at:032x}-0" for at in range(sequences)]
        prompts += new
        tokens = {name: 128 if at < prompts else 1 + drafts for at, name in enumerate(names)}
        made = [[] if at < prompts else [7] * (1 + drafts) for at in range(sequences)]
        self.requests = {
            name: Request(128, 128) if at < new else Request(600, 600 if at < prompts else 900)
            for at, name in enumerate(names)
        }
        cached = sequences - new
        self.running = list(self.requests.values())
        self.finished_req_ids: set[str] = set()
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank=0))
        self.output = SchedulerOutput(
            scheduled_new_reqs=[NewRequestData(name, 0) for name in names[:new]],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=names[new:],
                resumed_req_ids=set(),
                num_computed_tokens=[300] * cached,
                num_output_tokens=[0 if at < prompts else 300 for at in range(new, sequences)],
            ),
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens={name: [1] * drafts for name in names[prompts:]} if drafts else {},
            finished_req_ids=set(),
            preempted_req_ids=set(),
        )
        self.sampled = ModelRunnerOutput(made, {name: at for at, name in enumerate(names)})
        outputs = [EngineCoreOutput(name, each) for name, each in zip(names, made, strict=True) if each]
        self.results = {0: EngineCoreOutputs(outputs)}

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:  # noqa: ARG002
        """Return what was prepared."""
        return self.output

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,  # noqa: ARG002
        model_runner_output: ModelRunnerOutput,  # noqa: ARG002
    ) -> dict[int, EngineCoreOutputs]:
        """Return what was prepared."""
        return self.results


def step_us(made: Any, steps: int = 100) -> float:
    sampled = made.sampled
    begin = time.thread_time_ns()
    for _ in range(steps):
        made.update_from_output(made.schedule(False), sampled)
    return (time.thread_time_ns() - begin) / steps / 1000


def plugin_us(sequences: int, more: dict[str, int], rounds: int = 500) -> list[tuple[float, float]]:
    """Return microseconds a step of many pairs: with the plugin, and without."""
    recorded = type("Recorded", (Scheduled,), {})
    wrap(recorded)
    with_it, without = recorded(sequences, **more), Scheduled(sequences, **more)
    took = [(step_us(with_it), step_us(without)) for _ in range(rounds)]
    vars(with_it)["_gpuidle_steps"].ring.close()
    return took


def plugin() -> None:
    """Print the least and two medians of pairs.

    A neighbour on the same core halves the speed of a shared machine, for seconds at a time. Two empty calls
    tell: a pair is undisturbed in which they took at most a fifth more than the least of the whole run.
    """
    print("plugin, us a step; bar: 3 + 0.15 a sequence; least, median of undisturbed pairs, of all")
    sizes = (1, 16, 64, 256)
    loads: dict[str, dict[str, int]] = {
        "decode": {},
        "with a new prompt": {"new": 1},
        "with a further chunk of a prompt": {"prompts": 1},
        "with 3 drafts a sequence": {"drafts": 3},
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPUIDLE_STEPS_DIR"] = folder
        found = {(label, size): plugin_us(size, more) for label, more in loads.items() for size in sizes}
    bare = min(off for took in found.values() for _, off in took)
    worst = 0.0
    for label in loads:
        each = []
        for size in sizes:
            took = found[label, size]
            least = min(on for on, _ in took) - min(off for _, off in took)
            calm = [on - off for on, off in took if off <= 1.2 * bare]
            middle = statistics.median(calm) if len(calm) >= 10 else math.nan
            worst = max(worst, middle / (3 + 0.15 * size))
            each.append(
                f"{size}: {least:.1f}, {middle:.1f} ({len(calm)}), "
                f"{statistics.median(on - off for on, off in took):.1f}"
            )
        print(f"  {label}: {'; '.join(each)}")
    print(
        f"  medians of undisturbed pairs are {worst:.0%} of the bar at most; empty calls took {bare:.2f} us"
    )


# --------------------------------------------------------------------------------------------------------
# Polling

WRITER = """
import sys, time
from prometheus_client import Counter, Histogram
names = ["engine", "model_name"]
Counter("vllm:prompt_tokens", "h", names).labels("0", "m").inc()
made = Counter("vllm:generation_tokens", "h", names).labels("0", "m")
buckets = [2**k for k in range(15)]
steps = Histogram("vllm:iteration_tokens_total", "h", names, buckets=buckets).labels("0", "m")
first = Histogram("vllm:time_to_first_token_seconds", "h", names).labels("0", "m")
print("up", flush=True)
while True:
    made.inc(8); steps.observe(8); time.sleep(0.005)
"""


def share(work: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Return this process' CPU time per second, and how often a second the poller looked."""
    cpu, wall, woken = time.process_time(), time.monotonic(), waits()
    for _ in range(round(seconds / 0.5)):
        time.sleep(0.5)
        work()
    spent = time.monotonic() - wall
    return (time.process_time() - cpu) / spent, (waits() - woken) / spent


def waits() -> int:
    """Return how often the poller's thread has waited."""
    (poller,) = (each for each in threading.enumerate() if each.name == "gpuidle-steps")
    status = Path(f"/proc/self/task/{poller.native_id}/status").read_text()
    return int(status.rpartition("\nvoluntary_ctxt_switches:")[2].split()[0])


class Nothing(Follower):
    """What costs nothing to follow: the loop of the poller alone."""

    def __init__(self) -> None:
        self.failure = None

    def poll(self, now_ns: int) -> bool:  # noqa: ARG002
        """See a step each time, so that the loop stays fast."""
        return True


def polling(rounds: int = 5, seconds: float = 3.0) -> None:
    """Poll the files of a writer that counts 190 steps a second; rows are taken twice a second."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER],
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": folder},
            stdout=subprocess.PIPE,
        )
        stack.callback(writer.wait)
        stack.callback(writer.kill)
        assert writer.stdout is not None
        writer.stdout.readline()
        for hz in (1000, 2000):
            found: dict[str, list[tuple[float, float]]] = {"the loop alone": [], "polling": []}
            steps = lost = 0
            for _ in range(rounds):
                opened = [
                    MetricFile(os.open(f"{folder}/{kind}_{writer.pid}.db", os.O_RDONLY))
                    for kind in ("counter", "histogram")
                ]
                real = Follower(opened[0], opened[1], time.monotonic_ns())
                for name, follower in (("the loop alone", Nothing()), ("polling", real)):
                    poller = Poller(hz)
                    poller.follow((follower,))
                    work = partial(real.take, 0) if follower is real else int
                    time.sleep(0.1)
                    found[name].append(share(work, seconds))
                    poller.stop()
                rows, missing = real.take(1 << 62)["0"]
                steps, lost = steps + len(rows), lost + missing
                real.close()
            for name, each in found.items():
                shares = sorted(one for one, _ in each)
                print(
                    f"{name} at {hz} Hz: {statistics.median(shares):.2%} of a core "
                    f"({shares[0]:.2%} to {shares[-1]:.2%}; at least {min(rate for _, rate in each):.0f} "
                    "looks a second)"
                )
            print(f"  {steps} steps seen, {lost} lost")


# --------------------------------------------------------------------------------------------------------
# Pairs on a real engine


def engine(python: str, seconds: int) -> None:
    """Print what `steps_engine.py` measured in a real vLLM."""
    script = str(Path(__file__).with_name("steps_engine.py"))
    done = subprocess.run([python, script, str(seconds)], capture_output=True, text=True, check=False)
    line = next((each for each in done.stdout.splitlines() if each.startswith('{"sequences"')), None)
    if line is None:
        raise SystemExit(f"the engine did not run:\n{done.stderr[-4000:]}")
    found = json.loads(line)
    pairs, own = np.array(found["pairs"]), np.array(found["own"])
    low, middle, high = np.percentile(own, (10, 50, 90))
    print(
        f"an engine of vLLM's in one process, us of CPU a step of {found['sequences']} sequences, "
        f"{len(pairs)} pairs:"
    )
    for at, name in enumerate(
        ("whole step", "without the model's forward pass", "the scheduler's two calls alone")
    ):
        off, more = np.median(pairs[:, at + 3]), pairs[:, at] - pairs[:, at + 3]
        print(f"  {name}: {off:.0f} without the plugin; {interval(more)} more with it")
    print(f"  the plugin's own part by a clock around it: {middle:.1f} (10 to 90 %: {low:.1f} to {high:.1f})")


def interval(values: Any, rounds: int = 4000) -> str:
    """Return the median and its 95 % confidence interval, by bootstrap over the pairs."""
    draws = np.random.default_rng(0).choice(values, (rounds, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return f"{np.median(values):+.1f} [{low:+.1f}, {high:+.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--seconds", type=int, default=120, help="of pairs on the engine")
    options = parser.parse_args()
    plugin()
    polling()
    if options.vllm:
        engine(options.vllm, options.seconds)


if __name__ == "__main__":
    main()
