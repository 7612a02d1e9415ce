"""The bound against published measurements, where the folder of shared data is at hand.

Found through GPUIDLE_SHARED_DATA, or as ../shared/data beside the repository.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import pytest
from msgspec.structs import replace

from gpuidle.agent.physics.builtin import find_builtin
from gpuidle.agent.physics.parts import ModelShape, WeightFormat
from gpuidle.agent.physics.peaks import DevicePeaks, find_peaks
from gpuidle.agent.physics.quantisation import BF16, FP8, FP8_BLOCK
from gpuidle.agent.physics.roofline import Bound, compute_time_s, matmul_time_s, step_time_s
from gpuidle.agent.physics.shapes import shape_from_config
from gpuidle.agent.physics.work import Work, causal_pairs, work

Row = Mapping[str, str]


def rows_of(name: str) -> list[Row]:
    root = os.environ.get("GPUIDLE_SHARED_DATA") or Path(__file__).parents[4] / "shared" / "data"
    path = Path(root) / name
    if not path.exists():
        pytest.skip(f"no shared data: set GPUIDLE_SHARED_DATA to the folder that holds {name}")
    with path.open() as file:
        return list(csv.DictReader(file))


GPUS = {
    "A100-SXM-80GB": "A100-SXM4-80GB",
    "H100-SXM-80GB": "H100 80GB HBM3",
    "H100-SXM-64GB-HBM2e": "H100 64GB HBM2e",
    "H100-PCIe-80GB": "H100 PCIe",
    "B200-SXM-180GB": "B200",
    "MI250X-GCD": "MI250X GCD",
    "RTX4090": "RTX 4090",
    "RTX4080": "RTX 4080",
    "RTX3090": "RTX 3090",
    "RTX-A6000": "RTX A6000",
    "RTX6000-Ada": "RTX 6000 Ada",
    "M2-Ultra-76c": "M2 Ultra 76c",
    "L40S": "L40S",
}
BUILTIN = {
    "Llama-2-7B": "Llama-2-7b-hf",
    "Llama-2-13B": "Llama-2-13b-hf",
    "Llama-2-70B": "Llama-2-70b-hf",
    "Llama-3.1-8B": "Llama-3.1-8B",
    "Llama-3.1-70B": "Llama-3.1-70B",
    "Llama-3.3-70B": "Llama-3.1-70B",
    "Llama-3.1-405B": "Llama-3.1-405B",
    "Qwen3-8B": "Qwen3-8B",
    "Qwen3-32B": "Qwen3-32B",
}
QWEN3_14B = {
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
FORMATS = {
    "fp8": FP8,
    "int8": WeightFormat("int8", 8, "bf16"),
    "int4g32": WeightFormat("int4-g32", 5, "bf16"),
    "q4_0": WeightFormat("q4_0", 4.5, "bf16"),
    "q4_k_m": WeightFormat("q4_k_m", 4.82, "bf16"),
}


def shape_of(model: str, fmt: str = "bf16") -> ModelShape:
    shape = shape_from_config(QWEN3_14B) if model == "Qwen3-14B" else find_builtin(BUILTIN[model])
    assert shape is not None
    if fmt not in FORMATS:
        return shape
    stored = FORMATS[fmt]
    return replace(shape, matmuls=tuple(replace(m, format=stored) for m in shape.matmuls))


def device(name: str) -> DevicePeaks:
    peaks = find_peaks(GPUS[name], None)
    assert peaks is not None
    return peaks


def work_of(row: Row) -> Work:
    shape = shape_of(row["model"], row["weight_fmt"])
    batch, tokens, ranks = float(row["batch"]), float(row["ctx_or_input"]), int(row["n_gpu"])
    if row["phase"] == "decode":
        return work(
            shape,
            tensor_parallel=ranks,
            tokens=batch,
            logit_rows=batch,
            attention_pairs=batch * tokens,
            kv_read_tokens=batch * tokens,
        )
    return work(
        shape,
        tensor_parallel=ranks,
        tokens=batch * tokens,
        logit_rows=batch,
        attention_pairs=batch * causal_pairs(tokens, 0),
        kv_read_tokens=0,
    )


def test_no_published_point_beats_the_bound() -> None:
    rows = rows_of("bench/published_points.csv")
    beaten = [
        row["id"]
        for row in rows
        if step_time_s(work_of(row), device(row["gpu"])).seconds * 1e3 > float(row["measured_ms"])
    ]
    assert beaten == []
    assert len(rows) == 88


def independent(row: Row) -> float:
    """Our bound in ms under the assumptions of the independent one, where they are not ours by default."""
    peaks, step = device(row["gpu"]), work_of(row)
    bound: Bound = step_time_s(step, peaks, at_max_clock=False)
    if row["phase"] == "prefill" and row["gpu"] in {"RTX4090", "RTX4080"}:
        return float(bound.seconds) * 1e3 / 2  # its peak is that of 16-bit accumulation
    if row["phase"] == "prefill" and row["weight_fmt"] == "fp8":
        # all in FP8, attention and lm_head too; writes of the cache left out
        return (
            max(
                float(step.total_flops) / peaks.rate("fp8"),
                float(step.weight_bytes) / peaks.memory_bytes_per_s,
            )
            * 1e3
        )
    return float(bound.seconds) * 1e3


def test_independent_bounds_are_reproduced_within_2_per_cent() -> None:
    for row in rows_of("bench/published_points.csv"):
        assert independent(row) == pytest.approx(float(row["roofline_ms"]), rel=0.02), row["id"]


@pytest.mark.parametrize(
    ("file", "gpu"),
    [
        ("ops/aic_gemm_h100_sxm_vllm0.24.0.csv", "H100-SXM-80GB"),
        ("ops/aic_gemm_a100_sxm_vllm0.14.0.csv", "A100-SXM-80GB"),
    ],
)
def test_no_measured_product_beats_the_bound(file: str, gpu: str) -> None:
    formats = {"bfloat16": BF16, "fp8": FP8, "fp8_block": FP8_BLOCK}
    peaks, beaten, rows = device(gpu), [], rows_of(file)
    for row in rows:
        m, n, k = (int(row[key]) for key in "mnk")
        bound = matmul_time_s(m, k, n, formats[row["gemm_dtype"]], peaks)
        if bound.seconds * 1e3 > float(row["latency_ms"]):
            beaten.append(row)
    assert beaten == []
    assert len(rows) > 3000


def test_small_products_on_an_h100_reach_80_per_cent_of_the_bound() -> None:
    peaks = device("H100-SXM-80GB")
    efficiency = []
    for row in rows_of("ops/aic_gemm_h100_sxm_vllm0.24.0.csv"):
        m, n, k = (int(row[key]) for key in "mnk")
        if row["gemm_dtype"] == "bfloat16" and m <= 64 and 4096 <= n <= 16384 and 4096 <= k <= 16384:
            bound = matmul_time_s(m, k, n, BF16, peaks, at_max_clock=False)
            efficiency.append(float(bound.seconds) * 1e3 / float(row["latency_ms"]))
    assert len(efficiency) == 448
    assert median(efficiency) == pytest.approx(0.80, abs=0.03)


def test_a_real_server_with_one_user_used_a_fifth_of_a_per_cent() -> None:
    """Decode rows over the whole time; the prompt's 138 rows are a hundredth of it and left out."""
    row = next(
        row
        for row in rows_of("bench/tokenomics_h100_vllm_e2e.csv")
        if "70B" in row["model"] and row["batch"] == "1" and float(row["input_tokens"]) == 138
    )
    prompt, output = 138, int(float(row["output_tokens"]))
    contexts = range(prompt, prompt + output)
    steps = work(
        shape_of(row["model"]),
        tensor_parallel=int(row["tp_h100"]),
        tokens=output,
        logit_rows=output,
        attention_pairs=causal_pairs(output, prompt),
        kv_read_tokens=sum(contexts),
        steps=output,
    )
    used = float(compute_time_s(steps, device("H100-SXM-80GB"))) / float(row["elapsed_s"])
    assert output == 900
    assert used == pytest.approx(0.00199, rel=0.02)


def test_bandwidth_of_a_flat_decode_is_flat_over_the_batch() -> None:
    """Steps of one model at many batch sizes: bytes over time stay the same while the cache's part grows."""
    reached: dict[str, list[float]] = {}
    for row in rows_of("bench/published_points.csv"):
        if row["gpu"] == "H100-SXM-64GB-HBM2e" and row["phase"] == "decode":
            bound = step_time_s(work_of(row), device(row["gpu"]), at_max_clock=False)
            reached.setdefault(row["model"], []).append(
                float(bound.memory_s) * 1e3 / float(row["measured_ms"])
            )
    assert set(reached) == {"Llama-2-7B", "Llama-2-13B"}
    for model, spread in (("Llama-2-7B", 0.03), ("Llama-2-13B", 0.05)):
        assert len(reached[model]) == 3
        assert max(reached[model]) / min(reached[model]) - 1 <= spread
