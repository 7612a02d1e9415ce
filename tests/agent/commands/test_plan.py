from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpuidle.agent.commands.plan import command
from gpuidle.agent.physics.builtin import CONFIGS


def plan(*arguments: str, home: Path | None = None) -> Result:
    environment = {"HOME": str(home or "/nonexistent"), "HF_HOME": None, "HF_HUB_CACHE": None}
    return CliRunner().invoke(command, list(arguments), env=environment)


def test_70b_on_an_h100_prints_the_headline_and_that_it_needs_two_cards() -> None:
    result = plan("Llama-2-70b-hf", "--gpu", "H100 SXM", "--batch", "1")
    assert result.exit_code == 0, result.output
    for said in (
        "24 tok/s",
        "3.35 TFLOP/s",
        "0.34 % used",
        "99.66 % idle",
        "need two cards",
        "bound by memory",
    ):
        assert said in result.output


def test_json_has_all_figures_and_agrees_with_the_text() -> None:
    result = plan("Llama-2-70b-hf", "--gpu", "NVIDIA H100 80GB HBM3", "--batch", "1", "--json")
    told = json.loads(result.output)
    point = told["points"][0]
    assert point["tokens_per_s"] == pytest.approx(24.4, abs=0.05)
    assert point["used_ratio"] == pytest.approx(0.00339, abs=1e-5)
    assert point["idle_ratio"] == 1 - point["used_ratio"]
    assert point["limiter"] == "memory"
    assert told["cards_needed"] == 2
    assert told["kv_limited_batch"] is None
    assert 295 <= told["compute_bound_batch"] <= 310


def test_bytes_and_cost_follow_from_the_options() -> None:
    base = ("Llama-3.1-8B", "--gpu", "H100 SXM", "--batch", "16", "--context", "4096", "--json")
    plain = json.loads(plan(*base, "--price", "2.5").output)
    fp8 = json.loads(plan(*base, "--dtype", "fp8", "--kv-dtype", "fp8").output)
    two = json.loads(plan(*base, "--price", "2.5", "--tp", "2").output)
    assert fp8["compute_dtype"] == "fp8"
    assert fp8["points"][0]["kv_bytes"] == plain["points"][0]["kv_bytes"] / 2
    assert fp8["points"][0]["cost_per_million_tokens"] is None
    point = plain["points"][0]
    assert point["cost_per_million_tokens"] == pytest.approx(2.5 / 3600 / point["tokens_per_s"] * 1e6)
    # twice the cards, half the time: the same cost, and room for more than twice the sequences
    assert two["points"][0]["cost_per_million_tokens"] == pytest.approx(
        point["cost_per_million_tokens"], rel=1e-3
    )
    assert two["kv_limited_batch"] > 2 * plain["kv_limited_batch"]


def test_kv_heavy_decode_is_said_never_to_reach_the_ridge() -> None:
    result = plan("Llama-2-7b-hf", "--gpu", "H100 SXM", "--context", "600")
    assert "bound by compute from: never" in result.output


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_builtin_shape_can_be_planned(name: str) -> None:
    result = plan(name, "--gpu", "NVIDIA B200", "--context", "8192", "--tp", "8")
    assert result.exit_code == 0, result.output
    assert max(len(line) for line in result.output.splitlines()) <= 140


def test_folder_with_a_configuration_is_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen/Qwen3-8B"]))
    told = json.loads(plan(str(tmp_path), "--gpu", "L40S", "--json").output)
    assert told["parameters"] == 8190735360


def test_unknown_model_lists_what_is_known_and_unknown_architecture_is_named(tmp_path: Path) -> None:
    missing = plan("org/nothing", "--gpu", "L40S", home=tmp_path)
    assert missing.exit_code == 1
    assert "Built-in shapes: Llama-2-7b-hf" in missing.output
    (tmp_path / "config.json").write_text('{"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}')
    strange = plan(str(tmp_path), "--gpu", "L40S")
    assert strange.exit_code == 1
    assert "unknown architecture Mamba2ForCausalLM: FLOP basis absent" in strange.output


def test_ambiguous_gpu_is_a_usage_error_that_lists_candidates() -> None:
    result = plan("Llama-3.1-8B", "--gpu", "A100 SXM")
    assert result.exit_code == 2
    assert "NVIDIA A100-SXM4-40GB (40 GB)" in result.output
    assert plan("Llama-3.1-8B", "--gpu", "A100 SXM", "--gpu-memory", "80").exit_code == 0


def test_users_peak_and_bandwidth_replace_the_sheets() -> None:
    told = json.loads(
        plan("Llama-3.1-8B", "--gpu", "L40S", "--peak", "100", "--bandwidth", "500", "--json").output
    )
    assert (told["flops_per_s"], told["memory_bytes_per_s"]) == (100e12, 500e9)
    assert "overridden" in told["device_source"]
