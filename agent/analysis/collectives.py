"""How long the ranks of a group take to exchange messages, from measurements."""

from __future__ import annotations

import numpy as np

from gpuidle.agent.physics.work import Column

_BYTES = tuple(2**power for power in (15, 18, 20, 22, 24, 26, 29))
_MEASURED_US = {
    2: (7.08, 8.81, 14.7, 33.1, 82.2, 255.0, 1686.0),
    4: (11.2, 11.8, 18.1, 42.2, 99.0, 330.0, 2300.0),
    8: (18.4, 19.2, 25.4, 50.5, 122.0, 325.0, 2111.0),
}
"""By ranks: us of an all-reduce of 32 KiB, 256 KiB, 1, 4, 16, 64 and 512 MiB over NVLink between H100 SXM.

Source: ai-dynamo/aiconfigurator (Apache-2.0), NCCL 2.29.2, 16-bit floats; its sizes count elements. Engines
use kernels of their own for small messages, and slower links take longer.
"""

_LOG_BYTES = np.log(_BYTES)
_LOG_NS = {ranks: np.log(times) + np.log(1e3) for ranks, times in _MEASURED_US.items()}
_LAST_NS_PER_BYTE = {ranks: times[-1] * 1e3 / _BYTES[-1] for ranks, times in _MEASURED_US.items()}


def collectives_ns(messages: Column, payload_bytes: Column, ranks: int) -> Column:
    """Return the nanoseconds of `messages` all-reduces of together `payload_bytes` between `ranks` GPUs.

    Numbers or columns. The size of a message is their mean; between the sizes that were measured on
    logarithmic scales. The ranks are those of the next smaller group that was measured: a lower bound.
    """
    if ranks < 2:
        return messages * 0.0
    known = max(size for size in _MEASURED_US if size <= ranks)
    size = np.maximum(1.0, np.asarray(payload_bytes) / np.maximum(messages, 1e-9))
    each = np.exp(np.interp(np.log(size), _LOG_BYTES, _LOG_NS[known]))
    each = np.maximum(each, size * _LAST_NS_PER_BYTE[known])
    found = np.where(np.asarray(messages) > 0, messages * each, 0.0)
    return found if np.ndim(found) else float(found)


def line_ns(messages: Column, payload_bytes: Column, ranks: int) -> Column:
    """Return the same with messages of all sizes on the straight line between the ends of the table.

    A ring takes so long per hop and so long per byte; what was measured lies above its line where the library
    changes from one protocol to another.
    """
    if ranks < 2:
        return collectives_ns(messages, payload_bytes, ranks)
    each = float(collectives_ns(1, _BYTES[0], ranks))
    last = float(collectives_ns(1, _BYTES[-1], ranks))
    per_byte = (last - each) / (_BYTES[-1] - _BYTES[0])
    return messages * (each - per_byte * _BYTES[0]) + payload_bytes * per_byte
