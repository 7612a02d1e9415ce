"""Configuration: option > environment > TOML > default. An unknown key is an error that names it.

The TOML file has one table a command, with the command's options as keys (dashes as underscores):

    [run]
    interval = 1.0
    prometheus = "127.0.0.1:9405"
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_PATHS = (Path("/etc/gpuidle/gpuidle.toml"),)


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the file, the key and the remedy."""


def find_config(paths: Iterable[Path]) -> Path | None:
    """Return the first of `paths` that is a file.

    Raises:
        ConfigError: this user may not see whether one is there: defaults in its place would surprise.
    """
    for path in paths:
        try:
            found = path.is_file()
        except PermissionError as error:
            raise ConfigError(
                f"{path}: {error.strerror}: let this user read it, or name another with --config"
                " (/dev/null is none)"
            ) from error
        if found:
            return path
    return None


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of a TOML file.

    Raises:
        ConfigError: the file cannot be read or is no TOML.
    """
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name!r} stands outside a table; put it under [run] or [watch]")
    return tables


def check_keys(
    path: Path, tables: Mapping[str, Mapping[str, Any]], known: Mapping[str, Collection[str]]
) -> None:
    """Refuse tables and keys that no command knows.

    Raises:
        ConfigError: naming the first unknown one and the nearest that is known.
    """
    for table, keys in tables.items():
        if table not in known:
            raise ConfigError(f"{path}: unknown table [{table}]{_nearest(table, known)}")
        for key in keys:
            if key not in known[table]:
                raise ConfigError(f"{path}: unknown key {key!r} in [{table}]{_nearest(key, known[table])}")


def _nearest(word: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
