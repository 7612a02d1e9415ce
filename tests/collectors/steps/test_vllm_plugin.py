"""The plugin inside an engine: each step is recorded as what it was, and the engine never notices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.collectors.steps.fake_scheduler import Plan, result, scheduler_class, step

from gpuidle.collectors.steps import vllm_plugin
from gpuidle.collectors.steps.ring import Records, RingReader

SHAPES = ("0.8.5", "0.10", "0.32")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUIDLE_STEPS_DIR", str(tmp_path))
    return tmp_path / f"gpuidle-{os.geteuid()}"


@pytest.fixture(params=SHAPES)
def scheduler(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = scheduler_class(request.param)()
    yield made
    ring_of(made).close()


def ring_of(scheduler: Any) -> vllm_plugin.Ring:
    ring: vllm_plugin.Ring = vars(scheduler)["_gpuidle_steps"].ring
    return ring


def records(scheduler: Any) -> Records:
    reader = RingReader(os.open(ring_of(scheduler).path, os.O_RDONLY))
    try:
        return reader.records()
    finally:
        reader.close()


def rows(scheduler: Any, *fields: str) -> list[tuple[int, ...]]:
    found = records(scheduler)
    assert found.lost == 0
    return list(zip(*(found.of(field).tolist() for field in fields), strict=True))


def test_chunks_of_a_prompt_then_decodes_then_a_mixed_step(scheduler: Any) -> None:
    scheduler.add("a", 10)
    step(scheduler, Plan({"a": 6}))
    step(scheduler, Plan({"a": 4}))
    step(scheduler, Plan({"a": 1}))
    scheduler.add("b", 5)
    step(scheduler, Plan({"a": 1, "b": 5}))
    assert rows(
        scheduler, "prefill_tokens", "decode_tokens", "delivered_tokens", "sequences", "kv_tokens"
    ) == [(6, 0, 0, 1, 0), (4, 0, 1, 1, 6), (0, 1, 1, 1, 10), (5, 1, 2, 2, 11)]


def test_a_prefix_that_was_cached_is_context_and_not_prefill(scheduler: Any) -> None:
    scheduler.add("a", 10)
    scheduler.requests["a"].num_computed_tokens = 8
    step(scheduler, Plan({"a": 2}))
    assert rows(scheduler, "prefill_tokens", "kv_tokens", "recomputed_tokens") == [(2, 8, 0)]


def test_drafts_and_those_accepted_among_decodes_and_a_prompt(scheduler: Any) -> None:
    scheduler.add("a", 4)
    scheduler.add("b", 4)
    step(scheduler, Plan({"a": 4, "b": 4}))
    scheduler.add("c", 9)
    step(
        scheduler,
        Plan({"a": 4, "b": 1, "c": 5}, drafts={"a": 3}, sampled={"a": 3, "b": 1}),
    )
    assert rows(
        scheduler, "prefill_tokens", "decode_tokens", "delivered_tokens", "draft_tokens", "accepted_tokens"
    ) == [(8, 0, 2, 0, 0), (5, 5, 4, 3, 2)]


def test_drafts_of_a_request_that_is_gone_are_not_accepted(scheduler: Any) -> None:
    scheduler.add("a", 4)
    scheduler.add("b", 4)
    step(scheduler, Plan({"a": 4, "b": 4}))
    plan = Plan({"a": 3, "b": 3}, drafts={"a": 2, "b": 2}, sampled={"a": 3, "b": 3})
    scheduler.plan = plan
    output = scheduler.schedule()
    scheduler.finish("b")
    scheduler.update_from_output(output, result(scheduler, plan))
    assert rows(scheduler, "draft_tokens", "accepted_tokens", "delivered_tokens")[1] == (4, 2, 3)


def test_what_a_preempted_request_computes_again_is_told_apart(scheduler: Any) -> None:
    scheduler.add("a", 10)
    scheduler.add("b", 10)
    step(scheduler, Plan({"a": 10, "b": 10}))
    step(scheduler, Plan({"a": 1, "b": 1}))
    step(scheduler, Plan({"a": 1}, preempt=("b",)))
    step(scheduler, Plan({"a": 1, "b": 7}))  # of its 12 tokens 11 had been computed
    step(scheduler, Plan({"a": 1, "b": 5}))
    step(scheduler, Plan({"a": 1, "b": 1}))
    assert rows(
        scheduler, "prefill_tokens", "recomputed_tokens", "resumed_tokens", "decode_tokens", "preemptions"
    )[2:] == [(0, 0, 0, 1, 1), (7, 7, 7, 1, 0), (5, 4, 5, 1, 0), (0, 0, 0, 2, 0)]


def test_a_request_preempted_in_its_prompt_computes_again_what_it_had(scheduler: Any) -> None:
    scheduler.add("a", 10)
    step(scheduler, Plan({"a": 6}))
    scheduler.add("b", 3)
    step(scheduler, Plan({"b": 3}, preempt=("a",)))
    step(scheduler, Plan({"b": 1, "a": 8}))
    assert rows(scheduler, "prefill_tokens", "recomputed_tokens", "resumed_tokens", "preemptions") == [
        (6, 0, 0, 0),
        (3, 0, 0, 1),
        (8, 6, 0, 0),
    ]


def test_steps_in_flight_end_in_their_order_and_do_not_overlap(scheduler: Any) -> None:
    """Async scheduling and pipelining: the next step is scheduled before the last one's result came."""
    scheduler.add("a", 4)
    first = scheduler.plan = Plan({"a": 4})
    one = scheduler.schedule()
    second = scheduler.plan = Plan({"a": 1})
    two = scheduler.schedule()
    scheduler.update_from_output(one, result(scheduler, first))
    scheduler.update_from_output(two, result(scheduler, second))
    reader = RingReader(os.open(ring_of(scheduler).path, os.O_RDONLY))
    found = reader.records()
    series = reader.series("engine", found)
    reader.close()
    assert found.of("submit_ns")[1] < found.of("end_ns")[0]
    assert series.start_ns[1] == series.end_ns[0]
    assert (series.end_ns > series.start_ns).all()


def test_a_step_without_tokens_is_none(scheduler: Any) -> None:
    scheduler.add("a", 4)
    step(scheduler, Plan({}))
    step(scheduler, Plan({"a": 4}))
    assert rows(scheduler, "prefill_tokens") == [(4,)]


def test_the_rank_and_each_scheduler_of_a_process_have_a_ring_of_their_own() -> None:
    made = [scheduler_class("0.32")(rank) for rank in (0, 1)]
    try:
        for at, one in enumerate(made):
            one.add("a", 4 + at)
            step(one, Plan({"a": 4 + at}))
        assert [rows(one, "prefill_tokens") for one in made] == [[(4,)], [(5,)]]
        reader = RingReader(os.open(ring_of(made[1]).path, os.O_RDONLY))
        assert reader.header.rank == 1
        reader.close()
    finally:
        for one in made:
            ring_of(one).close()


# --------------------------------------------------------------------------------------------------------
# The engine never notices


def test_a_version_that_is_not_understood_goes_on_and_the_missing_steps_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd:
        def __init__(self) -> None:
            self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace())

        def schedule(self) -> str:
            return "something else"

        def update_from_output(self, output: str, sampled: None) -> str:
            return output.upper()

    vllm_plugin.wrap(Odd)
    odd = Odd()
    ring = ring_of(odd)
    for _ in range(120):
        assert odd.update_from_output(odd.schedule(), None) == "SOMETHING ELSE"
    assert "stopped recording" in caplog.text
    reader = RingReader(os.open(ring.path, os.O_RDONLY))
    found = reader.records()
    reader.close()
    ring.close()
    assert len(found.rows) == 0
    assert found.lost == 100


def test_methods_of_another_signature_are_called_as_the_engine_calls_them(folder: Path) -> None:
    base = scheduler_class("0.32")

    class Changed(base):  # type: ignore[misc, valid-type]
        def schedule(self, *, budget: int, more: bool = False) -> Any:
            return super().schedule(more)

        def update_from_output(self, scheduler_output: Any, result: Any, *, drain: bool) -> Any:
            return super().update_from_output(scheduler_output, result)

    unwrapped = {name: base.__dict__[name].__wrapped__ for name in ("schedule", "update_from_output")}
    for name, method in unwrapped.items():
        setattr(base, name, method)
    base._gpuidle_wrapped = False
    vllm_plugin.wrap(Changed)
    scheduler = Changed()
    scheduler.add("a", 6)
    for _ in range(2):
        scheduler.plan = Plan({"a": 6 if scheduler.requests["a"].num_computed_tokens == 0 else 1})
        output = scheduler.schedule(budget=3)
        scheduler.update_from_output(output, result=result(scheduler, scheduler.plan), drain=True)
    assert rows(scheduler, "prefill_tokens", "decode_tokens") == [(6, 0), (0, 1)]
    ring_of(scheduler).close()


def test_a_step_whose_drafts_cannot_be_read_is_one_lost_step(scheduler: Any) -> None:
    scheduler.add("a", 4)
    step(scheduler, Plan({"a": 4}))
    scheduler.plan = Plan({"a": 3}, drafts={"a": 2}, sampled={"a": 1})
    output = scheduler.schedule()
    sampled = result(scheduler, scheduler.plan)

    class Odd(list[list[int]]):
        def __bool__(self) -> bool:
            raise ValueError("no truth")

    sampled.sampled_token_ids = Odd(sampled.sampled_token_ids)
    scheduler.update_from_output(output, sampled)
    found = records(scheduler)
    assert (len(found.rows), found.lost) == (1, 1)


@pytest.mark.parametrize("kind", [list, np.array])
def test_accepted_drafts_are_counted_in_lists_and_in_arrays(kind: Any) -> None:
    """Versions 0.11 and 0.12 give arrays; of a request in its prompt there is no token."""
    scheduler = scheduler_class("0.32")()
    scheduler.add("a", 4)
    scheduler.add("b", 4)
    step(scheduler, Plan({"a": 4, "b": 4}))
    scheduler.add("c", 9)
    scheduler.plan = Plan({"a": 4, "b": 4, "c": 5}, drafts={"a": 3, "b": 3}, sampled={"a": 3, "b": 2})
    output = scheduler.schedule()
    sampled = result(scheduler, scheduler.plan)
    recorder = vars(scheduler)["_gpuidle_steps"]
    sampled.sampled_token_ids = [kind(each) for each in sampled.sampled_token_ids]
    assert recorder.accepted(scheduler, output, sampled) == 3
    ring_of(scheduler).close()


def test_the_engines_own_error_passes_through(scheduler: Any) -> None:
    scheduler.plan = Plan({"nobody": 1})
    with pytest.raises(KeyError, match="nobody"):
        scheduler.schedule()


@pytest.mark.parametrize("how", ["no folder", "a link", "a file", "open to others"])
def test_without_a_private_folder_the_engine_works_unrecorded(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "no folder":
        monkeypatch.setenv("GPUIDLE_STEPS_DIR", str(folder / "missing"))
    elif how == "a link":
        other = folder.parent / "other"
        other.mkdir(mode=0o700)
        folder.symlink_to(other)
    elif how == "a file":
        folder.touch(0o700)
    else:
        folder.mkdir()
        folder.chmod(0o755)
    scheduler = scheduler_class("0.32")()
    scheduler.add("a", 4)
    assert step(scheduler, Plan({"a": 4}))[0].outputs
    assert "records no steps" in caplog.text


def test_a_full_file_system_is_found_out_before_anything_is_mapped(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    scheduler = scheduler_class("0.32")()
    scheduler.add("a", 4)
    step(scheduler, Plan({"a": 4}))
    assert "No space" in caplog.text
    assert list(folder.iterdir()) == []


def test_folder_and_ring_are_private(scheduler: Any, folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    assert Path(ring_of(scheduler).path).stat().st_mode & 0o777 == 0o600


def test_results_that_never_come_do_not_pile_up(scheduler: Any) -> None:
    scheduler.add("a", 4)
    scheduler.plan = Plan({"a": 4})
    kept = [scheduler.schedule()]
    scheduler.plan = Plan({"a": 1})
    kept += [scheduler.schedule() for _ in range(200)]
    assert records(scheduler).lost > 0
    assert len(vars(scheduler)["_gpuidle_steps"].steps) <= 64


# --------------------------------------------------------------------------------------------------------
# Loading


def python(code: str, **environ: str) -> str:
    return subprocess.run(
        [sys.executable, "-I", "-c", code],
        env={"PATH": os.environ["PATH"], **environ},
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip


def test_the_module_needs_the_standard_library_only() -> None:
    code = (
        "import sys, gpuidle.collectors.steps.vllm_plugin as p; p.register();"
        "names = {name.partition('.')[0] for name in sys.modules};"
        "print(sorted(names - set(sys.stdlib_module_names) - {'__main__'}));"
        "print(sorted(n for n in sys.modules if n.startswith('gpuidle.')))"
    )
    others, own = python(code).splitlines()
    assert "numpy" not in others
    assert "msgspec" not in others
    assert "vllm" not in others
    assert own == str(
        ["gpuidle.collectors", "gpuidle.collectors.steps", "gpuidle.collectors.steps.vllm_plugin"]
    )


def test_the_entry_point_is_found_as_vllm_finds_it() -> None:
    code = (
        "from importlib.metadata import entry_points; found = entry_points(group='vllm.general_plugins');"
        "print([p.load().__name__ for p in found if p.name == 'gpuidle'])"
    )
    assert python(code) == "['register']"


def test_switched_on_without_vllm_it_says_so_and_goes_on() -> None:
    code = "import gpuidle.collectors.steps.vllm_plugin as p; p.register(); print('on')"
    assert python(code, GPUIDLE_STEPS="1") == "on"


def test_a_class_is_wrapped_once() -> None:
    made = scheduler_class("0.32")
    schedule = made.schedule
    vllm_plugin.wrap(made)
    assert made.schedule is schedule
