"""A recorded vLLM: what its `/metrics` shows at 10 Hz against its own steps. The figures: benchmarks."""

from __future__ import annotations

import pytest
from benchmarks.accuracy_recorded import (
    DATA,
    RUNS,
    Recorded,
    coverage_of,
    errors_of,
    exact_labels,
    quantiles,
    windows_of,
)


@pytest.mark.parametrize("name", RUNS)
def test_every_step_of_the_log_is_labelled_by_its_tokens(name: str) -> None:
    assert exact_labels(Recorded(DATA / f"{name}.jsonl")) == 1.0


def test_deltas_at_10_hz_come_close_to_the_steps() -> None:
    windows = windows_of(Recorded(DATA / "steplog_chunk256.jsonl"), lead_ns=111_000_000)
    assert len(windows) >= 15
    assert coverage_of(windows) >= 0.9
    own = quantiles(errors_of((window.told, window.own) for window in windows))
    assert own[0] <= 2.0
    assert own[1] <= 8.0
