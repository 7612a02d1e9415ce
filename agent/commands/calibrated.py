"""Saved calibrations, put beside what the driver says of its devices."""

from __future__ import annotations

import json
import os
from pathlib import Path

from msgspec.structs import replace

from gpuidle.agent.model import Problem, Reading
from gpuidle.agent.physics.calibration import BadCalibration, from_table
from gpuidle.agent.ports import Collector


def calibration_folder() -> Path:
    """Return where calibrations are kept, one file a device: the service's state folder, else the user's.

    A user without a home (any number in a container) has the folder that the service has by default.
    """
    service = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if service:
        return Path(service) / "calibration"
    state = os.environ.get("XDG_STATE_HOME")
    try:
        base = Path(state) if state else Path.home() / ".local" / "state"
    except RuntimeError:
        base = Path("/var/lib")
    return base / "gpuidle" / "calibration"


class Calibrated:
    """A collector of devices that adds to each what a copy on it reached when `calibrate` measured it.

    The folder is read once. A damaged file is a Problem in every reading; no file is none.
    """

    def __init__(self, collector: Collector, folder: Path) -> None:
        self._collector = collector
        self._copied: dict[str, float] = {}
        problems = []
        for path in sorted(folder.glob("*.json")):
            try:
                table = json.loads(path.read_text(encoding="utf-8"))
                found = from_table(table if isinstance(table, dict) else {})
            except (OSError, ValueError, BadCalibration) as error:
                problems.append(
                    Problem(
                        source="calibration",
                        kind="bad_file",
                        message=f"{path}: {error}",
                        remedy="Remove the file, or measure the device again: gpuidle calibrate.",
                        subject=path.stem,
                    )
                )
                continue
            self._copied[found.hw_id] = found.copy_bytes_per_s
        self._problems = tuple(problems)

    @property
    def name(self) -> str:
        """The collector's own name."""
        return self._collector.name

    def read(self, now_ns: int) -> Reading:
        """Read, and add what is known of the devices."""
        reading = self._collector.read(now_ns)
        if not self._copied and not self._problems:
            return reading
        gpus = reading.gpus
        if gpus is not None:
            gpus = tuple(replace(gpu, copy_bytes_per_s=self._copied.get(gpu.hw_id)) for gpu in gpus)
        return replace(reading, gpus=gpus, problems=(*reading.problems, *self._problems))

    def close(self) -> None:
        """Close the collector."""
        self._collector.close()
