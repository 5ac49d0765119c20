"""Rotation of values, folded into weights: the cache then holds rotated values, and no kernel has anything to undo.

Where weights cannot take it, because they are quantized or something else touches values on their way, a packed cache rotates
values itself and attention rotates its output back (`PackedCache(rotate_values=True)`).

With a normalized Hadamard matrix H (reference/hadamard.py), attention weights P and values V of a head, P (V H) H^T = P V. So H
goes into the rows of v_proj, for each KV head, and H^T = H into the columns of o_proj, for each query head. In real arithmetic the
model is the same one. The two weights are rounded once more, to their own type, as any weights of that type are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from halfbyte.errors import InvalidArgument, Unsupported, check
from halfbyte.hf.model_support import blocks, head_dims, kv_heads, text_config
from halfbyte.reference.hadamard import check_rotation, rotate

#: The entry of config.json by which a model is known to have it: applying H again would undo it.
SAVED = "halfbyte_rotated_values"
#: What an attention module may have besides v_proj and o_proj. Anything else may touch values between the two.
_ELSEWHERE = {"q_proj", "k_proj", "q_norm", "k_norm", "rotary_emb", "sinks"}


def layers_to_rotate(model: Any) -> list[tuple[nn.Linear, nn.Linear]]:
    """(v_proj, o_proj) of every layer to fold into; none if it is done already. Raises `Unsupported` with the reason."""
    config = text_config(model)
    if getattr(model.config, SAVED, False):
        return []
    try:
        dim, _ = head_dims(config)[1], config.num_attention_heads
    except (AttributeError, RuntimeError) as error:  # none (Mamba), or others in each layer (Gemma 4)
        raise Unsupported(
            f"rotate_values=True: the configuration of {config.model_type} has no heads of one size; leave rotate_values out"
        ) from error
    check_rotation(True, dim)
    if getattr(config, "clip_qkv", None) is not None:
        raise Unsupported(
            f"rotate_values=True: the model clips values (clip_qkv={config.clip_qkv}), which does not commute with it"
        )
    found = [_projections(block, number, config, dim) for number, block in enumerate(blocks(model))]
    weights = {linear.weight.data_ptr() for pair in found for linear in pair}
    if not found or len(weights) < 2 * len(found):
        raise Unsupported("rotate_values=True: no layers, or layers that share their weights")
    return found


def unfolded(model: Any) -> str:
    """Why the weights of a model cannot take the rotation; "" where they can, or have it."""
    check_rotation(True, head_dims(text_config(model))[1], "rotate_values")
    try:
        layers_to_rotate(model)
    except (InvalidArgument, Unsupported) as error:
        return str(error)
    return ""


@torch.no_grad()
def rotate_values_of(model: Any, layers: list[tuple[nn.Linear, nn.Linear]]) -> None:
    """Rotate the values of these layers, as `layers_to_rotate` gives them, in place. Computed in float64, rounded once."""
    dim = head_dims(text_config(model))[1]
    for v_proj, o_proj in layers:
        for t, axis in ((v_proj.weight, 0), (v_proj.bias, 0), (o_proj.weight, 1)):
            if t is not None:
                heads = t.double().movedim(axis, -1).unflatten(-1, (-1, dim))
                t.copy_(rotate(heads).flatten(-2).movedim(-1, axis))
    setattr(model.config, SAVED, True)


def _projections(block: nn.Module, number: int, config: Any, dim: int) -> tuple[nn.Linear, nn.Linear]:
    """v_proj and o_proj of a layer, if nothing but attention stands between them."""
    what = f"rotate_values=True: layer {number}"
    attention: Any = next((m for m in block.modules() if hasattr(m, "v_proj") and hasattr(m, "o_proj")), None)
    if attention is None:
        raise Unsupported(f"{what} has no attention with v_proj and o_proj")
    v_proj, o_proj = attention.v_proj, attention.o_proj
    for name, linear in (("v_proj", v_proj), ("o_proj", o_proj)):
        dense = type(linear) is nn.Linear and linear.weight.is_floating_point() and linear.weight.device.type != "meta"
        check(
            dense,
            f"{what}: {name} is a {type(linear).__name__}; rotation needs 16- or 32-bit weights: pass it with weights=, or name "
            f"values= as well, which the cache then rotates",
        )
    parts = {name for name, _ in (*attention.named_children(), *attention.named_parameters(recurse=False))}
    if more := parts - {"v_proj", "o_proj"} - _ELSEWHERE:
        raise Unsupported(f"{what} has {', '.join(sorted(more))}, which may change values between v_proj and o_proj")
    heads = int(config.num_attention_heads)
    shared = kv_heads(config, number)
    sizes = (v_proj.out_features, o_proj.in_features, getattr(attention.q_proj, "out_features", 0))
    if sizes != (shared * dim, heads * dim, heads * head_dims(config)[0]):
        raise Unsupported(f"{what}: v_proj, o_proj and q_proj have {sizes} features; expected those of {heads} heads on {shared}")
    return v_proj, o_proj
