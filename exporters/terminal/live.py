"""The live screen of `gpuidle watch`: the newest frame, at most four times a second."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

from msgspec.structs import replace

from gpuidle.agent.model import Frame

from .consoles import OutputClosedError, has_colour, make_console, wants_ascii
from .history import HISTORY_FRAMES
from .keys import KeyReader
from .options import ScreenOptions, View
from .screen import render, summary

if TYPE_CHECKING:
    from rich.console import ConsoleDimensions
    from rich.live import Live

SHORTEST_REDRAW_S = 0.25
_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O.)?")
"""Arrows and function keys: none of ours."""


class TerminalExporter:
    """Draws Frames on a terminal from a thread of its own.

    `publish` only keeps the frame. `start` takes the terminal: alternate screen, hidden cursor, keys
    without echo; `close` gives it back and leaves one line of summary. So does the end of the process,
    if nobody closed. `on_quit` is called once, from the drawing thread, when the watcher asks to leave or
    the terminal has gone.
    """

    def __init__(
        self,
        options: ScreenOptions,
        on_quit: Callable[[], None],
        output: IO[str] | None = None,
        keyboard: int | None = None,
    ) -> None:
        """Make a screen on the terminal `output` (standard output); keys come from descriptor `keyboard`."""
        self._output = sys.stdout if output is None else output
        self._console = make_console(self._output)
        self._keys = KeyReader(keyboard)
        self._options = replace(
            options,
            ascii=options.ascii or wants_ascii(self._output),
            colour=options.colour and has_colour(self._console),
        )
        self._on_quit = on_quit
        self._history: deque[Frame] = deque(maxlen=HISTORY_FRAMES)
        self._frozen: tuple[Frame, ...] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._pipe_open = True
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        self._closed = False
        self._gone = False
        self.error: BaseException | None = None
        """What ended the drawing thread, if it was a fault of ours."""

    @property
    def name(self) -> str:
        """The exporter's name."""
        return "terminal"

    def publish(self, frame: Frame) -> None:
        """Keep the frame for the next drawing.

        Raises:
            OutputClosedError: the terminal has gone.
        """
        if self._gone:
            raise OutputClosedError
        with self._lock:
            self._history.append(frame)
        self._wake()

    def start(self) -> None:
        """Begin to draw in a thread."""
        atexit.register(self._restore)
        self._thread = threading.Thread(target=self._run_guarded, name="gpuidle-terminal", daemon=True)
        self._thread.start()

    def run(self, stop: threading.Event) -> None:
        """Draw in this thread until `stop` is set; the terminal is as before when this returns or raises."""
        from rich.live import Live

        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        try:
            with self._keys:
                self._options = replace(self._options, keys=self._keys.descriptor is not None)
                self._live.start()
                self._loop(self._live, stop)
        finally:
            self._restore()

    def close(self) -> None:
        """Stop drawing, give the terminal back, and say in one line what was seen last."""
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        self._wake()
        if self._thread is not None:
            self._thread.join(timeout=1.5)
        self._restore()
        if self._thread is None or not self._thread.is_alive():
            self._close_pipe()
        atexit.unregister(self._restore)
        with self._lock:
            last = summary(tuple(self._history))
        if last and not self._gone:
            if self._options.ascii:
                last = last.replace("—", "-").encode("ascii", "replace").decode()
            with contextlib.suppress(OSError, ValueError):
                self._output.write(last + "\n")
                self._output.flush()

    def _run_guarded(self) -> None:
        try:
            self.run(self._stop)
        except OutputClosedError:
            self._gone = True
        except OSError:  # EIO: the terminal's window was closed
            self._gone = True
        except Exception as error:  # noqa: BLE001 - kept for the command, which raises it where it is seen
            self.error = error
        finally:
            if not self._stop.is_set():
                self._on_quit()

    def _loop(self, live: Live, stop: threading.Event) -> None:
        drawn: tuple[Frame | None, ScreenOptions, ConsoleDimensions] | None = None
        while not stop.is_set():
            with self._lock:
                frames = tuple(self._history) if self._frozen is None else self._frozen
            size = self._console.size = self._size()
            state = (frames[-1] if frames else None, self._options, size)
            if drawn is None or state[0] is not drawn[0] or state[1:] != drawn[1:]:
                live.update(render(frames, self._options, size.width, size.height), refresh=True)
                drawn = state
            pause = time.monotonic() + SHORTEST_REDRAW_S
            if not self._wait(SHORTEST_REDRAW_S):
                continue
            if self._press_all(self._keys_waiting()):
                self._on_quit()
                return
            # A frame that came at once waits for its turn; a key is answered without one, and so is the
            # first frame: until it comes the screen is empty.
            if state[1] == self._options and state[0] is not None:
                stop.wait(max(0.0, pause - time.monotonic()))

    def _size(self) -> ConsoleDimensions:
        """Return the size of the terminal that is drawn on, which need not be the one of standard input.

        A terminal that has hung up has none. rich would draw nothing on it for ever, and say nothing.
        """
        from rich.console import ConsoleDimensions

        try:
            size = os.get_terminal_size(self._output.fileno())
        except (OSError, ValueError):
            raise OutputClosedError from None
        return ConsoleDimensions(size.columns or 80, size.lines or 24)

    def _wait(self, timeout_s: float) -> bool:
        """Return whether a frame or a key came within `timeout_s`."""
        waiting = [self._wake_read]
        if self._keys.descriptor is not None:
            waiting.append(self._keys.descriptor)
        ready, _, _ = select.select(waiting, [], [], timeout_s)
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        return bool(ready)

    def _keys_waiting(self) -> str:
        descriptor = self._keys.descriptor
        if descriptor is None or not select.select([descriptor], [], [], 0)[0]:
            return ""
        return self._keys.read()

    def _press_all(self, keys: str) -> bool:
        """Act on keys; return whether one of them asks to leave."""
        for key in _ESCAPE.sub("", keys):
            if key in "qQ":
                return True
            self._press(key)
        return False

    def _press(self, key: str) -> None:
        options = self._options
        if key == " ":
            with self._lock:
                self._frozen = tuple(self._history) if self._frozen is None else None
            self._options = replace(options, frozen=self._frozen is not None)
        elif key in ("p", "?"):
            wanted: View = "problems" if key == "p" else "help"
            view: View = "main" if options.view == wanted else wanted
            self._options = replace(options, view=view, skip_problems=0)
        elif key in ("j", "k") and options.view == "problems":
            step = 1 if key == "j" else -1
            self._options = replace(options, skip_problems=max(0, options.skip_problems + step))

    def _wake(self) -> None:
        with self._lock:
            if not self._pipe_open:
                return
            with contextlib.suppress(BlockingIOError):  # full: it will wake anyway
                os.write(self._wake_write, b".")

    def _close_pipe(self) -> None:
        with self._lock:
            if self._pipe_open:
                self._pipe_open = False
                os.close(self._wake_read)
                os.close(self._wake_write)

    def _restore(self) -> None:
        """Leave the alternate screen and the key mode, from whichever thread is left to do it."""
        self._keys.restore()
        live, self._live = self._live, None
        if live is None:
            return
        with contextlib.suppress(OutputClosedError, OSError, ValueError):
            live.stop()
