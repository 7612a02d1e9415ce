"""Whatever a Frame holds, the screen is drawn, and never wider or higher than the terminal."""

from __future__ import annotations

import types
import typing
from datetime import timezone

import msgspec
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from gpuidle.agent.model import CAUSES, PHASES, Frame
from gpuidle.exporters.terminal.options import Replay, ScreenOptions
from gpuidle.exporters.terminal.screen import render, summary

INTEGERS = st.one_of(st.integers(0, 2**40), st.integers(-(2**63), 2**63 - 1))
FLOATS = st.one_of(st.floats(0, 1), st.floats())
TEXTS = st.one_of(
    st.sampled_from(
        [
            "",
            "vllm",
            "GPU-4f2a",
            "\x1b[31mred",
            "[bold]x[/]",
            "漢字" * 30,
            "e\u0301" * 9,
            "\u202eabc",
            "👩‍🚀🇩🇪",
            "a b " * 40,
        ]
    ),
    st.text(max_size=20),
)


def anything(hint: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Return what a field of type `hint` may hold; a new field of the model is covered by itself."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([anything(argument) for argument in arguments])
    if origin is tuple:
        return st.lists(anything(arguments[0]), max_size=2).map(tuple)
    if origin is dict:
        keys = st.one_of(st.sampled_from([*CAUSES, *PHASES, "flops", "tensor_pipe"]), TEXTS)
        return st.dictionaries(keys, anything(arguments[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        fields = typing.get_type_hints(hint)
        return st.fixed_dictionaries({name: anything(kind) for name, kind in fields.items()}).map(
            lambda values: hint(**values)
        )
    plain = {int: INTEGERS, float: FLOATS, str: TEXTS, bool: st.booleans(), type(None): st.none()}
    return plain[hint]


FRAMES = anything(Frame)
OPTIONS = st.builds(
    ScreenOptions,
    colour=st.booleans(),
    ascii=st.booleans(),
    keys=st.booleans(),
    frozen=st.booleans(),
    view=st.sampled_from(["main", "problems", "help"]),
    skip_problems=st.integers(0, 9),
    replay=st.one_of(st.none(), st.builds(Replay, name=TEXTS, start_ns=INTEGERS, end_ns=INTEGERS)),
    timezone=st.just(timezone.utc),
)

SLOW = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking a Frame takes minutes
)


@settings(SLOW, max_examples=60)
@given(st.lists(FRAMES, min_size=1, max_size=2), OPTIONS, st.integers(20, 250), st.integers(5, 80))
def test_any_frame_is_drawn_within_the_terminal(
    history: list[Frame], options: ScreenOptions, width: int, height: int
) -> None:
    text = render(history, options, width, height).plain()
    lines = text.split("\n")[:-1]
    assert len(lines) == height
    for line in lines:
        assert cell_len(line) <= width
        assert line.isprintable()
    assert text.isascii() or not options.ascii
    assert summary(history).isprintable()


@settings(SLOW, max_examples=20)
@given(st.lists(FRAMES, min_size=1, max_size=2), OPTIONS, st.integers(20, 250))
def test_any_frame_is_printed_in_full(history: list[Frame], options: ScreenOptions, width: int) -> None:
    lines = render(history, options, width).plain().splitlines()
    assert lines
    assert all(cell_len(line) <= width for line in lines)
