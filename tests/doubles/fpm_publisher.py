"""A publisher of ForwardPassMetrics that sends what its test tells it, as SGLang or Dynamo would."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq


def scheduled(
    prefill: int = 0, prompts: int = 0, decodes: int = 0, prefill_kv: int = 0, decode_kv: int = 0
) -> dict[str, Any]:
    return {
        "num_prefill_requests": prompts,
        "sum_prefill_tokens": prefill,
        "var_prefill_length": 0.0,
        "sum_prefill_kv_tokens": prefill_kv,
        "num_decode_requests": decodes,
        "sum_decode_kv_tokens": decode_kv,
        "var_decode_kv_tokens": 0.0,
    }


def message(
    number: int, work: dict[str, Any], *, wall_s: float = 0.01, rank: int = 0, positional: bool = False
) -> list[bytes]:
    fields = {
        "version": 1,
        "worker_id": "w",
        "dp_rank": rank,
        "counter_id": number,
        "wall_time": wall_s,
        "scheduled_requests": list(work.values()) if positional else work,
        "queued_requests": [0, 0, 0.0, 0, 0, 0.0] if positional else {},
    }
    payload = msgspec.msgpack.encode(list(fields.values()) if positional else fields)
    return [b"", number.to_bytes(8, "big"), payload]


class Publisher:
    """Binds a free loopback port."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 500)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"

    def wait_for_subscriber(self) -> None:
        self._socket.setsockopt(zmq.RCVTIMEO, 10_000)
        assert self._socket.recv() == b"\x01"

    def send(self, parts: list[bytes]) -> None:
        self._socket.send_multipart(parts)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
