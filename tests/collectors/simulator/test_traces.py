from __future__ import annotations

from pathlib import Path

import pytest

from gpuidle.collectors.simulator.scenario import SECOND_NS, Request, ScenarioError
from gpuidle.collectors.simulator.traces import read_trace, stretch


def test_azure_rows_are_requests_from_zero_on(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.0,0,8\n2023-11-16 18:17:05.4799600,7,8\n"
    )
    assert read_trace(path) == (Request(0, 4808, 10), Request(1_500_000_000, 7, 8))


def test_mooncake_rows_bring_their_prefix_hits(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.csv"
    path.write_text(
        "timestamp_ms,input_length,output_length,n_blocks_512,prefix_hit_blocks_infinite_cache\n"
        "3000,1024,5,2,2\n4000,1500,6,3,1\n"
    )
    assert read_trace(path) == (Request(0, 1024, 5, 1023), Request(SECOND_NS, 1500, 6, 512))


def test_another_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ScenarioError, match=r"other\.csv"):
        read_trace(path)


def test_a_cut_is_denser_and_leaves_out_what_does_not_fit() -> None:
    trace = tuple(Request(i * SECOND_NS, 100 * (i + 1), 5) for i in range(10))
    cut = stretch(trace, load=2.0, start_ns=2 * SECOND_NS, duration_ns=2 * SECOND_NS, longest_tokens=505)
    assert [(r.arrival_ns, r.prompt_tokens) for r in cut.requests] == [
        (0, 300),
        (SECOND_NS // 2, 400),
        (SECOND_NS, 500),
    ]
