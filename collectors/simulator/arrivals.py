"""Requests in order of arrival, drawn from what a scenario says of its users."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count
from random import Random

from msgspec.structs import replace

from gpuidle.collectors.simulator.scenario import (
    SECOND_NS,
    Arrivals,
    Burst,
    ClosedLoop,
    Listed,
    Mix,
    OpenArrivals,
    Poisson,
    Request,
)


def draw(mix: Mix, arrival_ns: int, rng: Random) -> Request:
    """Return one request of `mix`."""
    sizes = rng.choices(mix, [kind.weight for kind in mix])[0] if len(mix) > 1 else mix[0]
    prompt = rng.randint(*sizes.prompt)
    return Request(
        arrival_ns=arrival_ns,
        prompt_tokens=prompt,
        output_tokens=rng.randint(*sizes.output),
        prefix_hit_tokens=min(int(prompt * sizes.prefix_hit_ratio), prompt - 1),
    )


def open_requests(arrivals: OpenArrivals, rng: Random) -> Iterator[Request]:
    """Yield the requests of users who do not wait for an answer, in order of arrival, maybe for ever."""
    if isinstance(arrivals, Listed):
        yield from arrivals.requests
    elif isinstance(arrivals, Burst):
        for _ in range(arrivals.count):
            yield draw(arrivals.mix, arrivals.at_ns, rng)
    elif isinstance(arrivals, Poisson):
        at = float(arrivals.start_ns)
        while True:
            at += rng.expovariate(arrivals.per_second) * SECOND_NS
            if arrivals.stop_ns is not None and at >= arrivals.stop_ns:
                return
            yield draw(arrivals.mix, int(at), rng)
    else:
        for lap in count():
            offset = lap * arrivals.period_ns
            parts = (request for part in arrivals.parts for request in open_requests(part, rng))
            for request in sorted(parts, key=lambda request: request.arrival_ns):
                yield replace(request, arrival_ns=request.arrival_ns + offset)


class Feed:
    """All arrivals of one engine, merged. Users of a closed loop ask again once `finished` is called."""

    def __init__(self, arrivals: Sequence[Arrivals], seed: str) -> None:
        self._order = count()
        self._heap: list[tuple[int, int, Request, int]] = []
        self._open: list[Iterator[Request]] = []
        self._loops: list[tuple[ClosedLoop, Random]] = []
        for index, kind in enumerate(arrivals):
            rng = Random(f"{seed}/{index}")  # noqa: S311 - a simulation
            if isinstance(kind, ClosedLoop):
                self._loops.append((kind, rng))
                for _ in range(kind.users):
                    self._push(draw(kind.mix, kind.start_ns, rng), -len(self._loops))
            else:
                self._open.append(open_requests(kind, rng))
                self._refill(len(self._open) - 1)
        self._open.append(iter(()))  # what `give` brings has no successor

    def give(self, request: Request) -> None:
        """Add a request that comes from another engine."""
        self._push(request, len(self._open) - 1)

    def next_ns(self) -> int | None:
        """Return when the next request arrives; None: none is known of."""
        return self._heap[0][0] if self._heap else None

    def take(self, until_ns: int) -> list[tuple[Request, int]]:
        """Return the requests that arrive at or before `until_ns`, each with the tag of its user."""
        taken = []
        while self._heap and self._heap[0][0] <= until_ns:
            _, _, request, tag = heapq.heappop(self._heap)
            taken.append((request, tag))
            if tag >= 0:
                self._refill(tag)
        return taken

    def finished(self, tag: int, at_ns: int) -> None:
        """Say that the request with this tag got its last token."""
        if tag >= 0:
            return
        loop, rng = self._loops[-tag - 1]
        again_ns = at_ns + loop.think_ns
        if loop.stop_ns is None or again_ns < loop.stop_ns:
            self._push(draw(loop.mix, again_ns, rng), tag)

    def _refill(self, index: int) -> None:
        request = next(self._open[index], None)
        if request is not None:
            self._push(request, index)

    def _push(self, request: Request, tag: int) -> None:
        heapq.heappush(self._heap, (request.arrival_ns, next(self._order), request, tag))
