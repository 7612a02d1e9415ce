"""Start times, resets and deltas of counters."""

from __future__ import annotations

from collections import OrderedDict

from opentelemetry.sdk.metrics.export import NumberDataPoint

from gpuidle.exporters.catalogue import FRAME_METRICS, MetricPoints
from gpuidle.exporters.feeds import Point
from gpuidle.exporters.otlp_series import ENDED_SERIES_KEPT, Key, Series, Temporality, data_points, remember

ROWS = {metric.name: metric for metric in FRAME_METRICS}
CUMULATIVE = Temporality(delta=False, process_start_ns=1000)
DELTA = Temporality(delta=True, process_start_ns=1000)


class Receiver:
    """Plays exports one after the other, as the exporter does, and keeps what arrived."""

    def __init__(self, temporality: Temporality, name: str = "gpuidle.engine.tokens") -> None:
        self.temporality = temporality
        self.name = name
        self.known: OrderedDict[Key, Series] = OrderedDict()
        self.last_export_ns: int | None = None

    def export(
        self, time_ns: int, values: dict[str, int], *, arrives: bool = True
    ) -> dict[str, tuple[int, int, float]]:
        """Export one value for each named series; return (start, time, value) by series."""
        entry = MetricPoints(
            ROWS[self.name],
            tuple(Point((("gpuidle.engine.id", name),), value) for name, value in values.items()),
        )
        metrics, counters = data_points([entry], self.known, self.temporality, time_ns, self.last_export_ns)
        if arrives:
            remember(self.known, counters)
            self.last_export_ns = time_ns
        found: dict[str, tuple[int, int, float]] = {}
        for metric in metrics:
            for point in metric.data.data_points:
                assert isinstance(point, NumberDataPoint)
                assert point.attributes is not None
                name = str(point.attributes["gpuidle.engine.id"])
                found[name] = (point.start_time_unix_nano, point.time_unix_nano, point.value)
        return found


def test_a_total_counts_from_the_start_of_the_process() -> None:
    receiver = Receiver(CUMULATIVE)
    assert receiver.export(2000, {"a": 5}) == {"a": (1000, 2000, 5)}
    assert receiver.export(3000, {"a": 9}) == {"a": (1000, 3000, 9)}


def test_a_series_that_comes_later_starts_after_the_export_that_lacked_it() -> None:
    receiver = Receiver(CUMULATIVE)
    receiver.export(2000, {"a": 5})
    assert receiver.export(3000, {"a": 5, "b": 1})["b"] == (2000, 3000, 1)


def test_a_total_that_goes_back_starts_anew() -> None:
    receiver = Receiver(CUMULATIVE)
    receiver.export(2000, {"a": 500})
    assert receiver.export(3000, {"a": 20}) == {"a": (2000, 3000, 20)}
    assert receiver.export(4000, {"a": 30}) == {"a": (2000, 4000, 30)}


def test_a_total_that_pauses_and_comes_back_is_counted_once() -> None:
    for temporality, expected in ((CUMULATIVE, (1000, 5000, 70)), (DELTA, (2000, 5000, 20))):
        receiver = Receiver(temporality)
        receiver.export(2000, {"a": 50})
        receiver.export(3000, {})
        receiver.export(4000, {})
        assert receiver.export(5000, {"a": 70}) == {"a": expected}


def test_deltas_sum_to_the_total_over_losses_and_resets() -> None:
    receiver = Receiver(DELTA)
    arrived = [
        receiver.export(2000, {"a": 10})["a"],
        receiver.export(4000, {"a": 30}, arrives=False) and receiver.export(5000, {"a": 40})["a"],
        receiver.export(6000, {"a": 3})["a"],
    ]
    assert arrived == [(1000, 2000, 10), (2000, 5000, 30), (5000, 6000, 3)]


def test_the_same_reading_is_no_delta() -> None:
    receiver = Receiver(DELTA)
    receiver.export(2000, {"a": 10})
    assert receiver.export(2000, {"a": 10}) == {}
    assert receiver.export(3000, {"a": 10}) == {"a": (2000, 3000, 0)}


def test_a_devices_counter_has_no_known_start_and_its_first_sight_is_no_delta() -> None:
    cumulative = Receiver(CUMULATIVE, "hw.energy")
    assert cumulative.export(2000, {"a": 10**6}) == {"a": (2000, 2000, 10**6)}
    assert cumulative.export(3000, {"a": 10**6 + 7}) == {"a": (2000, 3000, 10**6 + 7)}
    delta = Receiver(DELTA, "hw.energy")
    assert delta.export(2000, {"a": 10**6}) == {}
    assert delta.export(3000, {"a": 10**6 + 7}) == {"a": (2000, 3000, 7)}


def test_a_wall_clock_that_steps_back_gives_no_negative_interval() -> None:
    for temporality in (CUMULATIVE, DELTA):
        receiver = Receiver(temporality)
        receiver.export(5000, {"a": 10})
        start, end, _ = receiver.export(500, {"a": 15})["a"]
        assert start <= end == 500


def test_what_is_remembered_does_not_grow_with_generations() -> None:
    receiver = Receiver(DELTA)
    for generation in range(100):
        receiver.export(2000 + generation, {f"engine-{generation}-{n}": 1 for n in range(100)})
    assert len(receiver.known) == ENDED_SERIES_KEPT + 100
    assert receiver.export(3000, {"engine-98-0": 5}) == {"engine-98-0": (2098, 3000, 4)}
