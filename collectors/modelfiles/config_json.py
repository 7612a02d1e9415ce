"""A served model's config.json, found the way the serving process finds it, in that process's own files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from gpuidle.collectors.support.files import read_regular

CONFIG_LIMIT = 1024 * 1024
"""Bytes; the largest published configurations have 50 KB."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")


class ConfigError(ValueError):
    """There is no usable configuration; the message says where was looked."""


class ConfigForbiddenError(ConfigError):
    """The files of the process may not be read by this user."""


def resolve_within(root: Path, path: str) -> Path:
    """Return `path` under `root` with links resolved as if `root` were "/": a container's links are its own.

    Raises:
        ConfigError: a loop of links.
        OSError: a part is not there, or not to be seen.
    """
    done: list[str] = []
    todo = [part for part in PurePosixPath(path).parts if part != "/"][::-1]
    links = 0
    while todo:
        part = todo.pop()
        if part == "..":
            done = done[:-1]
            continue
        here = root.joinpath(*done, part)
        if not here.is_symlink():
            here.lstat()
            done.append(part)
            continue
        links += 1
        if links > 40:
            raise ConfigError(f"too many links in {path}")
        target = PurePosixPath(here.readlink())
        if target.is_absolute():
            done = []
        todo += [step for step in target.parts if step != "/"][::-1]
    return root.joinpath(*done)


def read_model_config(
    model: str,
    *,
    root: Path,
    cwd: str = "/",
    environ: Mapping[str, str],
    revision: str | None = None,
    download_dir: str | None = None,
) -> str:
    """Return the text of config.json of `model`, a folder or a hub id, with its hf_quant_config.json.

    `root` is the process's root folder (/proc/PID/root), `cwd` and `environ` are the process's own.

    Raises:
        ConfigError: not found, too large, no JSON object of a model; ConfigForbiddenError: not allowed.
    """
    tried: list[str] = []
    forbidden = False
    for folder in _folders(model, root, cwd, environ, revision, download_dir):
        path = str(PurePosixPath(folder) / "config.json")
        tried.append(path)
        try:
            data = read_regular(resolve_within(root, path), CONFIG_LIMIT)
        except PermissionError:
            forbidden = True
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ConfigError(str(error)) from error
        else:
            return _with_quantisation(_checked(data, path), root, folder)
    where = ", ".join(tried) or f"{model!r} is neither a folder nor a hub id"
    if forbidden:
        raise ConfigForbiddenError(f"not allowed to read {where}")
    raise ConfigError(f"no config.json: looked for {where}")


def _folders(
    model: str,
    root: Path,
    cwd: str,
    environ: Mapping[str, str],
    revision: str | None,
    download_dir: str | None,
) -> list[str]:
    """Return where the configuration may lie, best first, as the process sees it."""
    folders = [str(PurePosixPath(cwd) / model)]
    if model.startswith(("/", ".", "~")) or _HUB_ID.fullmatch(model) is None:
        return folders
    home = environ.get("HOME", "/root")
    hub = (
        environ.get("HF_HUB_CACHE")
        or environ.get("HUGGINGFACE_HUB_CACHE")
        or str(
            PurePosixPath(
                environ.get("HF_HOME")
                or str(PurePosixPath(environ.get("XDG_CACHE_HOME") or f"{home}/.cache") / "huggingface")
            )
            / "hub"
        )
    )
    name = "models--" + model.replace("/", "--")
    for cache in (download_dir, hub):
        if cache:
            base = PurePosixPath(cwd) / cache.replace("~", home, 1) / name
            folders.append(str(base / "snapshots" / _commit(root, base, revision or "main")))
    return folders


def _commit(root: Path, base: PurePosixPath, revision: str) -> str:
    """Return the commit that a branch or tag points to; a commit stands for itself."""
    try:
        data = read_regular(resolve_within(root, str(base / "refs" / revision)), 200)
    except (OSError, ConfigError):
        return revision
    return data.decode("ascii", "replace").strip().replace("/", "")


def _with_quantisation(text: str, root: Path, folder: str) -> str:
    """Add the table of `hf_quant_config.json`, ModelOpt's way to say it, under that key.

    Without it a model of 4 or 8 bits would pass for one of 16. A block in config.json itself wins.
    """
    config = json.loads(text)
    if config.get("quantization_config") is not None:
        return text
    path = str(PurePosixPath(folder) / "hf_quant_config.json")
    try:
        data = read_regular(resolve_within(root, path), CONFIG_LIMIT)
        told = json.loads(data)
    except (FileNotFoundError, NotADirectoryError):
        return text
    except PermissionError as error:
        raise ConfigForbiddenError(f"not allowed to read {path}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {str(error)[:100]}") from error
    # Recordings keep what is returned: only the part that says how weights are stored passes.
    if not isinstance(told, dict) or not isinstance(told.get("quantization"), dict):
        raise ConfigError(f"{path} is not a model's quantisation")
    return json.dumps({**config, "hf_quant_config": {"quantization": told["quantization"]}})


def _checked(data: bytes, path: str) -> str:
    text = data.decode("utf-8", "replace")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {str(error)[:100]}") from error
    # Whatever the path leads to is kept in recordings: nothing but a model's configuration may pass.
    if not isinstance(told, dict) or not {"architectures", "model_type"} & told.keys():
        raise ConfigError(f"{path} is not a model's configuration")
    return text
