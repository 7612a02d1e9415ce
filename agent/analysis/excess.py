"""What DRAM needs beyond the tensor pipe's time in a window that is known by its token sums.

On window means a decode beside a prefill would not look memory-bound, nor would a small prompt beside a large
one. So decode steps are taken apart, by the traffic that is known of them and by what the pipe does in decode
alone, and the steps with prompts by their sizes: each reads the weights once, and computes as it has rows.
"""

from __future__ import annotations

from gpuidle.agent.analysis.activity import Activity
from gpuidle.agent.analysis.bandwidth import Reachable
from gpuidle.agent.analysis.enginewindow import EngineWindow
from gpuidle.agent.analysis.stepsizes import Sizes, decode_rows, prompt_sizes
from gpuidle.agent.physics.peaks import DevicePeaks


def excess_of_sums(
    engine: EngineWindow, seen: Activity, pipe_ratio: float | None, peaks: DevicePeaks, rate: Reachable
) -> float | None:
    """Return the ns that DRAM needs beyond the pipe's, part by part; None where decode steps are not known.

    Args:
        engine: The only engine on the device.
        seen: What the device's counters say of the window.
        pipe_ratio: Share of the pipe in windows that were decode alone; None: the work model's.
        peaks: The device's.
        rate: What its DRAM reaches.
    """
    pace_ns, sums = engine.clues.pace_ns, engine.sums
    if seen.active_ns is None or engine.decode is None or not pace_ns or sums is None:
        return None
    decode_ns = float(engine.shares.decode_ns)
    steps = decode_ns / pace_ns
    memory = steps * engine.decode.bytes_moved / rate.bytes_per_s * 1e9
    pipe = steps * engine.decode.pipe_s(peaks) * 1e9 if pipe_ratio is None else pipe_ratio * decode_ns
    if seen.dram_bytes is None:
        return min(decode_ns, max(0.0, memory - pipe))
    moved = seen.dram_bytes / rate.bytes_per_s * 1e9
    memory = min(memory, moved)
    excess = min(decode_ns, max(0.0, memory - pipe))
    if seen.tensor_ns is None or moved <= memory:
        return excess
    left, computed = moved - memory, max(0.0, seen.tensor_ns - pipe)
    unused = unused_ratio(prompt_sizes(sums), decode_rows(sums) / sums.cores, computed / left)
    return excess + min(max(0.0, seen.active_ns - decode_ns), left * unused)


def unused_ratio(sizes: Sizes, rows: float, intensity: float) -> float:
    """Return the part of the time that DRAM needs in which the pipe cannot be busy, over steps of all sizes.

    Args:
        sizes: The steps by the tokens of their prompts.
        rows: Of decodes, beside the prompts in each step.
        intensity: Time of the pipe over that of DRAM, of all these steps together.
    """
    count = sum(steps for _, steps in sizes)
    whole = sum((tokens + rows) * steps for tokens, steps in sizes)
    if not count or not whole:
        return max(0.0, 1 - intensity)
    each = intensity * count / whole
    return sum(max(0.0, 1 - each * (tokens + rows)) * steps for tokens, steps in sizes) / count
