"""A recorded vLLM: what its `/metrics` shows at 10 Hz against its own steps. The figures: benchmarks."""

from __future__ import annotations

import pytest
from benchmarks.accuracy_recorded import DATA, RUNS, Recorded, exact_labels, quantiles, score


@pytest.mark.parametrize("name", RUNS)
def test_every_step_of_the_log_is_labelled_by_its_tokens(name: str) -> None:
    assert exact_labels(Recorded(DATA / f"{name}.jsonl")) == 1.0


def test_deltas_at_10_hz_come_close_to_the_steps() -> None:
    errors, coverage, windows = score(Recorded(DATA / "steplog_chunk256.jsonl"), lead_ns=111_000_000)
    assert windows >= 15
    assert coverage >= 0.9
    assert quantiles(errors)[0] <= 2.0
