"""The peer: every tower as one PyTorch function of packed patches, for measuring beside ours.

It computes the same function from the same uint8 pixels and the same weights, from patch embedding to projector, and is
given what a careful PyTorch server would give itself: positions and the rotation's cosines and sines are computed
beforehand, an MLP width that leaves rows of bfloat16 unaligned is padded, and attention is
``torch.nn.attention.varlen`` over packed segments (on a CPU, or in float32, one SDPA a segment). It runs eager,
captured in a CUDA graph (what vLLM's encoder graphs do), and through ``torch.compile`` captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxvit.errors import DependencyError
from jaxvit.models.family import Family, Piece, joined
from jaxvit.reference.tower import Tower, bucket_of, tower_of

try:
    import torch
    from torch.nn import functional
except ImportError as error:
    raise DependencyError("the packed PyTorch peer needs torch: pip install 'jaxvit[compare]'") from error
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before PyTorch 2.10
    varlen_attn = None

Inputs = dict[str, Any]
"""Tensors on the device by name, attention segments, and None for what a call does not need."""

ALIGNED = 8
"""Elements of bfloat16 in 16 bytes: where the MLP's width is no multiple of it, it is padded to one of 64."""


class Packed:
    """A tower on a device.

    Args:
        family: with its configuration.
        parameters: canonical path -> array, all of them.
        dtype: "float32" or "bfloat16".
        device: as PyTorch names it, "cpu" or "cuda".
    """

    def __init__(self, family: Family, parameters: Iterable[tuple[str, np.ndarray]], dtype: str, device: str):
        self.family, self.tower, self.device = family, tower_of(family), device
        self.dtype = getattr(torch, dtype)
        self.varlen = device != "cpu" and self.dtype is not torch.float32 and varlen_attn is not None
        self.weights: dict[str, Any] = {}
        self.tables: dict[str, np.ndarray] = {}
        for name, array in parameters:
            if name.endswith((".kernel", ".bias", ".scale")):
                self.weights[name] = self._placed(widened(self.tower, name, array))
            else:
                self.tables[name] = array

    def _placed(self, array: np.ndarray) -> Any:
        """On the device in the compute dtype, kernels [inputs, outputs] as [outputs, inputs]."""
        raw = array.view(np.int16) if array.dtype.name == "bfloat16" else array
        tensor = torch.from_numpy(np.array(raw, order="C"))
        if array.dtype.name == "bfloat16":
            tensor = tensor.view(torch.bfloat16)
        tensor = tensor.to(self.device, self.dtype)
        return tensor.t().contiguous() if tensor.ndim == 2 else tensor

    def inputs(self, pieces: Sequence[Piece]) -> Inputs:
        """What the function takes for these pieces, packed in their order, on the device."""
        arrays = {name: joined(rows) for name, rows in self.family.layout(pieces, bucket_of(pieces)).items()}
        pixels, channels = arrays["pixels"], self.family.channels
        if "pixels_second" in arrays:
            second = np.where(arrays["still"][:, None] != 0, pixels, arrays["pixels_second"])
            pixels, channels = np.concatenate([pixels, second], axis=1), np.tile(channels, 2)
        table = self.family.table.astype(np.float64)
        slope = ((table[255] - table[0]) / 255)[channels].astype(np.float32)
        found: dict[str, np.ndarray | None] = dict.fromkeys(("positions", "cos", "sin", "mean_index", "mean_weight"))
        found |= {"pixels": pixels, "slope": slope, "start": table[0][channels].astype(np.float32)}
        if self.tower.positions:
            found["positions"] = self.tower.positions(self.tables, arrays)
        if self.tower.angles:
            angles = np.tile(self.tower.angles(arrays), 2)[:, None, :]
            found |= {"cos": np.cos(angles), "sin": np.sin(angles)}
        if any(piece.grid[0] > 1 for piece in pieces):
            found |= {name: arrays.get(name) for name in ("mean_index", "mean_weight")}
        found["order"] = arrays.get("reverse")
        placed: dict[str, Any] = {
            name: None if array is None else torch.from_numpy(np.array(array)).to(self.device)
            for name, array in found.items()
        }
        if placed["positions"] is not None:
            placed["positions"] = placed["positions"].to(self.dtype)
        for reach, lengths in self.family.lengths(pieces).items():
            placed[reach] = self._segments(lengths)
        return placed

    def _segments(self, lengths: np.ndarray) -> tuple[Any, Any]:
        """For varlen, cumulative lengths and the longest; else the lengths themselves and None."""
        if not self.varlen:
            return [int(length) for length in lengths], None
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return torch.from_numpy(ends).to(self.device), int(lengths.max())

    def __call__(self, inputs: Inputs) -> Any:
        """Embeddings [tokens, width], on the device."""
        with torch.inference_mode():
            return forward(self.weights, self.tower, inputs, self.dtype)

    def variants(self, inputs: Inputs, compiled: bool = True) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The ways to run one call: name, and a function that runs it and returns the embeddings.

        Each holds its memory while it is in hand: measure it before asking for the next.
        """
        yield "eager", lambda: self(inputs)
        if self.device != "cpu":
            yield "graph", self._graphed(lambda: self(inputs))
            torch.cuda.empty_cache()
            if compiled:
                yield "compile + graph", self._graphed(self._compiled(inputs))
                torch.cuda.empty_cache()

    def _compiled(self, inputs: Inputs, **options: Any) -> Callable[[], Any]:
        torch._dynamo.reset()  # else the recompilation limit counts shapes that came before
        function = torch.compile(forward, dynamic=False, **options)

        def run() -> Any:
            with torch.inference_mode():
                return function(self.weights, self.tower, inputs, self.dtype)

        return run

    def _graphed(self, run: Callable[[], Any]) -> Callable[[], Any]:
        cuda = torch.cuda
        run()
        cuda.synchronize()
        side = cuda.Stream()
        with cuda.stream(side):
            for _ in range(2):
                run()
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        # Only this thread's calls may spoil the capture: JAX has threads of its own.
        with cuda.graph(graph, capture_error_mode="thread_local"):
            out = run()

        def replay() -> Any:
            graph.replay()
            return out

        return replay


def widened(tower: Tower, name: str, array: np.ndarray) -> np.ndarray:
    """A parameter with the MLP's width padded by zeros where that aligns rows of bfloat16."""
    inner = [f".{path}.{kind}" for path in (tower.up, tower.gate) for kind in ("kernel", "bias")]
    axis = array.ndim - 1 if name.endswith(tuple(inner)) else 0 if name.endswith(f".{tower.down}.kernel") else None
    if axis is None or array.shape[axis] % ALIGNED == 0:
        return array
    return np.pad(array, [(0, -array.shape[axis] % 64 if one == axis else 0) for one in range(array.ndim)])


# The function, top to bottom


def forward(weights: Mapping[str, Any], tower: Tower, inputs: Inputs, dtype: Any) -> Any:
    """uint8 patches [patches, values] -> embeddings [tokens, width]."""
    x = (inputs["pixels"].float() * inputs["slope"] + inputs["start"]).to(dtype)
    embed = weights[f"{tower.embed}.kernel"]
    if embed.shape[1] == 2 * x.shape[1]:  # stills of a tower that takes pairs of frames
        x = torch.cat([x, x], dim=-1)
    x = linear(x, weights, tower.embed)
    if inputs["positions"] is not None:
        x = x + inputs["positions"]
    for index, reach in enumerate(tower.reaches):
        x = block(x, weights, f"blocks.{index}", tower, inputs, inputs[reach])
    if tower.final_norm is not None:
        x = norm(x, weights, tower.final_norm, tower.eps)
    return merge(x, weights, tower, inputs)


def block(x: Any, weights: Mapping[str, Any], path: str, tower: Tower, inputs: Inputs, segments: Any) -> Any:
    y = norm(x, weights, f"{path}.{tower.norm1}", tower.eps)
    q, k, v = linear(y, weights, f"{path}.{tower.qkv}").view(x.shape[0], 3, tower.heads, -1).unbind(1)
    if inputs["cos"] is not None:
        q, k = (rotate(each, inputs["cos"], inputs["sin"]) for each in (q, k))
    x = x + linear(attend(q, k, v, segments).reshape(x.shape), weights, f"{path}.{tower.out}")
    y = norm(x, weights, f"{path}.{tower.norm2}", tower.eps)
    wide = linear(y, weights, f"{path}.{tower.up}")
    if tower.gate is None:
        wide = activate(wide, tower.activation)
    else:
        wide = activate(linear(y, weights, f"{path}.{tower.gate}"), tower.activation) * wide
    return x + linear(wide, weights, f"{path}.{tower.down}")


def merge(x: Any, weights: Mapping[str, Any], tower: Tower, inputs: Inputs) -> Any:
    """Patches of a token -> its embedding: mean over frames where there are several, norm, join, project."""
    merged = weights[f"{tower.first}.kernel"].shape[1]
    x = x.reshape(-1, merged)
    if inputs["mean_index"] is not None:
        frames = x[inputs["mean_index"].long()].float() * inputs["mean_weight"][:, :, None]
        x = frames.sum(1).to(x.dtype)
    scale = weights.get(f"{tower.merge_norm}.scale")
    if scale is not None:
        x = norm(x.reshape(-1, scale.shape[0]), weights, tower.merge_norm, tower.merge_eps).reshape(-1, merged)
    x = linear(activate(linear(x, weights, tower.first), tower.merge_activation), weights, tower.second)
    return x if inputs["order"] is None else x[inputs["order"].long()]


def linear(x: Any, weights: Mapping[str, Any], path: str) -> Any:
    return functional.linear(x, weights[f"{path}.kernel"], weights.get(f"{path}.bias"))


def norm(x: Any, weights: Mapping[str, Any], path: str, eps: float) -> Any:
    """LayerNorm, or RMSNorm where there is no bias."""
    scale, bias = weights[f"{path}.scale"], weights.get(f"{path}.bias")
    if bias is None:
        return functional.rms_norm(x, scale.shape, scale, eps)
    return functional.layer_norm(x, scale.shape, scale, bias, eps)


def activate(x: Any, name: str) -> Any:
    if name == "gelu_pytorch_tanh":
        return functional.gelu(x, approximate="tanh")
    return {"gelu": functional.gelu, "silu": functional.silu, "relu": functional.relu}[name](x)


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    """[patches, heads, dim], halves rotated against each other in float32."""
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def attend(q: Any, k: Any, v: Any, segments: tuple[Any, Any]) -> Any:
    """[patches, heads, dim] each; see ``Packed._segments``."""
    ends, longest = segments
    if longest is not None and varlen_attn is not None:
        return varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), ends, ends, longest, longest)
    parts = zip(*(each.transpose(0, 1).split(ends, dim=1) for each in (q, k, v)), strict=True)
    return torch.cat([functional.scaled_dot_product_attention(*part) for part in parts], dim=1).transpose(0, 1)
