"""The query, key and value projections of one attention layer of a transformers model, and as a folder of .npy files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported, check

#: Names of the files in a folder of an extract, without .npy.
WEIGHTS, BIASES = ("wq", "wk", "wv"), ("bq", "bk", "bv")


@dataclass(frozen=True)
class Metadata:
    """What an extract is of. Weights are [out features, in features] and y = x w^T + b; `bias`: whether the model has biases (zeros
    are written where it has none); `head`: the only query head that was kept, with the KV head that it reads.
    """

    model: str
    layer: int
    head: int | None
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    bias: bool
    layout: str = "[out features, in features]"


@dataclass(frozen=True)
class Projections:
    """weights: q [Hq * D, K], k [H * D, K] and v [H * D, K] in float32; biases [N] each."""

    metadata: Metadata
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def save(self, folder: Path) -> None:
        """wq.npy ... bv.npy, float32, and metadata.json."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, x in zip((*WEIGHTS, *BIASES), (*self.weights, *self.biases), strict=True):
            np.save(folder / f"{name}.npy", x.numpy(), allow_pickle=False)
        (folder / "metadata.json").write_text(json.dumps(asdict(self.metadata), indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def load(folder: Path) -> Projections:
        """What `save` wrote. Raises `CheckpointError` where a file is missing, damaged or does not fit the others."""
        try:
            metadata = Metadata(**json.loads((folder / "metadata.json").read_text(encoding="utf-8")))
            arrays = [np.load(folder / f"{name}.npy", allow_pickle=False) for name in (*WEIGHTS, *BIASES)]
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{folder} holds no extract: {error}; `halfbyte extract MODEL -o DIR` writes one") from error
        sizes = [n * metadata.head_dim for n in (metadata.heads, metadata.kv_heads, metadata.kv_heads)]
        shapes = [*((n, metadata.hidden_size) for n in sizes), *((n,) for n in sizes)]
        for name, x, shape in zip((*WEIGHTS, *BIASES), arrays, shapes, strict=True):
            if x.shape != shape or x.dtype != np.float32:
                raise CheckpointError(f"{folder / name}.npy is {x.dtype} {list(x.shape)}; metadata.json says float32 {list(shape)}")
        q, k, v, *biases = (torch.from_numpy(x) for x in arrays)
        return Projections(metadata, (q, k, v), (biases[0], biases[1], biases[2]))


def extract(model: Any, name: str, layer: int = 0, head: int | None = None) -> Projections:
    """The projections of attention layer `layer` of a transformers model (negative: from the end); of one query head, if given.

    Reads q_proj, k_proj and v_proj, or c_attn, which holds all three side by side. Raises `Unsupported` on other models.
    """
    from halfbyte.hf.model_support import blocks, text_config

    config = text_config(model)
    parts = blocks(model) or [model]  # another tower has projections of these names too
    modules = [m for part in parts for m in part.modules() if hasattr(m, "c_attn") or all(hasattr(m, f"{x}_proj") for x in "qkv")]
    if not modules:
        raise Unsupported(
            f"model={name!r} ({type(model).__name__}) has no attention with q_proj, k_proj and v_proj, nor with c_attn"
        )
    check(
        -len(modules) <= layer < len(modules), f"layer={layer}; {name} has {len(modules)} attention layers, 0 to {len(modules) - 1}"
    )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    pairs = _projections(modules[layer])
    dim = pairs[0][0].shape[0] // heads
    rows = [w.shape[0] for w, _ in pairs]
    if rows != [heads * dim, kv_heads * dim, kv_heads * dim]:
        raise Unsupported(f"model={name!r}: q, k and v have {rows} rows, which {heads} heads on {kv_heads} KV heads do not explain")
    weights, biases = (
        [w.detach().float().cpu() for w, _ in pairs],
        [None if b is None else b.detach().float().cpu() for _, b in pairs],
    )
    full = [torch.zeros(w.shape[0], device="cpu") if b is None else b for w, b in zip(weights, biases, strict=True)]
    if head is not None:
        check(0 <= head < heads, f"head={head}; {name} has {heads} query heads, 0 to {heads - 1}")
        first = [dim * i for i in (head, *[head * kv_heads // heads] * 2)]
        weights, full = ([x[at : at + dim].clone() for x, at in zip(xs, first, strict=True)] for xs in (weights, full))
        heads = kv_heads = 1
    metadata = Metadata(
        name, layer % len(modules), head, heads, kv_heads, dim, weights[0].shape[1], any(b is not None for b in biases)
    )
    return Projections(metadata, (weights[0], weights[1], weights[2]), (full[0], full[1], full[2]))


def _projections(module: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """(weight [N, K], bias [N] or None) of q, k and v."""
    from transformers.pytorch_utils import Conv1D

    if hasattr(module, "c_attn"):
        projection: Any = module.c_attn
        # Linear layers of this name mix heads and q, k, v in orders of their own; a Conv1D, as in GPT-2, is [K, 3 N] in this order.
        if not isinstance(projection, Conv1D) or projection.weight.shape[1] != 3 * projection.weight.shape[0]:
            raise Unsupported(f"c_attn is a {type(projection).__name__}; extract knows the Conv1D of GPT-2, [N, 3 N]")
        return list(zip(projection.weight.T.chunk(3), projection.bias.chunk(3), strict=True))
    parts: list[Any] = [getattr(module, f"{x}_proj") for x in "qkv"]
    for part in parts:
        if not isinstance(part, nn.Linear) or not part.weight.is_floating_point():
            raise InvalidArgument(f"a projection is a {type(part).__name__}; extract reads weights that are not quantized")
    return [(part.weight, part.bias) for part in parts]


def load_layer(name: str, layer: int = 0, head: int | None = None) -> Projections:
    """`extract` from a model folder, a Hub id or `demo`; the files are checked as `halfbyte.hf.load` does."""
    from halfbyte.hf.checkpoint import load  # which says so where transformers is not installed
    from halfbyte.paths import resolve_model

    path = resolve_model(name)
    from transformers.utils import logging

    logging.disable_progress_bar()
    return extract(load(path, dtype=torch.float32), name, layer, head)
