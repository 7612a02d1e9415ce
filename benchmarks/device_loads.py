"""Loads whose work is known: products, copies, the steps of a transformer.

torch on a GPU; in a rehearsal on the CPU, or without torch by sleeping.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class Ran(NamedTuple):
    """A load that ran from `start_ns` to `end_ns` of CLOCK_MONOTONIC, `calls` times."""

    start_ns: int
    end_ns: int
    calls: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e9


class Load(Protocol):
    """What the sections ask of a device."""

    name: str

    def matmul(self) -> tuple[Callable[[], object], float]:
        """Return a BF16 product and its FLOPs."""
        ...

    def copy(self) -> tuple[Callable[[], object], float]:
        """Return a copy and the bytes that it reads (and writes again)."""
        ...

    def steps(self, batch: int, *, graphs: bool) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return a decode step of `batch` rows and a prefill step of PREFILL_TOKENS.

        Raises:
            MemoryError: the device cannot hold it.
        """
        ...

    def wait(self) -> None:
        """Wait for everything that was called."""
        ...


PREFILL_TOKENS = 2048
CONTEXT = 512


def run_for(load: Load, call: Callable[[], object], seconds: float, duty: float = 1.0) -> Ran:
    """Call again and again, some calls in flight; with `duty` below 1 pause in every tenth of a second."""
    load.wait()
    start = time.monotonic_ns()
    end, calls = start + round(seconds * 1e9), 0
    while (now := time.monotonic_ns()) < end:
        until = now + round(1e8 * duty)
        while time.monotonic_ns() < until:
            for _ in range(4):
                call()
            calls += 4
            load.wait()
        if duty < 1:
            time.sleep(max(0.0, (now + 1e8 - time.monotonic_ns()) / 1e9))
    load.wait()
    return Ran(start, time.monotonic_ns(), calls)


class TorchLoad:
    """torch on `device`."""

    def __init__(self, device: str) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.device = device
        self.on_gpu = device.startswith("cuda")
        self.name = f"torch {self.torch.__version__} on {device}"
        self.torch.set_grad_enabled(False)

    def _random(self, *shape: int) -> Any:
        return self.torch.randn(*shape, device=self.device, dtype=self.torch.bfloat16) / 32

    def matmul(self) -> tuple[Callable[[], object], float]:
        """See Load."""
        size = 8192 if self.on_gpu else 256
        a, b = self._random(size, size), self._random(size, size)
        out = self.torch.empty_like(a)
        return lambda: self.torch.matmul(a, b, out=out), 2.0 * size**3

    def copy(self) -> tuple[Callable[[], object], float]:
        """See Load. At least ten times the L2 cache, which would else hide traffic."""
        size = 1 << 22
        if self.on_gpu:
            cache = getattr(self.torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
            size = max(2 << 30, 10 * cache)
        source = self.torch.ones(size, dtype=self.torch.uint8, device=self.device)
        target = self.torch.empty_like(source)
        return lambda: target.copy_(source), float(size)

    def steps(self, batch: int, *, graphs: bool) -> tuple[Callable[[], object], Callable[[], object]]:
        """See Load. A decoder of the shape of an 8B model, half as deep where memory is short."""
        width, heads, kv, inner, layers = (4096, 32, 8, 14336, 32) if self.on_gpu else (64, 4, 2, 128, 2)
        if self.on_gpu:
            gc.collect()  # the model before this one
            self.torch.cuda.empty_cache()
            free = self.torch.cuda.mem_get_info()[0]
            layers = 32 if free > 40e9 else 8
            cache_bytes = batch * CONTEXT * layers * 2 * kv * (width // heads) * 2
            if cache_bytes > 0.4 * free:
                raise MemoryError(f"a KV cache of {cache_bytes / 1e9:.0f} GB does not fit")
        model = _Decoder(self, width, heads, kv, inner, layers, batch)
        tokens = PREFILL_TOKENS if self.on_gpu else 64
        row, prompt = self._random(batch, 1, width), self._random(1, tokens, width)

        def decode() -> object:
            return model.decode(row)

        def prefill() -> object:
            return model.prefill(prompt)

        for _ in range(3):
            decode(), prefill()
        self.wait()
        if graphs and self.on_gpu:
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(graph):
                decode()
            return graph.replay, prefill
        return decode, prefill

    def wait(self) -> None:
        """See Load."""
        if self.on_gpu:
            self.torch.cuda.synchronize()


class _Decoder:
    """Grouped-query attention and a gated MLP, in BF16, with a cache of CONTEXT tokens a sequence."""

    def __init__(
        self, load: TorchLoad, width: int, heads: int, kv: int, inner: int, layers: int, batch: int
    ) -> None:
        random = load._random  # noqa: SLF001
        self.functional: Any = importlib.import_module("torch.nn.functional")
        self.heads, self.kv, self.size = heads, kv, width // heads
        self.layers = [
            {
                "qkv": random((heads + 2 * kv) * self.size, width),
                "out": random(width, width),
                "up": random(2 * inner, width),
                "down": random(width, inner),
                "keys": random(batch, kv, CONTEXT, self.size),
                "values": random(batch, kv, CONTEXT, self.size),
            }
            for _ in range(layers)
        ]

    def _layer(self, layer: dict[str, Any], x: Any, *, cached: bool) -> Any:
        f = self.functional
        batch, tokens, _ = x.shape
        qkv = (
            f.linear(x, layer["qkv"]).view(batch, tokens, self.heads + 2 * self.kv, self.size).transpose(1, 2)
        )
        q, k, v = qkv.split((self.heads, self.kv, self.kv), dim=1)
        if cached:
            layer["keys"][:, :, -1:], layer["values"][:, :, -1:] = k, v
            k, v = layer["keys"], layer["values"]
        seen = f.scaled_dot_product_attention(q, k, v, is_causal=not cached, enable_gqa=True)
        x = x + f.linear(seen.transpose(1, 2).reshape(batch, tokens, -1), layer["out"])
        gate, up = f.linear(x, layer["up"]).chunk(2, dim=-1)
        return f.layer_norm(x + f.linear(f.silu(gate) * up, layer["down"]), x.shape[-1:])

    def decode(self, x: Any) -> Any:
        """One token of each sequence."""
        for layer in self.layers:
            x = self._layer(layer, x, cached=True)
        return x

    def prefill(self, x: Any) -> Any:
        """A prompt."""
        for layer in self.layers:
            x = self._layer(layer, x, cached=False)
        return x


class SleepLoad:
    """Stands in for torch in a rehearsal: every call takes a while and does nothing."""

    name = "no torch: calls that sleep"

    def matmul(self) -> tuple[Callable[[], object], float]:
        """See Load."""
        return lambda: time.sleep(0.001), 1e9

    def copy(self) -> tuple[Callable[[], object], float]:
        """See Load."""
        return lambda: time.sleep(0.001), 1e9

    def steps(self, batch: int, *, graphs: bool) -> tuple[Callable[[], object], Callable[[], object]]:
        """See Load."""
        return lambda: time.sleep(0.005 + batch * 1e-5 - 0.001 * graphs), lambda: time.sleep(0.02)

    def wait(self) -> None:
        """See Load."""


def find_load(*, rehearse: bool) -> Load:
    """Return torch on the GPU; in a rehearsal torch on the CPU, or a stand-in."""
    if importlib.util.find_spec("torch") is None:
        if rehearse:
            return SleepLoad()
        raise ModuleNotFoundError("torch is not installed")
    return TorchLoad("cpu" if rehearse else "cuda:0")
