"""What the commands that run the pipe share: options, the live source, signals, prices."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from gpuidle import __version__
from gpuidle.agent.model import EngineReading, Frame, GpuReading, Node, OutletStatus, Reading
from gpuidle.agent.pipeline import Pipeline
from gpuidle.agent.ports import Collector, Source

FIRST_READING_S = 0.5
"""How long the discovery of engines waits for the driver's first answer."""

Command = TypeVar("Command", bound=Callable[..., Any])


def source_options(command: Command) -> Command:
    """Add the options that say what is read."""
    for option in reversed(
        (
            click.option(
                "--interval",
                type=click.FloatRange(0.1, 3600),
                default=1.0,
                show_default=True,
                metavar="SECONDS",
                help="Time between two readings.",
            ),
            click.option(
                "--engine-url",
                "engine_urls",
                multiple=True,
                metavar="[NAME=]URL",
                callback=_endpoints,
                help="An engine named by hand, such as http://127.0.0.1:8000. Can be repeated.",
            ),
            click.option(
                "--discover/--no-discover",
                default=True,
                show_default=True,
                help="Look for engines among this node's processes.",
            ),
            click.option(
                "--steps/--no-steps",
                default=True,
                show_default=True,
                help="Read engines' steps where they can be read (docs/steps.md).",
            ),
            click.option(
                "--steps-fpm",
                multiple=True,
                metavar="[ENGINE=]ENDPOINT",
                callback=_fpm_endpoints,
                help="ForwardPassMetrics of an engine, such as tcp://127.0.0.1:20380. Can be repeated.",
            ),
            click.option(
                "--dcgm-url",
                metavar="URL",
                callback=_base_url,
                help="A dcgm-exporter, such as http://127.0.0.1:9400 [default: one found on this node].",
            ),
            click.option(
                "--counters",
                type=click.Choice(["auto", "pm"]),
                default="auto",
                show_default=True,
                help="'pm' adds PM sampling: counters of each step, with rights (docs/pm-sampling.md).",
            ),
            click.option(
                "--pm-rate",
                type=click.IntRange(100, 20_000),
                default=1000,
                show_default=True,
                metavar="HZ",
                help="Samples a second of PM sampling.",
            ),
            click.option(
                "--pm-duty",
                metavar="ONs/PERIODs",
                callback=_duty,
                help="PM sampling in bursts, such as 1s/30s [default: all the time].",
            ),
            click.option(
                "--proc",
                type=click.Path(path_type=Path, file_okay=False, exists=True),
                default=Path("/proc"),
                show_default=True,
                help="Where the node's /proc is mounted.",
            ),
        )
    ):
        command = option(command)
    return command


def _duty(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[float, float] | None:
    if value is None:
        return None
    from gpuidle.collectors.counters.cupti.rung import parse_duty

    try:
        return parse_duty(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def price_options(command: Command) -> Command:
    """Add the options that say what a GPU-hour costs."""
    for option in reversed(
        (
            click.option(
                "--price",
                "prices",
                multiple=True,
                metavar="[GPU=]AMOUNT",
                callback=_prices,
                help="Price of a GPU-hour, of all devices or of those named so (H100). Can be repeated.",
            ),
            click.option("--currency", default="USD", show_default=True, help="Of the price."),
        )
    ):
        command = option(command)
    return command


def _endpoints(
    _context: click.Context, _parameter: click.Parameter, values: Sequence[str]
) -> tuple[tuple[str | None, str], ...]:
    out = []
    for value in values:
        match = re.fullmatch(r"(?:(?P<name>[\w.-]+)=)?(?P<url>https?://[^\s/?#]+\S*)", value)
        if match is None:
            raise click.BadParameter(f"{value!r} is not [NAME=]http://HOST:PORT")
        out.append((match["name"], match["url"]))
    return tuple(out)


def _fpm_endpoints(
    _context: click.Context, _parameter: click.Parameter, values: Sequence[str]
) -> tuple[tuple[str | None, str], ...]:
    out = []
    for value in values:
        match = re.fullmatch(r"(?:(?P<name>.+?)=)?(?P<endpoint>(?:tcp|ipc)://\S+)", value)
        if match is None:
            raise click.BadParameter(f"{value!r} is not [ENGINE=]tcp://HOST:PORT or [ENGINE=]ipc://PATH")
        out.append((match["name"], match["endpoint"]))
    return tuple(out)


def _base_url(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", value) is None:
        raise click.BadParameter(f"{value!r} is not http://HOST:PORT")
    return value


def _prices(_context: click.Context, _parameter: click.Parameter, values: Sequence[str]) -> dict[str, float]:
    prices: dict[str, float] = {}
    for value in values:
        name, _, amount = value.rpartition("=")
        try:
            price = float(amount)
        except ValueError:
            price = -1.0
        if not 0 <= price < 1e6:
            raise click.BadParameter(f"{value!r} is not [GPU=]AMOUNT with an amount from 0 up")
        prices[name.strip()] = price
    return prices


class LatestGpus:
    """A collector that keeps who held which GPU, for the discovery of engines one tick later."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._processes: dict[str, tuple[int, ...]] = {}
        self._answered = threading.Event()

    @property
    def name(self) -> str:
        """The collector's own name."""
        return self._collector.name

    def read(self, now_ns: int) -> Reading:
        """Read, and remember the holders."""
        try:
            reading = self._collector.read(now_ns)
            self._processes = {gpu.hw_id: _pids(gpu) for gpu in reading.gpus or ()}
        finally:
            self._answered.set()
        return reading

    def close(self) -> None:
        """Close the collector."""
        self._collector.close()

    def processes(self) -> Mapping[str, tuple[int, ...]] | None:
        """Return the PIDs by `hw_id`, as of the last reading; None before the driver's first answer.

        Engines are named by the GPUs they hold, so the first call waits a moment for that answer.
        """
        return self._processes if self._answered.wait(FIRST_READING_S) else None


def _pids(gpu: GpuReading) -> tuple[int, ...]:
    return tuple(process.pid for process in gpu.processes or ())


class LatestEngines:
    """A collector that keeps the engines it read, for the collector of their steps one tick later."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._engines: tuple[EngineReading, ...] = ()

    @property
    def name(self) -> str:
        """The collector's own name."""
        return self._collector.name

    def read(self, now_ns: int) -> Reading:
        """Read, and remember the engines."""
        reading = self._collector.read(now_ns)
        self._engines = reading.engines
        return reading

    def close(self) -> None:
        """Close the collector."""
        self._collector.close()

    def engines(self) -> tuple[EngineReading, ...]:
        """Return the engines as of the last reading."""
        return self._engines


def this_node() -> Node:
    """Describe this machine."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot_id = ""
    return Node(hostname=socket.gethostname(), boot_id=boot_id, gpuidle_version=__version__)


def live_source(
    *,
    interval: float,
    engine_urls: tuple[tuple[str | None, str], ...],
    discover: bool,
    steps: bool,
    steps_fpm: tuple[tuple[str | None, str], ...],
    dcgm_url: str | None,
    counters: str,
    pm_rate: int,
    pm_duty: tuple[float, float] | None,
    proc: Path,
) -> Source:
    """Return the source that reads this machine."""
    from gpuidle.agent.clock import SystemClock
    from gpuidle.agent.commands.calibrated import Calibrated, calibration_folder
    from gpuidle.agent.sampler import Sampler
    from gpuidle.collectors.counters.dcgm import DcgmRung
    from gpuidle.collectors.counters.gpm import GpmRung
    from gpuidle.collectors.counters.ladder import LadderCollector
    from gpuidle.collectors.counters.nvml import NvmlCollector
    from gpuidle.collectors.counters.rung import CounterRung
    from gpuidle.collectors.engines.collector import EnginesCollector
    from gpuidle.collectors.engines.track import NamedEndpoint
    from gpuidle.collectors.steps.collector import StepsCollector
    from gpuidle.collectors.steps.fpm import FpmEndpoint
    from gpuidle.collectors.table import ENGINES

    rungs: list[CounterRung] = [GpmRung(), DcgmRung(dcgm_url, proc=proc)]
    if counters == "pm" or pm_duty is not None:
        from gpuidle.collectors.counters.cupti.rung import CuptiPmRung, PmOptions

        on_s, period_s = pm_duty or (0.0, 0.0)
        rungs.insert(0, CuptiPmRung(PmOptions(rate_hz=pm_rate, duty_on_s=on_s, duty_period_s=period_s), proc))
    gpus = LatestGpus(LadderCollector(Calibrated(NvmlCollector(proc), calibration_folder()), rungs))
    engines = LatestEngines(
        EnginesCollector(
            ENGINES,
            proc_root=str(proc),
            endpoints=tuple(NamedEndpoint(url=url, name=name) for name, url in engine_urls),
            gpu_processes=gpus.processes,
            discover=discover,
            scrape_period_s=interval,
        )
    )
    collectors: list[Collector] = [gpus, engines]
    if steps:
        fpm = [FpmEndpoint(endpoint, name) for name, endpoint in steps_fpm]
        collectors.append(StepsCollector(engines.engines, proc=proc, fpm=fpm))
    return Sampler(collectors, SystemClock(), this_node(), interval_ns=round(interval * 1e9))


def all_settled(frame: Frame) -> bool:
    """Return whether every device has a settled window. A GPU that is split never has: its instances do."""
    split = {gpu.parent_hw_id for gpu in frame.gpus}
    return all(gpu.window_ns for gpu in frame.gpus if gpu.hw_id not in split)


class Status:
    """What exporters ask of the pipe (ports.Telemetry), which is built after them."""

    def __init__(self) -> None:
        self.pipeline: Pipeline | None = None

    def outlets(self) -> tuple[OutletStatus, ...]:
        """Return the state of every outlet; nothing before the pipe stands."""
        return () if self.pipeline is None else self.pipeline.outlets()


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(call)


async def run_until_signalled(
    pipeline: Pipeline, source: Source, *, give_stop: Callable[[Callable[[], None]], None] | None = None
) -> None:
    """Run the pipe until its source ends or SIGINT or SIGTERM comes; then flush and close.

    `give_stop` is handed a function that ends the run and may be called from any thread. A second signal
    ends the program at once.
    """
    gc.freeze()
    gc.enable()
    loop = asyncio.get_running_loop()
    closing: set[asyncio.Task[None]] = set()

    def stop() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        closing.add(asyncio.ensure_future(source.close()))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    if give_stop is not None:
        give_stop(partial(_call_soon, loop, stop))
    await pipeline.run()
