from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuidle.agent.physics.builtin import CONFIGS
from gpuidle.agent.physics.served import served_shape
from gpuidle.agent.physics.shapes import ModelShape, UnknownArchitecture, shape_from_config

LLAMA: Mapping[str, object] = CONFIGS["meta-llama/Llama-3.1-8B"]
AWQ = {**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}


def test_options_left_alone_leave_the_configuration_alone() -> None:
    assert served_shape(LLAMA, dtype="auto", kv_dtype="auto", quantization=None) == shape_from_config(LLAMA)


def test_quantisation_while_loading_changes_bytes_and_rate() -> None:
    shape = served_shape(LLAMA, quantization="fp8")
    assert shape.compute_dtype == "fp8"
    assert shape.weight_bytes < 0.55 * shape_from_config(LLAMA).weight_bytes


def test_kernels_of_a_quantised_checkpoint_change_nothing() -> None:
    assert served_shape(AWQ, quantization="awq_marlin") == shape_from_config(AWQ)


def test_cache_dtype_of_the_engine_counts() -> None:
    assert served_shape(LLAMA, kv_dtype="fp8_e4m3").kv_bytes_per_token() == 131072 / 2


def test_fp32_files_are_served_in_16_bits_unless_told_otherwise() -> None:
    config = {**LLAMA, "dtype": None, "torch_dtype": "float32"}
    assert served_shape(config).compute_dtype == "bf16"
    assert served_shape(config, dtype="float32").compute_dtype == "fp32"


@pytest.mark.parametrize("options", [{"quantization": "rotor"}, {"kv_dtype": "fp2"}, {"dtype": "int5"}])
def test_unknown_options_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(UnknownArchitecture):
        served_shape(LLAMA, **options)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
QUANTISED: list[Mapping[str, object]] = [
    AWQ,
    {**LLAMA, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}},
    {
        **LLAMA,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "ignore": ["re:(", "lm_head"],
            "config_groups": {"a": {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 8}}},
        },
    },
    {"model_type": "llava", "text_config": dict(LLAMA)},
]


def spoil(table: dict[str, object], keys: list[int], value: object) -> None:
    """Put a value anywhere in a nested table."""
    names = sorted(table)
    name = names[keys[0] % len(names)]
    inner = table[name]
    if len(keys) > 1 and isinstance(inner, dict) and inner:
        spoil(inner, keys[1:], value)
    else:
        table[name] = value


@settings(max_examples=300, deadline=None)
@given(
    config=st.sampled_from([*CONFIGS.values(), *QUANTISED]),
    changes=st.lists(
        st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=4), JSON), min_size=1, max_size=3
    ),
)
def test_no_configuration_does_anything_but_give_a_shape_or_be_refused(
    config: Mapping[str, object], changes: list[tuple[list[int], object]]
) -> None:
    spoilt = copy.deepcopy(dict(config))
    for keys, value in changes:
        spoil(spoilt, keys, value)
    try:
        shape = shape_from_config(spoilt)
    except UnknownArchitecture:
        return
    assert isinstance(shape, ModelShape)
    assert shape.parameters > 0
    assert shape.weight_bytes > 0
