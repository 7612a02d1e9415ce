"""The shape of a model as an engine serves it: its configuration, overridden by the engine's own options."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from gpuidle.agent.physics.parts import ModelShape, UnknownArchitecture
from gpuidle.agent.physics.quantisation import UnknownQuantisation
from gpuidle.agent.physics.shapes import shape_from_config

_KV_BYTES: Mapping[str, float | None] = {
    "auto": None,
    "bfloat16": 2.0,
    "bf16": 2.0,
    "float16": 2.0,
    "half": 2.0,
    "fp16": 2.0,
    "float32": 4.0,
    "float": 4.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_inc": 1.0,
    "int8": 1.0,
}
_ONLINE: Mapping[str, Mapping[str, object]] = {
    "fp8": {"quant_method": "fp8"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
}
"""Methods that engines apply while they load 16-bit weights."""


def served_shape(
    config: Mapping[str, object],
    *,
    name: str = "",
    dtype: str | None = None,
    kv_dtype: str | None = None,
    quantization: str | None = None,
) -> ModelShape:
    """Return the shape as it is served.

    Args:
        config: What `shape_from_config` takes.
        name: To show; "": as the configuration says.
        dtype: The engine's option for activations ("bfloat16"); None and "auto" leave the file's.
        kv_dtype: The engine's option for the cache ("fp8"); None and "auto" leave the checkpoint's.
        quantization: The engine's option ("fp8"). Where the checkpoint is quantised, its own block counts:
            the option then only picks kernels ("awq_marlin").

    Raises UnknownArchitecture, also for an option that is not known: its bytes would be a guess.
    """
    method = (quantization or "").lower()
    has_block = any(config.get(key) is not None for key in ("quantization_config", "hf_quant_config", "gguf"))
    has_block = has_block or config.get("compression_config") is not None
    text = config.get("text_config")
    if isinstance(text, Mapping) and text.get("quantization_config") is not None:
        has_block = True
    if method not in {"", "none", "auto"} and not has_block:
        if method not in _ONLINE:
            raise UnknownQuantisation(f"weights in 16 bits served with {quantization}: FLOP basis absent")
        config = {**config, "quantization_config": _ONLINE[method]}
    shape = shape_from_config(config, name=name, dtype=_activations(config, dtype))
    if kv_dtype is None:
        return shape
    if kv_dtype.lower() not in _KV_BYTES:
        raise UnknownArchitecture(f"unknown KV cache dtype {kv_dtype}: FLOP basis absent")
    kv_bytes = _KV_BYTES[kv_dtype.lower()]
    return shape if kv_bytes is None else replace(shape, kv_dtype_bytes=kv_bytes)


def _activations(config: Mapping[str, object], dtype: str | None) -> str | None:
    """Return the dtype that `shape_from_config` is to be told. On "auto" engines serve FP32 files in FP16."""
    if dtype is not None and dtype.lower() not in {"auto", ""}:
        return dtype.lower()
    stated: object = None
    for part in (config.get("text_config"), config):
        if isinstance(part, Mapping):
            stated = stated or part.get("dtype") or part.get("torch_dtype")
    return "float16" if str(stated).removeprefix("torch.") in {"float32", "float"} else None
