"""The counters of a dcgm-exporter that runs on the node anyway: the `dcgm` rung.

Nothing is opened on the GPU: the page of the exporter is read, a quarter of its interval apart. Its counters
are means of its interval; each is handed over once, as long as it was. They come late by a lag that the
exporter does not tell (up to 40 s with its defaults); where its page has the energy counter, the lag is
found by looking up when NVML's own energy counter stood there.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gpuidle.agent.clock import Clock, SystemClock
from gpuidle.agent.model import RATIO_STEP, CounterSeries, GpuReading, Rung, column, rate_column
from gpuidle.agent.physics.peaks import find_peaks
from gpuidle.collectors.counters.dcgm_find import NONE, FoundExporter, find_exporter
from gpuidle.collectors.counters.dcgm_page import DcgmPage, DeviceKey, DeviceRow, read_page
from gpuidle.collectors.counters.dcgm_status import Standing, page_problems, status_of
from gpuidle.collectors.counters.dcgm_track import EnergyRenewal, Sample, Tracker
from gpuidle.collectors.counters.rung import RungReading
from gpuidle.collectors.discovery.processes import ProcessTable
from gpuidle.collectors.support.exposition import ExpositionError
from gpuidle.collectors.support.http import HttpClient, HttpError

_BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_PAGE_BYTES = 16 * 1024 * 1024
_KEPT_SAMPLES = 256
"""As many wait to be handed over; older ones are dropped when nobody asks."""
_LAGS = 15
_ENERGIES = 256


class DcgmRung:
    """Implements `gpuidle.collectors.counters.rung.CounterRung`.

    `url` is where an exporter answers ("http://127.0.0.1:9400"), None to look for one among the processes
    under `proc`. With `threaded` False nothing is polled but by `poll`: for tests, and for `doctor`.
    """

    name: Rung = "dcgm"

    def __init__(
        self,
        url: str | None = None,
        *,
        proc: Path = Path("/proc"),
        clock: Clock | None = None,
        timeout_s: float = 5.0,
        threaded: bool = True,
    ) -> None:
        self._named = url
        self._table = ProcessTable(proc)
        self._clock = clock or SystemClock()
        self._timeout_s = timeout_s
        self._threaded = threaded
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # Of the polling thread.
        self._client: HttpClient | None = None
        self._failures = 0
        self._text = ""
        self._page = DcgmPage(devices={}, recognised=False)
        # Shared, under the lock.
        self._tracker = Tracker()
        self._samples: deque[Sample] = deque(maxlen=_KEPT_SAMPLES)
        self._standing = Standing()
        # Of the reading thread.
        self._energies: dict[str, deque[tuple[int, float]]] = {}
        self._unplaced: list[EnergyRenewal] = []
        self._lags: deque[int] = deque(maxlen=_LAGS)
        self._last_end: dict[str, int] = {}
        self._counted: set[str] = set()
        self._gone: set[str] = set()

    @property
    def lag_ns(self) -> int | None:
        """How late the exporter's numbers are by the energy counters; None where that cannot be told."""
        return None if not self._lags else max(0, round(statistics.median(self._lags)))

    @property
    def standing(self) -> Standing:
        """How the exporter did last."""
        with self._lock:
            return self._standing

    def read(self, now_ns: int, devices: Sequence[GpuReading]) -> RungReading:
        """Hand over the intervals that were completed since the last call."""
        if self._threaded and self._thread is None and devices:
            self._thread = threading.Thread(target=self._run, name="gpuidle-dcgm", daemon=True)
            self._thread.start()
        with self._lock:
            samples = list(self._samples)
            self._samples.clear()
            renewals = self._tracker.take_energies()
            standing = self._standing
            stale_s = self._tracker.stale(now_ns)
        self._learn_lag(renewals, devices)
        for device in devices:
            row = None if standing.page is None else _row(standing.page.devices, device)
            if row is not None and row.ratios:
                self._counted.add(device.hw_id)
        present = {device.hw_id for device in devices}
        self._last_end = {hw_id: end for hw_id, end in self._last_end.items() if hw_id in present}
        series = [self._series(device, samples) for device in devices]
        return RungReading(
            series=tuple(each for each in series if each is not None),
            status=tuple(
                status_of(
                    device.hw_id,
                    standing,
                    None if standing.page is None else _row(standing.page.devices, device),
                    stale_s=stale_s,
                    counted=device.hw_id in self._counted,
                )
                for device in devices
            ),
            problems=page_problems(standing),
        )

    def close(self) -> None:
        """Stop polling; a request under way is left to its time limit."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(0.5)
        elif self._client is not None:
            self._client.close()

    def poll(self) -> float:
        """Ask the exporter once; return after how many seconds to ask again."""
        try:
            client = self._client or self._connect()
            self._client = client
            sent_ns = self._clock.now().monotonic_ns
            text = client.get("/metrics").text
            # Three of four pages are the one before.
            page = self._page if text == self._text else read_page(text)
        except _Nowhere as nowhere:
            return self._failed(nowhere.found.message, nowhere.found.remedy, "")
        except (HttpError, ExpositionError) as error:
            url = self._client.base_url if self._client is not None else self._named or ""
            return self._failed(str(error), "see whether the exporter runs and where it listens", url)
        now = self._clock.now()
        self._text, self._page = text, page
        self._failures = 0
        with self._lock:
            self._samples += self._tracker.poll(
                page, sent_ns, now.monotonic_ns, now.wall_ns - now.monotonic_ns
            )
            self._standing = Standing(
                url=client.base_url, page=page, interval_ns=self._tracker.interval_ns, served=True
            )
            pause_ns = self._tracker.pause_ns()
        if not page.recognised:
            self._disconnect()  # something else answers there: look again
            return _BACKOFF_S[-1]
        return pause_ns / 1e9

    def _run(self) -> None:
        while not self._stop.is_set():
            self._stop.wait(self.poll())
        self._disconnect()

    def _connect(self) -> HttpClient:
        urls: tuple[str, ...]
        if self._named is not None:
            urls = (self._named,)
        else:
            try:
                self._table.refresh()
                found = find_exporter(self._table)
            except OSError:
                found = NONE
            if not found.urls:
                raise _Nowhere(found)
            urls = found.urls
        # The last of several is asked again and again; the others only if it is not there.
        client = HttpClient(urls[-1], timeout_s=self._timeout_s, max_bytes=_PAGE_BYTES)
        for url in urls[:-1]:
            first = HttpClient(url, timeout_s=self._timeout_s, max_bytes=_PAGE_BYTES)
            with contextlib.suppress(HttpError, ExpositionError):
                if read_page(first.get("/metrics").text).recognised:
                    client.close()
                    return first
            first.close()
        return client

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _failed(self, message: str, remedy: str, url: str) -> float:
        self._disconnect()
        pause_s = _BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)]
        self._failures += 1
        with self._lock:
            # Whatever answers next may be another exporter, with another interval.
            self._tracker = Tracker()
            self._standing = Standing(url=url, failure=message, remedy=remedy, served=self._standing.served)
        return pause_s

    def _learn_lag(self, renewals: Sequence[EnergyRenewal], devices: Sequence[GpuReading]) -> None:
        """Find when NVML's energy counter stood where the exporter's page has it."""
        for device in devices:
            if device.energy_joules is None:
                continue
            known = self._energies.setdefault(device.hw_id, deque(maxlen=_ENERGIES))
            if known and device.energy_joules < known[-1][1]:
                known.clear()  # the driver was loaded anew
            known.append((device.read_ns, device.energy_joules))
        waiting: list[EnergyRenewal] = []
        for renewal in [*self._unplaced, *renewals]:
            moments = [_moment(self._energies.get(uuid), joules) for uuid, joules in renewal.joules.items()]
            found = [renewal.seen_ns - moment for moment in moments if moment is not None]
            self._lags += found
            if not found:
                waiting.append(renewal)
        self._unplaced = waiting[-_LAGS:]

    def _series(self, device: GpuReading, samples: Sequence[Sample]) -> CounterSeries | None:
        rows: list[DeviceRow] = []
        ends: list[int] = []
        widths: list[int] = []
        last_ns = self._last_end.get(device.hw_id)
        for sample in samples:
            row = _row(sample.devices, device)
            if row is None:
                continue
            if not row.ratios:
                self._gone.add(device.hw_id)
                continue
            if device.hw_id in self._gone:
                # The first number after a gap may be the mean of less than an interval.
                self._gone.remove(device.hw_id)
                continue
            end_ns = sample.ended_ns if sample.ended_ns is not None else sample.seen_ns - (self.lag_ns or 0)
            begin_ns = end_ns - sample.interval_ns
            if last_ns is not None:
                begin_ns = max(begin_ns, last_ns)
            if begin_ns >= end_ns:
                continue
            last_ns = end_ns
            rows.append(row)
            ends.append(end_ns)
            widths.append(end_ns - begin_ns)
        if not rows or last_ns is None:
            return None
        self._last_end[device.hw_id] = last_ns
        peaks = find_peaks(device.name, device.memory_total_bytes)
        dram = _values(rows, "dram_active")
        return CounterSeries(
            hw_id=device.hw_id,
            rung="dcgm",
            end_ns=column(ends, "<i8"),
            width_ns=column(widths, "<i8"),
            gr_active=_steps(rows, "gr_active"),
            sm_active=_steps(rows, "sm_active"),
            tensor_active=_steps(rows, "tensor_active"),
            dram_bytes_per_s=None
            if dram is None or peaks is None
            else rate_column([value * peaks.memory_bytes_per_s for value in dram]),
        )


class _Nowhere(Exception):
    def __init__(self, found: FoundExporter) -> None:
        super().__init__(found.message)
        self.found = found


def _row(rows: Mapping[DeviceKey, DeviceRow], device: GpuReading) -> DeviceRow | None:
    keys = [DeviceKey(device.hw_id)]
    if device.parent_hw_id is not None:
        keys = [DeviceKey(device.parent_hw_id, device.instance_id), *keys]
        if device.instance_id is None:
            del keys[0]
    return next((rows[key] for key in keys if key in rows), None)


def _moment(known: Sequence[tuple[int, float]] | None, joules: float | None) -> int | None:
    """Return when a counter that only grows stood at `joules`, or None if that is not among `known`."""
    if not known or joules is None or not known[0][1] < joules <= known[-1][1]:
        return None
    moments, levels = zip(*known, strict=True)
    offset = np.interp(joules, levels, [moment - moments[0] for moment in moments])
    return int(moments[0] + offset)


def _values(rows: Sequence[DeviceRow], name: str) -> list[float] | None:
    values = [row.ratios[name] for row in rows if name in row.ratios]
    return values if len(values) == len(rows) else None


def _steps(rows: Sequence[DeviceRow], name: str) -> np.ndarray[tuple[int], np.dtype[np.uint16]] | None:
    values = _values(rows, name)
    return None if values is None else column([round(value / RATIO_STEP) for value in values], "<u2")
