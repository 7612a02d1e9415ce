"""What goes into pipes and files: the report, NDJSON, the picture, and what a terminal is asked."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import timezone
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.exporters.terminal import frames as made

from gpuidle.agent.codec import decode_frame, encode_frame
from gpuidle.exporters.terminal.consoles import OutputClosedError, can_draw, wants_ascii
from gpuidle.exporters.terminal.ndjson import NdjsonExporter
from gpuidle.exporters.terminal.once import print_json, print_once
from gpuidle.exporters.terminal.options import ScreenOptions
from gpuidle.exporters.terminal.picture import main as draw_picture

ROOT = Path(__file__).parents[3]
OPTIONS = ScreenOptions(timezone=timezone.utc)


class Tty(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_report_in_a_pipe_has_80_columns_and_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream = io.StringIO()
    print_once(made.history(2, 1, made.PROBLEMS), OPTIONS, stream)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) == 80
    assert "\x1b" not in stream.getvalue()
    golden = ROOT / "tests" / "data" / "terminal" / "once-80.txt"
    assert stream.getvalue() == golden.read_text(encoding="utf-8")


def test_the_report_tells_every_problem_in_full() -> None:
    stream = io.StringIO()
    print_once(made.history(8, 1, made.PROBLEMS), OPTIONS, stream)
    assert "more" not in stream.getvalue()
    assert "counts no prefix queries" in stream.getvalue()
    assert "NVreg_RestrictProfilingToAdminUsers=0" in stream.getvalue()


def test_a_dumb_terminal_gets_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Tty()
    print_once(made.history(2, 1), OPTIONS, stream)
    assert "compute idle" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_colours_in_the_report() -> None:
    stream = Tty()
    print_once(made.history(2, 1), OPTIONS, stream)
    assert "\x1b[" in stream.getvalue()
    assert "▇" in stream.getvalue()


def test_the_c_locale_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_once(made.history(2, 1, made.PROBLEMS), OPTIONS, stream)
    stream.seek(0)
    assert "compute idle ~99.6 %" in stream.read()


@pytest.mark.parametrize(
    ("environment", "encoding", "ascii_only"),
    [
        ({}, "utf-8", False),
        ({"LANG": "en_US.UTF-8"}, "utf-8", False),
        ({"LC_ALL": "C.utf8"}, "utf-8", False),
        ({"LC_ALL": "C"}, "utf-8", True),
        ({"LC_ALL": "POSIX", "LANG": "en_US.UTF-8"}, "utf-8", True),
        ({"LANG": "de_DE@euro"}, "utf-8", True),
        ({"LANG": "en_US.UTF-8"}, "ascii", True),
        ({"LANG": "en_US.UTF-8"}, "no-such-encoding", True),
    ],
)
def test_ascii_is_for_locales_and_encodings_without_more(
    environment: Mapping[str, str], encoding: str, ascii_only: bool
) -> None:
    class Encoded(io.StringIO):
        @property
        def encoding(self) -> str:  # type: ignore[override]
            return encoding

    assert wants_ascii(Encoded(), environment) is ascii_only


def test_a_screen_is_drawn_on_terminals_that_move_their_cursor() -> None:
    assert can_draw(Tty(), {"TERM": "xterm"})
    assert not can_draw(Tty(), {"TERM": "dumb"})
    assert not can_draw(Tty(), {})
    assert not can_draw(io.StringIO(), {"TERM": "xterm"})
    closed = io.StringIO()
    closed.close()
    assert not can_draw(closed, {"TERM": "xterm"})


def test_ndjson_is_a_frame_a_line_and_each_is_flushed() -> None:
    class Counting(io.BytesIO):
        flushes = 0

        def flush(self) -> None:
            self.flushes += 1

    stream = Counting()
    exporter = NdjsonExporter(stream)
    history = made.history(2, 1, made.PROBLEMS)[:3]
    for number, frame in enumerate(history, 1):
        exporter.publish(frame)
        assert stream.flushes == number
    exporter.close()
    assert [decode_frame(line) for line in stream.getvalue().splitlines()] == history


def test_ndjson_stops_when_its_reader_has_gone() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb", buffering=0) as stream:
        exporter = NdjsonExporter(stream)
        with pytest.raises(OutputClosedError):
            exporter.publish(made.frame())
        assert exporter.closed
        with pytest.raises(OutputClosedError):
            exporter.publish(made.frame())
        exporter.close()


SCRIPT = """
import sys
from gpuidle.exporters.terminal.consoles import OutputClosedError
from gpuidle.exporters.terminal.once import print_json, print_once
from gpuidle.exporters.terminal.options import ScreenOptions
from tests.exporters.terminal import frames as made
history = made.history(2, 1)
sys.stdin.readline()
try:
    if sys.argv[1] == "text":
        print_once(history, ScreenOptions(), sys.stdout)
    else:
        print_json(history[-1], sys.stdout)
except OutputClosedError:
    sys.exit(3)
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_report_whose_reader_has_gone_ends_without_a_word(form: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, form],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / '.editable'}:{ROOT}"},
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(b"\n", timeout=30)
    assert (process.returncode, errors) == (3, b"")


def test_json_is_one_frame_on_one_line() -> None:
    stream = io.StringIO()
    frame = made.frame(2, 1, made.PROBLEMS)
    print_json(frame, stream)
    assert stream.getvalue().count("\n") == 1
    assert decode_frame(stream.getvalue().encode()) == frame


def test_the_picture_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    frames, target = tmp_path / "frames.ndjson", tmp_path / "a.svg"
    frames.write_bytes(encode_frame(made.history(2, 1)[-1]) + b"\n")
    draw_picture([str(frames), str(target)])
    svg = target.read_text()
    assert "url(http" not in svg
    assert "font-face" not in svg


def test_the_picture_holds_the_message_and_is_the_same_each_time(tmp_path: Path) -> None:
    frames, first, second = (tmp_path / name for name in ("frames.ndjson", "1.svg", "2.svg"))
    frames.write_bytes(b"".join(encode_frame(frame) + b"\n" for frame in made.history(2, 1)))
    for target in (first, second):
        draw_picture([str(frames), str(target), "--width", "100", "--height", "30"])
    svg = first.read_text(encoding="utf-8")
    assert svg == second.read_text(encoding="utf-8")
    assert svg.startswith("<svg")
    assert "SIMULATED" in svg
    assert "99.6" in svg


def test_options_are_not_guessed() -> None:
    with pytest.raises(TypeError):
        replace(OPTIONS, color=False)
