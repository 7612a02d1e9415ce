"""The service's log: problems as they come and go, and never more lines than a person reads."""

from __future__ import annotations

import io
import json
import logging

import msgspec
import pytest
from tests.exporters.frames import frame

from gpuidle.agent.commands.logs import REPEAT_PROBLEM_S, OutletLog, ProblemLog, RateLimit, _Json
from gpuidle.agent.model import OutletStatus, Problem

LOST = Problem(source="nvml", kind="lost", message="GPU is lost", remedy="restart the node", subject="GPU-1")


class Hours:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tell(problems: ProblemLog, clock: Hours, seconds: float, *present: Problem) -> None:
    clock.now += seconds
    problems.publish(msgspec.structs.replace(frame(), problems=present))


def test_a_problem_is_told_when_it_comes_when_it_lasts_and_when_it_goes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Hours()
    problems = ProblemLog(clock)
    with caplog.at_level(logging.INFO):
        tell(problems, clock, 1, LOST)
        tell(problems, clock, 1, LOST)
        assert caplog.messages == ["nvml: GPU is lost (restart the node)"]
        tell(problems, clock, REPEAT_PROBLEM_S, LOST)
        assert len(caplog.messages) == 2
        tell(problems, clock, 1)
        tell(problems, clock, 1)
    assert caplog.messages[2:] == ["nvml: lost is over for GPU-1"]


def test_a_problem_that_flaps_is_told_once_in_its_time(caplog: pytest.LogCaptureFixture) -> None:
    clock = Hours()
    problems = ProblemLog(clock)
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            tell(problems, clock, 1, LOST)
            tell(problems, clock, 1)
        assert len(caplog.messages) == 2
        tell(problems, clock, REPEAT_PROBLEM_S - 199, LOST)
    assert len(caplog.messages) == 3
    assert caplog.messages[-1].endswith("[came back 100 times]")


def test_json_lines_hold_the_problem_in_fields(caplog: pytest.LogCaptureFixture) -> None:
    clock = Hours()
    with caplog.at_level(logging.INFO):
        tell(ProblemLog(clock), clock, 1, LOST)
    [record] = caplog.records
    entry = json.loads(_Json().format(record))
    assert entry["level"] == "warning"
    assert entry["time"].endswith("Z")
    assert (entry["source"], entry["kind"], entry["subject"]) == ("nvml", "lost", "GPU-1")
    assert entry["remedy"] == "restart the node"


def test_more_lines_than_the_limit_are_left_out_and_counted() -> None:
    clock = Hours()
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RateLimit(handler, lines=3, clock=clock))

    def write(text: str) -> None:
        handler.handle(logging.LogRecord("gpuidle", logging.INFO, "", 0, text, None, None))

    for number in range(10):
        write(f"line {number}")
    clock.now = 61
    write("later")
    assert stream.getvalue().splitlines() == ["line 0", "line 1", "line 2", "7 lines left out", "later"]


class Outlets:
    """Telemetry of one outlet."""

    def __init__(self) -> None:
        self.failed = 0

    def outlets(self) -> tuple[OutletStatus, ...]:
        return (OutletStatus(outlet="recorder", failed=self.failed, last_error="no space left on device"),)


def test_an_outlet_that_fails_is_told_of_once_in_its_time(caplog: pytest.LogCaptureFixture) -> None:
    clock, told = Hours(), Outlets()
    outlets = OutletLog(told, clock)
    outlets.publish(frame())
    assert caplog.messages == []
    for _ in range(5):
        told.failed += 1
        clock.now += 1
        outlets.publish(frame())
    assert caplog.messages == ["recorder: no space left on device"]
    clock.now += REPEAT_PROBLEM_S
    outlets.publish(frame())
    assert len(caplog.messages) == 2
