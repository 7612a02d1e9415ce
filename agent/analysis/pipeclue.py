"""What the tensor pipe tells of a window of which only sums are known: how long its prompts were computed.

Counted steps and their pace say that decodes took D of the busy time, and that the rest C had prompts in it.
The pipe is busy for a share u of the former and p of the latter, but for the time in which small prompts wait
for the memory. So it should have been busy for u D + p (C - waits); what it was says by how much D is wrong.
What the pipe did is cut at a window's edges as time is, while steps are counted whole, and prompts when they
end.

p is learned as a ratio of sums, in which errors of single windows cancel; so is how far u is from the work
model's, by windows without prompts. What lies between both, beyond what the counted steps may be wrong by, is
the error of the pipe: each weighs by the other's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from gpuidle.agent.analysis.activity import Activity
from gpuidle.agent.analysis.phase import Clues
from gpuidle.agent.analysis.rates import Sums
from gpuidle.agent.analysis.stepsizes import prompt_sizes
from gpuidle.agent.model import Shares
from gpuidle.agent.physics.peaks import DevicePeaks

MEMORY_S = 60.0
"""After this much busy time a window's weight has fallen to 1/e."""
ENOUGH_S = 3.0
"""Time with prompts before it is known what the pipe does in it."""
EXPECTED_S = 2.0
"""Time of decodes by which the work model's share of the pipe is believed."""
EXPECTED_ERROR, EXPECTED_WINDOWS = 0.05, 5.0
"""Of the decodes by the pipe, as a part of the busy time, before anything was seen."""
LEAST_ERROR = 0.007
"""What is believed of the pipe at most, likewise."""
FAR = 4.0
"""Standard errors beyond which one of both is wrong altogether (a dead counter): nothing follows."""
APART = 1.5
"""Steps with prompts keep the pipe busy this much longer than decodes, or nothing follows."""


class Pipe(msgspec.Struct, frozen=True):
    """The tensor pipe in one window, the mean of an engine's devices."""

    busy_ns: float
    clock_ratio: float
    """SM clock over the sheet's."""
    peaks: DevicePeaks


def pipe_of(seen: Iterable[Activity], peaks: DevicePeaks | None, window_ns: int) -> Pipe | None:
    """Return what the pipes of an engine's devices did; None if they were not all seen."""
    devices = list(seen)
    times = [each.tensor_ns for each in devices if each.tensor_ns is not None]
    if peaks is None or len(times) < len(devices):
        return None
    if min(each.observed_ns for each in devices) < 0.98 * window_ns:
        return None
    clocks = [each.sm_clock_hz for each in devices if each.sm_clock_hz]
    sheet = peaks.sheet_clock_hz
    ratio = sum(clocks) / len(clocks) / sheet if clocks and sheet else 1.0
    return Pipe(sum(times) / len(times), ratio, peaks)


class PipeClue:
    """What the pipe does in the steps of one engine, learned from its windows."""

    def __init__(self) -> None:
        self._decodes = self._expected = EXPECTED_S * 1e9
        self._prompts = self._prompts_ns = 0.0
        self._square = EXPECTED_WINDOWS * EXPECTED_ERROR**2
        self._windows = EXPECTED_WINDOWS

    def with_pipe(self, clues: Clues, shares: Shares, sums: Sums, pipe: Pipe, pipe_s: float) -> Clues:
        """Return the clues with by how much longer (or shorter) decodes took than by counted steps.

        `shares` are by those steps, `pipe_s` is the time of the pipe in one of decodes by the work model.
        """
        return msgspec.structs.replace(clues, more_decodes_ns=self._learn(clues, shares, sums, pipe, pipe_s))

    def _learn(self, clues: Clues, shares: Shares, sums: Sums, pipe: Pipe, pipe_s: float) -> float:
        busy_ns, decode_ns = float(shares.window_ns - shares.idle_ns), float(shares.decode_ns)
        pace_ns, token_ns, following = clues.pace_ns, clues.prompt_token_ns, clues.following
        if pace_ns is None or shares.unknown_ns or not busy_ns or not decode_ns or sums.reset:
            return 0.0
        usual = pipe_s * 1e9 / pipe.clock_ratio / pace_ns
        prompts_ns = busy_ns - decode_ns
        fade = math.exp(-busy_ns / 1e9 / MEMORY_S)
        if not prompts_ns:
            if following is None or following.first_tokens or following.chunk_steps:
                return 0.0  # chunks of its prompts may have been computed here
            more = EXPECTED_S * 1e9 * (1 - fade)  # the model is never forgotten
            self._decodes = self._decodes * fade + pipe.busy_ns / max(usual, 1e-9) + more
            self._expected = self._expected * fade + busy_ns + more
            return 0.0
        if token_ns is None:
            return 0.0
        decodes = min(1.0, usual * self._decodes / self._expected)
        prompts_ns -= min(prompts_ns, _waits_ns(sums, pace_ns * clues.prompt_ratio, token_ns))
        self._prompts = self._prompts * fade + pipe.busy_ns - decodes * decode_ns
        self._prompts_ns = self._prompts_ns * fade + prompts_ns
        if self._prompts_ns < ENOUGH_S * 1e9:
            return 0.0
        prompts = self._prompts / self._prompts_ns
        if prompts <= APART * decodes:
            return 0.0
        missing_ns = (prompts * prompts_ns + decodes * decode_ns - pipe.busy_ns) / (prompts - decodes)
        counted = min(_error_ns(sums, clues, busy_ns, decode_ns), decode_ns) ** 2
        self._square = self._square * fade + (missing_ns**2 - counted) / busy_ns**2
        self._windows = self._windows * fade + 1
        seen = busy_ns**2 * max(LEAST_ERROR**2, self._square / self._windows)
        if missing_ns**2 > FAR**2 * (counted + seen):
            return 0.0
        return missing_ns * counted / (counted + seen)


def _waits_ns(sums: Sums, least_ns: float, token_ns: float) -> float:
    """Return the time in which steps with small prompts wait for the memory: they take `least_ns`."""
    return sum(max(0.0, least_ns - tokens * token_ns) * steps for tokens, steps in prompt_sizes(sums))


def _error_ns(sums: Sums, clues: Clues, busy_ns: float, decode_ns: float) -> float:
    """Return the standard error of the time of decodes by counted steps.

    Each edge cuts a decode anywhere, or none; the number of steps with prompts and the pace have their own.
    """
    step_ns, share = clues.pace_ns or 0.0, decode_ns / busy_ns
    edges = share / 6 + share * (1 - share) / 2
    count = sums.chunk_spread**2 + (sums.perhaps_steps / 2) ** 2
    if sums.prompt_steps is None:
        count += (sums.first_tokens or 0) / 4
    return math.hypot(step_ns * math.sqrt(edges + count), clues.pace_spread * decode_ns)
