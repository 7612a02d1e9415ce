"""Useful work by exact steps: rows that were thrown away, or computed before, are not in it."""

from __future__ import annotations

import pytest
from tests.agent.analysis.cases import outcome


@pytest.mark.parametrize("case", ["preemption", "speculation", "speculation with a draft model", "chats"])
def test_useful_flops_are_those_of_tokens_that_were_kept(case: str) -> None:
    found = outcome(case, "steps")
    engine, exact = found.frame.engines[0], found.truth.engines[0].total
    assert engine.useful_flops_total == pytest.approx(exact.useful_flops, rel=0.02)
