"""A model's configuration is found where the serving process would find it, and nothing else is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuidle.collectors.modelfiles.config_json import (
    CONFIG_LIMIT,
    ConfigError,
    read_model_config,
    resolve_within,
)

CONFIG = '{"architectures":["LlamaForCausalLM"],"hidden_size":128}'


def put(root: Path, path: str, text: str = CONFIG) -> Path:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_a_folder_absolute_or_relative(tmp_path: Path) -> None:
    put(tmp_path, "/models/m/config.json")
    assert read_model_config("/models/m", root=tmp_path, environ={}) == CONFIG
    assert read_model_config("m", root=tmp_path, cwd="/models", environ={}) == CONFIG
    assert read_model_config("./m", root=tmp_path, cwd="/models", environ={}) == CONFIG


@pytest.mark.parametrize(
    ("environ", "hub"),
    [
        ({"HF_HUB_CACHE": "/cache", "HF_HOME": "/other", "HOME": "/home/u"}, "/cache"),
        ({"HF_HOME": "/hf", "HOME": "/home/u"}, "/hf/hub"),
        ({"XDG_CACHE_HOME": "/xdg", "HOME": "/home/u"}, "/xdg/huggingface/hub"),
        ({"HOME": "/home/u"}, "/home/u/.cache/huggingface/hub"),
    ],
)
def test_a_hub_id_is_looked_up_in_the_cache_of_the_process(
    tmp_path: Path, environ: dict[str, str], hub: str
) -> None:
    base = f"{hub}/models--org--m"
    put(tmp_path, f"{base}/refs/main", "abc123")
    put(tmp_path, f"{base}/snapshots/abc123/config.json")
    assert read_model_config("org/m", root=tmp_path, environ=environ) == CONFIG


def test_a_revision_and_a_download_folder(tmp_path: Path) -> None:
    put(tmp_path, "/d/models--org--m/refs/v2", "fff\n")
    put(tmp_path, "/d/models--org--m/snapshots/fff/config.json")
    assert read_model_config("org/m", root=tmp_path, environ={}, revision="v2", download_dir="/d") == CONFIG
    assert read_model_config("org/m", root=tmp_path, environ={}, revision="fff", download_dir="/d") == CONFIG


def test_links_of_a_container_lead_inside_the_container(tmp_path: Path) -> None:
    root = tmp_path / "container"
    put(root, "/blobs/1")
    (root / "models").mkdir()
    (root / "models" / "config.json").symlink_to("/blobs/1")
    assert read_model_config("/models", root=root, environ={}) == CONFIG
    secret = put(tmp_path, "/secret.json")
    (root / "out").mkdir()
    (root / "out" / "config.json").symlink_to(f"../../../{secret.name}")
    with pytest.raises(ConfigError):
        read_model_config("/out", root=root, environ={})


def test_a_loop_of_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ConfigError, match="links"):
        resolve_within(tmp_path, "/a/config.json")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="snapshots"):
        read_model_config("org/m", root=tmp_path, environ={"HF_HOME": "/hf"})
    with pytest.raises(ConfigError, match=r"/models/x/config\.json"):
        read_model_config("/models/x", root=tmp_path, environ={})


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[1]",
        '{"auths":{"registry":{"auth":"c2VjcmV0"}}}',
        "[" * 100_000,
        '{"architectures":[]' + " " * CONFIG_LIMIT + "}",
    ],
    ids=["text", "list", "credentials", "deep", "large"],
)
def test_what_is_no_configuration_of_a_model_is_not_taken(tmp_path: Path, text: str) -> None:
    put(tmp_path, "/m/config.json", text)
    with pytest.raises(ConfigError):
        read_model_config("/m", root=tmp_path, environ={})


def test_a_pipe_in_place_of_the_file_does_not_hold_the_reader(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    os.mkfifo(tmp_path / "m" / "config.json")
    with pytest.raises(ConfigError, match="regular"):
        read_model_config("/m", root=tmp_path, environ={})
