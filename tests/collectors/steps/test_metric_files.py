"""Metric files as the real prometheus_client writes them, polled in every state of a half-written step."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import mmap_dict

from gpuidle.collectors.steps.metric_files import MetricFile, MetricFileError
from gpuidle.collectors.steps.polling import Follower, Poller, Row, series, spread_prompts
from gpuidle.collectors.steps.ticker import Ticker

MS = 1_000_000
SAMPLES = Path(__file__).parents[2] / "data" / "vllm" / "prom_multiproc_db"


def key(family: str, sample: str, **labels: str) -> str:
    return json.dumps([family, sample, {"model_name": "tiny", **labels}, "help"], sort_keys=True)


class Engine:
    """Writes the counters of one API server in vLLM's order."""

    def __init__(self, folder: Path, ranks: tuple[str, ...] = ("0",)) -> None:
        self.counter_path, self.histogram_path = folder / "counter_1.db", folder / "histogram_1.db"
        make: Any = mmap_dict.MmapedDict
        self._counters = make(str(self.counter_path))
        self._histograms = make(str(self.histogram_path))
        for rank in ranks:
            for name in ("prompt", "generation"):
                self.add(name, 0, rank)
            self.count(0, rank)
            self.first(0.0, rank, 0)
        self.follower = Follower(self._open(self.counter_path), self._open(self.histogram_path), 0)
        self._now_ms = 0

    @staticmethod
    def _open(path: Path) -> MetricFile:
        return MetricFile(os.open(path, os.O_RDONLY))

    def _bump(self, file: Any, name: str, amount: float) -> None:
        value, _ = file.read_value(name)
        file.write_value(name, value + amount, 0.0)

    def add(self, name: str, amount: float, rank: str = "0") -> None:
        if name == "prompt":
            sample, labels = "vllm:prompt_tokens_by_source_total", {"source": "local_compute"}
            for source in ("local_compute", "local_cache_hit"):
                amount_here = amount if source == "local_compute" else 5 * amount
                self._bump(self._counters, key("p", sample, engine=rank, source=source), amount_here)
            return
        sample, labels = f"vllm:{name}_total", {}
        if name == "generation":
            sample = "vllm:generation_tokens_total"
        self._bump(self._counters, key(name, sample, engine=rank, **labels), amount)

    def mark(self, tokens: float, rank: str = "0") -> None:
        """The sum of the histogram of steps, which is written before its count."""
        name = "vllm:iteration_tokens_total"
        self._bump(self._histograms, key(name, f"{name}_sum", engine=rank), tokens)

    def count(self, steps: int, rank: str = "0", le: str = "8.0") -> None:
        self.mark(4 * steps, rank)
        self.bucket(steps, rank, le)

    def bucket(self, steps: int, rank: str = "0", le: str = "8.0") -> None:
        name = "vllm:iteration_tokens_total"
        self._bump(self._histograms, key(name, f"{name}_bucket", engine=rank, le=le), steps)

    def first(self, seconds: float, rank: str = "0", requests: int = 1) -> None:
        name = "vllm:time_to_first_token_seconds"
        self._bump(self._histograms, key(name, f"{name}_sum", engine=rank), seconds * requests)
        self._bump(self._histograms, key(name, f"{name}_bucket", engine=rank, le="1.0"), requests)

    def poll(self, after_ms: int = 1) -> None:
        self._now_ms += after_ms
        self.follower.poll(self._now_ms * MS)

    def rows(self, rank: str = "0") -> list[Row]:
        return self.follower.take(1 << 62)[rank][0]

    def close(self) -> None:
        self.follower.close()
        self._counters.close()
        self._histograms.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.close()


def test_decodes_and_a_prompt_with_a_poll_between_every_two_writes(engine: Engine) -> None:
    """Whatever the reader sees of a step that is being written, the step comes out whole."""
    engine.poll()
    for prompt, made, firsts in ((40, 2, 1), (0, 2, 0), (0, 2, 0)):
        for write in (
            partial(engine.add, "prompt", prompt),
            partial(engine.add, "generation", made),
            partial(engine.mark, prompt + made),
            partial(engine.bucket, 1),
            partial(engine.first, 0.002, requests=firsts),
        ):
            write()
            engine.poll()
        engine.poll()
    engine.poll()
    rows = engine.rows()
    assert [(r.prefill_tokens, r.decode_tokens, r.delivered_tokens, r.steps) for r in rows] == [
        (40, 1, 2, 1),
        (0, 2, 2, 1),
        (0, 2, 2, 1),
    ]
    assert rows[1].start_ns == rows[0].end_ns


def test_a_step_of_decodes_needs_no_further_poll(engine: Engine) -> None:
    """No first token can follow it, so no look is made for one."""
    engine.poll()
    for made in (3, 5, 7):  # the first look after the files grew has nothing to compare prompts with
        engine.add("generation", made)
        engine.count(1)
        engine.poll()
    assert [(row.decode_tokens, row.delivered_tokens) for row in engine.rows()] == [(3, 3), (5, 5), (7, 7)]


def test_prompts_of_the_next_step_that_were_read_early_keep_their_first_token(engine: Engine) -> None:
    """The poll that sees a step may fall between the next step's tokens and its count."""
    for _ in range(2):
        engine.add("generation", 4)
        engine.count(1)
        engine.poll()
    engine.add("generation", 4)
    engine.count(1)
    engine.add("prompt", 40)
    engine.poll()
    engine.poll()
    engine.add("generation", 5)
    engine.count(1)
    engine.poll()
    engine.first(0.002)
    engine.poll()
    engine.add("generation", 5)
    engine.count(1)
    engine.poll()
    rows = engine.rows()
    assert [row.decode_tokens for row in rows] == [4, 4, 4, 4, 5]
    assert sum(row.prefill_tokens for row in rows) == 40


def test_first_tokens_are_found_where_the_file_has_grown_before_them(engine: Engine) -> None:
    engine.poll()
    engine.add("generation", 1)
    engine.count(1)
    engine.poll()
    engine.count(0, le="512.0")  # a row that makes the stretch of first tokens longer
    engine._bump(
        engine._histograms, key("t", "vllm:time_to_first_token_seconds_bucket", engine="0", le="9"), 0
    )
    engine.poll(300)
    engine.add("prompt", 7)
    engine.add("generation", 2)
    engine.count(1)
    engine.poll()
    engine.first(0.002)
    engine.poll()
    assert [(row.prefill_tokens, row.decode_tokens) for row in engine.rows()] == [(0, 1), (7, 1)]


def test_steps_between_two_polls_are_one_row_and_the_others_are_lost(engine: Engine) -> None:
    engine.poll()
    engine.add("generation", 12)
    engine.count(3)
    engine.poll()
    engine.poll()
    rows, lost = engine.follower.take(1 << 62)["0"]
    assert [(r.steps, r.delivered_tokens) for r in rows] == [(3, 12)]
    assert lost == 2
    assert engine.follower.take(1 << 62)["0"] == ([], 0)


def test_a_step_without_tokens_is_counted_though_it_leaves_no_mark(engine: Engine) -> None:
    engine.poll()
    engine.bucket(1)
    for _ in range(300):
        engine.poll()
    (row,) = engine.rows()
    assert (row.steps, row.delivered_tokens) == (1, 0)


def test_a_file_without_the_sum_of_steps_is_watched_by_their_counts(tmp_path: Path) -> None:
    make: Any = mmap_dict.MmapedDict
    counters, histograms = make(str(tmp_path / "counter_1.db")), make(str(tmp_path / "histogram_1.db"))
    name = "vllm:iteration_tokens_total"
    bucket = key(name, f"{name}_bucket", engine="0", le="8.0")
    histograms.read_value(bucket)
    opened = [
        MetricFile(os.open(tmp_path / f"{kind}_1.db", os.O_RDONLY)) for kind in ("counter", "histogram")
    ]
    follower = Follower(opened[0], opened[1], 0)
    histograms.write_value(bucket, 1.0, 0.0)
    assert follower.poll(MS)
    assert not follower.poll(2 * MS)
    assert [row.steps for row in follower.take(1 << 62)["0"][0]] == [1]
    for one in (follower, counters, histograms):
        one.close()


def test_more_looks_than_are_kept_are_decoded_while_the_engine_works(engine: Engine) -> None:
    """A step between every two polls, so that no poll finds the engine at rest."""
    engine.poll()
    for at in range(700):
        engine.add("generation", 1 + at % 3)
        engine.count(1)
        engine.poll()
    engine.poll()
    rows, lost = engine.follower.take(1 << 62)["0"]
    assert [row.delivered_tokens for row in rows] == [1 + at % 3 for at in range(700)]
    assert lost == 0


def test_after_its_end_a_poll_does_nothing(engine: Engine) -> None:
    engine.poll()
    engine.follower.close()
    engine.count(1)
    assert not engine.follower.poll(MS * 1000)
    engine.follower.close = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize("timer", [True, False])
def test_a_ticker_ticks_with_and_without_a_timer_of_the_kernels(
    timer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not timer:
        monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    with Ticker(1000) as ticker:
        for _ in range(3):
            assert isinstance(ticker.wait(), bytes) is timer


def test_drafts_that_were_rejected_were_rows_too(engine: Engine) -> None:
    engine.add("spec_decode_num_draft_tokens", 0)
    engine.add("spec_decode_num_accepted_tokens", 0)
    engine.poll(300)
    engine.add("spec_decode_num_draft_tokens", 6)
    engine.add("spec_decode_num_accepted_tokens", 2)
    engine.add("generation", 4)
    engine.count(1)
    engine.poll()
    engine.poll()
    (row,) = engine.rows()
    assert (row.decode_tokens, row.delivered_tokens, row.draft_tokens, row.accepted_tokens) == (8, 4, 6, 2)


def test_a_prefill_after_a_rest_begins_when_its_requests_had_waited_their_time(engine: Engine) -> None:
    engine.poll()
    engine.add("generation", 1)
    engine.count(1)
    engine.poll()
    engine.poll(5000)
    engine.add("prompt", 100)
    engine.add("generation", 1)
    engine.count(1)
    engine.first(0.25)
    engine.poll(1000)
    engine.poll()
    row = engine.rows()[-1]
    assert row.end_ns - row.start_ns == 250 * MS


def test_each_rank_has_its_own_steps(tmp_path: Path) -> None:
    engine = Engine(tmp_path, ranks=("0", "1"))
    engine.poll()
    engine.add("generation", 3, "1")
    engine.count(1, "1")
    engine.poll()
    engine.poll()
    assert [row.delivered_tokens for row in engine.rows("1")] == [3]
    assert engine.rows("0") == []
    engine.close()


def test_files_that_begin_anew_give_no_negative_step(engine: Engine) -> None:
    engine.poll()
    engine.add("generation", 9)
    engine.count(2)
    engine.poll()
    engine.add("generation", -9)
    engine.count(-2)
    engine.poll()
    engine.add("generation", 1)
    engine.count(1)
    engine.poll()
    engine.poll()
    assert [(row.steps, row.delivered_tokens) for row in engine.rows()][-1] == (1, 1)
    assert all(row.delivered_tokens >= 0 for row in engine.rows())


def test_the_reader_sees_a_file_grow_and_new_entries_in_it(engine: Engine) -> None:
    for at in range(2000):
        engine._bump(engine._counters, key("other", f"vllm:other_{at}", engine="0"), 1)
    engine.poll(300)
    engine.add("num_preemptions", 2)
    engine.poll(300)
    engine.add("generation", 1)
    engine.count(1)
    engine.poll()
    engine.poll()
    assert engine.rows()[0].preemptions == 2


@pytest.mark.parametrize("cut", [0, 3, 100])
def test_a_file_cut_short_is_an_error_and_not_a_crash(engine: Engine, cut: int) -> None:
    engine.poll()
    os.truncate(engine.histogram_path, cut)
    with pytest.raises(MetricFileError):
        engine.follower.poll(MS)
    # The client unmaps its own file at the end: give it back its pages.
    os.truncate(engine.histogram_path, 1 << 16)


def test_the_thread_ends_with_a_reason_and_not_with_an_exception(engine: Engine) -> None:
    os.truncate(engine.counter_path, 0)
    poller = Poller(1000)
    poller.follow((engine.follower,))
    for _ in range(1000):
        if engine.follower.failure is not None:
            break
        time.sleep(0.01)
    poller.stop()
    assert engine.follower.failure is not None
    os.truncate(engine.counter_path, 1 << 16)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400), st.integers(-10, 500))
def test_hostile_files_are_refused_or_empty(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, used: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "hostile.db"
    path.write_bytes(struct.pack("=ii", used, 0) + data)
    file = MetricFile(os.open(path, os.O_RDONLY))
    try:
        file.refresh()
        assert not file.ranks
    except MetricFileError:
        pass
    finally:
        file.close()


def test_a_key_of_a_thousand_brackets_is_passed_over(tmp_path: Path) -> None:
    name = b'["vllm:x", ' + b"[" * 4000
    padded = name + b" " * (8 - (len(name) + 4) % 8)
    entry = struct.pack(f"=i{len(padded)}sdd", len(name), padded, 1.0, 0.0)
    path = tmp_path / "counter_1.db"
    path.write_bytes(struct.pack("=ii", 8 + len(entry), 0) + entry)
    file = MetricFile(os.open(path, os.O_RDONLY))
    file.refresh()
    assert not file.ranks
    file.close()


def test_the_files_of_a_real_server_have_what_its_metrics_page_says() -> None:
    counters = MetricFile(os.open(SAMPLES / "counter_24098.db", os.O_RDONLY))
    histograms = MetricFile(os.open(SAMPLES / "histogram_24098.db", os.O_RDONLY))
    assert counters.refresh()
    assert histograms.refresh()
    assert histograms.counts_steps()
    assert not counters.counts_steps()
    tokens, counted = counters.span(lambda _: True), histograms.span(lambda name: name == "steps")
    told = tokens.columns([counters.read(tokens)], "0")
    (steps,) = counted.columns([histograms.read(counted)], "0")["steps"]
    page = (SAMPLES.parent / "metrics_9_multiproc_env_single_server.txt").read_text()
    labels = '{engine="0",model_name="tiny"}'
    assert f"vllm:generation_tokens_total{labels} {told['generated_tokens'][0]}" in page
    assert f"vllm:iteration_tokens_total_count{labels} {steps}" in page
    counters.close()
    histograms.close()


# --------------------------------------------------------------------------------------------------------
# Late prompt tokens


def test_a_prompt_longer_than_a_step_goes_back_to_the_steps_that_computed_it() -> None:
    assert spread_prompts([0, 0, 0, 600], [4, 4, 4, 4], 256) == [0, 96, 252, 252]
    assert spread_prompts([0, 0, 600], [4, 0, 4], 256) == [0, 0, 600]
    assert spread_prompts([0, 600], [4, 4], None) == [0, 600]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 64)), max_size=30),
    st.one_of(st.none(), st.integers(1, 600)),
)
def test_spreading_keeps_the_sum_and_takes_nothing_below_zero(
    rows: list[tuple[int, int]], budget: int | None
) -> None:
    prefill, decode = [row[0] for row in rows], [row[1] for row in rows]
    spread = spread_prompts(prefill, decode, budget)
    assert sum(spread) == sum(prefill)
    assert all(value >= 0 for value in spread)


def test_rows_become_steps_that_say_they_are_reconstructed(engine: Engine) -> None:
    engine.poll()
    engine.add("generation", 1)
    engine.count(1)
    engine.poll()
    engine.poll()
    steps = series("e", "0", engine.rows(), 4, 256)
    assert (steps.source, steps.exact, steps.lost, len(steps)) == ("mmap", False, 4, 1)
    assert steps.kv_tokens is None
