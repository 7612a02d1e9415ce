"""Where a libcupti is found, and which one is not trusted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuidle.collectors.counters.cupti.child import buffer_bytes
from gpuidle.collectors.counters.cupti.find import find_libraries, trusted


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An engine's environment; folders that tests are given may belong to anyone, so the root is checked."""
    folder = tmp_path / "venv/lib/python3.12/site-packages"
    library = folder / "nvidia/cu13/lib/libcupti.so.13"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    return folder


def engine(tmp_path: Path, mapped: Path, root: Path = Path("/")) -> Path:
    process = tmp_path / "proc/77"
    process.mkdir(parents=True)
    (process / "root").symlink_to(root)
    (process / "maps").write_text(f"7f0000000000-7f0000001000 r-xp 00000000 00:1f 99     {mapped}\n")
    return tmp_path / "proc"


def test_a_named_library_is_the_only_one() -> None:
    assert find_libraries(named="/opt/libcupti.so.13", search_path="/tmp") == ("/opt/libcupti.so.13",)


def test_the_search_path_comes_first(site: Path) -> None:
    folder = site / "nvidia/cu13/lib"
    assert find_libraries(search_path=f":{folder}:/nonexistent")[0] == str(folder / "libcupti.so.13")


def test_an_engines_own_library_is_found_mapped_or_beside_its_packages(site: Path, tmp_path: Path) -> None:
    library = site / "nvidia/cu13/lib/libcupti.so.13"
    for number, mapped in enumerate((library, site / "torch/lib/libtorch_cuda.so")):
        proc = engine(tmp_path / str(number), mapped)
        assert str(library) in find_libraries(engine_pids=[77, 78], proc=proc, search_path="")


def test_a_library_that_others_could_have_written_is_not_loaded(site: Path, tmp_path: Path) -> None:
    library = site / "nvidia/cu13/lib/libcupti.so.13"
    proc = engine(tmp_path, library)
    assert trusted(library)
    (site / "nvidia").chmod(0o777)
    assert not trusted(library)
    assert str(library) not in find_libraries(engine_pids=[77], proc=proc, search_path="")
    (site / "nvidia").chmod(0o755)
    library.chmod(0o666)
    assert not trusted(library)
    assert not trusted(site / "missing")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_library_of_another_user_is_not_loaded(site: Path) -> None:
    library = site / "nvidia/cu13/lib/libcupti.so.13"
    os.chown(library, 65534, 65534)
    assert not trusted(library)


def test_a_library_of_another_container_is_not_loaded(site: Path, tmp_path: Path) -> None:
    library = site / "nvidia/cu13/lib/libcupti.so.13"
    proc = engine(tmp_path, library, root=tmp_path)
    assert str(library) not in find_libraries(engine_pids=[77], proc=proc, search_path="")


@pytest.mark.parametrize(
    ("rate", "size"), [(100, 2e6), (1000, 20e6), (10_000, 128 * 2**20), (20_000, 128 * 2**20)]
)
def test_the_hardware_buffer_holds_two_seconds_within_the_limit(rate: int, size: float) -> None:
    assert buffer_bytes(rate, 128 * 2**20) == size


def test_a_rate_that_the_limit_does_not_allow_is_refused() -> None:
    assert buffer_bytes(20_000, 50_000_000) is None
