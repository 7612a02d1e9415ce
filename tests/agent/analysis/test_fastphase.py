from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuidle.agent.analysis.fastphase import Levels, label_window
from gpuidle.agent.model import RATIO_STEP, CounterSeries, column, rate_column

MS = 10**6


def series(rows: list[tuple[float, float, float]], width_ns: int = MS) -> CounterSeries:
    """Samples of (tensor, DRAM share of 1 TB/s, active), end to end from 0."""
    tensor, dram, active = (np.array(c) for c in zip(*rows, strict=True))
    return CounterSeries(
        hw_id="GPU-0",
        rung="cupti_pm",
        end_ns=column(np.arange(1, len(rows) + 1) * width_ns, "i8"),
        width_ns=column(np.full(len(rows), width_ns), "i8"),
        gr_active=column(np.rint(active / RATIO_STEP), "u2"),
        tensor_active=column(np.rint(tensor / RATIO_STEP), "u2"),
        dram_read_bytes_per_s=rate_column(dram * 1e12),
        dram_write_bytes_per_s=rate_column(dram * 0),
    )


DECODE, PREFILL, REST = (0.1, 0.6, 1.0), (0.6, 0.1, 1.0), (0.0, 0.0, 0.0)


def test_the_two_classes_are_told_apart_and_rest_is_idle() -> None:
    found = label_window(Levels(), [series([DECODE] * 50 + [PREFILL] * 30 + [REST] * 20)], 0, 100 * MS, 1e12)
    assert found is not None
    assert round(found.decode_ns / MS, 2) == 50
    assert round(found.containing_ns / MS, 2) == 30
    assert round(found.idle_ns / MS, 2) == 20
    assert found.unknown_ns == 0


def test_levels_are_learned_a_small_prompt_stands_out_of_a_quiet_decode() -> None:
    levels = Levels()
    quiet, small = (0.05, 0.55, 1.0), (0.26, 0.49, 1.0)
    first = label_window(levels, [series([small] * 10)], 0, 10 * MS, 1e12)
    assert first is not None
    assert first.decode_ns == 10 * MS  # by the ridge alone this is a decode
    label_window(levels, [series([quiet] * 900 + [PREFILL] * 100)], 0, 1000 * MS, 1e12)
    later = label_window(levels, [series([small] * 10)], 0, 10 * MS, 1e12)
    assert later is not None
    assert later.decode_ns == 0


def test_an_edge_keeps_the_label_before_it_but_not_for_long() -> None:
    levels = Levels()
    label_window(levels, [series([DECODE] * 500 + [PREFILL] * 500)], 0, 1000 * MS, 1e12)
    edge = (0.245, 0.255, 1.0)
    found = label_window(levels, [series([DECODE] * 5 + [edge] * 8 + [PREFILL] * 5)], 0, 18 * MS, 1e12)
    assert found is not None
    assert found.unknown_ns > 4 * MS


def test_a_missing_column_gives_no_label() -> None:
    bare = series([DECODE])
    found = CounterSeries("GPU-0", "cupti_pm", bare.end_ns, bare.width_ns, gr_active=bare.gr_active)
    assert label_window(Levels(), [found], 0, MS, 1e12) is None
    assert label_window(Levels(), [], 0, MS, 1e12) is None


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0, 1.2), st.floats(0, 1.2), st.floats(0, 1)), min_size=1, max_size=40),
    st.integers(0, 40),
)
def test_labels_sum_to_the_samples(rows: list[tuple[float, float, float]], cut: int) -> None:
    found = label_window(Levels(), [series(rows)], 0, cut * MS, 1e12)
    if found is None:
        assert cut == 0
        return
    parts = (found.decode_ns, found.containing_ns, found.unknown_ns, found.idle_ns)
    assert min(parts) >= -1e-3
    assert abs(sum(parts) - min(cut, len(rows)) * MS) < 1e-3
