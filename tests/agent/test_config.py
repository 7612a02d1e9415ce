from __future__ import annotations

from pathlib import Path

import pytest

from gpuidle.agent.config import ConfigError, check_keys, read_config


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("interval = [")
    with pytest.raises(ConfigError, match=r"c\.toml: not TOML"):
        read_config(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        read_config(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_config(tmp_path / "none.toml")


def test_a_key_outside_a_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("interval = 1")
    with pytest.raises(ConfigError, match="'interval' stands outside a table"):
        read_config(path)


def test_unknown_keys_and_tables_are_named_with_the_nearest_known() -> None:
    known = {"run": {"interval", "prometheus"}}
    with pytest.raises(ConfigError, match=r"unknown key 'intervall' in .run.; did you mean 'interval'"):
        check_keys(Path("c"), {"run": {"intervall": 1}}, known)
    with pytest.raises(ConfigError, match=r"unknown table .rum.; did you mean 'run'"):
        check_keys(Path("c"), {"rum": {}}, known)
