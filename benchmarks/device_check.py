"""Asks the first GPU everything that no test without one can settle, in under six minutes.

Run from the root of the repository, as root, with torch and nvidia-ml-py beside gpuidle, on an idle GPU:

    python -m benchmarks.device_check --out /tmp/device-check

Each section runs in a process of its own with a time limit, so that a crash or a hang costs its own rows
only. A table comes last and stands in `table.txt`; each section's rows stand in its JSON file, beside the
recorded session and its truth. `--rehearse` runs the same code against the doubles of NVML and CUPTI: the
numbers then mean nothing but that it works.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

TOTAL_LIMIT_S = 360
REHEARSED_UUID = "GPU-00000000-0000-4000-8000-000000000000"


def rehearsal(folder: Path) -> dict[str, str]:
    """Return the environment in which the doubles stand in for a driver, CUPTI and NVML."""
    from tests.doubles import cupti, nvml

    levels = ((1, 97.0), (2, 90.0), (5, 60.0), (10, 50.0))
    gpu = nvml.Gpu(
        uuid=REHEARSED_UUID,
        utilization_gpu_percent=97,
        clock_sm_mhz=1500,
        gpm=tuple(nvml.GpmMetric(number, value) for number, value in levels),
    )
    nvml.Scenario(gpus=(gpu,)).write(folder / "nvml")
    cupti.Scenario(settings={"wave_duty": 1}).write(folder / "cupti")
    env = nvml.environment(nvml.build(), folder / "nvml")
    library = cupti.build()
    chosen = cupti.environment(library, folder / "cupti")
    path = f"{library}:{env['LD_LIBRARY_PATH']}"
    return {
        **env,
        **chosen,
        "LD_LIBRARY_PATH": path,
        "GPUIDLE_DEVICE_LIBRARY": str(library / "libcupti.so.13"),
    }


def choose(options: argparse.Namespace, env: dict[str, str]) -> tuple[str, str]:
    """Return the GPU's UUID and the libcupti to use."""
    if options.rehearse:
        return REHEARSED_UUID, env["GPUIDLE_DEVICE_LIBRARY"]
    from gpuidle.collectors.counters.cupti.find import find_libraries
    from gpuidle.collectors.counters.nvml_binding import nvml

    nvml.nvmlInit()
    uuid = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(options.gpu))
    nvml.nvmlShutdown()
    found = find_libraries(named=options.library)
    if not found:
        raise SystemExit(
            "no libcupti found: pip install nvidia-cuda-cupti==13.0.85, or name one with --library"
        )
    return str(uuid), found[0]


def run_section(name: str, bench: bytes, env: dict[str, str], limit_s: float, out: Path) -> str:
    """Run one section in a process of its own; return "" or what became of it."""
    command = [sys.executable, "-m", "benchmarks.device_check", "--section", name]
    log = (out / f"{name}.log").open("wb")
    with (
        log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdin is not None
        process.stdin.write(bench)
        process.stdin.close()
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"no answer within {limit_s:.0f} s"
    return "" if status == 0 else f"ended with {status}: see {name}.log"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("device-check"), help="folder for all results")
    parser.add_argument("--gpu", type=int, default=0, help="NVML's index")
    parser.add_argument("--library", help="path of libcupti")
    parser.add_argument("--only", help="sections, with commas")
    parser.add_argument("--rehearse", action="store_true", help="on the doubles, for a short time")
    parser.add_argument("--scale", type=float, help="of all durations; 1, or 0.2 in a rehearsal")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    options = parser.parse_args()
    from benchmarks.device_bench import Bench, Row
    from benchmarks.device_sections import SECTIONS

    if options.section:
        bench = msgspec.json.decode(
            sys.stdin.buffer.read(), type=Bench, dec_hook=lambda _, value: Path(value)
        )
        rows = SECTIONS[options.section][0](bench)
        (bench.out / f"{options.section}.json").write_bytes(msgspec.json.encode(rows))
        return 0

    chosen = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := [name for name in chosen if name not in SECTIONS]:
        parser.error(f"unknown sections {', '.join(unknown)}; known: {', '.join(SECTIONS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    begin, failed = time.monotonic(), 0
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, **(rehearsal(Path(folder)) if options.rehearse else {})}
        uuid, library = choose(options, env)
        env["CUDA_VISIBLE_DEVICES"] = uuid
        env["LD_LIBRARY_PATH"] = f"{Path(library).parent}:{env.get('LD_LIBRARY_PATH', '')}"
        bench = Bench(
            out=options.out.resolve(),
            rehearse=options.rehearse,
            hw_id=uuid,
            library=library,
            scale=options.scale or (0.2 if options.rehearse else 1.0),
        )
        encoded = msgspec.json.encode(bench, enc_hook=str)
        for name in chosen:
            left_s = TOTAL_LIMIT_S - (time.monotonic() - begin)
            (options.out / f"{name}.json").unlink(missing_ok=True)
            print(f"{name} ...", flush=True)
            wrong = run_section(name, encoded, env, min(SECTIONS[name][1], left_s), options.out)
            rows = [Row(what="section", got=wrong)]
            if not wrong:
                rows = msgspec.json.decode((options.out / f"{name}.json").read_bytes(), type=list[Row])
            failed += bool(wrong) + sum(row.verdict == "OFF" for row in rows)
            lines += [f"{name:10}{line}" for line in map(draw, rows)]
    took = time.monotonic() - begin
    lines.append(
        f"{len(chosen)} sections in {took:.0f} s, {failed} failed or off{' (REHEARSED)' * options.rehearse}"
    )
    text = "\n".join(lines)
    (options.out / "table.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if failed else 0


def draw(row: object) -> str:
    """Return a row of the table."""
    from benchmarks.device_bench import Row

    assert isinstance(row, Row)

    def number(value: float | str) -> str:
        return value if isinstance(value, str) else f"{value:.6g}"

    want = f"  expected {number(row.want)}" if row.want != "" else ""
    bar = f" (within {row.within:.0%})" if row.within is not None else ""
    return f"{row.what:52} {number(row.got)} {row.unit}{want}{bar}  {row.verdict}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
