"""Every figure of the analysis' accuracy, each with its coverage.

python -m benchmarks.accuracy [recorded] [traces] [counters] [memorygap] [ledger]

Without arguments all parts run. Third-party data is looked for in GPUIDLE_SHARED_DATA, else in shared/data in
or beside the repository; parts that need it say so and are skipped without.
"""

from __future__ import annotations

import sys
import time

from benchmarks import (
    accuracy_counters,
    accuracy_ledger,
    accuracy_memorygap,
    accuracy_recorded,
    accuracy_traces,
)


def traces() -> None:
    accuracy_traces.report_without_data()
    accuracy_traces.report()


PARTS = {
    "recorded": accuracy_recorded.report,
    "traces": traces,
    "counters": accuracy_counters.report,
    "memorygap": accuracy_memorygap.report,
    "ledger": accuracy_ledger.report,
}


def main() -> int:
    wanted = sys.argv[1:] or list(PARTS)
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        print(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
        return 2
    for name in wanted:
        begin = time.perf_counter()
        PARTS[name]()
        print(f"[{name}: {time.perf_counter() - begin:.0f} s]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
