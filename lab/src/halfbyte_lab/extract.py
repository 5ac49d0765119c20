"""The query, key and value projections of one attention layer of a transformers model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from halfbyte.checkpoints.projections import Metadata, Projections
from halfbyte.errors import InvalidArgument, Unsupported, check
from halfbyte.hf.model_support import blocks, text_config


def extract(model: Any, name: str, layer: int = 0, head: int | None = None) -> Projections:
    """The projections of attention layer `layer` of a transformers model (negative: from the end); of one query head, if given.

    Reads q_proj, k_proj and v_proj, or c_attn, which holds all three side by side. Raises `Unsupported` on other models.
    """
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
    from transformers.utils import logging

    from halfbyte.hf.checkpoint import load
    from halfbyte.paths import resolve_model

    logging.disable_progress_bar()
    return extract(load(resolve_model(name), dtype=torch.float32), name, layer, head)
