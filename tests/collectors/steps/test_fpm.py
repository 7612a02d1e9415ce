"""ForwardPassMetrics: both encodings, the losses, what is refused, and a real socket."""

from __future__ import annotations

import time

import msgspec
import pytest

from gpuidle.collectors.steps.fpm import FpmError, Pass, PassFollower, Subscriber, decode_pass

zmq = pytest.importorskip("zmq", reason="the extra fpm is not installed")
from tests.doubles.fpm_publisher import Publisher, message, scheduled  # noqa: E402

MIXED = scheduled(prefill=240, prompts=2, decodes=16, prefill_kv=512, decode_kv=9000)


@pytest.mark.parametrize("positional", [False, True])
def test_map_and_list_say_the_same(positional: bool) -> None:
    payload = message(7, MIXED, wall_s=0.02, rank=1, positional=positional)[2]
    assert decode_pass(payload) == Pass("1", 0.02, 240, 16, 18, 9512)


def test_a_heartbeat_is_no_pass() -> None:
    assert decode_pass(message(1, scheduled(), wall_s=0.0)[2]) is None


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"wall_time": 1.0}),
        msgspec.msgpack.encode({"version": 2, "wall_time": 1.0, "scheduled_requests": MIXED}),
        msgspec.msgpack.encode({"wall_time": "long", "scheduled_requests": MIXED}),
        msgspec.msgpack.encode({"wall_time": float("nan"), "scheduled_requests": MIXED}),
        msgspec.msgpack.encode({"wall_time": -1.0, "scheduled_requests": MIXED}),
        msgspec.msgpack.encode({"wall_time": 0.1, "scheduled_requests": {"num_decode_requests": -3}}),
        msgspec.msgpack.encode({"wall_time": 0.1, "scheduled_requests": {"num_decode_requests": 1 << 60}}),
        b"\x91" * 5000,
    ],
)
def test_what_is_no_pass_is_refused(payload: bytes) -> None:
    with pytest.raises(FpmError):
        decode_pass(payload)


def test_gaps_are_lost_and_repeats_are_dropped_and_a_restart_is_neither() -> None:
    follower = PassFollower()
    for number in (5, 6, 6, 9, 0, 1):
        follower.take_message(message(number, MIXED), 1_000_000_000 + number)
    follower.take_message([b"", b"short", b""], 1)
    taken = follower.take("e")
    (steps,) = taken.series
    assert len(steps) == 5
    assert steps.lost == 2
    assert taken.duplicates == 1
    assert taken.refused == 1
    assert follower.take("e").series == ()


def test_steps_end_when_their_message_comes_and_do_not_overlap() -> None:
    follower = PassFollower()
    second = 1_000_000_000
    follower.take_message(message(0, MIXED, wall_s=0.5), 10 * second)
    follower.take_message(message(1, MIXED, wall_s=0.5), 10 * second + 200_000_000)
    follower.take_message(message(2, MIXED, wall_s=0.5, rank=1), 10 * second + 300_000_000)
    first, other = follower.take("e").series
    assert first.start_ns.tolist() == [9_500_000_000, 10_000_000_000]
    assert first.end_ns.tolist() == [10_000_000_000, 10_200_000_000]
    assert first.rank == "0"
    assert other.rank == "1"
    assert other.start_ns.tolist() == [9_800_000_000]


def test_a_loss_is_told_even_when_nothing_else_came() -> None:
    follower = PassFollower()
    follower.take_message(message(0, MIXED), 1)
    follower.take("e")
    follower.take_message(message(9, scheduled(), wall_s=0.0), 2)
    (steps,) = follower.take("e").series
    assert (len(steps), steps.lost) == (0, 8)


def test_a_real_socket_brings_every_pass() -> None:
    publisher = Publisher()
    subscriber = Subscriber(publisher.endpoint)
    try:
        publisher.wait_for_subscriber()
        for number in range(200):
            publisher.send(message(number, MIXED, positional=number % 2 == 0))
        steps = 0
        deadline = time.monotonic() + 20
        while steps < 200 and time.monotonic() < deadline:
            steps += sum(len(one) for one in subscriber.follower.take("e").series)
            time.sleep(0.01)
        assert steps == 200
    finally:
        subscriber.close()
        publisher.close()


def test_an_endpoint_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="no ZMQ endpoint"):
        Subscriber("nonsense")
