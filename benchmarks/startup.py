"""Start-up: `gpuidle --version`, and the first frame of `gpuidle watch --demo` on a terminal.

Prints the median, the least and the most of several runs, beside a bare `python -c pass` in the same run,
since machines are noisy. Bars: 0.15 s and 0.5 s.

    python benchmarks/startup.py [--runs 9]
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import signal
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable


def timed(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def first_frame(command: list[str]) -> float:
    """Return the seconds until the screen names a simulated node and a GPU's ledger."""
    start = time.perf_counter()
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    seen = b""
    try:
        while not (b"SIMULATED" in seen and b"idle" in seen and b"GPU" in seen):
            seen += os.read(terminal, 65536)
        return time.perf_counter() - start
    finally:
        os.kill(pid, signal.SIGINT)
        try:
            while os.read(terminal, 65536):
                pass
        except OSError:
            pass
        os.close(terminal)
        os.waitpid(pid, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args().runs
    # An installed program has its modules compiled; a shell that forbids that measures the compiler.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    gpuidle = [sys.executable, "-m", "gpuidle"]
    cases: dict[str, Callable[[], float]] = {
        "python -c pass": lambda: timed([sys.executable, "-c", "pass"]),
        "gpuidle --version": lambda: timed([*gpuidle, "--version"]),
        "watch --demo, first frame": lambda: first_frame([*gpuidle, "watch", "--demo"]),
    }
    for case in cases.values():
        case()  # compiles what is not compiled yet
    figures: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(runs):
        for name, case in cases.items():
            figures[name].append(case())
    print(f"{'':28}{'median':>9}{'least':>9}{'most':>9}   bar")
    for name, bar in zip(cases, ("", "0.15 s", "0.5 s"), strict=True):
        row = figures[name]
        print(f"{name:28}{statistics.median(row):8.3f}s{min(row):8.3f}s{max(row):8.3f}s   {bar}")


if __name__ == "__main__":
    main()
