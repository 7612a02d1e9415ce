"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.doubles.nvml import build


@pytest.fixture(scope="session")
def nvml_library() -> Path:
    """The folder of the NVML double, for LD_LIBRARY_PATH of a process (see `doubles.nvml.environment`)."""
    return build()
