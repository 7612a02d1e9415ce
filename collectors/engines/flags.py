"""Command lines of engines, read the way argparse would, without knowing all their options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_LARGEST = 2**53


@dataclass(frozen=True)
class Flags:
    """Options by their long name with dashes ("tensor-parallel-size"), a bare switch as "true"."""

    options: Mapping[str, str]
    positionals: tuple[str, ...]

    def text(self, *names: str) -> str | None:
        """Return the first of `names` that was given a value."""
        return next((self.options[name] for name in names if self.options.get(name)), None)

    def number(self, *names: str) -> int | None:
        """Return a whole number, also one such as "8k" (8000) or "8K" (8192); None if it is none."""
        return human_int(self.text(*names))

    def switch(self, name: str) -> bool | None:
        """Return whether a switch is on, off (`--no-NAME` or "false"), or not given."""
        if name in self.options:
            return self.options[name].lower() not in ("false", "0", "no", "off")
        return False if self.options.get(f"no-{name}", "false") == "true" else None


def human_int(text: str | None) -> int | None:
    """Return "2048", "2k" (2000), "2K" (2048) or "1.5k" as a whole number, None where it is none."""
    if not text or not text.isascii():
        return None
    factor = _DECIMAL.get(text[-1]) or _BINARY.get(text[-1])
    digits = text[:-1] if factor else text
    try:
        value = float(digits) * factor if factor else int(digits)
    except (ValueError, OverflowError):
        return None
    return int(value) if 0 <= value <= _LARGEST else None


def parse_flags(
    words: Sequence[str],
    *,
    short: Mapping[str, str],
    switches: AbstractSet[str],
    lists: AbstractSet[str],
) -> Flags:
    """Read `--name value`, `--name=value`, `--na_me value` and the `short` forms; the last one wins.

    An option in `switches`, or one that starts with enable-, disable- or no-, takes no value unless it is
    given with "=", so that a positional word may follow it. One in `lists` takes all words up to the next
    option and keeps the first.
    """
    options: dict[str, str] = {}
    positionals: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        name, equals, value = word.partition("=")
        if name.startswith("--") and len(name) > 2:
            key = name[2:].partition(".")[0].replace("_", "-")
        elif name in short:
            key = short[name]
        else:
            if not word.startswith("-"):
                positionals.append(word)
            continue
        if not equals:
            bare = key in switches or key.startswith(("enable-", "disable-", "no-"))
            if bare or at >= len(words) or _is_option(words[at]):
                value = "true"
            else:
                value = words[at]
                at += 1
                while key in lists and at < len(words) and not _is_option(words[at]):
                    at += 1
        options[key] = value
    return Flags(options, tuple(positionals))


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not word[1].isdigit()


def parse_simple_yaml(text: str) -> dict[str, str]:
    """Return the `key: value` lines of the top level; anything deeper or longer is passed over.

    Engines keep flags in such files; no YAML library is needed for the plain scalars among them.
    """
    found: dict[str, str] = {}
    for line in text.splitlines()[:2000]:
        if not line or line[0] in " \t#-" or ":" not in line:
            continue
        key, _, value = line.partition(":")
        value = value.strip()
        if value[:1] in ("'", '"'):
            value = value[1:].partition(value[0])[0]
        else:
            value = value.partition(" #")[0].strip()
        if value and value[0] not in "[|>&*!":
            found[key.strip().strip("'\"").replace("_", "-").removeprefix("--")] = value
    return found
