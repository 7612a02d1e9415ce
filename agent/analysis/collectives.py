"""How long the ranks of a group take to exchange messages: a lower bound, from measurements."""

from __future__ import annotations

MEASURED: dict[int, tuple[float, float]] = {2: (7.1e3, 159e9), 4: (11.2e3, 117e9), 8: (18.4e3, 127e9)}
"""By ranks: ns of a 16 KiB all-reduce, and bytes/s of a 256 MiB one, over NVLink between H100 SXM.

Source: ai-dynamo/aiconfigurator (Apache-2.0), NCCL 2.29.2, 16-bit floats. Between the two ends NCCL takes
up to 1.5 times their sum, but engines use kernels of their own there; slower links take longer.
"""


def collectives_ns(messages: float, payload_bytes: float, ranks: int) -> float:
    """Return the nanoseconds of `messages` all-reduces of together `payload_bytes` between `ranks` GPUs.

    Those of the next smaller group that was measured: a lower bound.
    """
    if messages <= 0 or ranks < 2:
        return 0.0
    latency_ns, bytes_per_s = MEASURED[max(size for size in MEASURED if size <= ranks)]
    return messages * latency_ns + payload_bytes / bytes_per_s * 1e9
