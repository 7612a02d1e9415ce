"""One device: its child, whether it serves, why not, when to try again."""

from __future__ import annotations

import msgspec

from gpuidle.agent.model import CounterSeries, Problem
from gpuidle.collectors.counters.cupti.child import Child, Message, Orders
from gpuidle.collectors.counters.cupti.clockfit import ClockFit
from gpuidle.collectors.counters.cupti.columns import Raw, convert
from gpuidle.collectors.counters.cupti.faults import NEXT_LIBRARY, NOT_COMPATIBLE, Fault, Verdict, explain
from gpuidle.collectors.counters.rung import RungStatus

SOURCE = "cupti_pm"
SECOND_NS = 1_000_000_000
START_LIMIT_NS = 20 * SECOND_NS
SILENT_LIMIT_NS = 2 * SECOND_NS
END_LIMIT_NS = 5 * SECOND_NS
"""For an end in order; killing a session in the middle can leave the GPU's counters stuck."""
HUNG_LIMIT_NS = 1 * SECOND_NS
"""For a child that hangs and is not expected to heed its signal."""
BACKOFF_S = (0, 1, 2, 4, 8, 16, 30)
STEADY_NS = 10 * SECOND_NS
"""After so long without a fault a child's past ones are forgotten."""
SOON_NS = 5 * SECOND_NS
"""For so long after a child's sudden end the driver may still hold its session."""
GAP_PERIODS = 3
UNREADABLE_NS = 3 * SECOND_NS

STARTING = Verdict(state="starting", message="", remedy="")
PAUSED = Verdict(state="starting", message="between two bursts of sampling", remedy="")


class Tally(msgspec.Struct):
    """What was left out since it was last told."""

    bad_times: int = 0
    bad_values: int = 0
    overwritten: int = 0
    overflows: int = 0
    steps: int = 0
    gaps: list[str] = msgspec.field(default_factory=list)


class Track:
    """Keeps the child of one device running and takes what it samples. Not thread-safe."""

    def __init__(self, hw_id: str, orders: Orders, libraries: tuple[str, ...], now_ns: int) -> None:
        self.hw_id = hw_id
        self._orders = orders
        self._libraries = libraries
        self._library = 0
        self._child: Child | None = None
        self._verdict = STARTING
        self._retry_ns = now_ns
        self._failures = 0
        self._started_ns = now_ns
        self._heard_ns = now_ns
        self._sudden_ns = -SOON_NS
        self._ending_ns: int | None = None
        self._end_limit_ns = END_LIMIT_NS
        self._ready: Message | None = None
        self._paused = False
        self._fault: Fault | None = None
        self._why_gap = ""
        self._overflows = 0
        self._fit = ClockFit()
        self._last_end_ns = 0
        self._fresh_ns = now_ns
        self.parts: list[CounterSeries] = []
        self.tally = Tally()

    @property
    def pid(self) -> int | None:
        """Of the child, while there is one."""
        return None if self._child is None else self._child.pid

    def status(self) -> RungStatus:
        """Return how the rung stands with this device: between two bursts other rungs serve."""
        verdict = self._verdict
        if verdict.state == "serving" and self._paused and not self.parts:
            verdict = PAUSED
        return RungStatus(
            rung="cupti_pm",
            hw_id=self.hw_id,
            state=verdict.state,
            message=verdict.message,
            remedy=verdict.remedy,
        )

    def tick(self, now_ns: int, holder: str) -> None:
        """Look after the child; `holder` is who else uses the counters, or ""."""
        if self._child is None:
            if holder:
                self._verdict = _held(holder)
                self._retry_ns = now_ns
            elif now_ns >= self._retry_ns:
                self._start(now_ns)
            return
        self._listen(self._child, now_ns, holder)
        if (code := self._child.exit_status()) is not None:
            self._listen(self._child, now_ns, holder)
            self._ended(self._child, code, now_ns, holder)
        elif self._ending_ns is not None:
            if now_ns - self._ending_ns > self._end_limit_ns:
                self._child.kill()
        elif holder:
            self._fault = None
            self._verdict = _held(holder)
            self._end(now_ns, f"left to {holder}")
        elif now_ns - self._heard_ns > (SILENT_LIMIT_NS if self._ready else START_LIMIT_NS):
            self._fault = None
            self._verdict = Verdict(
                state="lost",
                message="the sampler hangs in a call of the driver and is started anew",
                remedy="See `dmesg` for lines of the driver if it happens again.",
            )
            self._failures += 1
            self._end(now_ns, "the sampler hung", HUNG_LIMIT_NS)

    def stop(self, now_ns: int) -> None:
        """Have the child end, for good."""
        if self._child is not None:
            self._end(now_ns, "")

    def finish(self, timeout_s: float) -> None:
        """Wait for the child's end. One that takes longer is not killed: it goes on to its end alone."""
        if self._child is None:
            return
        self._child.wait(timeout_s)
        self._child.close()
        self._child = None

    def forget(self, most: int) -> None:
        """Keep the newest `most` batches that no one has asked for, and count the samples of the others."""
        old, self.parts = self.parts[:-most], self.parts[-most:]
        self.tally.overwritten += sum(map(len, old))

    def problems(self) -> tuple[Problem, ...]:
        """Return what was left out since the last call."""
        tally, self.tally = self.tally, Tally()
        rows = [
            ("bad_timestamp", tally.bad_times, "samples with impossible times left out", ""),
            ("bad_reading", tally.bad_values, "samples with impossible values left out", ""),
            ("overwritten", tally.overwritten, "samples overwritten before they were read", ""),
            (
                "overflow",
                tally.overflows,
                "overflows of the hardware buffer: sampling was started anew",
                "If they go on, sample at a lower rate.",
            ),
            ("clock_step", tally.steps, "steps of CUPTI's clock: fitted anew", ""),
        ]
        found = [
            Problem(source=SOURCE, kind=kind, message=f"{count} {text}", remedy=remedy, subject=self.hw_id)
            for kind, count, text, remedy in rows
            if count
        ]
        found += [Problem(source=SOURCE, kind="gap", message=text, subject=self.hw_id) for text in tally.gaps]
        return tuple(found)

    def _start(self, now_ns: int) -> None:
        orders = msgspec.structs.replace(self._orders, library=self._libraries[self._library])
        try:
            self._child = Child(orders)
        except OSError as error:
            self._verdict = Verdict(state="failed", message=f"no sampler can be started: {error}", remedy="")
            self._retry_ns = now_ns + 30 * SECOND_NS
            return
        self._fit = ClockFit()
        self._ready, self._fault, self._paused = None, None, False
        self._ending_ns = None
        self._overflows = 0
        self._started_ns = self._heard_ns = self._fresh_ns = now_ns
        if self._verdict.state == "serving":
            self._verdict = STARTING

    def _end(self, now_ns: int, why: str, limit_ns: int = END_LIMIT_NS) -> None:
        if self._child is not None and self._ending_ns is None:
            self._ending_ns = now_ns
            self._end_limit_ns = limit_ns
            self._why_gap = why
            self._child.ask_to_end()

    def _listen(self, child: Child, now_ns: int, holder: str) -> None:
        rows: Message | None = None
        for message in child.messages():
            self._heard_ns = now_ns
            if message.kind == "ready":
                self._ready, self._paused = message, False
            elif message.kind == "paused":
                self._paused = True
            elif message.kind == "fault":
                self._fault = Fault(
                    reason=message.reason, call=message.call, code=message.code, text=message.text
                )
            elif message.kind == "rows":
                rows = message
                if message.anchor is not None and self._fit.add(message.anchor):
                    self.tally.steps += 1
        if rows is not None and self._ready is not None:
            # Counts in the last message include those before it: one conversion for all of them.
            self._rows(child, self._ready, rows, now_ns)
        if self._ready is None and self._fault is not None:
            self._verdict = explain(self._fault, holder)

    def _rows(self, child: Child, ready: Message, message: Message, now_ns: int) -> None:
        self.tally.overflows += message.overflows - self._overflows
        overflowed = message.overflows > self._overflows
        self._overflows = message.overflows
        raw, overwritten = child.ring.take(message.head, ready.columns)
        self.tally.overwritten += overwritten
        if not self._fit.known:
            return
        period_ns = SECOND_NS // self._orders.rate_hz
        # Nothing that was sampled before this child began can come from it.
        not_before_ns = max(self._last_end_ns, self._started_ns)
        done = convert(
            raw,
            self._fit,
            hw_id=self.hw_id,
            period_ns=period_ns,
            not_before_ns=not_before_ns,
            not_after_ns=message.decoded_ns,
        )
        self.tally.bad_times += done.bad_times
        self.tally.bad_values += done.bad_values
        if done.series is None:
            if len(raw.end) and now_ns - self._fresh_ns > UNREADABLE_NS:
                self._verdict = Verdict(
                    state="failed",
                    message="no sample is believed: the newest seems to end "
                    f"{_lag_ms(self._fit, raw, message)} ms before it was decoded; see its Problems",
                    remedy="The next counter source serves. Please report it with the GPU's name and driver.",
                )
            return
        self._fresh_ns = now_ns
        start_ns = int(done.series.end_ns[0] - done.series.width_ns[0])
        if (
            self._last_end_ns
            and start_ns - self._last_end_ns > GAP_PERIODS * period_ns
            and not self._in_duty()
        ):
            why = self._why_gap or ("the hardware buffer overflowed" if overflowed else "samples are missing")
            self.tally.gaps.append(f"no samples for {(start_ns - self._last_end_ns) / 1e9:.3f} s: {why}")
        self._why_gap = ""
        self._last_end_ns = int(done.series.end_ns[-1])
        self.parts.append(done.series)
        if self._ending_ns is None:
            self._verdict = Verdict(state="serving", message="", remedy="")
        if now_ns - self._started_ns > STEADY_NS:
            self._failures = 0

    def _in_duty(self) -> bool:
        return self._orders.duty_period_s > 0 and not self._why_gap

    def _ended(self, child: Child, code: int, now_ns: int, holder: str) -> None:
        asked = self._ending_ns is not None
        served = self._ready is not None
        child.close()
        self._child, self._ending_ns = None, None
        if asked:
            self._retry_ns = now_ns + self._delay_ns()
            if code < 0:
                self._sudden_ns = now_ns
            return
        fault = self._fault
        if fault is None:
            self._sudden_ns = now_ns
            how = f"signal {-code}" if code < 0 else f"status {code}"
            words = f": {child.last_words()}" if code >= 0 and child.last_words() else ""
            self._failures += 1
            self._why_gap = f"the sampler ended by {how}"
            self._verdict = Verdict(
                state="lost",
                message=f"the sampler ended by {how}{words} and is started anew",
                remedy="If it goes on, another release of nvidia-cuda-cupti (12.6 to 13.1) may not crash.",
            )
            self._retry_ns = now_ns + self._delay_ns()
            return
        if fault.reason in NEXT_LIBRARY or fault.code == NOT_COMPATIBLE:
            self._library += 1
            if self._library < len(self._libraries):
                self._retry_ns = now_ns
                return
            self._library = 0
        self._verdict = explain(fault, holder, served=served)
        self._why_gap = self._verdict.message
        # Just after a sudden end it is the driver that still holds our own session.
        ours = self._verdict.state == "busy" and now_ns - self._sudden_ns < SOON_NS
        self._retry_ns = now_ns + (SECOND_NS // 2 if ours else self._verdict.retry_s * SECOND_NS)

    def _delay_ns(self) -> int:
        return BACKOFF_S[min(max(self._failures - 1, 0), len(BACKOFF_S) - 1)] * SECOND_NS


def _lag_ms(fit: ClockFit, raw: Raw, message: Message) -> str:
    return f"{(message.decoded_ns - int(fit.to_monotonic(raw.end[-1:])[0])) / 1e6:.1f}"


def _held(holder: str) -> Verdict:
    return Verdict(
        state="busy",
        message=f"the counters are left to {holder}",
        remedy="Sampling goes on when it ends. A DCGM host engine keeps its profiler until it is started "
        "anew without profiling fields; a dcgm-exporter's counters serve meanwhile.",
    )
