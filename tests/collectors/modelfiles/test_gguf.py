from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuidle.agent.physics.shapes import UnknownArchitecture, shape_from_config
from gpuidle.collectors.modelfiles.gguf import GgufError, read_gguf_header

Tensor = tuple[str, tuple[int, ...], int]
F32, F16, Q4_0, Q6_K, MXFP4 = 0, 1, 2, 14, 39


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, value: object) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", 6, value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", 4, value)
    assert isinstance(value, list)
    if isinstance(value[0], str):
        return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(item) for item in value)
    return text(key) + struct.pack("<IIQ", 9, 4, len(value)) + struct.pack(f"<{len(value)}I", *value)


def gguf(metadata: dict[str, object], tensors: Sequence[Tensor], *, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    body = b"".join(entry(key, value) for key, value in metadata.items())
    for name, dims, kind in tensors:
        body += text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        body += struct.pack("<IQ", kind, 0)
    return head + body + b"\0" * 64


def metadata_of(architecture: str, **more: object) -> dict[str, object]:
    sizes: dict[str, object] = {
        "embedding_length": 256,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return {
        "general.architecture": architecture,
        "general.name": "tiny",
        "tokenizer.ggml.tokens": [f"token {index}" for index in range(5000)],
        "tokenizer.ggml.token_type": [1] * 5000,
        **{f"{architecture}.{key}": value for key, value in sizes.items()},
    }


def attention(layer: int, kind: int = Q4_0) -> list[Tensor]:
    return [
        (f"blk.{layer}.attn_norm.weight", (256,), F32),
        (f"blk.{layer}.attn_q.weight", (256, 256), kind),
        (f"blk.{layer}.attn_k.weight", (256, 128), kind),
        (f"blk.{layer}.attn_v.weight", (256, 128), Q6_K if kind == Q4_0 else kind),
        (f"blk.{layer}.attn_output.weight", (256, 256), kind),
        (f"blk.{layer}.ffn_norm.weight", (256,), F32),
    ]


def dense(kind: int = Q4_0) -> list[Tensor]:
    tensors: list[Tensor] = [("token_embd.weight", (256, 1024), Q4_0 if kind == Q4_0 else kind)]
    for layer in range(2):
        tensors += attention(layer, kind)
        tensors += [
            (f"blk.{layer}.ffn_gate.weight", (256, 512), kind),
            (f"blk.{layer}.ffn_up.weight", (256, 512), kind),
            (f"blk.{layer}.ffn_down.weight", (512, 256), kind),
        ]
    return [*tensors, ("output_norm.weight", (256,), F32), ("rope_freqs.weight", (32,), F32)]


HEAD: Tensor = ("output.weight", (256, 1024), Q6_K)
LLAMA = {
    "model_type": "llama",
    "torch_dtype": "float16",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}


def header_of(tmp_path: Path, data: bytes, name: str = "model.gguf") -> dict[str, object]:
    path = tmp_path / name
    path.write_bytes(data)
    return {"gguf": read_gguf_header(path)}


def test_gguf_in_16_bits_is_the_same_shape_as_its_config_json(tmp_path: Path) -> None:
    tensors = [*dense(F16), ("output.weight", (256, 1024), F16)]
    ours = shape_from_config(header_of(tmp_path, gguf(metadata_of("llama"), tensors)))
    theirs = shape_from_config(LLAMA)
    assert ours.parameters == theirs.parameters + 32  # the table of rotary factors
    assert ours.matmul_parameters == theirs.matmul_parameters
    assert ours.weight_bytes == theirs.weight_bytes
    assert ours.kv_bytes_per_token() == theirs.kv_bytes_per_token()
    assert ours.attentions == theirs.attentions
    assert (ours.name, ours.compute_dtype) == ("tiny", "bf16")


def test_bits_come_from_each_tensors_type(tmp_path: Path) -> None:
    shape = shape_from_config(header_of(tmp_path, gguf(metadata_of("llama"), [*dense(), HEAD])))
    layer = 256 * 256 * 2 + 256 * 128 + 3 * 256 * 512
    expected = 2 * (layer * 4.5 + 256 * 128 * 6.5625) / 8 + 256 * 1024 * 6.5625 / 8
    assert shape.weight_bytes == expected
    assert shape.compute_dtype == "int8"
    assert not shape.tied


def test_without_a_head_the_embedding_is_the_head(tmp_path: Path) -> None:
    shape = shape_from_config(header_of(tmp_path, gguf(metadata_of("llama"), dense())))
    assert shape.tied
    assert next(m for m in shape.matmuls if m.part == "lm_head").format.name == "q4_0"


def test_experts_are_counted_and_their_router_is_measured_in_16_bits(tmp_path: Path) -> None:
    tensors: list[Tensor] = [("token_embd.weight", (256, 1024), F16), HEAD]
    for layer in range(2):
        tensors += attention(layer)
        tensors += [
            (f"blk.{layer}.ffn_gate_inp.weight", (256, 8), F32),
            (f"blk.{layer}.ffn_gate_exps.weight", (256, 128, 8), MXFP4),
            (f"blk.{layer}.ffn_up_exps.weight", (256, 128, 8), MXFP4),
            (f"blk.{layer}.ffn_down_exps.weight", (128, 256, 8), MXFP4),
        ]
    metadata = metadata_of("qwen3moe", expert_count=8, expert_used_count=2)
    shape = shape_from_config(header_of(tmp_path, gguf(metadata, tensors)))
    expert = [m for m in shape.matmuls if m.part == "expert"]
    assert sum(m.parameters for m in expert) == 2 * 8 * 3 * 256 * 128
    assert sum(m.active_parameters for m in expert) == 2 * 2 * 3 * 256 * 128
    assert {m.format.compute for m in shape.matmuls if m.part == "router"} == {"bf16"}
    assert (shape.experts, shape.experts_per_token) == (8, 2)


def test_windows_follow_the_architecture(tmp_path: Path) -> None:
    windowed = metadata_of("gemma2", attention__sliding_window=64)
    shape = shape_from_config(header_of(tmp_path, gguf(windowed, dense())))
    assert {(a.layers, a.window) for a in shape.attentions} == {(1, 64), (1, None)}


@pytest.mark.parametrize(
    ("architecture", "more", "extra", "message"),
    [
        ("mamba", {}, [], "unknown architecture mamba"),
        ("llama", {}, [("blk.0.ssm_in.weight", (256, 512), F16)], "unknown tensor blk.0.ssm_in.weight"),
        ("llama", {}, [("output.weight", (256, 1024), 77)], "unknown type 77"),
        ("llama", {"attention__sliding_window": 64}, [], "sliding window"),
        ("llama", {"attention__head_count_kv": [2, 4]}, [], "differ in attention.head_count_kv"),
        ("llama", {"block_count": 3}, [], "2 of 3 layers have a known attention"),
    ],
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, architecture: str, more: dict[str, object], extra: list[Tensor], message: str
) -> None:
    data = gguf(metadata_of(architecture, **more), [*dense(), *extra])
    with pytest.raises(UnknownArchitecture, match=message):
        shape_from_config(header_of(tmp_path, data))


def test_parts_of_a_split_file_are_put_together(tmp_path: Path) -> None:
    tensors = [*dense(), HEAD]
    split = {"split.count": 2, "split.tensors.count": len(tensors)}
    second = tmp_path / "m-00002-of-00002.gguf"
    second.write_bytes(gguf({"split.count": 2}, tensors[9:]))
    first = gguf({**metadata_of("llama"), **split}, tensors[:9])
    whole = shape_from_config(header_of(tmp_path, first, "m-00001-of-00002.gguf"))
    assert (
        whole.parameters
        == shape_from_config(header_of(tmp_path, gguf(metadata_of("llama"), tensors))).parameters
    )
    from_second = read_gguf_header(second)
    assert shape_from_config({"gguf": from_second}).parameters == whole.parameters
    second.write_bytes(gguf({"split.count": 2}, tensors[10:]))
    with pytest.raises(GgufError, match="were announced"):
        read_gguf_header(tmp_path / "m-00001-of-00002.gguf")
    second.unlink()
    with pytest.raises(FileNotFoundError):
        read_gguf_header(tmp_path / "m-00001-of-00002.gguf")


def test_a_file_cut_anywhere_in_its_header_is_an_error(tmp_path: Path) -> None:
    whole = gguf({"general.architecture": "llama", "llama.block_count": 2, "x": [1, 2, 3]}, dense())[:-64]
    path = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(GgufError):
            read_gguf_header(path)


@pytest.mark.parametrize(
    "data",
    [
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 99),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 1 << 61),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("t") + struct.pack("<I", 9),
        b"PK\x03\x04",
    ],
)
def test_damaged_or_hostile_headers_are_errors(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(GgufError):
        header_of(tmp_path, data)
