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
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from gpuidle.agent.model import StepSeries, column
from gpuidle.collectors.steps.metric_files import MARK, MetricFile, MetricFileError, Span, Totals
from gpuidle.collectors.steps.ticker import Ticker

SOURCE = "mmap"
POLL_HZ = 1000
_IDLE_HZ = 100
_IDLE_AFTER_NS = 2_000_000_000
_REFRESH_NS = 250_000_000
_DECODE_AT, _MOST_LOOKS = 64, 256
"""Looks of 10 kB that are decoded together, after a poll that saw no more steps or else after any."""
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


class _Look(NamedTuple):
    """The bytes that one poll read."""

    now_ns: int
    before_ns: int
    """When the poll before was."""
    steps: bytes
    """Empty if nothing was counted since the poll before."""
    firsts: bytes
    tokens: bytes
    """Empty as `steps`."""
    settled: bool = True
    """Whether no first token can come later: no prompt's tokens were counted, or this was the look for it."""


class _Seen(NamedTuple):
    """Counters at the poll that saw the count of steps go up."""

    end_ns: int
    poll_before_ns: int
    totals: Totals


class RankFollower:
    """Turns the counters of one engine core into rows.

    The engine writes token counters, then the count of steps, then first tokens: so a row with a prompt is
    settled only at the poll after the one that saw it.
    """

    def __init__(self, totals: Totals) -> None:
        self._base = totals
        self._pending: _Seen | None = None
        self._last_end_ns = 0

    def moved(self, totals: Totals, now_ns: int, poll_before_ns: int) -> Row | None:
        """Take the counters of a poll that saw steps; return the row that is settled by it."""
        pending = self._pending
        reference = pending.totals if pending is not None else self._base
        if totals.steps < reference.steps or totals.generated_tokens < reference.generated_tokens:
            self._base, self._pending = totals, None  # the files begin anew
            return None
        if totals.steps == reference.steps:  # they are of another engine core
            return self.rested(totals.first_tokens, totals.first_token_s)
        row = None
        if pending is not None:
            # First tokens seen by now are the new step's only if it had a prompt.
            firsts_of = (
                totals if totals.computed_prompt_tokens == reference.computed_prompt_tokens else reference
            )
            row = self._settle(pending, firsts_of.first_tokens, firsts_of.first_token_s)
        self._pending = _Seen(now_ns, poll_before_ns, totals)
        return row

    def rested(self, first_tokens: float, first_token_s: float) -> Row | None:
        """Take a poll that saw no more steps, or all of them; return the row that is settled by it."""
        pending, self._pending = self._pending, None
        return None if pending is None else self._settle(pending, first_tokens, first_token_s)

    def _settle(self, seen: _Seen, first_tokens: float, first_token_s: float) -> Row:
        totals = seen.totals
        if totals.first_tokens != first_tokens:
            totals = totals._replace(first_tokens=first_tokens, first_token_s=first_token_s)
        change = totals.minus(self._base)
        self._base = totals
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
    """The metric files of one API server. `poll` and `take` may be called from two threads.

    A poll only notes the bytes that it read: decoding many of them together takes a fifth of what it takes
    to decode each after a sleep.
    """

    _steps: Span
    _firsts: Span
    _tokens: Span
    _prompts: slice
    _last_prompts: bytes
    _read_mark: Callable[[], bytes]

    def __init__(self, counters: MetricFile, histograms: MetricFile, now_ns: int) -> None:
        """Begin at what the counters are now.

        Raises:
            MetricFileError: the files are not as they should be.
            OSError: they cannot be read.
        """
        self._counters, self._histograms = counters, histograms
        self._looks: list[_Look] = []
        self._polled_ns = now_ns
        self._prompted = self._unsettled = False
        self._closed = False
        self._lock = threading.Lock()
        self._refresh(now_ns)
        self._last_mark = self._read_mark()
        self._last_steps = histograms.read(self._steps)
        self._last_firsts, tokens = histograms.read(self._firsts), counters.read(self._tokens)
        begin = _Look(now_ns, now_ns, self._last_steps, self._last_firsts, tokens)
        self._ranks = {rank: RankFollower(self._totals(rank, [begin])[0]) for rank in histograms.ranks}
        self._rows: dict[str, list[Row]] = {rank: [] for rank in self._ranks}
        self._lost: dict[str, int] = dict.fromkeys(self._ranks, 0)
        self.failure: str | None = None
        """Why it ended."""

    def close(self) -> None:
        """Let go of the files; a poll that comes later does nothing."""
        with self._lock:
            self._closed = True
            self._look_at_ns = 0
            self._counters.close()
            self._histograms.close()

    def poll(self, now_ns: int) -> bool:
        """Look once; return whether a step was counted.

        Raises:
            MetricFileError: the files are not as they should be.
            OSError: they cannot be read.
        """
        # Most polls end here, so without a lock, and without a call that is not needed.
        mark = None
        if now_ns < self._look_at_ns:
            mark = self._read_mark()
            if mark == self._last_mark:
                self._polled_ns = now_ns
                return False
        with self._lock:
            return not self._closed and self._look(now_ns, mark)

    def _look(self, now_ns: int, mark: bytes | None) -> bool:
        refreshed = now_ns >= self._refresh_at_ns
        if refreshed:
            self._refresh(now_ns)
        before_ns, self._polled_ns = self._polled_ns, now_ns
        if mark is None or refreshed:
            mark = self._read_mark()
        seen = mark == self._last_mark and not refreshed  # a step without tokens leaves no mark
        steps = self._last_steps if seen else self._histograms.read(self._steps)
        # The engine writes tokens, then the mark, then the count of steps, then first tokens.
        moved = steps != self._last_steps
        unsettled, self._unsettled = self._unsettled, False
        if moved:
            self._last_mark, self._last_steps = mark, steps
            tokens = self._counters.read(self._tokens)
            prompts = tokens[self._prompts]
            # What was read may have held the next step's prompts already: its first tokens are to come, too.
            prompted, self._prompted = self._prompted, prompts != self._last_prompts
            self._unsettled = self._prompted or prompted
            self._last_prompts = prompts
            if unsettled or self._unsettled:
                self._last_firsts = self._histograms.read(self._firsts)
            settled = not self._unsettled
            self._looks.append(_Look(now_ns, before_ns, steps, self._last_firsts, tokens, settled))
        elif unsettled:
            self._last_firsts = self._histograms.read(self._firsts)
            self._looks.append(_Look(now_ns, before_ns, b"", self._last_firsts, b""))
        if len(self._looks) >= (_MOST_LOOKS if moved else _DECODE_AT):
            self._decode()
        self._look_at_ns = 0 if self._unsettled else self._refresh_at_ns
        return moved

    def _decode(self) -> None:
        """Turn what was noted into rows."""
        looks, self._looks = self._looks, []
        moved = [look for look in looks if look.steps]
        for rank, follower in self._ranks.items():
            totals = iter(self._totals(rank, moved) if moved else ())
            columns = self._firsts.columns([look.firsts for look in looks], rank) if looks else {}
            zeros = [0.0] * len(looks)
            firsts = zip(columns.get("first_tokens", zeros), columns.get("first_token_s", zeros), strict=True)
            for look, (first_tokens, first_token_s) in zip(looks, firsts, strict=True):
                if look.steps:
                    self._keep(rank, follower.moved(next(totals), look.now_ns, look.before_ns))
                if look.settled:
                    self._keep(rank, follower.rested(first_tokens, first_token_s))

    def _refresh(self, now_ns: int) -> None:
        self._look_at_ns = self._refresh_at_ns = now_ns + _REFRESH_NS
        histograms, counters = self._histograms.refresh(), self._counters.refresh()
        if self._looks and (histograms or counters):
            self._decode()  # by the places that they were read from
        if histograms:
            self._read_mark = self._histograms.mark()
            self._steps = self._histograms.span(lambda name: name == "steps")
            self._firsts = self._histograms.span(lambda name: name not in ("steps", MARK))
        if counters:
            self._tokens = self._counters.span(lambda _: True)
            prompts = self._counters.span(lambda name: "prompt_tokens" in name)
            begin = prompts.begin - self._tokens.begin
            found = prompts.end > prompts.begin  # else each step may have had a prompt
            self._prompts = slice(begin, begin + prompts.end - prompts.begin) if found else slice(None)
        if histograms or counters:
            self._last_prompts = b""  # so that first tokens are read anew

    def _totals(self, rank: str, looks: list[_Look]) -> list[Totals]:
        values = {
            **self._steps.columns([look.steps for look in looks], rank),
            **self._firsts.columns([look.firsts for look in looks], rank),
            **self._tokens.columns([look.tokens for look in looks], rank),
        }
        zeros = [0.0] * len(looks)
        values.setdefault("computed_prompt_tokens", values.get("prompt_tokens", zeros))
        return list(map(Totals, *(values.get(name, zeros) for name in Totals._fields)))

    def take(self, until_ns: int) -> Mapping[str, tuple[list[Row], int]]:
        """Return rows that ended by `until_ns` and steps lost, by engine core, once."""
        out: dict[str, tuple[list[Row], int]] = {}
        with self._lock:
            self._decode()
            for rank, rows in self._rows.items():
                ready = [row for row in rows if row.end_ns <= until_ns]
                self._rows[rank] = rows[len(ready) :]
                out[rank] = (ready, self._lost[rank])
                self._lost[rank] = 0
        return out

    def _keep(self, rank: str, row: Row | None) -> None:
        if row is None:
            return
        kept = self._rows[rank]
        kept.append(row)
        self._lost[rank] += row.steps - 1
        over = len(kept) - _MOST_ROWS
        if over > 0:
            self._lost[rank] += over
            del kept[:over]


class Poller:
    """The thread that polls all followers; slowly while no engine of them works."""

    def __init__(self, hz: int = POLL_HZ) -> None:
        self._hz = hz
        self._followers: tuple[Follower, ...] = ()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def follow(self, followers: tuple[Follower, ...]) -> None:
        """Poll these from now on; the thread starts with the first and waits while there are none."""
        self._followers = followers
        if followers and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpuidle-steps", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # it needs CAP_SYS_NICE; without it a full machine loses steps
            policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
            os.sched_setscheduler(threading.get_native_id(), policy, os.sched_param(1))
        with Ticker(self._hz) as fast, Ticker(min(self._hz, _IDLE_HZ)) as slow:
            moved_ns = time.monotonic_ns()
            while not self._stopped:  # in one function: after each sleep, each call is one into a cold cache
                now_ns = time.monotonic_ns()
                for follower in self._followers:
                    if follower.failure is None:
                        try:
                            if follower.poll(now_ns):
                                moved_ns = now_ns
                        except (MetricFileError, OSError, ValueError, OverflowError) as error:
                            follower.failure = str(error) or type(error).__name__
                (fast if now_ns - moved_ns < _IDLE_AFTER_NS else slow).wait()


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
