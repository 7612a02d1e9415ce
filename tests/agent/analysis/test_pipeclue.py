"""What the tensor pipe adds to counted steps."""

from __future__ import annotations

import random

import pytest
from tests.agent.analysis.test_phase import sums

from gpuidle.agent.analysis.activity import Activity
from gpuidle.agent.analysis.phase import Clues, shares_from_sums
from gpuidle.agent.analysis.pipeclue import Pipe, PipeClue, pipe_of
from gpuidle.agent.analysis.rates import Sums
from gpuidle.agent.model import Shares
from gpuidle.agent.physics.peaks import find_peaks

T = 10**9
PEAKS = find_peaks("NVIDIA H100 80GB HBM3", 80 * 2**30)
STEP_NS, CHUNK_NS = 20e6, 60e6
IN_DECODE, IN_PROMPT = 0.1, 0.5


def clues(**more: object) -> Clues:
    known: dict[str, object] = {
        "window_ns": T,
        "busy_ns": float(T),
        "pace_ns": STEP_NS,
        "prompt_token_ns": 30e3,
        "following": sums(counted_steps=1),
    }
    return Clues(**(known | more))  # type: ignore[arg-type]


def window(decodes: float, chunks: float, told_chunks: float) -> tuple[Sums, float]:
    """Return a window as the engine tells it, and what the pipe did; `told_chunks` may be wrong."""
    steps = round(decodes + chunks)
    told = sums(
        counted_steps=steps,
        first_tokens=1,
        prefill_tokens=round(2000 * told_chunks),
        generated_tokens=4 * steps,
        running=(4, 4),
        prompt_steps=((2000.0, told_chunks),),
        chunk_spread=1.0,
    )
    return told, IN_DECODE * decodes * STEP_NS + IN_PROMPT * chunks * CHUNK_NS


def told_by(clue: PipeClue, told: Sums, pipe_ns: float) -> tuple[Shares, Shares]:
    """Return the phases by counted steps, and with the pipe."""
    assert PEAKS is not None
    known = clues()
    first = shares_from_sums(told, known)
    pipe = Pipe(pipe_ns, 1.0, PEAKS)
    known = clue.with_pipe(known, first, told, pipe, IN_DECODE * STEP_NS / 1e9)
    return first, shares_from_sums(told, known)


def learned(rng: random.Random, noise: float = 0.0) -> PipeClue:
    clue = PipeClue()
    for _ in range(60):
        chunks = rng.randrange(2, 10)
        told, pipe_ns = window((T - chunks * CHUNK_NS) / STEP_NS, chunks, chunks + rng.choice((-1, 0, 0, 1)))
        told_by(clue, told, pipe_ns * (1 + rng.gauss(0.0, noise)))
    return clue


def test_a_chunk_that_was_not_told_shows_in_the_pipe() -> None:
    clue = learned(random.Random(1))
    told, pipe_ns = window((T - 5 * CHUNK_NS) / STEP_NS, 5, 4)
    counted, seen = told_by(clue, told, pipe_ns)
    real = 5 * CHUNK_NS
    assert abs(seen.mixed_ns - real) < 0.4 * abs(counted.mixed_ns - real)
    assert seen.prefill_low_ns <= seen.mixed_ns <= seen.prefill_high_ns
    assert seen.window_ns == seen.mixed_ns + seen.decode_ns + seen.idle_ns


def test_a_pipe_that_tells_little_changes_little() -> None:
    clue = learned(random.Random(2), noise=0.5)
    told, pipe_ns = window((T - 5 * CHUNK_NS) / STEP_NS, 5, 4)
    counted, seen = told_by(clue, told, pipe_ns)
    assert abs(seen.mixed_ns - counted.mixed_ns) < 0.01 * T


def test_a_counter_that_died_moves_nothing() -> None:
    clue = learned(random.Random(3))
    told, _ = window((T - 5 * CHUNK_NS) / STEP_NS, 5, 5)
    counted, seen = told_by(clue, told, 0.0)
    assert seen == counted


def test_what_the_pipe_does_in_decodes_is_learned_where_no_prompt_runs() -> None:
    """Kernels of few rows may leave the pipe alone, whatever the work model says."""
    clue = PipeClue()
    quiet = sums(counted_steps=50, generated_tokens=200, running=(4, 4), prompt_steps=())
    for _ in range(60):
        told_by(clue, quiet, 0.0)
    chunks = 5
    for _ in range(60):
        told, pipe_ns = window((T - chunks * CHUNK_NS) / STEP_NS, chunks, chunks)
        told_by(clue, told, pipe_ns - IN_DECODE * (T - chunks * CHUNK_NS))
    many, few = 12, 2
    for chunks in (many, few):
        told, pipe_ns = window((T - chunks * CHUNK_NS) / STEP_NS, chunks, chunks)
        counted, seen = told_by(clue, told, pipe_ns - IN_DECODE * (T - chunks * CHUNK_NS))
        assert abs(seen.mixed_ns - counted.mixed_ns) < 0.015 * T


def test_all_devices_must_have_been_seen() -> None:
    one = Activity(rung="nvml_gpm", observed_ns=T, tensor_ns=2e8, sm_clock_hz=1.8e9)
    other = Activity(rung="nvml_gpm", observed_ns=T, tensor_ns=4e8, sm_clock_hz=1.8e9)
    found = pipe_of([one, other], PEAKS, T)
    assert found is not None
    assert found.busy_ns == pytest.approx(3e8)
    assert pipe_of([one, Activity(rung="nvml", observed_ns=T)], PEAKS, T) is None
    assert pipe_of([one], None, T) is None
    assert pipe_of([one], PEAKS, 2 * T) is None
