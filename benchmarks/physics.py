"""Work of a million steps: must stay under half a second on one core.

python benchmarks/physics.py
"""

from __future__ import annotations

import sys
import time

import numpy as np

from gpuidle.agent.physics.builtin import find_builtin
from gpuidle.agent.physics.work import work

LIMIT_S = 0.5
STEPS = 1_000_000


def seconds(name: str) -> float:
    shape = find_builtin(name)
    assert shape is not None
    rng = np.random.default_rng(0)
    tokens, context = rng.integers(1, 512, STEPS), rng.integers(0, 100_000, STEPS)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        work(
            shape,
            tensor_parallel=2,
            tokens=tokens,
            logit_rows=tokens,
            attention_pairs=context + tokens,
            kv_read_tokens=context,
        )
        best = min(best, time.perf_counter() - begin)
    return best


def main() -> int:
    worst = 0.0
    for name in ("Llama-2-70b-hf", "gpt-oss-120b", "DeepSeek-V3"):
        took = seconds(name)
        worst = max(worst, took)
        print(f"{name}: work of {STEPS:,} steps in {took:.3f} s")
    return 0 if worst < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
