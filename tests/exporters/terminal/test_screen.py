"""Golden screens, and what every screen must say.

`GPUIDLE_UPDATE_GOLDENS=1 pytest tests/exporters/terminal` writes the goldens anew: read the difference.
"""

from __future__ import annotations

import os
import re
from datetime import timezone
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.exporters.terminal import frames as made

from gpuidle.agent.model import CollectorRun, Frame, Problem
from gpuidle.exporters.terminal.layout import line_width
from gpuidle.exporters.terminal.options import Replay, ScreenOptions
from gpuidle.exporters.terminal.screen import render, summary

GOLDENS = Path(__file__).parents[2] / "data" / "terminal"
LIVE = ScreenOptions(colour=False, keys=True, timezone=timezone.utc)
PLAIN = ScreenOptions(colour=False, timezone=timezone.utc)


def slow_counters() -> list[Frame]:
    """A node with utilisation alone: nothing is known of compute, and the ledger is unattributed."""
    result = []
    for frame in made.history(1, 1, pattern="????????"):
        gpu = frame.gpus[0]
        causes = dict.fromkeys(gpu.causes_ns, 0)
        result.append(
            msgspec.structs.replace(
                frame,
                gpus=(
                    msgspec.structs.replace(
                        gpu,
                        rung="nvml",
                        causes_ns=causes | {"unattributed": made.SECOND},
                        causes_total_ns=causes | {"unattributed": made.SECOND * (frame.sequence + 1)},
                        estimated_causes=(),
                        idle={},
                        tensor_active=None,
                        sm_active=None,
                        dram_bandwidth=None,
                        roofline_attained=None,
                        reclaimable_total_ns=None,
                        price_per_hour=None,
                    ),
                ),
                problems=(
                    Problem(
                        source="nvml",
                        kind="no_tensor_counter",
                        message="This GPU's driver gives no counter of its tensor cores",
                        remedy="a driver of 535 or newer on Hopper or newer has one",
                        subject=gpu.hw_id,
                    ),
                ),
            )
        )
    return result


def bare() -> list[Frame]:
    problem = Problem(
        source="nvml",
        kind="no_library",
        message="libnvidia-ml.so.1 was not found",
        remedy="install NVIDIA's driver, or run the container with --gpus all",
    )
    frame = msgspec.structs.replace(
        made.frame(0, 0, (problem,), simulated=False),
        gpu_source=False,
        runs=(
            CollectorRun(collector="nvml", duration_ns=1, ok=False),
            CollectorRun(collector="discovery", duration_ns=1, ok=True),
        ),
    )
    return [frame]


def engine_alone() -> list[Frame]:
    return [
        msgspec.structs.replace(frame, gpu_source=False)
        for frame in made.history(0, 1, bare()[0].problems, "dd")
    ]


def late_replay() -> list[Frame]:
    *before, last = made.history(2, 1)
    return [*before, msgspec.structs.replace(last, lateness_ns=120_000_000, missed_ticks_total=3)]


GOLDEN_SCREENS: dict[str, tuple[list[Frame], ScreenOptions, int, int | None]] = {
    "two-80x24": (made.history(2, 1, made.PROBLEMS), LIVE, 80, 24),
    "two-120x40": (made.history(2, 1, made.PROBLEMS), LIVE, 120, 40),
    "two-200x50": (made.history(2, 1, made.PROBLEMS), LIVE, 200, 50),
    "eight-80x24": (made.history(8, 1, made.PROBLEMS), LIVE, 80, 24),
    "eight-120x40": (made.history(8, 1, made.PROBLEMS), LIVE, 120, 40),
    "eight-200x50": (made.history(8, 2, made.PROBLEMS), LIVE, 200, 50),
    "sixteen-80x24": (made.history(16, 3, made.PROBLEMS), LIVE, 80, 24),
    "slow-counters-80x24": (slow_counters(), LIVE, 80, 24),
    "first-frame-80x24": (made.history(2, 1, pattern="d"), LIVE, 80, 24),
    "bare-80x24": (bare(), LIVE, 80, 24),
    "engine-alone-80x24": (engine_alone(), LIVE, 80, 24),
    "blank-80x24": ([made.blank_frame()], LIVE, 80, 24),
    "ascii-80x24": (made.history(2, 1, made.PROBLEMS), replace(LIVE, ascii=True), 80, 24),
    "problems-80x24": (made.history(2, 1, made.PROBLEMS), replace(LIVE, view="problems"), 80, 24),
    "help-80x24": (made.history(2, 1), replace(LIVE, view="help"), 80, 24),
    "replay-80x24": (
        late_replay(),
        replace(LIVE, frozen=True, replay=Replay("night.mcap", 1000 * made.SECOND, 4600 * made.SECOND)),
        80,
        24,
    ),
    "once-80": (made.history(2, 1, made.PROBLEMS), PLAIN, 80, None),
}


@pytest.mark.parametrize("name", GOLDEN_SCREENS)
def test_a_screen_is_as_its_golden_text(name: str) -> None:
    history, options, width, height = GOLDEN_SCREENS[name]
    text = render(history, options, width, height).plain()
    golden = GOLDENS / f"{name}.txt"
    if os.environ.get("GPUIDLE_UPDATE_GOLDENS"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_every_golden_text_belongs_to_a_screen() -> None:
    assert {golden.stem for golden in GOLDENS.glob("*.txt")} == set(GOLDEN_SCREENS)


def text_of(
    history: list[Frame], options: ScreenOptions = LIVE, width: int = 80, height: int | None = 24
) -> str:
    return render(history, options, width, height).plain()


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)])
def test_the_message_is_on_the_screen_at_every_size(size: tuple[int, int]) -> None:
    text = text_of(made.history(2, 1), LIVE, *size)
    assert re.search(r"busy +100\.0 %.*compute idle ~99\.6 %", text)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_simulated_node_says_so_at_every_width(width: int) -> None:
    simulated, real = made.frame(2, 1), made.frame(2, 1, simulated=False)
    assert "SIMULATED" in text_of([simulated], width=width).splitlines()[0]
    assert "SIMULATED" not in text_of([real], width=width)


def test_both_bases_are_told_with_their_bounds_and_none_is_averaged() -> None:
    text = text_of(made.history(1, 1))
    assert "flops ~99.6 % (99.4–99.8)" in text
    assert "tensor pipe 98.9 %" in text


def test_eight_gpus_have_a_line_each_on_a_small_terminal() -> None:
    lines = text_of(made.history(8, 1, made.PROBLEMS)).splitlines()
    assert [line.split()[0] for line in lines if re.match(r"\d", line)] == [str(n) for n in range(8)]


def test_gpus_that_do_not_fit_are_counted() -> None:
    text = text_of(made.history(16, 1), height=10)
    shown = len(re.findall(r"^\d", text, re.MULTILINE))
    assert f"+{16 - shown} more of 16 GPUs" in text


def test_what_is_not_known_is_a_dash_and_never_a_zero() -> None:
    for width, height in ((80, 24), (120, 40), (200, 50), (40, 12), (80, None)):
        text = text_of([made.blank_frame()], replace(PLAIN, keys=False), width, height)
        assert "—" in text
        below_the_date = text.partition("\n")[2]
        assert not re.search(r"0|nan|None|inf", below_the_date), text


def test_a_figure_without_evidence_is_a_dash() -> None:
    frame = made.frame(1, 1)
    unknown = made.figure(0.5, 0.0, 1.0, "unknown")
    gpu = msgspec.structs.replace(
        frame.gpus[0], idle={"flops": unknown, "tensor_pipe": unknown}, busy=unknown
    )
    text = text_of([msgspec.structs.replace(frame, gpus=(gpu,))])
    assert re.search(r"busy +—", text)
    assert "compute idle —" in text
    assert "flops —  tensor pipe —" in text


def test_the_tensor_pipe_stands_in_the_headline_where_flops_are_not_known() -> None:
    frame = made.frame(1, 1)
    gpu = msgspec.structs.replace(frame.gpus[0], idle={"tensor_pipe": made.figure(0.9889)})
    text = text_of([msgspec.structs.replace(frame, gpus=(gpu,))])
    assert "compute idle 98.9 %" in text
    assert "flops —" in text


def test_an_unobserved_engine_shows_no_rates() -> None:
    frame = made.frame(1, 1)
    engine = msgspec.structs.replace(frame.engines[0], state="unobserved")
    text = text_of([msgspec.structs.replace(frame, engines=(engine,))])
    assert "unobserved" in text
    assert "1,843" not in text


def test_a_bare_node_says_what_was_looked_for_and_names_the_demo() -> None:
    text = text_of(bare())
    assert "Nothing to measure was found" in text
    assert "libnvidia-ml.so.1" in text
    assert "gpuidle watch --demo" in text
    assert "Failed      nvml" in text
    assert "→ install NVIDIA's driver" in text


def test_a_driver_without_a_gpu_is_told_apart_from_no_driver() -> None:
    with_driver = msgspec.structs.replace(bare()[0], gpu_source=True)
    assert "it has no GPU" in text_of([with_driver])
    assert "no GPU driver answered" in text_of(bare())


def test_ascii_screens_are_ascii_and_mean_the_same() -> None:
    history = made.history(2, 1, made.PROBLEMS)
    for view in ("main", "problems", "help"):
        for size in ((80, 24), (120, 40)):
            drawn = render(history, replace(LIVE, ascii=True, colour=True, view=view), *size).plain()
            assert drawn.isascii()
    assert "p prefill" in text_of(history, replace(LIVE, ascii=True), 120, 40)
    assert re.search(r"ledger +U+P?M+", text_of(history, replace(LIVE, ascii=True, colour=True)))


def test_a_letter_stands_for_every_cause_and_phase_without_colour() -> None:
    text = text_of(made.history(1, 1), LIVE, 120, 40)
    bar = re.search(r"ledger +(\S+)", text)
    strip = re.search(r"phases +([pdm·?]{30,})", text)
    assert bar is not None
    assert strip is not None
    assert set(bar.group(1)) == set("UPMLGNx")
    assert strip.group(1) == made.PATTERN


def test_before_the_first_frame_the_screen_says_that_it_waits() -> None:
    assert "waiting for the first frame" in text_of([])


def test_the_summary_fits_a_line_of_scrollback_and_says_simulated() -> None:
    line = summary(made.history(2, 1))
    assert "\n" not in line
    assert "simulated" in line
    assert "GPU 1 busy 100.0 %, compute idle ~99.6 %" in line
    assert summary([]) == ""


HOSTILE = "\x1b[31mred\x1b[0m\x1b]0;title\x07[bold]x[/bold]\r\n\u202egnol\u200b\u0301\x9b2J"


def test_names_cannot_write_escape_sequences_or_markup() -> None:
    frame = made.frame(1, 1)
    hostile = msgspec.structs.replace(
        frame,
        node=msgspec.structs.replace(frame.node, hostname=HOSTILE, gpuidle_version=HOSTILE),
        gpus=(
            msgspec.structs.replace(frame.gpus[0], name=HOSTILE, currency=HOSTILE, clock_events=(HOSTILE,)),
        ),
        engines=(msgspec.structs.replace(frame.engines[0], model=HOSTILE, engine=HOSTILE, version=HOSTILE),),
        problems=(Problem(source=HOSTILE, kind="x", message=HOSTILE, remedy=HOSTILE, subject=HOSTILE),),
    )
    for view in ("main", "problems"):
        text = text_of([hostile], replace(LIVE, view=view), 200, 50)
        assert all(character.isprintable() for character in text.replace("\n", ""))
        assert "[bold]x[/bold]" in text
    assert summary([hostile]).isprintable()


def test_wide_names_keep_their_columns() -> None:
    frame = made.frame(2, 1)
    gpus = tuple(msgspec.structs.replace(gpu, name="加速器" * 20) for gpu in frame.gpus)
    lines = render([msgspec.structs.replace(frame, gpus=gpus)], LIVE, 80, 24).lines
    assert all(line_width(line) <= 80 for line in lines)
