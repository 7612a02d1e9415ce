"""`gpuidle plan`: what a model can do on a GPU, by the sheet."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

_BATCHES = (1, 4, 16, 64, 256, 1024)
_DTYPES: Mapping[str, Mapping[str, object] | None] = {
    "bf16": None,
    "fp16": None,
    "fp8": {"quant_method": "fp8"},
    "int8": {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head", "re:.*mlp\\.gate$"],
        "config_groups": {
            "all": {
                "targets": ["Linear"],
                "weights": {"type": "int", "num_bits": 8},
                "input_activations": {"type": "int", "num_bits": 8},
            }
        },
    },
    "int4": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
}
_KV_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}


@click.command()
@click.argument("model")
@click.option("--gpu", required=True, metavar="NAME", help='Such as "H100 SXM", or the driver\'s name.')
@click.option(
    "--gpu-memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB",
    help="Memory of the GPU, where its name alone does not settle which one.",
)
@click.option(
    "--peak",
    type=click.FloatRange(min=0, min_open=True),
    metavar="TFLOP/S",
    help="Override of the 16-bit peak; other dtypes scale with it.",
)
@click.option(
    "--bandwidth",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB/S",
    help="Override of the memory's bandwidth.",
)
@click.option("--tp", default=1, show_default=True, type=click.IntRange(1), help="Tensor-parallel ranks.")
@click.option("--pp", default=1, show_default=True, type=click.IntRange(1), help="Pipeline stages.")
@click.option("--dp", default=1, show_default=True, type=click.IntRange(1), help="Data-parallel replicas.")
@click.option("--ep", is_flag=True, help="Deal experts out whole over all ranks.")
@click.option(
    "--batch",
    multiple=True,
    type=click.IntRange(1),
    metavar="N",
    help="Sequences a step; may be repeated [default: 1 to 1024].",
)
@click.option(
    "--context",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    metavar="TOKENS",
    help="Cached tokens of each sequence; 0: the weights alone.",
)
@click.option(
    "--dtype", type=click.Choice(list(_DTYPES)), help="Format of the weights [default: the model's own]."
)
@click.option(
    "--kv-dtype", type=click.Choice(list(_KV_BYTES)), help="Format of the cache [default: the model's own]."
)
@click.option("--price", type=click.FloatRange(min=0), metavar="PER_HOUR", help="Price of one GPU an hour.")
@click.option("--currency", default="USD", show_default=True, help="Of the price.")
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
def command(
    model: str,
    gpu: str,
    gpu_memory: float | None,
    peak: float | None,
    bandwidth: float | None,
    tp: int,
    pp: int,
    dp: int,
    ep: bool,
    batch: tuple[int, ...],
    context: int,
    dtype: str | None,
    kv_dtype: str | None,
    price: float | None,
    currency: str,
    as_json: bool,
) -> None:
    """Print what MODEL can reach on a GPU at best: bounds, idle compute, where it turns compute-bound.

    MODEL is a folder, a config.json, a GGUF file, the hub id of a model in the local cache, or a built-in
    shape such as Llama-2-70b-hf. Nothing is downloaded. The bounds come from data sheets: no engine is
    faster, and all are slower.
    """
    from gpuidle.agent.physics.capacity import Parallel
    from gpuidle.agent.physics.peaks import NoPeak, find_peaks, known_devices
    from gpuidle.agent.physics.plan import make_plan
    from gpuidle.agent.physics.shapes import UnknownArchitecture, shape_from_config

    peaks = find_peaks(gpu, None if gpu_memory is None else round(gpu_memory * 1e9))
    if peaks is None:
        near = "; ".join(known_devices(gpu)[:6])
        raise click.BadParameter(
            f"{gpu!r} does not settle one GPU, give its memory with --gpu-memory, or one of: {near}",
            param_hint="--gpu",
        )
    peaks = peaks.override(
        bf16_flops_per_s=None if peak is None else peak * 1e12,
        memory_bytes_per_s=None if bandwidth is None else bandwidth * 1e9,
    )
    config, name = _configuration(model)
    try:
        shape = shape_from_config(_with_dtype(config, dtype), name=name)
        plan = make_plan(
            shape,
            peaks,
            batch or _BATCHES,
            context_tokens=context,
            parallel=Parallel(tp, pp, dp, ep),
            kv_dtype_bytes=None if kv_dtype is None else _KV_BYTES[kv_dtype],
            price_per_hour=price,
        )
    except (UnknownArchitecture, NoPeak) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        told: dict[str, Any] = msgspec.to_builtins(plan)
        for point, row in zip(plan.points, told["points"], strict=True):
            row["idle_ratio"] = point.idle_ratio
        click.echo(json.dumps({**told, "currency": currency if price is not None else None}, indent=2))
        return
    from gpuidle.agent.commands.plan_text import plan_lines

    click.echo("\n".join(plan_lines(plan, currency=currency)))


def _configuration(model: str) -> tuple[Mapping[str, object], str]:
    """Return the model's table and the name to show: files and the cache first, then the built-in ones."""
    from gpuidle.agent.physics.builtin import CONFIGS, builtin_name
    from gpuidle.collectors.modelfiles.model import ModelFileError, read_model

    try:
        return read_model(model, cwd=Path.cwd(), environ=os.environ), Path(model).name or model
    except ModelFileError as error:
        name = builtin_name(model)
        if name is None:
            known = ", ".join(full.partition("/")[2] for full in CONFIGS)
            raise click.ClickException(f"{error}\nBuilt-in shapes: {known}") from error
        return CONFIGS[name], name


def _with_dtype(config: Mapping[str, object], dtype: str | None) -> Mapping[str, object]:
    """Return the configuration with its weights in another format."""
    if dtype is None:
        return config
    if "gguf" in config:
        raise click.UsageError("--dtype: the tensors of a GGUF file have the formats they have")
    plain = "float16" if dtype == "fp16" else "bfloat16"
    changed = {
        key: value for key, value in config.items() if key not in {"hf_quant_config", "compression_config"}
    }
    for part in ("text_config", "llm_config"):
        inner = changed.get(part)
        if isinstance(inner, Mapping):
            kept = {
                k: v for k, v in inner.items() if k not in {"dtype", "torch_dtype", "quantization_config"}
            }
            changed[part] = kept
    return {**changed, "dtype": plain, "torch_dtype": plain, "quantization_config": _DTYPES[dtype]}
