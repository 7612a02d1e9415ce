from __future__ import annotations

import threading

from tests.agent.analysis.builders import gpu, snapshot
from tests.agent.fakes import ListExporter, ListSource

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.codec import encode_frame
from gpuidle.agent.model import Frame, Snapshot
from gpuidle.agent.pipeline import QUEUE_LENGTH, Pipeline


def session(count: int) -> list[Snapshot]:
    return [snapshot(t, gpus=(gpu(t, 0.5),)) for t in range(count)]


class ListSink:
    def __init__(self, gate: threading.Event | None = None) -> None:
        self.written: list[int] = []
        self.gaps: list[int] = []
        self.closed = False
        self.gate = gate

    def write(self, snapshot: Snapshot) -> None:
        if self.gate is not None:
            self.gate.wait(10)
        self.written.append(snapshot.sequence)

    def gap(self, snapshots: int) -> None:
        self.gaps.append(snapshots)

    def close(self) -> None:
        self.closed = True


async def test_every_sink_gets_every_frame_and_is_closed() -> None:
    one, two, sink = ListExporter("one"), ListExporter("two"), ListSink()
    source = ListSource(session(5))
    pipeline = Pipeline(source, Analyzer().feed, [one, two], recorder=sink)
    await pipeline.run()
    assert [f.sequence for f in one.frames] == [f.sequence for f in two.frames] == [0, 1, 2, 3, 4]
    assert sink.written == [0, 1, 2, 3, 4]
    assert one.closed
    assert sink.closed
    assert source.closed
    assert [(s.outlet, s.delivered, s.dropped) for s in pipeline.outlets()] == [
        ("recorder", 5, 0),
        ("one", 5, 0),
        ("two", 5, 0),
    ]


async def test_a_slow_outlet_drops_its_oldest_frames_and_counts_them() -> None:
    gate = threading.Event()
    slow, quick = ListExporter("slow", gate), ListExporter("quick")

    class Source(ListSource):
        async def close(self) -> None:
            gate.set()

    count = QUEUE_LENGTH + 30
    pipeline = Pipeline(Source(session(count)), Analyzer().feed, [slow, quick])
    await pipeline.run()
    status = pipeline.outlets()[0]
    assert status.delivered + status.dropped == count
    assert status.dropped >= 29
    assert slow.frames[-1].sequence == count - 1


async def test_a_recorder_that_overflows_writes_a_counted_gap() -> None:
    gate = threading.Event()
    sink = ListSink(gate)

    class Source(ListSource):
        async def close(self) -> None:
            gate.set()

    count = QUEUE_LENGTH + 30
    await Pipeline(Source(session(count)), Analyzer().feed, [], recorder=sink).run()
    assert sum(sink.gaps) + len(sink.written) == count
    assert sum(sink.gaps) >= 29


async def test_a_replay_waits_and_loses_nothing() -> None:
    exporter = ListExporter()
    count = 4 * QUEUE_LENGTH
    await Pipeline(ListSource(session(count)), Analyzer().feed, [exporter], lossless=True).run()
    assert [f.sequence for f in exporter.frames] == list(range(count))


async def test_a_failing_exporter_is_counted_and_the_others_go_on() -> None:
    bad, good = ListExporter("bad"), ListExporter("good")

    def fault(frame: Frame) -> None:
        if frame.sequence % 2:
            raise OSError("disk full")

    bad.fault = fault
    pipeline = Pipeline(ListSource(session(6)), Analyzer().feed, [bad, good])
    await pipeline.run()
    status = pipeline.outlets()[0]
    assert (status.delivered, status.failed) == (3, 3)
    assert "disk full" in status.last_error
    assert len(good.frames) == 6


async def test_the_pipe_adds_nothing_to_what_the_analyzer_says() -> None:
    exporter, analyzer = ListExporter(), Analyzer()
    await Pipeline(ListSource(session(8)), Analyzer().feed, [exporter], lossless=True).run()
    direct = [encode_frame(analyzer.feed(s)) for s in session(8)]
    assert [encode_frame(f) for f in exporter.frames] == direct
