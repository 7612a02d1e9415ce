"""Frames as lines of JSON, for pipes."""

from __future__ import annotations

from typing import IO

from gpuidle.agent.codec import encode_frame
from gpuidle.agent.model import Frame

from .consoles import OutputClosedError


class NdjsonExporter:
    """Writes one Frame a line and flushes each, so that a reader sees it at once."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._closed = False

    @property
    def name(self) -> str:
        """The exporter's name."""
        return "ndjson"

    @property
    def closed(self) -> bool:
        """Whether the reader has gone: nothing is written any more."""
        return self._closed

    def publish(self, frame: Frame) -> None:
        """Write one line.

        Raises:
            OutputClosedError: the reader has gone; a reason to stop, not a fault.
        """
        if self._closed:
            raise OutputClosedError
        try:
            self._stream.write(encode_frame(frame) + b"\n")
            self._stream.flush()
        except BrokenPipeError:
            self._closed = True
            raise OutputClosedError from None

    def close(self) -> None:
        """Flush what is left; the stream stays its owner's."""
        if self._closed:
            return
        self._closed = True
        try:
            self._stream.flush()
        except (BrokenPipeError, ValueError):
            return
