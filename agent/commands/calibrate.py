"""`gpuidle calibrate`: what this device reaches, beside what its sheet says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click


@click.command()
@click.option("--device", default="cuda:0", show_default=True, help="Device of torch; cpu rehearses.")
@click.option(
    "--seconds",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True, max=60),
    help="Time spent on each figure.",
)
@click.option("--force", is_flag=True, help="Measure although others use the GPU: it slows them.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where to save [default: calibration/ID.json in the state folder].",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was saved as JSON.")
def command(device: str, seconds: float, force: bool, output: Path | None, as_json: bool) -> None:
    """Measure the matmul FLOP/s and the copy bandwidth that this device reaches, and save them.

    Needs the extra `torch`. It loads the GPU fully for some seconds, so it refuses one that others use.
    The ledger takes the copy's bandwidth as what this device reaches, from the next start on.
    """
    from gpuidle.agent.commands.calibrate_torch import CalibrationError, measure
    from gpuidle.agent.commands.calibrated import calibration_folder
    from gpuidle.agent.physics.calibration import compare, to_table
    from gpuidle.agent.physics.peaks import find_peaks

    try:
        calibration = measure(device, seconds=seconds, force=force)
    except CalibrationError as error:
        raise click.ClickException(str(error)) from error
    path = output or calibration_folder() / f"{calibration.hw_id}.json"
    text = json.dumps(to_table(calibration), indent=2)
    try:
        _write(path, text)
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error
    if as_json:
        click.echo(text)
        return
    peaks = find_peaks(calibration.device, None)
    click.echo(f"{calibration.device} ({calibration.hw_id}), {calibration.tool}")
    click.echo(f"{'':6} {'reached':>12} {'sheet':>12} {'share':>7}")
    for row in compare(calibration, peaks):
        unit, scale = ("GB/s", 1e9) if row.what == "copy" else ("TFLOP/s", 1e12)
        reached = "-" if row.reached is None else f"{row.reached / scale:,.4g}"
        sheet = "-" if row.sheet is None else f"{row.sheet / scale:,.4g}"
        share = "-" if row.share is None else f"{row.share:.1%}"
        why = f"  {calibration.missing[row.what]}" if row.what in calibration.missing else ""
        click.echo(f"{row.what:6} {reached:>12} {sheet:>12} {share:>7} {unit}{why}")
    click.echo(f"saved to {path}")


def _write(path: Path, text: str) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text + "\n")
    beside.replace(path)
