from __future__ import annotations

from pathlib import Path

import pytest

from gpuidle.agent.config import ConfigError, check_keys, find_config, read_config


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


def test_a_place_that_this_user_may_not_look_at_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(ConfigError, match=r"/etc/x/gpuidle.toml: Permission denied: .*--config"):
        find_config([Path("/etc/x/gpuidle.toml")])


def test_without_a_file_there_is_no_configuration(tmp_path: Path) -> None:
    assert find_config([tmp_path / "gpuidle.toml"]) is None
    (tmp_path / "gpuidle.toml").write_text("")
    assert find_config([tmp_path / "none", tmp_path / "gpuidle.toml"]) == tmp_path / "gpuidle.toml"
