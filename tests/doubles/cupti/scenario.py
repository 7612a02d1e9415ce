"""What the CUPTI double plays, written to the file that it watches."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

SCENARIO_VARIABLE = "GPUIDLE_CUPTI_SCENARIO"
JOURNAL_VARIABLE = "GPUIDLE_CUPTI_JOURNAL"


@dataclass(frozen=True)
class Scenario:
    """Settings by key and faults, as `double.h` and `cupti.c` describe them; a change works at once."""

    settings: dict[str, object] = field(default_factory=dict)
    device_settings: dict[str, dict[str, object]] = field(default_factory=dict)
    """By UUID."""
    faults: tuple[tuple[object, ...], ...] = ()
    """(function, code or "hang" or "crash", calls before it[, UUID])."""

    def write(self, path: Path) -> None:
        """Replace the file at once, so that no reader sees half of it."""
        lines = [f"{key} {value}" for key, value in self.settings.items()]
        lines += [
            f"{uuid} {key} {value}"
            for uuid, keys in self.device_settings.items()
            for key, value in keys.items()
        ]
        lines += ["fault " + " ".join(map(str, fault)) for fault in self.faults]
        new = path.with_suffix(".new")
        new.write_text("".join(line + "\n" for line in lines), encoding="ascii")
        new.replace(path)


def environment(library: Path, scenario: Path, journal: Path | None = None) -> dict[str, str]:
    """Return the variables by which a child finds the doubles and their scenario."""
    variables = {"LD_LIBRARY_PATH": str(library), SCENARIO_VARIABLE: str(scenario)}
    return variables if journal is None else {**variables, JOURNAL_VARIABLE: str(journal)}
