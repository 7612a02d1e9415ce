from __future__ import annotations

import pytest

from gpuidle.agent.physics.peak_table import ROWS
from gpuidle.agent.physics.peaks import NoPeak, find_peaks, known_devices

MIB = 2**20
NVML = [
    ("Tesla T4", 15360 * MIB, 65, 320),
    ("NVIDIA A10", 23028 * MIB, 125, 600),
    ("NVIDIA A100-SXM4-40GB", 40960 * MIB, 312, 1555),
    ("NVIDIA A100-PCIE-40GB", 40960 * MIB, 312, 1555),
    ("NVIDIA A100-SXM4-80GB", 81920 * MIB, 312, 2039),
    ("NVIDIA A100 80GB PCIe", 81920 * MIB, 312, 1935),
    ("NVIDIA L4", 23034 * MIB, 121, 300),
    ("NVIDIA L40S", 46068 * MIB, 362, 864),
    ("NVIDIA GeForce RTX 4090", 24564 * MIB, 165, 1008),
    ("NVIDIA H100 PCIe", 81559 * MIB, 756, 2039),
    ("NVIDIA H100 80GB HBM3", 81559 * MIB, 989, 3352),
    ("NVIDIA H100 NVL", 95830 * MIB, 835, 3938),
    ("NVIDIA H200", 143771 * MIB, 989, 4800),
    ("NVIDIA H200 NVL", 143771 * MIB, 835, 4800),
    ("NVIDIA H20", 97871 * MIB, 148, 4000),
    ("NVIDIA GH200 480GB", 97871 * MIB, 989, 4000),
    ("NVIDIA B200", 183359 * MIB, 2250, 7700),
    ("NVIDIA GB200", 189471 * MIB, 2500, 8000),
    ("NVIDIA B300 SXM6 AC", 275040 * MIB, 2250, 7700),
    ("NVIDIA GB300", 284208 * MIB, 2500, 8000),
    ("NVIDIA GeForce RTX 5090", 32607 * MIB, 209.5, 1792),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887 * MIB, 504, 1792),
]


@pytest.mark.parametrize(("name", "memory", "bf16", "bandwidth"), NVML)
def test_name_and_memory_of_the_driver_find_the_row(
    name: str, memory: int, bf16: float, bandwidth: float
) -> None:
    peaks = find_peaks(name, memory)
    assert peaks is not None
    assert peaks.rate("bf16") / 1e12 == pytest.approx(bf16, rel=1.5e-3)
    assert peaks.memory_bytes_per_s / 1e9 == bandwidth
    assert not peaks.formula
    assert peaks.source


def test_an_h100_with_64_gb_has_its_own_bandwidth() -> None:
    peaks = find_peaks("NVIDIA H100 64GB HBM2", 65247 * MIB)
    assert peaks is not None
    assert peaks.memory_bytes_per_s == 2.039e12


def test_a_memory_size_that_fits_no_row_is_no_match() -> None:
    assert find_peaks("NVIDIA H100 80GB HBM3", 40 * 2**30) is None


@pytest.mark.parametrize("name", ["A100 SXM", "A100", "NVIDIA", "", "NVIDIA L40", "NVIDIA H1000"])
def test_a_name_that_does_not_settle_the_device_is_no_match(name: str) -> None:
    assert find_peaks(name, None) is None


def test_the_memory_size_settles_a_short_name() -> None:
    peaks = find_peaks("H100 SXM", int(80e9))
    assert peaks is not None
    assert peaks.name == "NVIDIA H100 80GB HBM3"
    again = find_peaks("A100-SXM4-40GB", None)
    assert again is not None
    assert again.memory_bytes == 40e9


def test_a_common_device_is_meant_unless_the_memory_says_otherwise() -> None:
    for name in ("H100 SXM", "h100-sxm5", "NVIDIA H100"):
        common = find_peaks(name, None)
        assert common is not None
        assert common.memory_bytes == 80e9
        rare = find_peaks(name, int(64e9))
        assert rare is not None
        assert rare.memory_bytes_per_s == 2.039e12


def test_known_devices_begin_with_those_alike() -> None:
    assert known_devices("A100")[0].startswith("NVIDIA A100")
    assert len(known_devices()) == len(ROWS)


def test_no_row_shadows_another() -> None:
    for row in ROWS:
        for name in row.names:
            peaks = find_peaks(name, int(row.memory_gb * 1e9))
            assert peaks is not None, name
            assert peaks.source == row.source


def test_peaks_are_dense() -> None:
    """A sparse figure in the table would be four times its 16-bit rate in FP8, or twice the known one."""
    for row in ROWS:
        if row.fp8 is not None:
            assert row.fp8 <= 2.05 * row.bf16, row.names


def test_missing_float_formats_run_in_16_bits_and_integers_are_not_guessed() -> None:
    a100 = find_peaks("NVIDIA A100-SXM4-80GB", None)
    b300 = find_peaks("B300", None)
    assert a100 is not None
    assert b300 is not None
    assert a100.rate("fp8") == a100.rate("fp4") == a100.rate("bf16")
    with pytest.raises(NoPeak):
        b300.rate("int8")
    with pytest.raises(NoPeak):
        a100.rate("fp32")


def test_h100_sheet_clock_is_1830_mhz_and_the_maximum_gives_8_per_cent_more() -> None:
    peaks = find_peaks("NVIDIA H100 80GB HBM3", 81559 * MIB)
    assert peaks is not None
    assert peaks.sheet_clock_hz == pytest.approx(1830e6, rel=1e-3)
    assert peaks.rate("bf16", at_max_clock=True) / peaks.rate("bf16") == pytest.approx(1.082, abs=1e-3)
    told = find_peaks("NVIDIA H100 80GB HBM3", 81559 * MIB, max_clock_hz=1755e6)
    assert told is not None
    assert told.rate("bf16", at_max_clock=True) == told.rate("bf16")


def test_geforce_may_reach_twice_its_row_with_16_bit_sums() -> None:
    peaks = find_peaks("NVIDIA GeForce RTX 4090", 24564 * MIB)
    assert peaks is not None
    assert peaks.rate("bf16", at_max_clock=True) == pytest.approx(330.4e12, rel=1e-3)


def test_formula_is_a_flagged_last_resort() -> None:
    asked = {"compute_capability": "9.0", "multiprocessors": 132, "max_clock_hz": 1830e6}
    peaks = find_peaks("NVIDIA H999", 80 << 30, **asked, memory_clock_hz=2619e6, memory_bus_bits=5120)  # type: ignore[arg-type]
    assert peaks is not None
    assert peaks.formula
    assert peaks.rate("bf16") == pytest.approx(989.4e12, rel=1e-3)
    assert peaks.memory_bytes_per_s == pytest.approx(3352e9, rel=1e-3)
    assert find_peaks("NVIDIA H999", 80 << 30, compute_capability="9.0") is None


def test_the_kind_of_memory_in_a_name_must_be_the_rows() -> None:
    assert find_peaks("NVIDIA H100 80GB HBM2e", 81559 * MIB) is None
    assert find_peaks("NVIDIA H100 80GB", 81559 * MIB) is not None
    assert find_peaks("NVIDIA H100 64GB HBM2e", 65247 * MIB) is not None


@pytest.mark.parametrize(
    ("name", "bf16", "bandwidth"),
    [
        ("NVIDIA A30 MIG 1g.6gb", 165e12 / 4, 933e9 / 4),
        ("NVIDIA A30 MIG 2g.12gb", 165e12 / 2, 933e9 / 2),
        ("NVIDIA A30 MIG 4g.24gb", 165e12, 933e9),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb", 467.8e12 / 4, 1792e9 / 4),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 4g.96gb", 467.8e12, 1792e9),
    ],
)
def test_a_device_of_four_slices_is_not_cut_into_seven(name: str, bf16: float, bandwidth: float) -> None:
    peaks = find_peaks(name, None)
    assert peaks is not None
    assert peaks.rate("bf16") == pytest.approx(bf16)
    assert peaks.memory_bytes_per_s == pytest.approx(bandwidth)


def test_mig_instance_gets_its_slices() -> None:
    peaks = find_peaks("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9856 * MIB)
    assert peaks is not None
    assert peaks.memory_bytes_per_s == pytest.approx(3352e9 / 8)
    assert peaks.rate("bf16") == pytest.approx(989.4e12 * 16 / 132)
    whole = find_peaks("NVIDIA A100-SXM4-80GB MIG 7g.80gb", 80 << 30)
    assert whole is not None
    assert whole.memory_bytes_per_s == 2039e9
