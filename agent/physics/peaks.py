"""What a device can do at best: dense FLOP/s by dtype and bytes/s of its memory, with a source for each row.

Names alone do not identify a device (an "H100" with 64 GB has 60 % of the bandwidth of one with 80 GB), so
a row matches by name and memory size together. All figures are dense: a sparse sheet figure is halved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from gpuidle.agent.physics.peak_table import ROWS, PeakRow

_NOISE = frozenset({"nvidia", "tesla", "amd", "intel", "google", "aws", "instinct"})
_MEMORY = re.compile(r"\bhbm\d+e?\b")

_MIG = re.compile(r"\bMIG\s+(\d)g\.(\d+)gb", re.IGNORECASE)
_MIG_SMS: Mapping[int, Mapping[int, int]] = {
    56: {1: 14, 2: 28, 4: 56},
    108: {1: 14, 2: 28, 3: 42, 4: 56, 7: 98},
    132: {1: 16, 2: 32, 3: 60, 4: 64, 7: 132},
}
"""SMs of a MIG profile by the device's SMs and the profile's compute slices (NVIDIA MIG user guide)."""
_MIG_SLICES: Mapping[int, int] = {56: 4, 188: 4}
"""Compute slices that a device can be cut into, where they are not 7: A30 and RTX PRO 6000 have 4."""

FLOP_PER_CLOCK_PER_SM: Mapping[str, int] = {
    "7.5": 1024,
    "8.0": 2048,
    "8.6": 1024,
    "8.9": 1024,
    "9.0": 4096,
    "10.0": 8192,
    "10.3": 8192,
    "12.0": 1024,
}
"""Dense 16-bit tensor FLOPs a clock and SM by compute capability (NVIDIA architecture white papers)."""


class NoPeak(LookupError):
    """The device has no figure for a dtype: a ratio against it would be a guess."""


class DevicePeaks(msgspec.Struct, frozen=True):
    """Dense peaks of one device. Rates are at `sheet_clock_hz`."""

    name: str
    memory_bytes: float
    flops_per_s: Mapping[str, float]
    """By dtype: "bf16" (any 16-bit float), "fp8", "int8", "fp4". A dtype that the device lacks is absent."""
    memory_bytes_per_s: float
    sheet_clock_hz: float | None
    """The clock that the sheet's FLOP/s imply; None: unknown."""
    max_clock_hz: float | None
    source: str
    formula: bool = False
    """True where the rate was computed from SMs, clock and bus: often too high, always flagged."""
    accumulate_halved: bool = False
    """The rates are with FP32 accumulation; kernels that accumulate in FP16 get twice as much."""
    multiprocessors: int | None = None
    l2_bytes: float | None = None
    """Weights that fit here may be read faster than `memory_bytes_per_s`."""

    def rate(self, dtype: str, *, at_max_clock: bool = False) -> float:
        """Return the FLOP/s of a product of `dtype` on this device: the sheet's, or the most at any time.

        `at_max_clock` is for bounds that nothing may beat: the maximum clock, and where FP32 accumulation
        halves the sheet's figure, the rate of kernels that accumulate in FP16.

        Where the device lacks the dtype, weights of it are unpacked and multiplied in 16 bits (FP8 on
        Ampere, FP4 on Hopper), so the 16-bit rate holds. Raises
        NoPeak for "fp32", and for INT8 where no figure is known.
        """
        rate = self.flops_per_s.get(dtype)
        if rate is None and dtype in {"fp8", "fp4"}:
            rate = self.flops_per_s.get("bf16")
        if rate is None:
            raise NoPeak(f"no dense peak of {self.name} for {dtype} is known")
        if not at_max_clock:
            return rate
        doubled = self.accumulate_halved and dtype != "int8"
        return rate * self.clock_ratio * (2.0 if doubled else 1.0)

    @property
    def clock_ratio(self) -> float:
        """Maximum clock over sheet clock; 1 where either is unknown."""
        if self.sheet_clock_hz is None or self.max_clock_hz is None:
            return 1.0
        return max(1.0, self.max_clock_hz / self.sheet_clock_hz)

    def override(
        self, *, bf16_flops_per_s: float | None = None, memory_bytes_per_s: float | None = None
    ) -> DevicePeaks:
        """Return the peaks with a user's figures; the other dtypes keep their ratio to the 16-bit rate."""
        if bf16_flops_per_s is None and memory_bytes_per_s is None:
            return self
        scale = 1.0 if bf16_flops_per_s is None else bf16_flops_per_s / self.flops_per_s["bf16"]
        return replace(
            self,
            flops_per_s={dtype: rate * scale for dtype, rate in self.flops_per_s.items()},
            memory_bytes_per_s=self.memory_bytes_per_s if memory_bytes_per_s is None else memory_bytes_per_s,
            source=f"{self.source}; overridden by the user",
            formula=False,
        )

    def fraction(self, compute: float, memory: float) -> DevicePeaks:
        """Return the peaks of a partition that owns these fractions of compute and of memory (MIG)."""
        return replace(
            self,
            memory_bytes=self.memory_bytes * memory,
            flops_per_s={dtype: rate * compute for dtype, rate in self.flops_per_s.items()},
            memory_bytes_per_s=self.memory_bytes_per_s * memory,
            source=f"{self.source}; {compute:g} of its compute, {memory:g} of its memory",
            l2_bytes=None if self.l2_bytes is None else self.l2_bytes * memory,
        )


def find_peaks(
    name: str,
    memory_total_bytes: int | None,
    *,
    compute_capability: str | None = None,
    multiprocessors: int | None = None,
    max_clock_hz: float | None = None,
    memory_clock_hz: float | None = None,
    memory_bus_bits: int | None = None,
) -> DevicePeaks | None:
    """Return the peaks of the device of this name and memory size, or None if it is not known.

    `name` is the driver's ("NVIDIA H100 80GB HBM3"), or a short one ("H100 SXM"). A name that fits rows of
    different memory sizes needs the size; without it, or with one that fits no row, there is no match. With
    the last four arguments and a compute capability that is listed, the formula is used as a fallback and
    flagged: it is twice too high on GeForce and four times on H20. A MIG instance ("... MIG 1g.10gb") gets
    its part of the device that its name begins with; `memory_total_bytes` is then the instance's own.
    """
    instance = _MIG.search(name)
    if instance is not None:
        whole = find_peaks(name[: instance.start()], None, max_clock_hz=max_clock_hz)
        return None if whole is None else _instance(whole, instance, multiprocessors)
    words, size_gb = _words(name)
    hits = [row for row in ROWS if any(_is_named(alias, name, words) for alias in row.names)]
    if memory_total_bytes is not None:
        hits = [row for row in hits if _fits(row, memory_total_bytes)]
    elif size_gb is not None and any(row.memory_gb == size_gb for row in hits):
        hits = [row for row in hits if row.memory_gb == size_gb]
    else:
        hits = [row for row in hits if not row.uncommon]
    if len(hits) == 1:
        return _peaks_of(hits[0], max_clock_hz)
    if hits:
        return None
    if None in (compute_capability, multiprocessors, max_clock_hz, memory_clock_hz, memory_bus_bits):
        return None
    assert compute_capability and multiprocessors and max_clock_hz and memory_clock_hz and memory_bus_bits  # noqa: PT018
    return formula_peaks(
        name,
        memory_total_bytes or 0,
        compute_capability=compute_capability,
        multiprocessors=multiprocessors,
        max_clock_hz=max_clock_hz,
        memory_clock_hz=memory_clock_hz,
        memory_bus_bits=memory_bus_bits,
    )


def known_devices(like: str = "") -> list[str]:
    """Return the names of the table with their memory sizes, those that share a word with `like` first."""
    words, _ = _words(like)
    rows = sorted(ROWS, key=lambda row: -max(len(words & _words(alias)[0]) for alias in row.names))
    return [f"{row.names[0]} ({row.memory_gb:g} GB)" for row in rows]


def whole_name(name: str) -> str:
    """Return the name of the device that a MIG instance's name begins with; of any other, its own."""
    instance = _MIG.search(name)
    return name if instance is None else name[: instance.start()].strip()


def instance_ratio(name: str) -> float:
    """Return the part of its device's compute slices that a MIG instance of this name has; else 1."""
    instance = _MIG.search(name)
    if instance is None:
        return 1.0
    whole = find_peaks(whole_name(name), None)
    return int(instance[1]) / _MIG_SLICES.get((whole.multiprocessors if whole else None) or 0, 7)


def _instance(whole: DevicePeaks, profile: re.Match[str], multiprocessors: int | None) -> DevicePeaks:
    """Return the part of a MIG profile such as "1g.10gb": SMs if known, else slices; eighths of memory."""
    slices, gigabytes = int(profile[1]), int(profile[2])
    listed = _MIG_SMS.get(whole.multiprocessors or 0, {}).get(slices)
    sms = multiprocessors or listed
    cut = _MIG_SLICES.get(whole.multiprocessors or 0, 7)
    compute = slices / cut if sms is None or whole.multiprocessors is None else sms / whole.multiprocessors
    eighths = min(8, max(1, round(gigabytes * 1e9 / (whole.memory_bytes / 8))))
    part = whole.fraction(compute, eighths / 8)
    return replace(part, name=f"{whole.name} MIG {slices}g.{gigabytes}gb", multiprocessors=sms)


def formula_peaks(
    name: str,
    memory_total_bytes: int,
    *,
    compute_capability: str,
    multiprocessors: int,
    max_clock_hz: float,
    memory_clock_hz: float,
    memory_bus_bits: int,
) -> DevicePeaks | None:
    """Return SMs x FLOP/clk/SM x clock and 2 x memory clock x bus / 8, flagged; None for an unlisted chip."""
    per_clock = FLOP_PER_CLOCK_PER_SM.get(compute_capability)
    if per_clock is None:
        return None
    bf16 = multiprocessors * per_clock * max_clock_hz
    flops = {"bf16": bf16}
    major = int(compute_capability.partition(".")[0])
    if compute_capability == "8.9" or major >= 9:
        flops["fp8"] = 2 * bf16
    if major >= 10:
        flops["fp4"] = 4 * bf16
    return DevicePeaks(
        name=name,
        memory_bytes=float(memory_total_bytes),
        flops_per_s=flops,
        memory_bytes_per_s=2 * memory_clock_hz * memory_bus_bits / 8,
        sheet_clock_hz=max_clock_hz,
        max_clock_hz=max_clock_hz,
        source=f"formula: {multiprocessors} SMs x {per_clock} FLOP/clk x maximum clock",
        formula=True,
        multiprocessors=multiprocessors,
    )


def _peaks_of(row: PeakRow, max_clock_hz: float | None) -> DevicePeaks:
    flops = {
        dtype: tera * 1e12
        for dtype, tera in (("bf16", row.bf16), ("fp8", row.fp8), ("int8", row.int8), ("fp4", row.fp4))
        if tera is not None
    }
    per_clock = FLOP_PER_CLOCK_PER_SM.get(row.compute_capability or "")
    sheet_clock = None
    if row.sheet_clock_mhz is not None:
        sheet_clock = row.sheet_clock_mhz * 1e6
    elif row.sms is not None and per_clock is not None and not row.capped and not row.accumulate_halved:
        sheet_clock = row.bf16 * 1e12 / (row.sms * per_clock)
    sheet_max = None if row.max_clock_mhz is None else row.max_clock_mhz * 1e6
    return DevicePeaks(
        name=row.names[0],
        memory_bytes=row.memory_gb * 1e9,
        flops_per_s=flops,
        memory_bytes_per_s=row.gb_per_s * 1e9,
        sheet_clock_hz=sheet_clock,
        max_clock_hz=sheet_max if max_clock_hz is None else max_clock_hz,
        source=row.source,
        accumulate_halved=row.accumulate_halved,
        multiprocessors=row.sms,
        l2_bytes=None if row.l2_mb is None else row.l2_mb * 1e6,
    )


def _is_named(alias: str, name: str, words: frozenset[str]) -> bool:
    """Whether a row's name is the device's; they may differ in the kind of memory only if one leaves it out.

    An "H100 80GB HBM2e" has 60 % of the bandwidth of an "H100 80GB HBM3".
    """
    kinds = [found[0] for text in (alias, name) if (found := _MEMORY.search(text.lower()))]
    return _words(alias)[0] == words and len(set(kinds)) < 2


def _words(name: str) -> tuple[frozenset[str], float | None]:
    """Split a name into its identifying words and the memory size that it states, in GB.

    The maker's name, the size and the kind of memory are left out: see `_is_named` for the last.
    """
    text = _MEMORY.sub(" ", name.lower())
    size = re.search(r"(\d+)\s*gi?b\b", text)
    text = re.sub(r"\d+\s*gi?b\b", " ", text)
    text = re.sub(r"\brtx(?=\d)", "rtx ", text)
    words = frozenset(re.findall(r"[a-z0-9]+", text)) - _NOISE
    return words, None if size is None else float(size.group(1))


def _fits(row: PeakRow, memory_total_bytes: int) -> bool:
    """Drivers count in powers of two, and report a little less than all (ECC, reserved)."""
    return 0.92 * row.memory_gb * 1e9 <= memory_total_bytes <= 1.01 * row.memory_gb * 2**30
