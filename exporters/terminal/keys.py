"""Keys of a terminal, one at a time and without echo, for as long as the screen stands."""

from __future__ import annotations

import os
import termios
import tty
from types import TracebackType
from typing import Any


class KeyReader:
    """Puts a terminal into cbreak mode inside of `with`, and back at its end whatever happened.

    Signals stay with the terminal: Ctrl-C still interrupts. A descriptor that is no terminal is left alone.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._before: list[Any] | None = None

    @property
    def descriptor(self) -> int | None:
        """The descriptor to wait on; None where no keys come."""
        return self._descriptor if self._before is not None else None

    def __enter__(self) -> KeyReader:  # noqa: PYI034 - typing.Self is of Python 3.11
        if self._descriptor is None:
            return self
        try:
            self._before = termios.tcgetattr(self._descriptor)
            tty.setcbreak(self._descriptor, termios.TCSANOW)
        except (termios.error, OSError):
            self._before = None
        return self

    def read(self) -> str:
        """Return the keys that are waiting; "" when the terminal has gone, after which none come."""
        if self._descriptor is None or self._before is None:
            return ""
        try:
            data = os.read(self._descriptor, 64)
        except OSError:
            data = b""
        if not data:
            self.restore()
        return data.decode("ascii", "replace")

    def restore(self) -> None:
        """Put the terminal back as it was; more than once does no harm."""
        before, self._before = self._before, None
        if before is None or self._descriptor is None:
            return
        try:
            termios.tcsetattr(self._descriptor, termios.TCSANOW, before)
        except (termios.error, OSError):  # the terminal has gone, and its mode with it
            return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restore()
