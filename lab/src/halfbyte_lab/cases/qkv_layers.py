"""The four published variants of attention on block-wise quantized weights, each as a list of launches.

    naive             dequantize Wq, Wk, Wv; three products; attention                         7 launches
    projection-fused  dequantize all three at once; three products; attention                  5
    semi-fused        dequantize into one [Nq + Nk + Nv, K]; one product; attention            3
    two-kernel        `halfbyte.qkv_projection`: dequantization and products in one; attention 2

Attention is torch's own scaled_dot_product_attention, unmodified and causal, and the same in all; products are torch's. Beside them
stands the layer with its weights in 16 bits: one product, attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

import halfbyte
from halfbyte.checkpoints.safetensors_files import TensorInfo, read_folder
from halfbyte.paths import shipped_model
from halfbyte.tensors import QuantTensor
from halfbyte_lab.cases.linear_baselines import dequantize_rows
from halfbyte_lab.extract import Projections
from halfbyte_lab.measure.checks import Accuracy, timed_attention_accuracy

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer over `tokens` tokens of one sequence."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    tokens: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def rows(self) -> tuple[int, int, int]:
        """Rows of the weights of q, k and v."""
        return self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim

    @property
    def sizes(self) -> dict[str, int]:
        """The shape as a record keeps it."""
        return {"L": self.tokens, "K": self.hidden, "Hq": self.heads, "H": self.kv_heads, "D": self.dim}


#: The published layer, with the published fp16 activations, and one of Llama-3-8B.
GPT2 = AttentionShape("GPT-2 layer", 768, 12, 12, 64, dtype=torch.float16)
LLAMA = AttentionShape("Llama-3-8B layer", 4096, 32, 8, 128)


@dataclass(frozen=True)
class Weights:
    """Weights [N, K] and biases [N] of q, k and v in float32, and where they come from, in words."""

    shape: AttentionShape
    weights: Three
    biases: Three
    source: str


def random_weights(shape: AttentionShape) -> Weights:
    """Normal numbers, the same every time."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, shape.hidden, generator=generator) * shape.hidden**-0.5 for n in shape.rows)
    return Weights(shape, (q, k, v), _zeros(shape), "random weights")


def shipped_weights(shape: AttentionShape) -> Weights:
    """Those of the first layer of the model that comes with halfbyte, repeated to the shape."""
    tensors = read_folder(shipped_model())

    def one(name: str, rows: int) -> torch.Tensor:
        w = _read(tensors[f"model.layers.0.self_attn.{name}_proj.weight"]).float()
        across = w.repeat(-(-rows // w.shape[0]), -(-shape.hidden // w.shape[1]))
        return across[:rows, : shape.hidden].contiguous()

    q, k, v = (one(name, rows) for name, rows in zip("qkv", shape.rows, strict=True))
    return Weights(shape, (q, k, v), _zeros(shape), "weights of the shipped model, repeated to this shape")


def extracted_weights(folder: Path) -> Weights:
    """Those that `halfbyte extract` wrote; the layer's shape is theirs. Raises `CheckpointError`."""
    projections = Projections.load(folder)
    m = projections.metadata
    name = f"{m.model} layer {m.layer}" + ("" if m.head is None else f" head {m.head}")
    shape = AttentionShape(name, m.hidden_size, m.heads, m.kv_heads, m.head_dim, dtype=torch.float16)
    return Weights(shape, projections.weights, projections.biases, f"weights of {m.model}, layer {m.layer}")


def _zeros(shape: AttentionShape) -> Three:
    q, k, v = (torch.zeros(n) for n in shape.rows)
    return q, k, v


def _read(info: TensorInfo) -> torch.Tensor:
    with info.file.open("rb") as file:
        file.seek(info.start)
        return torch.frombuffer(bytearray(file.read(info.end - info.start)), dtype=info.dtype).view(info.shape)


# ------------------------------------------------------------------------------------------------------------- the layer


@dataclass
class QkvLayer:
    """One quantized attention layer with everything that a variant reads and writes; a rotation has several.

    x [L, K] and biases [N] in 16 bits; `whole` [Nq + Nk + Nv, K] is where variants put dequantized weights, which `sixteen` holds
    from the start; q, k, v [L, N] are what launches leave for the next.
    """

    shape: AttentionShape
    x: torch.Tensor
    weights: tuple[QuantTensor, QuantTensor, QuantTensor]
    biases: Three
    impl: str = "auto"
    whole: torch.Tensor = field(init=False)
    sixteen: torch.Tensor = field(init=False)
    bias: torch.Tensor = field(init=False)
    q: torch.Tensor = field(init=False)
    k: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.whole = self.x.new_empty(sum(self.shape.rows), self.shape.hidden)
        self.sixteen = torch.cat([w.dequantize(self.x.dtype) for w in self.weights])
        self.bias = torch.cat(self.biases)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The rows of `whole` that are those of q, k and v."""
        return torch.split(self.whole, list(self.shape.rows))

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weights."""
        return sum(w.nbytes for w in self.weights)

    def copy(self) -> QkvLayer:
        """The same in memory of its own; x is shared."""
        q, k, v = (QuantTensor(w.format, w.shape, **{name: t.clone() for name, t in w.parts().items()}) for w in self.weights)
        return QkvLayer(self.shape, self.x, (q, k, v), self.biases, self.impl)

    def attend(self) -> torch.Tensor:
        """torch's attention over q, k, v: [1, Hq, L, D]."""
        s = self.shape
        q, k, v = (t.view(1, s.tokens, -1, s.dim).transpose(1, 2) for t in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.heads > s.kv_heads)


def build(given: Weights, fmt: str, device: torch.device, impl: str = "auto") -> QkvLayer:
    """A layer in one format, with activations between -1 and 1 as in the published study."""
    shape, generator = given.shape, torch.Generator().manual_seed(1)
    x = (2 * torch.rand(shape.tokens, shape.hidden, generator=generator) - 1).to(device, shape.dtype)
    q, k, v = (halfbyte.quantize(w.to(device), fmt) for w in given.weights)
    a, b, c = (bias.to(device, shape.dtype) for bias in given.biases)
    return QkvLayer(shape, x, (q, k, v), (a, b, c), impl)


# ------------------------------------------------------------------------------------------------------------- the variants


@dataclass(frozen=True)
class Launch:
    """One launch of a variant: it reads and writes a layer, and returns what it wrote last."""

    name: str
    run: Callable[[QkvLayer], torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """Launches in order; the last gives the attention's output [1, Hq, L, D]."""

    name: str
    launches: tuple[Launch, ...]

    def run(self, layer: QkvLayer) -> torch.Tensor:
        """All launches."""
        for launch in self.launches:
            out = launch.run(layer)
        return out


def _dequantize_one(i: int) -> Launch:
    def run(layer: QkvLayer) -> torch.Tensor:
        dequantize_rows([layer.weights[i]], layer.parts[i])
        return layer.whole

    return Launch(f"dequantize {'qkv'[i]}", run)


def _dequantize_all(layer: QkvLayer) -> torch.Tensor:
    dequantize_rows(layer.weights, layer.whole)
    return layer.whole


def _product(i: int) -> Launch:
    def run(layer: QkvLayer) -> torch.Tensor:
        y = F.linear(layer.x, layer.parts[i], layer.biases[i])
        setattr(layer, "qkv"[i], y)
        return y

    return Launch(f"product {'qkv'[i]}", run)


def _one_product(layer: QkvLayer) -> torch.Tensor:
    return _product_with(layer, layer.whole)


def _product_in_16_bits(layer: QkvLayer) -> torch.Tensor:
    return _product_with(layer, layer.sixteen)


def _product_with(layer: QkvLayer, weights: torch.Tensor) -> torch.Tensor:
    y = F.linear(layer.x, weights, layer.bias)
    layer.q, layer.k, layer.v = y.split(layer.shape.rows, 1)
    return y


def _fused(layer: QkvLayer) -> torch.Tensor:
    layer.q, layer.k, layer.v = halfbyte.qkv_projection(layer.x, layer.weights, layer.biases, impl=layer.impl)
    return layer.q


_ATTENTION = Launch("attention", QkvLayer.attend)
_EACH, _PRODUCTS = tuple(_dequantize_one(i) for i in range(3)), tuple(_product(i) for i in range(3))
_ALL = Launch("dequantize q, k, v", _dequantize_all)
NAIVE, TWO_KERNEL, SIXTEEN = "naive", "two-kernel", "16-bit weights"
VARIANTS = (
    Variant(NAIVE, (*_EACH, *_PRODUCTS, _ATTENTION)),
    Variant("projection-fused", (_ALL, *_PRODUCTS, _ATTENTION)),
    Variant("semi-fused", (_ALL, Launch("product q, k, v", _one_product), _ATTENTION)),
    Variant(TWO_KERNEL, (Launch("fused projection", _fused), _ATTENTION)),
)
#: The published variants, and the layer without quantization.
MEASURED = (*VARIANTS, Variant(SIXTEEN, (Launch("product q, k, v", _product_in_16_bits), _ATTENTION)))


# ------------------------------------------------------------------------------------------------------------- what is right


def promise(layer: QkvLayer) -> Callable[[torch.Tensor], Accuracy]:
    """Judges outputs [1, Hq, L, D]: the promise of attention, over float64 on the dequantized weights, by eager torch."""
    wide = [w.dequantize(torch.float64) for w in layer.weights]
    ref = _eager(layer.shape, layer.x.double(), wide, [b.double() for b in layer.biases])
    base = _eager(layer.shape, layer.x, [w.to(layer.x.dtype) for w in wide], layer.biases)
    return lambda out: timed_attention_accuracy(out, base, ref)


def _eager(shape: AttentionShape, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole layer, step by step, in the dtype of x: [1, Hq, L, D]."""
    q, k, v = (F.linear(x, w, b).view(shape.tokens, -1, shape.dim).transpose(0, 1) for w, b in zip(weights, biases, strict=True))
    k, v = (t.repeat_interleave(shape.heads // shape.kv_heads, 0) for t in (k, v))
    later = torch.ones(shape.tokens, shape.tokens, dtype=torch.bool, device=x.device).triu(1)
    scores = (q @ k.mT * shape.dim**-0.5).masked_fill(later, -torch.inf)
    return (torch.softmax(scores, -1) @ v).unsqueeze(0)
