from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuidle.collectors.modelfiles.model import ModelFileError, read_model

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}
BESIDE = {"quantization": {"quant_algo": "FP8"}}


def folder(path: Path, **files: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_folder_and_file_give_the_configuration(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", config=CONFIG)
    assert read_model("model", cwd=tmp_path, environ={}) == CONFIG
    assert read_model(str(model), cwd=Path("/"), environ={}) == CONFIG
    assert read_model(str(model / "config.json"), cwd=Path("/"), environ={}) == CONFIG


def test_hub_id_resolves_through_the_cache_and_takes_the_quantisation_beside_it(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    folder(repository / "snapshots" / "abc", config=CONFIG, hf_quant_config=BESIDE)
    folder(repository / "refs")
    (repository / "refs" / "main").write_text("abc")
    told = read_model("org/name", cwd=tmp_path, environ={"HF_HUB_CACHE": str(tmp_path / "hub")})
    assert told == {**CONFIG, "hf_quant_config": BESIDE}


def test_quantisation_beside_the_configuration_is_added_unless_it_has_its_own(tmp_path: Path) -> None:
    folder(tmp_path / "a", config=CONFIG, hf_quant_config=BESIDE)
    assert read_model("a", cwd=tmp_path, environ={}) == {**CONFIG, "hf_quant_config": BESIDE}
    own = {**CONFIG, "quantization_config": {"quant_method": "awq"}}
    folder(tmp_path / "b", config=own, hf_quant_config=BESIDE)
    assert read_model("b", cwd=tmp_path, environ={}) == own


def test_unreadable_quantisation_is_an_error_and_not_16_bits(tmp_path: Path) -> None:
    folder(tmp_path / "a", config=CONFIG)
    (tmp_path / "a" / "hf_quant_config.json").write_text("{")
    with pytest.raises(ModelFileError, match="hf_quant_config"):
        read_model("a", cwd=tmp_path, environ={})


def test_nothing_there_says_where_was_looked(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=str(tmp_path)):
        read_model("org/name", cwd=tmp_path, environ={"HOME": str(tmp_path)})
    folder(tmp_path / "empty")
    with pytest.raises(ModelFileError, match="no GGUF file"):
        read_model("empty", cwd=tmp_path, environ={})
