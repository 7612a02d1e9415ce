"""What the steps cost: the plugin in the engine, the polling of metric files here, and pairs on a real vLLM.

Bars: plugin at most 3 us + 0.15 us a scheduled sequence a step; polling at most 5 % of a core at 1 kHz.

    python benchmarks/steps_cost.py [--vllm PYTHON] [--pairs 12]

With an interpreter that has vLLM, one server is started whose plugin is switched on and off by a signal
(through a plugin of this benchmark's own), and the same load runs in pairs, in the order on-off-off-on: CPU
time of the engine's core process and wall time, each a step, with a 95 % confidence interval of the
difference.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
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

    def __init__(self, sequences: int, *, prompts: int = 0, drafts: int = 0) -> None:
        names = [f"cmpl-{at:032x}-0" for at in range(sequences)]
        tokens = {name: 128 if at < prompts else 1 + drafts for at, name in enumerate(names)}
        made = [[] if at < prompts else [7] * (1 + drafts) for at in range(sequences)]
        self.requests = {name: Request(600, 600 if at < prompts else 900) for at, name in enumerate(names)}
        self.running = list(self.requests.values())
        self.finished_req_ids: set[str] = set()
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank=0))
        self.output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=names,
                resumed_req_ids=set(),
                num_computed_tokens=[300] * sequences,
                num_output_tokens=[0 if at < prompts else 300 for at in range(sequences)],
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


def plugin_us(sequences: int, more: dict[str, int], rounds: int = 60) -> tuple[float, float]:
    """Return least and median of many pairs: microseconds a step with the plugin, less those without."""
    recorded = type("Recorded", (Scheduled,), {})
    wrap(recorded)
    with_it, without = recorded(sequences, **more), Scheduled(sequences, **more)
    took = [(step_us(with_it), step_us(without)) for _ in range(rounds)]
    vars(with_it)["_gpuidle_steps"].ring.close()
    least = min(each[0] for each in took) - min(each[1] for each in took)
    return least, statistics.median(on - off for on, off in took)


def plugin() -> None:
    print("plugin, us a step, least (median) of pairs with and without; bar: 3 + 0.15 a sequence")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPUIDLE_STEPS_DIR"] = folder
        for label, more in (
            ("decode", {}),
            ("with a chunk of a prompt", {"prompts": 1}),
            ("with 3 drafts a sequence", {"drafts": 3}),
        ):
            sizes = (1, 16, 64, 256)
            took = [plugin_us(size, more) for size in sizes]
            slope, base = np.polyfit(sizes, [least for least, _ in took], 1)
            each = ", ".join(
                f"{size}: {least:.1f} ({middle:.1f})"
                for size, (least, middle) in zip(sizes, took, strict=True)
            )
            worst = max(middle / (3 + 0.15 * size) for size, (_, middle) in zip(sizes, took, strict=True))
            print(
                f"  {label}: {each}; fit {base:.2f} + {slope:.3f} n; median {worst:.0%} of the bar at worst"
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

SWITCH = """
import os, signal, time
from gpuidle.collectors.steps import vllm_plugin
spent = []
def timed(method):
    def call(*args):
        begin = time.perf_counter_ns()
        result = method(*args)
        spent.append(time.perf_counter_ns() - begin)
        return result
    return call
def register():
    for name in ("scheduled", "finished"):
        setattr(vllm_plugin.Recorder, name, timed(getattr(vllm_plugin.Recorder, name)))
    vllm_plugin.register()
    from vllm.v1.core.sched.scheduler import Scheduler
    names = ("schedule", "update_from_output")
    on = {name: getattr(Scheduler, name) for name in names}
    off = {name: each.__wrapped__ for name, each in on.items()}
    def turn(number, _frame):
        for name, each in (on if number == signal.SIGUSR1 else off).items():
            setattr(Scheduler, name, each)
        if number == signal.SIGUSR2 and spent:
            with open(os.environ["GPUIDLE_SPENT"], "a") as file:
                file.write(" ".join(map(str, spent)) + " ")
            spent.clear()
    signal.signal(signal.SIGUSR1, turn)
    signal.signal(signal.SIGUSR2, turn)
"""


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pairs(python: str, count: int) -> None:
    import psutil
    from tests.live.server import Ask, Server

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        info = folder / "site" / "steps_switch-1.dist-info"
        info.mkdir(parents=True)
        (info.parent / "steps_switch.py").write_text(SWITCH)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: steps-switch\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nswitch = steps_switch:register\n")
        os.environ.update(
            PYTHONPATH=os.pathsep.join([str(info.parent), str(ROOT / ".editable")]),
            GPUIDLE_STEPS="1",
            GPUIDLE_SPENT=str(folder / "spent"),
            GPUIDLE_STEPS_DIR=str(folder),
        )
        server = Server(python, folder / "server.log")
        stack.callback(server.stop)
        server.wait_until_healthy()
        children = psutil.Process(server.process.pid).children(recursive=True)
        (core,) = [child.pid for child in children if "EngineCore" in " ".join(child.cmdline())]

        def run(*, on: bool) -> tuple[float, float]:
            os.kill(core, signal.SIGUSR1 if on else signal.SIGUSR2)
            time.sleep(0.2)
            cpu, wall = cpu_s(core), time.monotonic()
            server.client.complete_all([Ask(8, 256)] * 16, 16)
            return (cpu_s(core) - cpu) / 256 * 1e6, (time.monotonic() - wall) / 256 * 1e6

        run(on=True)
        differences: list[tuple[float, float]] = []
        base: list[tuple[float, float]] = []
        for at in range(count):
            order = (True, False) if at % 2 == 0 else (False, True)
            took = {on: run(on=on) for on in order}
            differences.append((took[True][0] - took[False][0], took[True][1] - took[False][1]))
            base.append(took[False])
        run(on=False)
        spent = np.array((folder / "spent").read_text().split(), dtype=np.int64) / 1000
        low, middle, high = np.percentile(spent[0::2] + spent[1::2], (10, 50, 90))
        print(
            f"in the engine, between its other work: {middle:.1f} us a step of 16 sequences "
            f"(10 to 90 %: {low:.1f} to {high:.1f}; {len(spent) // 2} steps)"
        )
        for which, name in ((0, "CPU of the core process"), (1, "wall time")):
            values = [each[which] for each in differences]
            off = statistics.mean(each[which] for each in base)
            print(f"{name}, us a step of 16 sequences: {off:.0f} without; {interval(values)} more with")


def interval(values: list[float]) -> str:
    """Return mean and 95 % confidence interval (Student's t, near enough from 8 values on)."""
    mean = statistics.mean(values)
    half = (1.96 + 2.5 / len(values)) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}] (median {statistics.median(values):+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--pairs", type=int, default=12)
    options = parser.parse_args()
    plugin()
    polling()
    if options.vllm:
        pairs(options.vllm, options.pairs)


if __name__ == "__main__":
    main()
