"""The service's log: lines of text or of JSON, few of them, and the problems as they come and go."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone

from gpuidle.agent.model import Frame, Problem
from gpuidle.agent.ports import Telemetry

log = logging.getLogger("gpuidle")

REPEAT_PROBLEM_S = 600
"""A problem that lasts, or comes and goes, is logged again after this time."""

LINES_A_MINUTE = 60
"""More are left out and counted: no fault may fill a disk."""

_FIELDS = ("source", "kind", "subject", "remedy", "times")
"""What a record may carry beside its message, given as `extra`."""


def set_up(log_format: str) -> None:
    """Send the log to standard error, as "text" or "json"."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if log_format == "json" else logging.Formatter(_TEXT))
    handler.addFilter(RateLimit(handler))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


_TEXT = "%(levelname)s %(name)s: %(message)s"


class _Json(logging.Formatter):
    """One JSON object a line: time (RFC 3339), level, logger, message, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        entry: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: record.__dict__[name] for name in _FIELDS if name in record.__dict__}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class RateLimit(logging.Filter):
    """Lets `lines` records a minute through, and says how many it left out once there is room again."""

    def __init__(
        self,
        handler: logging.Handler,
        lines: int = LINES_A_MINUTE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._handler, self._lines, self._clock = handler, lines, clock
        self._passed: deque[float] = deque()
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002
        """Return whether the record is written."""
        now = self._clock()
        while self._passed and now - self._passed[0] >= 60:
            self._passed.popleft()
        if len(self._passed) >= self._lines:
            self._left_out += 1
            return False
        self._passed.append(now)
        if self._left_out:
            count, self._left_out = self._left_out, 0
            note = logging.LogRecord(log.name, logging.WARNING, "", 0, "%d lines left out", (count,), None)
            self._handler.emit(note)
        return True


@dataclass
class _Told:
    """What was said of one problem."""

    at: float
    gone: bool = False
    times: int = 0
    """How often it came back since."""


class ProblemLog:
    """An exporter that logs problems as they come, last and go.

    A problem that comes and goes is told once in `REPEAT_PROBLEM_S`, with how often it came back.
    """

    name = "log"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[tuple[str, str, str], _Told] = {}

    def publish(self, frame: Frame) -> None:
        """Log what is new, what lasts, and what has gone."""
        now = self._clock()
        present = {(problem.source, problem.kind, problem.subject): problem for problem in frame.problems}
        for key, problem in present.items():
            told = self._told.get(key)
            if told is None or now - told.at >= REPEAT_PROBLEM_S:
                times = 0 if told is None else told.times + told.gone
                self._told[key] = _Told(now)
                _say(problem, times)
            elif told.gone:
                told.gone = False
                told.times += 1
        for key, told in list(self._told.items()):
            if key in present:
                continue
            if not told.gone:
                told.gone = True
                if not told.times:
                    source, kind, subject = key
                    of = f" for {subject}" if subject else ""
                    fields = {"source": source, "kind": kind, "subject": subject}
                    log.info("%s: %s is over%s", source, kind, of, extra=fields)
            if now - told.at >= REPEAT_PROBLEM_S:
                del self._told[key]

    def close(self) -> None:
        """Nothing is held."""


class OutletLog:
    """An exporter that logs when another outlet fails: a full disk, a receiver that refuses.

    Each outlet is told of once in `REPEAT_PROBLEM_S` while it goes on to fail.
    """

    name = "outlet-log"

    def __init__(self, telemetry: Telemetry, clock: Callable[[], float] = time.monotonic) -> None:
        self._telemetry = telemetry
        self._clock = clock
        self._told: dict[str, tuple[float, int]] = {}

    def publish(self, frame: Frame) -> None:  # noqa: ARG002
        """Look at the outlets."""
        now = self._clock()
        for outlet in self._telemetry.outlets():
            at, failed = self._told.get(outlet.outlet, (-float(REPEAT_PROBLEM_S), 0))
            if outlet.failed > failed and now - at >= REPEAT_PROBLEM_S:
                self._told[outlet.outlet] = (now, outlet.failed)
                log.warning(
                    "%s: %s",
                    outlet.outlet,
                    outlet.last_error,
                    extra={"source": outlet.outlet, "kind": "failed"},
                )

    def close(self) -> None:
        """Nothing is held."""


def _say(problem: Problem, times: int) -> None:
    remedy = f" ({problem.remedy})" if problem.remedy else ""
    again = f" [came back {times} times]" if times else ""
    log.warning(
        "%s: %s%s%s",
        problem.source,
        problem.message,
        remedy,
        again,
        extra={
            "source": problem.source,
            "kind": problem.kind,
            "subject": problem.subject,
            "remedy": problem.remedy,
            "times": times,
        },
    )
