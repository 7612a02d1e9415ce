"""What describes a model on this machine: a folder, a config.json, a GGUF file, or a cached hub id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from gpuidle.collectors.modelfiles.config_json import ConfigError, read_model_config
from gpuidle.collectors.modelfiles.gguf import GgufError, read_gguf_header
from gpuidle.collectors.support.files import read_regular

_QUANT_LIMIT = 8 * 1024 * 1024


class ModelFileError(ValueError):
    """There is no readable description of the model; the message says where was looked."""


def read_model(model: str, *, cwd: Path, environ: Mapping[str, str]) -> dict[str, object]:
    """Return the table that `shape_from_config` takes.

    That is the `config.json`, with the table of a `hf_quant_config.json` beside it under
    "hf_quant_config"; or the header of a GGUF under "gguf". `cwd` and `environ` are the caller's: hub ids
    resolve through HF_HUB_CACHE, HF_HOME and HOME. Nothing is downloaded.

    Raises:
        ModelFileError: nothing there, or it cannot be read.
    """
    path = cwd / Path(model).expanduser()
    try:
        if path.suffix == ".gguf":
            return {"gguf": read_gguf_header(path)}
        if path.is_file():
            return _with_quantisation(_table(path), path.parent)
        if path.is_dir() and not (path / "config.json").exists():
            headers = sorted(path.glob("*.gguf"))
            if len(headers) == 1 or (headers and "-00001-of-" in headers[0].name):
                return {"gguf": read_gguf_header(headers[0])}
            found = f"{len(headers)} GGUF files" if headers else "no GGUF file"
            raise ModelFileError(f"{path} holds no config.json, and {found}")
        text = read_model_config(model, root=Path("/"), cwd=str(cwd), environ=environ)
    except (GgufError, ConfigError, OSError) as error:
        raise ModelFileError(str(error)) from error
    return cast("dict[str, object]", json.loads(text))


def _with_quantisation(config: Mapping[str, object], folder: Path) -> dict[str, object]:
    """Return the configuration with the folder's `hf_quant_config.json` added, where there is one.

    ModelOpt writes it instead of a block in `config.json`; a block that stands there already wins.

    Raises:
        ModelFileError: the file is there and is no JSON table: without it the formats would be guessed.
    """
    beside = folder / "hf_quant_config.json"
    if config.get("quantization_config") is not None or not beside.exists():
        return dict(config)
    return {**config, "hf_quant_config": _table(beside)}


def _table(path: Path) -> dict[str, object]:
    try:
        told = json.loads(read_regular(path, _QUANT_LIMIT))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: {str(error)[:200]}") from error
    if not isinstance(told, dict):
        raise ModelFileError(f"{path} is no JSON table")
    return told
