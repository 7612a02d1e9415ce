"""Phases of a window from steps that name their tokens, by the definition.

Engines, and the cores of one, are looked at together: their columns are short, and a call costs more than
the rows in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.analysis.columns import whole
from gpuidle.agent.analysis.durations import durations_by_kind
from gpuidle.agent.analysis.integers import split
from gpuidle.agent.model import Durations, Shares, StepSeries

_COLUMNS = ("start_ns", "end_ns", "prefill_tokens", "decode_tokens")
_Rows: TypeAlias = "tuple[NDArray[np.int64], ...]"
"""One array for each of them."""
_NAMES = ("unknown", "prefill", "decode", "mixed")


class StepWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one engine clipped to one window."""

    shares: Shares
    steps: dict[str, int]
    """Steps that ended in the window, by phase."""
    durations: dict[str, Durations]
    """Of the same steps, where they named tokens: whole, not clipped to the window."""
    gap_with_requests_ns: int
    """Between steps while a sequence was alive: the host's fault."""
    gap_without_requests_ns: int


def shares_from_steps(series: Sequence[StepSeries], start_ns: int, end_ns: int) -> StepWindow | None:
    """Return the phases of [start_ns, end_ns) from steps that name their tokens; None without such steps.

    `series` may reach beyond the window on both sides: the step after a gap tells whether requests were
    alive in it (a decode row in it was), so windows are settled with some steps of the future in hand.
    """
    return shares_of_each([series], start_ns, end_ns)[0]


def shares_of_each(
    streams: Sequence[Sequence[StepSeries]], start_ns: int, end_ns: int
) -> list[StepWindow | None]:
    """Return the same of each stream of steps: of an engine, or of a core."""
    usable = [
        [s for s in series if s.prefill_tokens is not None and s.decode_tokens is not None and len(s)]
        for series in streams
    ]
    known = [series for series in usable if series]
    if not known:
        return [None] * len(streams)
    found = iter(_shares_of_known(known, start_ns, end_ns))
    return [next(found) if series else None for series in usable]


def _shares_of_known(streams: Sequence[Sequence[StepSeries]], start_ns: int, end_ns: int) -> list[StepWindow]:
    parts = [_near(series, start_ns, end_ns) for series in streams]
    start, end, prefill, decode, of = _joined(parts)
    alike = of[1:] == of[:-1]
    overlapping = ((start[1:] < end[:-1]) & alike) | (start[1:] > end[1:])
    if np.count_nonzero(overlapping):
        for which in set(of[1:][overlapping].tolist()):
            parts[which] = [_sorted(streams[which])]
        start, end, prefill, decode, of = _joined(parts)
        alike = of[1:] == of[:-1]
    with_prompt, with_decode = prefill > 0, decode > 0
    kinds = with_prompt + 2 * with_decode + len(_NAMES) * of
    places = len(_NAMES) * len(streams)
    clipped = _clipped(start, end, start_ns, end_ns)
    times = np.bincount(kinds, clipped, places).reshape(-1, len(_NAMES)).tolist()
    ended = (end > start_ns) & (end <= end_ns)
    lengths, kinds = (end - start)[ended], kinds[ended]
    lasted = durations_by_kind(lengths, kinds, places)
    ended_by_kind = np.bincount(kinds, minlength=places).reshape(-1, len(_NAMES)).tolist()
    # Between the steps of a stream, while a sequence was alive: a decode row after the gap lived through it.
    gaps = _clipped(end[:-1], start[1:], start_ns, end_ns)
    alive = alike & with_decode[1:]
    chunks = alike & ~with_decode[1:] & with_prompt[1:] & with_prompt[:-1] & (gaps > 0)
    if np.count_nonzero(chunks):
        whole_gaps = np.maximum(0, start[1:] - end[:-1])
        longest = np.zeros(len(streams))
        for which in set(of[1:][chunks].tolist()):
            longest[which] = _longest_between_chunks(streams[which])
        alive |= chunks & (whole_gaps <= longest[of[1:]])
    with_requests = np.bincount(of[1:], gaps * alive, len(streams)).tolist()
    return [
        _told(
            end_ns - start_ns,
            [int(ns) for ns in times[i]],
            ended_by_kind[i],
            lasted[len(_NAMES) * i : len(_NAMES) * (i + 1)],
            int(with_requests[i]),
            exact=all(s.exact for s in series),
        )
        for i, series in enumerate(streams)
    ]


def _clipped(
    start: NDArray[np.int64], end: NDArray[np.int64], start_ns: int, end_ns: int
) -> NDArray[np.int64]:
    """Return how much of each interval lies in the window."""
    found: NDArray[np.int64] = np.maximum(0, np.minimum(end, end_ns) - np.maximum(start, start_ns))
    return found


def _joined(parts: Sequence[Sequence[_Rows]]) -> _Rows:
    """Return the columns of all streams in one, and then the number of the stream of each row."""
    counts = [sum([len(rows[0]) for rows in part]) for part in parts]
    columns = map(np.concatenate, zip(*(rows for part in parts for rows in part), strict=True))
    return (*columns, np.repeat(np.arange(len(parts)), counts))


def _near(series: Sequence[StepSeries], start_ns: int, end_ns: int) -> list[_Rows]:
    """Return the columns of the series that touch the window, and the step before and the one after them.

    Those of all series where they do not follow each other.
    """
    before: list[tuple[StepSeries, slice]] = []
    found: list[tuple[StepSeries, slice]] = []
    after: list[tuple[StepSeries, slice]] = []
    reached_ns = series[0].start_ns.item(0)
    for s in series:
        first_ns, last_ns = s.start_ns.item(0), s.end_ns.item(-1)
        if first_ns < reached_ns or last_ns < first_ns:
            return [_sorted(series)]
        reached_ns = last_ns
        if last_ns <= start_ns:
            before = [(s, slice(-1, None))]
        elif first_ns < end_ns:
            found.append((s, slice(None)))
        elif not after:
            after = [(s, slice(0, 1))]
    return [
        (s.start_ns[rows], s.end_ns[rows], s.prefill_tokens[rows], s.decode_tokens[rows])
        for s, rows in (*before, *found, *after)
        if s.prefill_tokens is not None and s.decode_tokens is not None
    ]


def _sorted(series: Sequence[StepSeries]) -> _Rows:
    """Return the columns of all steps in order of their ends."""
    columns = [whole(series, name) for name in _COLUMNS]
    order = np.argsort(columns[1], kind="stable")
    return tuple([column[order] for column in columns])


def _longest_between_chunks(series: Sequence[StepSeries]) -> float:
    """Return how long a gap may be that a prompt between two of its chunks lived through, ns.

    A prefill-only step after a gap may be the next chunk of a prompt: it is taken for one when the gap is as
    short as the gaps before decodes.
    """
    start, end, _, decode = _sorted(series)
    usual = np.maximum(0, start[1:] - end[:-1])[decode[1:] > 0]
    usual_ns = float(np.median(usual)) if len(usual) else 0.0
    return max(3 * usual_ns, 2e6)


def _told(
    window_ns: int,
    times_ns: list[int],
    ended: list[int],
    lasted: Sequence[Durations | None],
    gaps_with_requests_ns: int,
    *,
    exact: bool,
) -> StepWindow:
    """Put together what one stream showed; sequences are in the order of `_NAMES`."""
    busy_ns = sum(times_ns)
    if busy_ns > window_ns:  # steps of two overlapping sources: their shares still hold
        times_ns, busy_ns = split(window_ns, times_ns), window_ns
    unknown, prefill, decode, mixed = times_ns
    with_requests = min(gaps_with_requests_ns, window_ns - busy_ns)
    return StepWindow(
        shares=Shares(
            window_ns=window_ns,
            prefill_ns=prefill,
            decode_ns=decode,
            mixed_ns=mixed,
            unknown_ns=unknown,
            idle_ns=window_ns - busy_ns,
            prefill_low_ns=prefill + mixed,
            prefill_high_ns=prefill + mixed + unknown,
            evidence="measured" if exact else "estimated",
        ),
        steps={_NAMES[kind]: ended[kind] for kind in (1, 2, 3, 0) if ended[kind]},
        durations={name: each for name, each in zip(_NAMES[1:], lasted[1:], strict=True) if each is not None},
        gap_with_requests_ns=with_requests,
        gap_without_requests_ns=window_ns - busy_ns - with_requests,
    )
