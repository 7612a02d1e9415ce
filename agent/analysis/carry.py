"""Work that is booked in another window than the one that did it: prompts are counted when they end.

Tokens of decodes are booked on time, those of a prompt on its last chunk. So each window pays for as much of
the prompts' work as it had room for; what it cannot pay is owed to the next ones, and a window that began
prompts of the next pays for them in advance. Sums over a session stay those of the tokens.
"""

from __future__ import annotations

import math

import msgspec

from gpuidle.agent.analysis.enginewindow import EngineWindow
from gpuidle.agent.analysis.stepsizes import prompt_sizes
from gpuidle.agent.analysis.tracks import GpuTrack
from gpuidle.agent.physics.peaks import DevicePeaks

MOST_OWED_NS = 4e9
"""The longest prompts there are take less of a GPU's pipe."""
RATE_MEMORY_NS = 60e9
"""After this much time in prefills what their rate was learned from has fallen to 1/e."""
ENOUGH_NS = 2e9
"""Time in prefills before their rate is believed."""
FASTER = 1.25
"""Prompts are paid for at this many times their usual rate at most where no counter shows the pipe: what is
owed goes down, and no window is filled with the work of others."""
DOUBT = 0.5
"""How much of the padding may be work: what the pipe does in decode moves with the batch."""
DEAD_RATIO = 0.5
"""A tensor counter that saw less than this of the work of a minute is not taken for a limit of it."""


class Paid(msgspec.Struct, frozen=True, kw_only=True):
    """What one window is booked for, in ns of it."""

    useful_ns: float
    talk_ns: float | None
    """Time of messages between ranks; None: not known."""


def pay(
    track: GpuTrack,
    engine: EngineWindow,
    useful_ns: float,
    tensor_ns: float | None,
    active_ns: float,
    peaks: DevicePeaks,
    pad_ns: float | None,
) -> Paid:
    """Return the useful time and the messages of a window that is known by its token sums only.

    Args:
        track: The device; what is owed and what was learned of it is kept there.
        engine: The only engine on it; its `work` is known.
        useful_ns: What the tokens booked in this window claim.
        tensor_ns: Tensor-active time; None: no counter shows it.
        active_ns: Time with work on the GPU.
        peaks: The device's.
        pad_ns: Estimate of the rows that fill up tiles in decode steps, in ns of the pipe.
    """
    work = engine.work
    if work is None:
        return Paid(useful_ns=useful_ns, talk_ns=None)
    shares = engine.shares
    containing_ns = float(shares.prefill_ns + shares.mixed_ns)
    doubtful_ns = containing_ns + shares.unknown_ns
    prompts_ns = useful_ns * work.prompt_ratio
    decodes_ns = useful_ns - prompts_ns
    _learn_talk(track, prompts_ns, work.prompt_collectives_ns)
    if tensor_ns is not None:
        padding_ns = _padding(track, float(shares.decode_ns), decodes_ns, pad_ns)
        room_ns = tensor_ns - decodes_ns - padding_ns
        most_ns = room_ns + DOUBT * padding_ns
    else:
        room_ns = most_ns = active_ns - decodes_ns
        if track.prompt_rate_ns[1] >= ENOUGH_NS:
            rate = FASTER * track.prompt_rate_ns[0] / track.prompt_rate_ns[1]
            room_ns, most_ns = min(room_ns, rate * doubtful_ns), min(most_ns, rate * active_ns)
    if not shares.unknown_ns:
        _learn_rate(track, prompts_ns, containing_ns)
    debt_ns = track.useful_debt_ns
    lent_ns = _lendable(engine, peaks) if containing_ns else 0.0
    # The window's own prompts are believed unless the pipe contradicts; what others owe needs room.
    own_ns = min(max(0.0, prompts_ns + min(0.0, debt_ns)), max(0.0, most_ns))
    others_ns = min(max(0.0, prompts_ns + debt_ns + lent_ns - own_ns), max(0.0, room_ns - own_ns))
    paid_ns = own_ns + (others_ns if doubtful_ns else 0.0)
    left_ns = prompts_ns + debt_ns - paid_ns
    track.useful_debt_ns = max(-MOST_OWED_NS, min(left_ns, MOST_OWED_NS))
    talk_ns = work.collectives_ns - work.prompt_collectives_ns + track.prompt_talk_ratio * paid_ns
    return Paid(useful_ns=decodes_ns + paid_ns, talk_ns=talk_ns)


def pay_exact(track: GpuTrack, useful_ns: float, tensor_ns: float) -> float:
    """Return the useful time where steps tell when it was done, or where several engines did it.

    What the pipe had no room for (the counter's noise, an edge) is owed to the next windows.
    """
    owed_ns = useful_ns + track.useful_debt_ns
    paid_ns = min(max(0.0, owed_ns), tensor_ns)
    track.useful_debt_ns = max(-MOST_OWED_NS, min(owed_ns - paid_ns, MOST_OWED_NS))
    return paid_ns


def counter_is_dead(track: GpuTrack, useful_ns: float, tensor_ns: float) -> bool:
    """Whether the pipe's counter saw too little of the work of this window and of those kept before it.

    One window alone tells nothing: it may book the prompts of the windows before it.
    """
    rows = [row for row in track.trailing if row.useful_ns is not None and row.tensor_cycles_ns is not None]
    seen = tensor_ns + sum(row.tensor_cycles_ns or 0.0 for row in rows)
    return seen < DEAD_RATIO * (useful_ns + sum(row.useful_ns[1] for row in rows if row.useful_ns))


def _learn_rate(track: GpuTrack, prompts_ns: float, doubtful_ns: float) -> None:
    """Learn the useful time of prompts in a ns of steps that contain a prefill."""
    fade = math.exp(-doubtful_ns / RATE_MEMORY_NS)
    useful, busy = track.prompt_rate_ns
    track.prompt_rate_ns = (useful * fade + prompts_ns, busy * fade + doubtful_ns)


def _learn_talk(track: GpuTrack, prompts_ns: float, talk_ns: float) -> None:
    if prompts_ns > 0:
        track.prompt_talk_ratio = talk_ns / prompts_ns


def _padding(track: GpuTrack, decode_ns: float, useful_ns: float, pad_ns: float | None) -> float:
    """Return the pipe's time for rows that fill up tiles: as seen in decode alone, else as estimated."""
    if track.decode_pipe_ratio is not None:
        return max(0.0, track.decode_pipe_ratio * decode_ns - useful_ns)
    return pad_ns or 0.0


def _lendable(engine: EngineWindow, peaks: DevicePeaks) -> float:
    """Return the prompts' work booked in the next window that may have been done in this one.

    Beside prompts that end here that is one step with prompts: the one that the edge cuts.
    """
    following, lent = engine.clues.following, engine.lent
    if lent is None or following is None:
        return 0.0
    seconds = lent.useful_s(peaks)
    if seconds is None:
        return 0.0
    steps = sum(count for _, count in prompt_sizes(following))
    ended = engine.sums is not None and engine.sums.first_tokens
    return seconds * 1e9 * lent.prompt_ratio / (max(1.0, steps) if ended else 1.0)
