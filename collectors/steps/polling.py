"""Steps from metric files that are polled faster than the engine steps: no HTTP, no code in the engine.

What is seen: that the count of steps went up, when (to one poll), and by how much each token counter went
up with it. What is not: steps that gave no token (chunks of a prompt alone), and where several steps fell
between two polls, which was which: then one row holds them all and the others are counted as lost.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from gpuidle.agent.model import StepSeries, column
from gpuidle.collectors.steps.metric_files import MetricFile, MetricFileError, Totals

SOURCE = "mmap"
POLL_HZ = 1000
_IDLE_HZ = 100
_IDLE_AFTER_NS = 2_000_000_000
_REFRESH_NS = 250_000_000
_MOST_ROWS = 200_000
"""Kept for a reader that does not come; about a minute of the fastest engine."""


class Row(NamedTuple):
    """What one poll saw, settled."""

    start_ns: int
    end_ns: int
    steps: int
    prefill_tokens: int
    decode_tokens: int
    delivered_tokens: int
    draft_tokens: int
    accepted_tokens: int
    preemptions: int


class _Seen(NamedTuple):
    """Counters at the poll that saw the count of steps go up."""

    end_ns: int
    poll_before_ns: int
    totals: Totals


class RankFollower:
    """Turns the counters of one engine core into rows."""

    def __init__(self, totals: Totals, now_ns: int) -> None:
        self._base = totals
        self._pending: _Seen | None = None
        self._last_poll_ns = now_ns
        self._last_end_ns = 0

    def poll(self, totals: Totals, now_ns: int) -> list[Row]:
        """Take the counters of one poll; return the rows that are settled by it.

        The engine writes token counters, then the count of steps, then first tokens: so a row is settled
        only at the poll after the one that saw it.
        """
        rows: list[Row] = []
        reference = self._pending.totals if self._pending is not None else self._base
        if totals.steps < reference.steps or totals.generated_tokens < reference.generated_tokens:
            self._base, self._pending = totals, None  # the files begin anew
        elif totals.steps > reference.steps:
            seen = _Seen(now_ns, self._last_poll_ns, totals)
            if self._pending is not None:
                own = self._pending.totals
                # First tokens seen by now are the new step's only if it had a prompt.
                if totals.computed_prompt_tokens == own.computed_prompt_tokens:
                    own = own._replace(first_tokens=totals.first_tokens, first_token_s=totals.first_token_s)
                rows.append(self._settle(self._pending._replace(totals=own)))
            self._pending = seen
        elif self._pending is not None:
            own = self._pending.totals._replace(
                first_tokens=totals.first_tokens, first_token_s=totals.first_token_s
            )
            rows.append(self._settle(self._pending._replace(totals=own)))
            self._pending = None
        self._last_poll_ns = now_ns
        return rows

    def rest(self, now_ns: int) -> None:
        """Take a poll that saw nothing new."""
        self._last_poll_ns = now_ns

    def _settle(self, seen: _Seen) -> Row:
        change = seen.totals.minus(self._base)
        self._base = seen.totals
        firsts = min(change.first_tokens, change.generated_tokens)
        others = change.generated_tokens - firsts
        rejected = max(0.0, change.draft_tokens - change.accepted_tokens)
        start_ns = self._start_ns(seen, change, decodes=others > 0)
        self._last_end_ns = seen.end_ns
        return Row(
            start_ns=start_ns,
            end_ns=seen.end_ns,
            steps=round(change.steps),
            prefill_tokens=round(change.computed_prompt_tokens),
            decode_tokens=round(others + rejected),
            delivered_tokens=round(change.generated_tokens),
            draft_tokens=round(change.draft_tokens),
            accepted_tokens=round(change.accepted_tokens),
            preemptions=round(change.preemptions),
        )

    def _start_ns(self, seen: _Seen, change: Totals, *, decodes: bool) -> int:
        """Return when a step began: at the end of the last one where a sequence lived through both.

        Where all sequences are new, their mean time to the first token bounds it from below.
        """
        if decodes or change.first_tokens <= 0:
            return self._last_end_ns or seen.poll_before_ns
        waited_ns = round(change.first_token_s / change.first_tokens * 1e9)
        return max(self._last_end_ns, seen.end_ns - max(0, waited_ns))


class Follower:
    """The metric files of one API server. `poll` and `take` may be called from two threads."""

    def __init__(self, counters: MetricFile, histograms: MetricFile, now_ns: int) -> None:
        """Begin at what the counters are now.

        Raises:
            MetricFileError: the files are not as they should be.
            OSError: they cannot be read.
        """
        self._counters, self._histograms = counters, histograms
        self._refresh(now_ns)
        totals = self._read_all(histograms.read(self._steps))
        self._ranks = {rank: RankFollower(totals[rank], now_ns) for rank in histograms.ranks}
        self._rows: dict[str, list[Row]] = {rank: [] for rank in self._ranks}
        self._lost: dict[str, int] = dict.fromkeys(self._ranks, 0)
        self._last = b""
        self._unsettled = False
        self._closed = False
        self._lock = threading.Lock()
        self.failure: str | None = None
        """Why it ended."""

    def close(self) -> None:
        """Let go of the files; a poll that comes later does nothing."""
        with self._lock:
            self._closed = True
            self._counters.close()
            self._histograms.close()

    def poll(self, now_ns: int) -> bool:
        """Look once; return whether a step was counted.

        Raises:
            MetricFileError: the files are not as they should be.
            OSError: they cannot be read.
        """
        with self._lock:
            return not self._closed and self._poll(now_ns)

    def _poll(self, now_ns: int) -> bool:
        if now_ns - self._refreshed_ns >= _REFRESH_NS:
            self._refresh(now_ns)
        # The engine writes tokens before it counts the step: one stretch tells whether there is more.
        steps = self._histograms.read(self._steps)
        moved = steps != self._last
        if moved or self._unsettled:
            totals = self._read_all(steps)
            for rank, follower in self._ranks.items():
                rows = follower.poll(totals[rank], now_ns)
                if rows:
                    self._keep(rank, rows)
        else:
            for follower in self._ranks.values():
                follower.rest(now_ns)
        self._last, self._unsettled = steps, moved
        return moved

    def _refresh(self, now_ns: int) -> None:
        self._refreshed_ns = now_ns
        if self._histograms.refresh():
            self._steps = self._histograms.span(lambda name: name == "steps")
            self._firsts = self._histograms.span(lambda name: name != "steps")
        if self._counters.refresh():
            self._tokens = self._counters.span(lambda _: True)

    def _read_all(self, steps: bytes) -> dict[str, Totals]:
        firsts, tokens = self._histograms.read(self._firsts), self._counters.read(self._tokens)
        out = {}
        for rank in self._histograms.ranks:
            values = {
                **self._steps.values(steps, rank),
                **self._firsts.values(firsts, rank),
                **self._tokens.values(tokens, rank),
            }
            values.setdefault("computed_prompt_tokens", values.get("prompt_tokens", 0.0))
            out[rank] = Totals(**values)
        return out

    def take(self, until_ns: int) -> Mapping[str, tuple[list[Row], int]]:
        """Return rows that ended by `until_ns` and steps lost, by engine core, once."""
        out: dict[str, tuple[list[Row], int]] = {}
        with self._lock:
            for rank, rows in self._rows.items():
                ready = [row for row in rows if row.end_ns <= until_ns]
                self._rows[rank] = rows[len(ready) :]
                out[rank] = (ready, self._lost[rank])
                self._lost[rank] = 0
        return out

    def _keep(self, rank: str, rows: list[Row]) -> None:
        kept = self._rows[rank]
        kept += rows
        self._lost[rank] += sum(row.steps - 1 for row in rows)
        over = len(kept) - _MOST_ROWS
        if over > 0:
            self._lost[rank] += over
            del kept[:over]


class Poller:
    """The thread that polls all followers; slowly while no engine of them works."""

    def __init__(self, hz: int = POLL_HZ) -> None:
        self._period_s = 1 / hz
        self._followers: tuple[Follower, ...] = ()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, followers: tuple[Follower, ...]) -> None:
        """Poll these from now on; the thread starts with the first and waits while there are none."""
        self._followers = followers
        if followers and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpuidle-steps", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # it needs CAP_SYS_NICE; without it a full machine loses steps
            policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
            os.sched_setscheduler(threading.get_native_id(), policy, os.sched_param(1))
        moved_ns = time.monotonic_ns()
        while not self._stopped.is_set():
            now_ns = time.monotonic_ns()
            for follower in self._followers:
                if follower.failure is None and _poll(follower, now_ns):
                    moved_ns = now_ns
            idle = now_ns - moved_ns > _IDLE_AFTER_NS
            time.sleep(1 / _IDLE_HZ if idle else self._period_s)


def _poll(follower: Follower, now_ns: int) -> bool:
    try:
        return follower.poll(now_ns)
    except (MetricFileError, OSError, ValueError, OverflowError) as error:
        follower.failure = str(error) or type(error).__name__
        return False


def spread_prompts(prefill: list[int], decode: list[int], budget: int | None) -> list[int]:
    """Give the prompt tokens of long prompts back to the steps that computed them.

    The engine counts a prompt in the step of its last chunk. With `budget` tokens a step, of which decodes
    take theirs first, what does not fit was computed in the steps before. Sums stay the same; what fits
    nowhere (the steps before were not counted) stays with the last chunk.
    """
    if budget is None:
        return prefill
    out = list(prefill)
    for at in range(len(out) - 1, -1, -1):
        over = out[at] - max(1, budget - decode[at])
        back = at - 1
        while over > 0 and back >= 0 and decode[back] > 0:
            room = max(0, min(budget - decode[back] - out[back], over))
            out[back] += room
            out[at] -= room
            over -= room
            back -= 1
    return out


def series(engine_id: str, rank: str, rows: list[Row], lost: int, budget: int | None) -> StepSeries:
    """Return rows as steps: reconstructed, since chunks are invisible and times are the front end's."""
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(Row._fields))

    def of(name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return column(table[:, Row._fields.index(name)], "i8")

    prefill = spread_prompts(of("prefill_tokens").tolist(), of("decode_tokens").tolist(), budget)
    return StepSeries(
        engine_id=engine_id,
        source=SOURCE,
        exact=False,
        lost=lost,
        start_ns=of("start_ns"),
        end_ns=of("end_ns"),
        prefill_tokens=column(np.array(prefill, dtype=np.int64), "i8"),
        decode_tokens=of("decode_tokens"),
        delivered_tokens=of("delivered_tokens"),
        draft_tokens=of("draft_tokens"),
        accepted_tokens=of("accepted_tokens"),
        preemptions=of("preemptions"),
        rank=rank,
    )
