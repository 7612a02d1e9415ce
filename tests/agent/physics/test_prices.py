from __future__ import annotations

import pytest

from gpuidle.agent.physics.prices import price_of

GB = 10**9
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("named", [H100, "H100", "h100 80gb", "H100 SXM", "H100-80GB-HBM3"])
def test_a_price_is_found_by_the_names_that_people_give(named: str) -> None:
    assert price_of(H100, 85 * GB, {named: 4.0, "": 1.0, "A100": 2.0}) == 4.0


@pytest.mark.parametrize("named", ["A100", "H100 PCIe", "H200", "H1"])
def test_another_devices_price_is_not_taken(named: str) -> None:
    assert price_of(H100, 85 * GB, {named: 4.0}) is None
    assert price_of(H100, 85 * GB, {named: 4.0, "": 1.0}) == 1.0


def test_the_longest_name_wins() -> None:
    prices = {"A100": 2.0, "A100 80GB": 3.0}
    assert price_of("NVIDIA A100-SXM4-80GB", 85 * GB, prices) == 3.0
    assert price_of("NVIDIA A100-SXM4-40GB", 42 * GB, prices) == 2.0


def test_an_instance_costs_its_part_of_the_gpu() -> None:
    parts = [price_of(f"{H100} MIG 1g.10gb", 10 * GB, {"H100": 7.0}) for _ in range(7)]
    assert parts == [1.0] * 7
    assert price_of(f"{H100} MIG 3g.40gb", 40 * GB, {"": 7.0}) == pytest.approx(3.0)
    assert price_of("NVIDIA A30 MIG 1g.6gb", 6 * GB, {"": 4.0}) == 1.0


def test_nothing_told_is_no_price() -> None:
    assert price_of(H100, 85 * GB, {}) is None
