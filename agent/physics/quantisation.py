"""Which format each matrix is stored in, from a configuration's quantisation block.

Covers compressed-tensors, AWQ, GPTQ, FP8 (per tensor and in blocks), MXFP4, ModelOpt (FP8, NVFP4; also as
`hf_quant_config.json`) and bitsandbytes. A block that says something else is refused: bits are not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias, cast

from gpuidle.agent.physics.parts import UnknownArchitecture, WeightFormat

FormatOf: TypeAlias = "Callable[[str], WeightFormat]"
"""Takes a module's full name, such as "model.layers.3.mlp.up_proj"."""


class UnknownQuantisation(UnknownArchitecture):
    """The quantisation block is of a kind, or has a setting, that is not known."""


BF16 = WeightFormat("bf16", 16, "bf16")
FP16 = WeightFormat("fp16", 16, "bf16")
FP32 = WeightFormat("fp32", 32, "fp32")
FP8 = WeightFormat("fp8", 8, "fp8")
FP8_BLOCK = WeightFormat("fp8-block128", 8 + 32 / 128**2, "fp8")
INT8 = WeightFormat("int8", 8, "int8")
MXFP4 = WeightFormat("mxfp4", 4.25, "bf16")
"""Four bits and an 8-bit scale for 32 weights. Multiplied in 16 bits, but on Blackwell by some kernels in
FP8: `compute_variants` gives the range."""
NVFP4 = WeightFormat("nvfp4", 4.5, "fp4")
"""Four bits and an 8-bit scale for 16 weights."""
NVFP4_WEIGHTS = WeightFormat("nvfp4-w4a16", 4.5, "bf16")

_PLAIN = {
    "bfloat16": BF16,
    "float16": FP16,
    "half": FP16,
    "float32": FP32,
    "float": FP32,
}


def plain_format(dtype: str) -> WeightFormat:
    """Return the format of weights that are not quantised. Raises UnknownQuantisation."""
    found = _PLAIN.get(dtype.removeprefix("torch."))
    if found is None:
        raise UnknownQuantisation(f"unknown weight dtype {dtype}: FLOP basis absent")
    return found


def integer_format(bits: int, group: int, *, zero_bits: float) -> WeightFormat:
    """Return a weight-only integer format: a 16-bit scale and a zero point for each group of weights."""
    extra = 0.0 if group <= 0 else (16 + zero_bits) / group
    return WeightFormat(f"int{bits}-g{group}" if group > 0 else f"int{bits}", bits + extra, "bf16")


def formats(quantisation: Mapping[str, object] | None, plain: WeightFormat) -> FormatOf:
    """Return the rule that gives each module's format.

    `quantisation` is the block `quantization_config` of a `config.json`, or the whole of a
    `hf_quant_config.json`; None where there is neither. Raises UnknownQuantisation.
    """
    if quantisation is None:
        return lambda _module: plain
    inner = quantisation.get("quantization")
    if isinstance(inner, Mapping):
        return _modelopt(cast("Mapping[str, object]", inner), plain)
    method = str(quantisation.get("quant_method", "")).lower().replace("_", "-")
    builders: dict[str, Callable[[Mapping[str, object], WeightFormat], FormatOf]] = {
        "awq": _awq,
        "gptq": _gptq,
        "fp8": _fp8,
        "fbgemm-fp8": _fp8,
        "mxfp4": _mxfp4,
        "modelopt": _modelopt,
        "modelopt-fp4": _modelopt,
        "compressed-tensors": _compressed_tensors,
        "bitsandbytes": _bitsandbytes,
    }
    builder = builders.get(method)
    if builder is None:
        raise UnknownQuantisation(f"unknown quantisation {method or '(unnamed)'}: FLOP basis absent")
    return builder(quantisation, plain)


def kv_bytes_of(quantisation: Mapping[str, object] | None) -> float | None:
    """Return the bytes of a cached element that the checkpoint asks for, or None if it does not say."""
    if quantisation is None:
        return None
    inner = quantisation.get("quantization", quantisation)
    if not isinstance(inner, Mapping):
        return None
    scheme = inner.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        bits = scheme.get("num_bits")
        if isinstance(bits, int) and bits in {4, 8}:
            return bits / 8
        raise UnknownQuantisation(f"unknown KV cache format of {bits!r} bits")
    algorithm = inner.get("kv_cache_quant_algo")
    if algorithm is None and isinstance(scheme, str):
        algorithm = scheme
    if algorithm is None:
        return None
    known = {"FP8": 1.0, "INT8": 1.0, "NVFP4": 0.5625}
    if str(algorithm).upper() not in known:
        raise UnknownQuantisation(f"unknown KV cache format {algorithm}")
    return known[str(algorithm).upper()]


def is_excluded(module: str, patterns: Sequence[str]) -> bool:
    """Whether a module is named by one of the patterns that quantisers write.

    "re:..." is a regular expression, "*" a glob; else the name itself, a parent of it, or a run of whole
    name parts inside it ("lm_head", "self_attn", "block_sparse_moe.gate").
    """
    module = module.replace("language_model.", "")
    for written in patterns:
        pattern = written.replace("language_model.", "")
        if pattern.startswith("re:"):
            try:
                if re.match(pattern[3:], module):
                    return True
            except re.error as error:
                raise UnknownQuantisation(f"exclusion {written!r}: {error}: FLOP basis absent") from error
        elif "*" in pattern:
            if fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*"):
                return True
        elif f".{pattern}." in f".{module}.":
            return True
    return False


def _strings(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []


def _number(block: Mapping[str, object], *keys: str) -> int:
    for key in keys:
        value = block.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and -1 <= value < 1 << 20:
            return value
    raise UnknownQuantisation(f"the quantisation block lacks {' or '.join(keys)}")


def _bits(block: Mapping[str, object]) -> int:
    bits = _number(block, "bits", "w_bit")
    if bits not in {2, 3, 4, 8}:
        raise UnknownQuantisation(f"weights of {bits} bits: FLOP basis absent")
    return bits


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 20


def _except(fmt: WeightFormat, plain: WeightFormat, patterns: Sequence[str]) -> FormatOf:
    return lambda module: plain if is_excluded(module, patterns) else fmt


_NEVER = ("lm_head", "embed_tokens")
"""Loaders of these methods leave the head alone unless told otherwise."""
_ROUTERS = (
    "re:.*\\.(mlp|block_sparse_moe|feed_forward|mixer)\\.(gate|router)$",
    "re:.*\\.shared_expert_gate$",
)
"""Routers are small and stay in 16 bits: engines build them without a quantised kernel."""


def _awq(block: Mapping[str, object], plain: WeightFormat) -> FormatOf:
    bits, group = _bits(block), _number(block, "group_size", "q_group_size")
    zeros = block.get("zero_point", True)
    fmt = integer_format(bits, group, zero_bits=bits if zeros else 0)
    return _except(fmt, plain, (*_NEVER, *_ROUTERS, *_strings(block.get("modules_to_not_convert"))))


def _gptq(block: Mapping[str, object], plain: WeightFormat) -> FormatOf:
    bits, group = _bits(block), _number(block, "group_size")
    fmt = integer_format(bits, group, zero_bits=bits)
    never = _ROUTERS if block.get("lm_head") else (*_NEVER, *_ROUTERS)
    return _except(fmt, plain, (*never, *_strings(block.get("modules_to_not_convert"))))


def _fp8(block: Mapping[str, object], plain: WeightFormat) -> FormatOf:
    size = block.get("weight_block_size")
    fmt = FP8
    if size is not None:
        if not (isinstance(size, (list, tuple)) and len(size) == 2 and all(_positive(side) for side in size)):
            raise UnknownQuantisation(f"weight_block_size {size!r}: FLOP basis absent")
        fmt = WeightFormat(f"fp8-block{size[0]}", 8 + 32 / (size[0] * size[1]), "fp8")
    ignored = _strings(block.get("ignored_layers")) + _strings(block.get("modules_to_not_convert"))
    return _except(fmt, plain, (*_NEVER, *_ROUTERS, *ignored))


def _mxfp4(block: Mapping[str, object], plain: WeightFormat) -> FormatOf:
    ignored = _strings(block.get("modules_to_not_convert"))

    def of(module: str) -> WeightFormat:
        return MXFP4 if ".experts." in module and not is_excluded(module, ignored) else plain

    return of


def _bitsandbytes(block: Mapping[str, object], plain: WeightFormat) -> FormatOf:
    skipped = (*_NEVER, *_strings(block.get("llm_int8_skip_modules")))
    if block.get("load_in_8bit"):
        return _except(INT8, plain, skipped)
    if block.get("load_in_4bit"):
        # 64 weights share a 32-bit scale; doubly quantised, 8 bits and a 32-bit scale for 256 of them
        bits = 4 + (8 / 64 + 32 / (64 * 256) if block.get("bnb_4bit_use_double_quant") else 32 / 64)
        return _except(WeightFormat("bnb-4bit", bits, "bf16"), plain, skipped)
    raise UnknownQuantisation("bitsandbytes with neither 4 nor 8 bits: FLOP basis absent")


_MODELOPT = {
    "FP8": FP8,
    "FP8_PB_WO": WeightFormat("fp8-block128", FP8_BLOCK.bits, "bf16"),
    "FP8_PB_REAL": FP8_BLOCK,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8,
    "NVFP4": NVFP4,
    "NVFP4_AWQ": NVFP4,
    "W4A16_NVFP4": NVFP4_WEIGHTS,
    "W8A8_SQ_PER_CHANNEL": INT8,
    "INT8_SQ": INT8,
    "MXFP4": MXFP4,
}


def _modelopt(block: Mapping[str, object], plain: WeightFormat) -> FormatOf:
    algorithm = str(block.get("quant_algo", "")).upper()
    excluded = _strings(block.get("exclude_modules")) + _strings(block.get("ignore"))
    if algorithm == "MIXED_PRECISION":
        layers = block.get("quantized_layers")
        if not isinstance(layers, Mapping):
            raise UnknownQuantisation("MIXED_PRECISION without quantized_layers: FLOP basis absent")
        named = {str(name): _modelopt_format(_group(row)) for name, row in layers.items()}

        def of(module: str) -> WeightFormat:
            for parent in _parents(module):
                if parent in named:
                    return named[parent]
            return plain

        return of
    return _except(_modelopt_format(block), plain, (*_NEVER, *_ROUTERS, *excluded))


def _modelopt_format(block: Mapping[str, object]) -> WeightFormat:
    algorithm = str(block.get("quant_algo", "")).upper()
    if algorithm in _MODELOPT:
        return _MODELOPT[algorithm]
    if algorithm in {"W4A16_AWQ", "W4A16", "INT4_AWQ"}:
        return integer_format(4, _number(block, "group_size"), zero_bits=0)
    if algorithm == "W4A8_AWQ":
        stored = integer_format(4, _number(block, "group_size"), zero_bits=0)
        return WeightFormat(f"{stored.name}-a8", stored.bits, "fp8")
    if algorithm in {"W8A16", "W8A16_WEIGHT_ONLY"}:
        return integer_format(8, 0, zero_bits=0)
    raise UnknownQuantisation(f"unknown ModelOpt algorithm {algorithm or '(unnamed)'}: FLOP basis absent")


def _parents(module: str) -> list[str]:
    pieces = module.split(".")
    return [".".join(pieces[:end]) for end in range(len(pieces), 0, -1)]


def _compressed_tensors(block: Mapping[str, object], plain: WeightFormat) -> FormatOf:
    """Each group has targets ("Linear", a name, "re:...") and says how weights and activations are kept."""
    groups = block.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UnknownQuantisation("compressed-tensors without config_groups: FLOP basis absent")
    ignored = _strings(block.get("ignore"))
    rules: list[tuple[list[str], WeightFormat]] = [
        (_strings(group.get("targets")), _compressed_format(group)) for group in map(_group, groups.values())
    ]

    def of(module: str) -> WeightFormat:
        if is_excluded(module, ignored):
            return plain
        for targets, fmt in rules:
            if is_excluded(module, [target for target in targets if target != "Linear"]):
                return fmt
        for targets, fmt in rules:
            if "Linear" in targets:
                return fmt
        return plain

    return of


def _group(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise UnknownQuantisation("a quantisation group that is no table: FLOP basis absent")
    return cast("Mapping[str, object]", value)


def _compressed_format(group: Mapping[str, object]) -> WeightFormat:
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise UnknownQuantisation("a compressed-tensors group without weights: FLOP basis absent")
    kind, bits = str(weights.get("type", "int")), weights.get("num_bits")
    activations = group.get("input_activations")
    acts = cast("Mapping[str, object]", activations) if isinstance(activations, Mapping) else {}
    act_kind, act_bits = str(acts.get("type", "")), acts.get("num_bits")
    size = weights.get("group_size")
    group_size = size if isinstance(size, int) and size > 0 else 0
    if kind == "float" and bits == 4:
        if act_bits is None:
            return NVFP4_WEIGHTS if group_size == 16 else MXFP4
        return NVFP4 if group_size == 16 else MXFP4
    if kind == "float" and bits == 8:
        structure = weights.get("block_structure")
        fmt = FP8_BLOCK if isinstance(structure, (list, tuple)) and list(structure) == [128, 128] else FP8
        return fmt if act_bits == 8 else WeightFormat(f"{fmt.name}-w8a16", fmt.bits, "bf16")
    if kind == "int" and bits == 8 and act_bits == 8 and act_kind == "int":
        return INT8
    if kind == "int" and isinstance(bits, int) and bits in {2, 3, 4, 8} and act_bits is None:
        return integer_format(bits, group_size, zero_bits=0 if weights.get("symmetric", True) else bits)
    if kind == "int" and bits == 4 and act_bits == 8:
        compute = "int8" if act_kind == "int" else "fp8"
        return WeightFormat(f"int4-g{group_size}-a8", 4 + (16 / group_size if group_size else 0), compute)
    raise UnknownQuantisation(
        f"unknown compressed-tensors scheme {kind}{bits} with activations {act_kind or 'float'}"
        f"{act_bits or 16}: FLOP basis absent"
    )
