"""Fusion: boundaries from the best clock, tokens from the best count, disagreement as figures."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuidle.agent.model import StepSeries, column
from gpuidle.collectors.steps.fuse import fuse


def steps(
    source: str,
    times: list[tuple[int, int]],
    decode: list[int] | None = None,
    prefill: list[int] | None = None,
    **more: object,
) -> StepSeries:
    def col(values: list[int] | None) -> object:
        return None if values is None else column(values, "i8")

    return StepSeries(
        engine_id="e",
        source=source,
        exact=True,
        lost=0,
        start_ns=column([start for start, _ in times], "i8"),
        end_ns=column([end for _, end in times], "i8"),
        prefill_tokens=col(prefill),  # type: ignore[arg-type]
        decode_tokens=col(decode),  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )


def test_boundaries_of_the_driver_take_the_tokens_of_the_counters() -> None:
    clock = steps("uprobe", [(0, 9), (10, 19), (20, 29)])
    count = steps("mmap", [(1, 11), (11, 22), (22, 31)], decode=[1, 2, 3], prefill=[0, 50, 0])
    fused, agreement = fuse([clock, count])
    assert fused.source == "uprobe+mmap"
    assert not fused.exact
    assert fused.start_ns.tolist() == [0, 10, 20]
    assert fused.decode_tokens is not None
    assert fused.decode_tokens.tolist() == [1, 2, 3]
    assert agreement is not None
    assert (agreement.matched, agreement.without_tokens, agreement.without_boundary) == (3, 0, 0)


def test_tokens_of_a_step_that_was_several_go_to_the_last_of_them() -> None:
    clock = steps("uprobe", [(0, 9), (10, 19), (20, 29)])
    count = steps("mmap", [(0, 29)], decode=[6], prefill=[0])
    fused, agreement = fuse([clock, count])
    assert fused.decode_tokens is not None
    assert fused.decode_tokens.tolist() == [0, 0, 6]
    assert agreement is not None
    assert (agreement.matched, agreement.shared) == (1, 2)


def test_a_counted_step_without_a_boundary_keeps_its_time_where_that_is_free() -> None:
    clock = steps("uprobe", [(0, 10), (40, 50)])
    count = steps("mmap", [(0, 11), (11, 30), (38, 50)], decode=[1, 2, 3], prefill=[0, 0, 0])
    fused, agreement = fuse([clock, count])
    assert list(zip(fused.start_ns.tolist(), fused.end_ns.tolist(), strict=True)) == [
        (0, 10),
        (11, 30),
        (40, 50),
    ]
    assert agreement is not None
    assert agreement.without_boundary == 1


def test_a_boundary_without_a_counted_step_has_no_tokens() -> None:
    fused, agreement = fuse(
        [steps("uprobe", [(0, 10), (20, 30)]), steps("mmap", [(0, 12)], decode=[4], prefill=[0])]
    )
    assert fused.decode_tokens is not None
    assert fused.decode_tokens.tolist() == [4, 0]
    assert agreement is not None
    assert agreement.without_tokens == 1


def test_two_streams_are_compared_and_the_better_one_is_taken_whole() -> None:
    plugin = steps("plugin", [(0, 10), (10, 20)], decode=[4, 4], prefill=[0, 0])
    other = steps("fpm", [(1, 11), (11, 21)], decode=[4, 5], prefill=[0, 0])
    fused, agreement = fuse([other, plugin])
    assert fused is plugin
    assert agreement is not None
    assert (agreement.matched, agreement.disagreeing) == (2, 1)


def test_one_source_is_itself_and_agrees_with_nothing() -> None:
    one = steps("plugin", [(0, 1)], decode=[1], prefill=[0])
    assert fuse([one]) == (one, None)


def test_losses_of_both_are_not_added() -> None:
    """Both may have missed the same step."""
    clock = steps("uprobe", [(0, 9)])
    count = steps("mmap", [(0, 9)], decode=[1], prefill=[0])
    object.__setattr__(clock, "lost", 3)
    object.__setattr__(count, "lost", 2)
    assert fuse([clock, count])[0].lost == 3


def test_what_cannot_be_fused_is_refused() -> None:
    one = steps("plugin", [(0, 1)])
    with pytest.raises(ValueError, match="no steps"):
        fuse([])
    with pytest.raises(ValueError, match="different"):
        fuse([one, steps("fpm", [(0, 1)], rank="1")])
    with pytest.raises(ValueError, match="once"):
        fuse([one, one])


spans = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=25)


def laid_out(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out, now = [], 0
    for gap, width in pieces:
        out.append((now + gap, now + gap + width))
        now = out[-1][1]
    return out


@settings(max_examples=120, deadline=None)
@given(spans, spans)
def test_fused_steps_are_disjoint_and_in_order_and_have_every_token_once(
    clock_pieces: list[tuple[int, int]], count_pieces: list[tuple[int, int]]
) -> None:
    clock, counted = laid_out(clock_pieces), laid_out(count_pieces)
    count = steps("mmap", counted, decode=list(range(1, len(counted) + 1)), prefill=[0] * len(counted))
    fused, agreement = fuse([steps("uprobe", clock), count])
    assert agreement is not None
    assert fused.decode_tokens is not None
    start, end = fused.start_ns, fused.end_ns
    assert (end[1:] >= end[:-1]).all()
    assert (start[1:] >= end[:-1]).all()
    assert fused.decode_tokens.sum() == len(counted) * (len(counted) + 1) // 2
    assert agreement.matched + agreement.without_boundary == len(counted)
    assert agreement.steps == len(fused) >= len(clock)
