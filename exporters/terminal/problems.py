"""The part of the screen about what is absent or doubtful, and what would mend it."""

from __future__ import annotations

from collections.abc import Sequence

from gpuidle.agent.model import Frame, Problem

from .engines import numbers_together
from .layout import Line, clean, rule, span, wrap
from .palette import QUIET, STRONG, WARNING


def ranked(frame: Frame) -> list[tuple[Problem, tuple[str, ...]]]:
    """Return the problems of a frame with their subjects, the most important first.

    One that says the same of several devices is told once. What concerns the whole node stands before
    what concerns one device, and what can be mended before what cannot; else the order of the frame.
    """
    together: dict[tuple[str, str, str, str], list[Problem]] = {}
    for problem in frame.problems:
        together.setdefault((problem.source, problem.kind, problem.message, problem.remedy), []).append(
            problem
        )
    result = [(group[0], tuple(problem.subject for problem in group)) for group in together.values()]
    return sorted(result, key=lambda item: (any(item[1]), not item[0].remedy))


def problem_section(frame: Frame, width: int, room: int | None, hint: str = "") -> list[Line]:
    """Return as many whole problems as fit into `room` lines, under a rule that counts them all.

    None is cut in its middle, unless the first alone has no room. `hint` is said beside "+3 more".
    """
    problems = ranked(frame)
    if not problems or (room is not None and room < 1):
        return []
    noun = "problem" if len(problems) == 1 else "problems"
    lines = [rule(span(f"{len(problems)} {noun}", STRONG), (), width)]
    for position, (problem, subjects) in enumerate(problems):
        block = problem_lines(frame, problem, subjects, width)
        following = len(problems) - position - 1
        if room is not None and len(lines) + len(block) + (following > 0) > room:
            return _cut_short(lines, block, len(problems) - position, room, hint)
        lines += block
    return lines


def _cut_short(lines: list[Line], block: list[Line], left: int, room: int, hint: str) -> list[Line]:
    """Return `lines`, what is left counted, and the start of `block` if nothing else stands there."""
    if len(lines) == 1 and room >= 3:
        lines += block[: room - 2]
        more = f"the rest, and {left - 1} more" if left > 1 else "the rest"
    else:
        more = f"+{left} more"
    return [*lines, span(f"  {more}{hint}", QUIET)][:room]


def problem_lines(frame: Frame, problem: Problem, subjects: Sequence[str], width: int) -> list[Line]:
    """Return one problem: who says it of what, the message, and the remedy behind an arrow."""
    about = _names(frame, subjects)
    head = f"{clean(problem.source)}{', ' + about if about else ''}: "
    text = clean(problem.message).rstrip(". ") + "."
    wrapped = wrap(head + text, width - 2)
    lines: list[Line] = []
    for number, line in enumerate(wrapped):
        start: Line = (("! ", WARNING),) if number == 0 else span("  ")
        lines.append((*start, (line, "")))
    if problem.remedy:
        for number, line in enumerate(wrap(clean(problem.remedy), width - 4)):
            lines.append(((("  → " if number == 0 else "    "), STRONG), (line, STRONG)))
    return lines


def _names(frame: Frame, subjects: Sequence[str]) -> str:
    """Return subjects as people call them: "GPU 0-3", an engine's name, or the address as it stands."""
    gpus = {gpu.hw_id: gpu.index for gpu in frame.gpus}
    engines = {engine.engine_id: f"{engine.engine} {engine.model or ''}".strip() for engine in frame.engines}
    indices = sorted(gpus[subject] for subject in subjects if subject in gpus)
    names = [f"GPU {numbers_together(indices)}"] if indices else []
    names += [clean(engines.get(subject, subject)) for subject in subjects if subject and subject not in gpus]
    return ", ".join(names)
