"""The referee: counters, work model and the engine's own estimate side by side; who of them is likely wrong.

All three tell how much was computed, and steps tell how often the weights were read. Each has its error:
tokens are booked late, attention is known from means, kernels fill up tiles. Over a trailing window these
stay within bars; what lies beyond them has a few known causes, and each leaves its own trace. A verdict names
the likeliest one. It never corrects a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from gpuidle.agent.model import Problem

SHORTEST_NS = 20 * 10**9
"""Less than this was not seen for long enough: tokens are booked late."""
EXCESS = 1.3
"""Work over what the pipe did: the model's lower bound above this is beyond its error."""
SHORTFALL = 0.75
"""The model's upper bound, a quarter added, below this share of the pipe's time is beyond it as well."""
DEAD = 8.0
"""Work over the pipe's time from which on the counter did not see the work at all."""
LEAST_WORK, LEAST_TRAFFIC = 0.01, 0.02
"""Shares of the time that work and traffic must claim before they are held against anything."""
FEWEST_ROWS, MANY_ROWS = 16.0, 1024.0
"""Rows a step: below the one kernels may do without the tensor pipe, above the other tiles are full."""
MISREAD = 0.75
"""DRAM's bytes over the weights of the steps: below this not all of them were read as configured."""
ENGINE_LOW, ENGINE_HIGH = 0.7, 1.5
"""The engine's estimate over the work model's bounds: vLLM counts masked pairs, and each FFN as gated."""
STEADY = 1.5
"""What is wrong throughout shows in both halves of the time, within this factor; a counter that has died,
or an engine that has just changed, does not."""
LAG_NS = 10_000_000
"""A lag of the counters that is worth telling, though it was removed."""


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """What was said of one GPU in one window; None: nothing was said. Times in ns, work per GPU."""

    end_ns: int
    window_ns: int
    observed_ns: int
    active_ns: float | None = None
    """Measured time with work on the GPU."""
    stepping_ns: float | None = None
    """Time with a step of the engine under way."""
    pipe_ns: float | None = None
    """Tensor-active time."""
    clock_ratio: float = 1.0
    """SM clock over the sheet's."""
    clock_hz: float | None = None
    dram_bytes: float | None = None
    work_ns: tuple[float, float, float] | None = None
    """Low, estimate, high: the work model's FLOPs over the dense peaks."""
    flops: tuple[float, float] | None = None
    """Low and high."""
    weight_bytes: float | None = None
    """Bytes of the weights, once for each step."""
    traffic_bytes: float | None = None
    """All that the work model moves; None where contexts are not exact."""
    rows: float = 0.0
    """Tokens computed."""
    steps: float | None = None
    decode_only: bool = False
    exact: bool = False
    """Whether exact steps told the work: then it is booked where it was done."""
    draft_tokens: int = 0
    prompt_tokens: int | None = None
    """Prompt tokens by the engine's counters."""
    step_prompt_tokens: int | None = None
    """Prompt tokens by the steps, less those that are known to be computed again."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change from window to window."""

    subject: str
    device: str
    peak_bytes_per_s: float
    max_clock_hz: float | None = None
    faster: float = 1.0
    """The device's fastest rate over that of the model's dtype."""
    slower: float = 1.0
    """Its 16-bit rate over that of the model's dtype."""
    accumulates_twice: bool = False
    """Kernels that accumulate in 16 bits run at twice the peak."""
    l2_bytes: float | None = None
    weight_bytes: float | None = None
    """On this GPU."""
    experts: bool = False
    latent: bool = False
    """Latent attention: what prompts expand again is executed, not useful."""
    budget_tokens: int = 8192
    speculative: bool = False
    engine_ratio: tuple[float, float] | None = None
    """The engine's own estimate over the work model's high and low; None: one of them is not known, or they
    are known to differ."""
    lag_ns: float = 0.0
    """By how much the counters' clock is ahead of the engine's, where that is clear."""


def referee(claims: Sequence[Claims], case: Case) -> tuple[Problem, ...]:
    """Return the verdicts over a trailing window, at most one for each counter."""
    seen = [each for each in claims if each.observed_ns >= 0.9 * each.window_ns]
    if sum([each.window_ns for each in seen]) < SHORTEST_NS:
        return ()
    found = (_clock(seen, case), _active(seen, case), _pipe(seen, case), _dram(seen, case))
    verdicts = [each for each in found if each is not None]
    if not any(each.kind == "estimates_disagree" for each in verdicts):
        verdicts += _engine(case, judged=bool(verdicts))
    speculation = _speculation(seen, case)
    return tuple(verdicts + ([] if speculation is None else [speculation]))


def _say(case: Case, kind: str, message: str, remedy: str) -> Problem:
    return Problem(
        source="referee", kind=kind, message=f"{case.device}: {message}", remedy=remedy, subject=case.subject
    )


# --------------------------------------------------------------------------------------------------------
# Clocks


def _clock(seen: Sequence[Claims], case: Case) -> Problem | None:
    clocks = [each.clock_hz for each in seen if each.clock_hz is not None]
    top = case.max_clock_hz
    if top is not None and clocks and min(clocks) > 1.05 * top:
        return _wrong_clock(
            case, f"the SM clock is told as {min(clocks) / 1e6:.0f} MHz, the most is {top / 1e6:.0f}"
        )
    if abs(case.lag_ns) > LAG_NS:
        side = "behind" if case.lag_ns > 0 else "before"
        told = f"the counters are stamped {abs(case.lag_ns) / 1e6:.0f} ms {side} the steps; that is removed"
        return _wrong_clock(case, told)
    timed = [each for each in seen if each.stepping_ns is not None and each.active_ns is not None]
    if len(timed) < 10:
        return None
    span = sum([c.window_ns for c in timed])
    apart = sum([abs((c.stepping_ns or 0.0) - (c.active_ns or 0.0)) for c in timed])
    net = abs(sum([(c.stepping_ns or 0.0) - (c.active_ns or 0.0) for c in timed]))
    if apart > 0.3 * span and net < 0.2 * apart:
        return _wrong_clock(
            case,
            f"the GPU is as active as the engine's steps say, but at other times ({apart / span:.0%} apart)",
        )
    return None


def _wrong_clock(case: Case, message: str) -> Problem:
    return _say(
        case,
        "wrong_clock",
        message,
        "compare the clock with nvidia-smi -q -d CLOCK; steps and counters must be stamped in CLOCK_MONOTONIC"
        " of this machine, not in that of a container with a time namespace",
    )


# --------------------------------------------------------------------------------------------------------
# Counters


def _active(seen: Sequence[Claims], case: Case) -> Problem | None:
    """Steps ran, and the counter of activity stands at 0."""
    timed = [each for each in seen if each.stepping_ns is not None and each.active_ns is not None]
    span = sum([c.window_ns for c in timed])
    stepping = sum([c.stepping_ns or 0.0 for c in timed])
    if span < SHORTEST_NS or stepping < 0.2 * span:
        return None
    if sum([c.active_ns or 0.0 for c in timed]) > 0.02 * stepping:
        return None
    return _dead(
        case, "activity", f"steps ran {stepping / span:.0%} of the time and the counter saw none of it"
    )


def _dead(case: Case, counter: str, message: str) -> Problem:
    return _say(
        case,
        "dead_counter",
        f"the {counter} counter is likely dead: {message}",
        "another profiler may hold the counters (DCGM, Nsight, a second agent): stop it, restart the"
        " exporter, or choose another source of counters",
    )


def _pipe(seen: Sequence[Claims], case: Case) -> Problem | None:
    known = [each for each in seen if each.pipe_ns is not None and each.work_ns is not None]
    span = sum([c.window_ns for c in known])
    if span < SHORTEST_NS:
        return None
    if _stuck([each for each in known if each.end_ns > known[-1].end_ns - SHORTEST_NS]):
        return _dead(case, "tensor", "it shows the same value whatever the load")
    low, middle, _ = _work(known)
    pipe = sum([_pipe_at_clock(c) for c in known])
    if low < LEAST_WORK * span or _rows_a_step(known) < FEWEST_ROWS:
        return None
    if low > EXCESS * pipe:
        return _too_much(known, case, low, middle, pipe)
    working = [each for each in known if each.rows]
    full = [each for each in working if each.steps and each.rows >= MANY_ROWS * each.steps]
    # Sums are booked late: which window was full of prompts only exact steps tell.
    late = not all(each.exact for each in working)
    judged = known if late and len(full) == len(working) else [] if late else full
    if not judged or case.latent or case.experts or any(each.draft_tokens for each in judged):
        return None
    low, middle, high = _work(judged)
    pipe = sum([_pipe_at_clock(c) for c in judged])
    if high < LEAST_WORK * span or 1.25 * high > SHORTFALL * pipe:
        return None
    return _too_little(judged, case, middle, pipe)


def _pipe_at_clock(each: Claims) -> float:
    return (each.pipe_ns or 0.0) * each.clock_ratio


def _over(one: float, other: float) -> float:
    return one / max(other, 1.0)


def _halves(
    claims: Sequence[Claims], amount: Callable[[Claims], float]
) -> tuple[Sequence[Claims], Sequence[Claims]]:
    """Return the older and the newer windows, each with half of the amount; one window is both."""
    left, at = sum([amount(c) for c in claims]) / 2, 0
    while at < len(claims) and left > 0:
        left -= amount(claims[at])
        at += 1
    return claims[:at], claims[at:] or claims


def _work(claims: Sequence[Claims]) -> tuple[float, float, float]:
    known = [each.work_ns for each in claims if each.work_ns is not None]
    return sum([w[0] for w in known]), sum([w[1] for w in known]), sum([w[2] for w in known])


def _rows_a_step(claims: Sequence[Claims]) -> float:
    counted = [each for each in claims if each.steps]
    steps = sum([c.steps or 0.0 for c in counted])
    return sum([c.rows for c in counted]) / steps if steps else 0.0


def _stuck(known: Sequence[Claims]) -> bool:
    """Whether a counter of which no two windows are alike shows one value while the work varies."""
    if len(known) < 5:
        return False
    busy = [
        each for each in known if each.work_ns is not None and each.work_ns[1] > LEAST_WORK * each.window_ns
    ]
    if len(busy) < 5:
        return False
    shares = [(each.pipe_ns or 0.0) / each.observed_ns for each in known]
    work = [each.work_ns[1] / each.window_ns for each in busy if each.work_ns is not None]
    return min(shares) > 0 and max(shares) - min(shares) < 1e-6 and max(work) > 1.2 * min(work)


def _too_much(known: Sequence[Claims], case: Case, low: float, middle: float, pipe: float) -> Problem | None:
    """The work model claims more than the pipe did."""
    pipe_at_sheet = sum([c.pipe_ns or 0.0 for c in known])
    older, newer = _halves(known, lambda c: c.work_ns[0] if c.work_ns else 0.0)
    then, now = (_over(_work(half)[0], sum([_pipe_at_clock(c) for c in half])) for half in (older, newer))
    if now > DEAD > then:
        return _dead(case, "tensor", "it followed the tokens, and has stood still since")
    if max(then, now) > STEADY * min(then, now) and min(then, now) < DEAD:
        return None
    if low > DEAD * pipe and not SHORTFALL <= middle / max(pipe_at_sheet, 1.0) <= EXCESS:
        return _dead(
            case, "tensor", f"the tokens need {middle / 1e9:.1f} s of the pipe, it shows {pipe / 1e9:.2f} s"
        )
    told = f"the tokens need {middle / pipe:.1f} times what the tensor pipe did"
    if pipe < 0.7 * pipe_at_sheet and SHORTFALL <= middle / pipe_at_sheet <= EXCESS:
        return _wrong_clock(case, f"{told} at the SM clock that is told, and just that at the sheet's clock")
    if case.engine_ratio is not None and case.engine_ratio[1] < ENGINE_LOW:
        return _disagree(case, f"{told}, and the engine's own estimate agrees with the pipe", "work model")
    if case.accumulates_twice and middle <= 2 * EXCESS * pipe:
        return None
    if case.faster > 1.0 and middle <= 1.15 * case.faster * pipe:
        return _quantised(
            case, f"{told}: products likely run in a narrower dtype than the model's configuration says"
        )
    return _disagree(case, told, "tensor counter or work model")


def _too_little(judged: Sequence[Claims], case: Case, middle: float, pipe: float) -> Problem:
    """The pipe was busy longer than the work can be, though tiles were full."""
    told = f"the tensor pipe was busy {pipe / middle:.1f} times as long as the tokens need, with full tiles"
    pipe_at_sheet = sum([c.pipe_ns or 0.0 for c in judged])
    if pipe > 1.2 * pipe_at_sheet and middle > 0.8 * pipe_at_sheet:
        return _wrong_clock(
            case, f"{told} at the SM clock that is told, and just as long at the sheet's clock"
        )
    if case.engine_ratio is not None and case.engine_ratio[0] > ENGINE_HIGH:
        return _disagree(case, f"{told}, and the engine's own estimate agrees with the pipe", "work model")
    if case.slower < 0.9 and SHORTFALL <= middle / case.slower / pipe <= EXCESS:
        return _quantised(case, f"{told}: the weights are narrow, but products likely run in 16 bits")
    if 0.4 <= middle / pipe <= 0.62:
        return _say(
            case,
            "sparse_peak",
            f"{told}: the peak in use is likely a sparse one, twice the dense",
            "give the dense peak: data sheets print the sparse figure first",
        )
    return _disagree(case, told, "peak, dtype or work model")


def _quantised(case: Case, message: str) -> Problem:
    return _say(
        case,
        "unknown_quantisation",
        message,
        "hold the dtype and quantisation that the engine was started with against the model's config.json",
    )


def _disagree(case: Case, message: str, who: str) -> Problem:
    return _say(
        case,
        "estimates_disagree",
        f"{message}; likely wrong: {who}",
        "FLOP-based figures of this GPU are doubtful; please report model, engine version and device",
    )


# --------------------------------------------------------------------------------------------------------
# Memory


def _dram(seen: Sequence[Claims], case: Case) -> Problem | None:
    known = [each for each in seen if each.dram_bytes is not None and each.weight_bytes is not None]
    span = sum([c.window_ns for c in known])
    weights = sum([c.weight_bytes or 0.0 for c in known])
    if span < SHORTEST_NS or case.experts or weights < LEAST_TRAFFIC * case.peak_bytes_per_s * span / 1e9:
        return None
    read = sum([c.dram_bytes or 0.0 for c in known])
    if read < MISREAD * weights:
        told = f"DRAM moved {read / weights:.0%} of the weights that the steps read"
        if case.weight_bytes is not None and case.l2_bytes is not None and case.weight_bytes <= case.l2_bytes:
            return _say(
                case,
                "weights_in_l2",
                f"{told}: they likely stay in the L2 cache ({case.l2_bytes / 2**20:.0f} MiB)",
                "nothing to mend: memory-bound time and bandwidth of such a small model are not DRAM's",
            )
        older, newer = _halves(known, lambda c: c.weight_bytes or 0.0)
        parts = [
            _over(sum([c.dram_bytes or 0.0 for c in half]), sum([c.weight_bytes or 0.0 for c in half]))
            for half in (older, newer)
        ]
        if parts[1] < 0.05:
            return _dead(case, "DRAM", told)
        if max(parts) > STEADY * min(parts):
            return None
        return _quantised(
            case, f"{told}: they are likely stored narrower than the model's configuration says"
        )
    alone = [each for each in known if each.decode_only and each.exact and each.traffic_bytes]
    expected = sum([c.traffic_bytes or 0.0 for c in alone])
    moved = sum([c.dram_bytes or 0.0 for c in alone])
    if sum([c.window_ns for c in alone]) >= SHORTEST_NS and moved > 1.6 * expected and not case.speculative:
        return _quantised(
            case,
            f"DRAM moved {moved / expected:.1f} times what decode steps of this model read: its weights are"
            " likely wider in memory than the configuration says, or another process reads as well",
        )
    return None


# --------------------------------------------------------------------------------------------------------
# The engine


def _engine(case: Case, *, judged: bool) -> list[Problem]:
    """Tell an engine's estimate that is beyond the bars while the counters agree with the work model."""
    if case.engine_ratio is None or judged:
        return []
    over_high, over_low = case.engine_ratio
    if over_low >= ENGINE_LOW and over_high <= ENGINE_HIGH:
        return []
    times = over_high if over_high > ENGINE_HIGH else over_low
    told = f"the engine estimates {times:.1f} times the FLOPs of the work model, which no counter contradicts"
    return [_disagree(case, told, "the engine's estimate")]


def _speculation(seen: Sequence[Claims], case: Case) -> Problem | None:
    """The steps call more tokens prompt than the engine's counters ever did."""
    known = [each for each in seen if each.prompt_tokens is not None and each.step_prompt_tokens is not None]
    drafts = sum([c.draft_tokens for c in known])
    if not (drafts or case.speculative) or sum([c.window_ns for c in known]) < SHORTEST_NS:
        return None
    by_steps = sum([c.step_prompt_tokens or 0 for c in known])
    counted = sum([c.prompt_tokens or 0 for c in known])
    if by_steps <= 1.2 * counted + case.budget_tokens:
        return None
    return _say(
        case,
        "speculation_as_prefill",
        f"steps booked {by_steps:.0f} prompt tokens where the engine computed {counted:.0f}: verified drafts"
        " are likely booked as prefill",
        "use gpuidle's plugin for steps, or update their source; phases of this engine are doubtful",
    )
