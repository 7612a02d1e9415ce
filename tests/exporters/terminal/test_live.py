"""The live screen on a pseudo-terminal: it draws, and it gives the terminal back whatever happens."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timezone
from pathlib import Path
from typing import IO

import pyte
import pytest
from tests.exporters.terminal import frames as made

from gpuidle.exporters.terminal.consoles import OutputClosedError
from gpuidle.exporters.terminal.live import TerminalExporter
from gpuidle.exporters.terminal.options import ScreenOptions

ROOT = Path(__file__).parents[3]
PATIENCE_S = 120.0
OPTIONS = ScreenOptions(timezone=timezone.utc)
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """The user's end of a pseudo-terminal: what was written, as bytes and as a screen."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.written = b""
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)

    def wait_for(self, seen: Callable[[], bool]) -> None:
        """Read until `seen`; fail when nothing comes for a long time."""
        deadline = time.monotonic() + PATIENCE_S
        while not seen():
            assert time.monotonic() < deadline, self.text()
            if select.select([self.master], [], [], 0.1)[0]:
                data = os.read(self.master, 65536)
                self.written += data
                self._stream.feed(data)

    def shows(self, text: str) -> None:
        self.wait_for(lambda: text in self.text())

    def text(self) -> str:
        return "\n".join(self.screen.display)

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.slave)[3] & termios.ECHO)

    def assert_restored(self) -> None:
        self.wait_for(lambda: LEAVE in self.written)
        assert self.written.count(ENTER) == self.written.count(LEAVE) == 1
        assert not self.screen.cursor.hidden
        assert termios.tcgetattr(self.slave) == self.before

    def close(self) -> None:
        for descriptor in (self.master, self.slave):
            os.close(descriptor)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal()
    yield opened
    opened.close()


@contextmanager
def output_of(terminal: Terminal) -> Iterator[IO[str]]:
    with os.fdopen(os.dup(terminal.slave), "w", encoding="utf-8") as stream:
        yield stream


@contextmanager
def watching(terminal: Terminal, frames: int = 3) -> Iterator[tuple[TerminalExporter, threading.Event]]:
    asked = threading.Event()
    with output_of(terminal) as output:
        exporter = TerminalExporter(OPTIONS, asked.set, output, terminal.slave)
        exporter.start()
        for frame in made.history(2, 1, made.PROBLEMS)[:frames]:
            exporter.publish(frame)
        try:
            yield exporter, asked
        finally:
            exporter.close()
    assert exporter.error is None


def test_the_screen_is_drawn_and_the_terminal_is_given_back(terminal: Terminal) -> None:
    with watching(terminal):
        terminal.shows("compute idle ~99.6 %")
        assert ENTER in terminal.written
        assert terminal.screen.cursor.hidden
        assert not terminal.echoes()
    terminal.assert_restored()
    terminal.shows("gpuidle: gpu-node-17, simulated")


def test_a_new_frame_is_drawn(terminal: Terminal) -> None:
    with watching(terminal) as (exporter, _):
        terminal.shows("SIMULATED")
        exporter.publish(made.frame(1, 1, simulated=False, sequence=99))
        terminal.wait_for(lambda: "SIMULATED" not in terminal.text())


def test_a_new_size_is_drawn(terminal: Terminal) -> None:
    with watching(terminal):
        terminal.shows("q quit")
        terminal.screen.resize(40, 120)
        fcntl.ioctl(terminal.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        terminal.shows("2026-01-01")


def test_keys_open_pages_freeze_and_quit(terminal: Terminal) -> None:
    with watching(terminal) as (exporter, asked):
        terminal.shows("p problems")
        terminal.press("p")
        terminal.shows("p back")
        terminal.press("?")
        terminal.shows("where each GPU-second went")
        terminal.press("?")
        terminal.press(" ")
        terminal.shows("FROZEN")
        exporter.publish(made.frame(1, 1, simulated=False, sequence=99))
        terminal.press("\x1b[A")
        terminal.press("p")
        terminal.shows("p back")
        assert "SIMULATED" in terminal.text()
        terminal.press("p ")
        terminal.wait_for(lambda: "SIMULATED" not in terminal.text())
        terminal.press("q")
        terminal.wait_for(lambda: LEAVE in terminal.written)
        assert asked.wait(PATIENCE_S)
    terminal.assert_restored()


def test_an_exception_while_watching_gives_the_terminal_back(terminal: Terminal) -> None:
    def watch() -> None:
        with watching(terminal):
            terminal.shows("compute idle")
            raise RuntimeError("elsewhere")

    with pytest.raises(RuntimeError, match="elsewhere"):
        watch()
    terminal.assert_restored()


def test_a_fault_of_the_drawing_itself_gives_the_terminal_back_and_is_kept(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("drawing")

    monkeypatch.setattr("gpuidle.exporters.terminal.live.render", fail)
    asked = threading.Event()
    with output_of(terminal) as output:
        exporter = TerminalExporter(OPTIONS, asked.set, output, terminal.slave)
        exporter.start()
        assert asked.wait(PATIENCE_S)
        exporter.close()
    assert isinstance(exporter.error, ArithmeticError)
    terminal.assert_restored()


def test_without_a_keyboard_no_keys_are_named_and_the_mode_is_left_alone(terminal: Terminal) -> None:
    with output_of(terminal) as output:
        exporter = TerminalExporter(OPTIONS, lambda: None, output)
        exporter.start()
        exporter.publish(made.frame(2, 1))
        terminal.shows("compute idle")
        assert "quit" not in terminal.text()
        assert terminal.echoes()
        exporter.close()
        exporter.close()
    terminal.assert_restored()


def test_the_history_is_bounded(terminal: Terminal) -> None:
    with output_of(terminal) as output:
        exporter = TerminalExporter(OPTIONS, lambda: None, output)
        frame = made.frame(1, 1)
        for _ in range(2000):
            exporter.publish(frame)
        assert len(exporter._history) == 600
        exporter.close()


def test_no_color_leaves_no_colour_and_tells_causes_by_letter(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with watching(terminal):
        terminal.shows("UUU")
    assert not colours(terminal.written)


def test_with_colour_there_are_colours(terminal: Terminal) -> None:
    with watching(terminal):
        terminal.shows("▇▇▇")
    assert colours(terminal.written)


def colours(written: bytes) -> set[int]:
    """Return the SGR parameters of `written` that set a colour."""
    found: set[int] = set()
    for part in written.split(b"\x1b[")[1:]:
        parameters, mark, _ = part.partition(b"m")
        if mark and parameters.replace(b";", b"").isdigit():
            found |= {int(number) for number in parameters.split(b";")}
    return found & {*range(30, 39), *range(40, 49), *range(90, 98), *range(100, 108)}


CHILD = """
import signal, sys, threading
from gpuidle.exporters.terminal.live import TerminalExporter
from gpuidle.exporters.terminal.options import ScreenOptions
from tests.exporters.terminal import frames as made

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
exporter = TerminalExporter(ScreenOptions(), lambda: None, keyboard=0)
"""
CLOSES = (
    CHILD
    + """
try:  # from before the screen shows anything: an interrupt may come as soon as it does
    exporter.start()
    exporter.publish(made.frame(2, 1))
    threading.Event().wait(600)
except KeyboardInterrupt:
    pass
finally:
    exporter.close()
"""
)
DIES = (
    CHILD
    + """
exporter.start()
exporter.publish(made.frame(2, 1))
sys.stdin.readline()
raise RuntimeError("nobody closed the screen")
"""
)


@contextmanager
def child(terminal: Terminal, script: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / '.editable'}:{ROOT}"}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=terminal.slave,
        stdout=terminal.slave,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_an_interrupt_gives_the_terminal_back_and_leaves_a_line(terminal: Terminal) -> None:
    with child(terminal, CLOSES) as process:
        terminal.shows("compute idle")
        assert not terminal.echoes()
        process.send_signal(signal.SIGINT)
        terminal.shows("gpuidle: gpu-node-17, simulated")
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    terminal.assert_restored()


def test_a_process_that_dies_without_closing_gives_the_terminal_back(terminal: Terminal) -> None:
    with child(terminal, DIES) as process:
        terminal.shows("compute idle")
        terminal.press("\n")
        assert process.wait(PATIENCE_S) == 1
        assert process.stderr is not None
        assert b"nobody closed the screen" in process.stderr.read()
    terminal.assert_restored()


def test_a_terminal_that_goes_away_ends_the_screen_quietly() -> None:
    terminal = Terminal()
    asked = threading.Event()
    stream = os.fdopen(os.dup(terminal.slave), "w", encoding="utf-8")
    exporter = TerminalExporter(OPTIONS, asked.set, stream)
    exporter.start()
    exporter.publish(made.frame(1, 1))
    terminal.shows("compute idle")
    terminal.close()
    exporter.publish(made.frame(1, 1, sequence=1))
    assert asked.wait(PATIENCE_S)
    exporter.close()
    assert exporter.error is None
    with pytest.raises(OutputClosedError):
        exporter.publish(made.frame(1, 1, sequence=2))
    stream.close()
