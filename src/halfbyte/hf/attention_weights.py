"""Projections of attention before a cache quantizes what they give: a warning about key biases, and a rotation of values.

Large key biases ruin 4-bit keys. A key is W x + b. When b is large, every key of a head is b plus a little, and a 4-bit code with
one scale a token spends its 16 levels on b: Qwen2 and Qwen2.5 break down (their first and last layers have key biases with norms of
600 to 900, against 22 elsewhere). A rotation spreads b over all dims: the step shrinks, to about a fifth where b lies in one pair
of 128 dims, which is not enough for such norms.

A rotation of values is folded into weights: the cache then holds rotated values, and no kernel has anything to undo. Where weights
cannot take it, because they are quantized or something else touches values on their way, a packed cache rotates values itself and
attention rotates its output back (`PackedCache(rotate_values=True)`).

With a normalized Hadamard matrix H (reference/hadamard.py), attention weights P and values V of a head, P (V H) H^T = P V. So H
goes into the rows of v_proj, for each KV head, and H^T = H into the columns of o_proj, for each query head. In real arithmetic the
model is the same one. The two weights are rounded once more, to their own type, as any weights of that type are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfbyte.errors import InvalidArgument, Unsupported, check
from halfbyte.formats import Format
from halfbyte.hf.model_support import Decoder, kv_scales, one_each
from halfbyte.modules import dense_weight
from halfbyte.nn import QuantLinear
from halfbyte.reference.hadamard import block_size, check_rotation, rotate

_NORMS = ("input_layernorm", "ln_1", "ln1", "norm1", "attention_norm", "self_attn_layer_norm")


class KeyBiasWarning(UserWarning):
    """The keys of this model do not suit the format that was chosen for them."""


@dataclass(frozen=True)
class KeyBias:
    """How far the key bias of one layer is out of line.

    norm    the bias, over all heads
    ratio   the rounding step that the bias alone forces on 4-bit codes, over the spread of the keys without it, in the worst head.
            Above 1, keys of different tokens get the same codes
    """

    layer: int
    norm: float
    ratio: float


def key_biases(model: nn.Module, rotate_keys: bool | Sequence[bool] = False) -> list[KeyBias]:
    """One entry for each layer whose key projection has a bias and a dense weight.

    rotate_keys: whether keys are to be Hadamard-rotated, in all layers or in each; it changes `ratio`.
    """
    decoder = Decoder(model)
    return list(_biases(decoder, one_each("rotate_keys", rotate_keys, int(decoder.config.num_hidden_layers))))


def _biases(decoder: Decoder, rotations: Sequence[bool]) -> Iterator[KeyBias]:
    for layer, (block, heads) in enumerate(zip(decoder.blocks, decoder.kv_heads, strict=True)):
        for projection, rows in _key_projections(block, decoder.dims[layer][0], heads):
            bias, weight = _rows(projection, rows)
            if bias is not None and weight is not None:
                yield _measure(layer, bias, weight, _gain(block), heads, rotations[layer])


def check_key_bias(decoder: Decoder, keys: Sequence[Format], rotate_keys: Sequence[bool]) -> list[KeyBias]:
    """Warn about layers whose keys have 4 bits or fewer and scales per token that their bias ruins; returns them.

    keys, rotate_keys: of each layer.
    """
    if not any(_is_ruined(fmt) for fmt in keys):
        return []
    bad = [b for b in _biases(decoder, rotate_keys) if b.ratio > 1 and _is_ruined(keys[b.layer])]
    if bad:
        worst = max(bad, key=lambda b: b.ratio)
        fmt = keys[worst.layer]
        layers = ", ".join(str(b.layer) for b in bad)
        several = "s" if len(bad) > 1 else ""
        warnings.warn(
            f"keys={fmt.name!r}: the key bias of layer{several} {layers} is far out of line (norm {worst.norm:.0f} in layer "
            f"{worst.layer}); {fmt.code.bits}-bit keys with one scale a token will ruin this model"
            f"{', rotated or not' * rotate_keys[worst.layer]}. "
            f'Use keys="int8" or keys="int4_channel", or keep those layers in 16 bits with skip_layers=[{layers}]',
            KeyBiasWarning,
            stacklevel=3,
        )
    return bad


def _is_ruined(fmt: Format) -> bool:
    """Whether a large bias ruins keys in this format."""
    return fmt.code.bits <= 4 and not fmt.token_block


def _key_projections(block: nn.Module, dim: int, heads: int) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """(module, the numbers of its rows that make keys, head by head), of heads of `dim`."""
    for name, module in block.named_modules():
        rows = int(getattr(module, "nf", 0) or getattr(module, "out_features", 0))  # Conv1D calls it nf
        match name.rpartition(".")[2]:
            case "k_proj" if rows == heads * dim:
                yield module, torch.arange(rows, device="cpu")
            case "c_attn" | "qkv_proj" if rows > 2 * heads * dim:  # all of q, then k, then v
                yield module, torch.arange(rows - 2 * heads * dim, rows - heads * dim, device="cpu")
            case "query_key_value" if rows == 3 * heads * dim:  # q, k and v of each head (GPT-NeoX)
                yield module, torch.arange(rows, device="cpu").view(heads, 3, dim)[:, 1].flatten()


def _rows(projection: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    bias = getattr(projection, "bias", None)
    if bias is None or bias.is_meta:
        return None, None
    weight = projection.weight.dequantize() if isinstance(projection, QuantLinear) else dense_weight(projection)
    rows = rows.to(weight.device)
    return bias.detach()[rows].float(), weight[rows].float()


def _gain(block: nn.Module) -> torch.Tensor | None:
    """The weight of the norm in front of attention: what a typical normalized input is multiplied by."""
    for name in _NORMS:
        weight = getattr(getattr(block, name, None), "weight", None)
        if isinstance(weight, torch.Tensor):
            return weight.detach().float()
    return None


def _measure(
    layer: int, bias: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor | None, heads: int, rotate_keys: bool
) -> KeyBias:
    scaled = weight if gain is None else weight * gain  # inputs behind a norm have unit variance
    spread = scaled.square().sum(-1).sqrt().view(heads, -1)  # of each dim
    by_head = bias.view(heads, -1)
    if rotate_keys:
        typical, amplitude = spread.square().mean(-1).sqrt(), _amplitude_rotated(by_head)
    else:
        typical, amplitude = spread.median(-1).values, by_head.abs().amax(-1)
    step = 2 * amplitude / 15  # RoPE turns the bias, so both signs occur
    return KeyBias(layer, float(bias.norm()), float((step / typical.clamp_min(1e-12)).max()))


def _amplitude_rotated(bias: torch.Tensor) -> torch.Tensor:
    """How large a bias [heads, D] is in rotated keys, [heads]: a few dims add up, and of many no more than a normal sum does."""
    size = block_size(bias.shape[1])
    amplitude = torch.hypot(bias, bias.roll(bias.shape[1] // 2, -1))  # what RoPE makes of a dim at most
    blocks = amplitude.unflatten(-1, (-1, size))
    normal = 3 * (blocks.square().sum(-1) / 2).sqrt()  # half of a pair's square in each of its dims, on average
    return torch.mul(torch.minimum(blocks.sum(-1), normal).amax(-1), size**-0.5)


#: The entry of config.json by which a model is known to have it: applying H again would undo it.
SAVED = "halfbyte_rotated_values"
#: What an attention module may have besides v_proj and o_proj. Anything else may touch values between the two.
_ELSEWHERE = {"q_proj", "k_proj", "q_norm", "k_norm", "rotary_emb", "sinks"}


def layers_to_rotate(decoder: Decoder) -> list[tuple[nn.Linear, nn.Linear]]:
    """(v_proj, o_proj) of every layer to fold into; none if it is done already. Raises `Unsupported` with the reason."""
    config = decoder.config
    if getattr(decoder.model.config, SAVED, False):
        return []
    try:
        dims, heads = decoder.dims, int(config.num_attention_heads)
        ((key_dim, dim),) = set(dims)
    except (AttributeError, ValueError) as error:  # none (Mamba), or others in some layers (Gemma 4)
        raise Unsupported(
            f"rotate_values=True: the configuration of {config.model_type} has no heads of one size; leave rotate_values out"
        ) from error
    check_rotation(True, dim)
    if getattr(config, "clip_qkv", None) is not None:
        raise Unsupported(
            f"rotate_values=True: the model clips values (clip_qkv={config.clip_qkv}), which does not commute with it"
        )
    layers = zip(decoder.blocks, decoder.kv_heads, strict=True)
    pairs = [
        _projections(block, f"rotate_values=True: layer {number}", (kv_heads * dim, heads * dim, heads * key_dim))
        for number, (block, kv_heads) in enumerate(layers)
    ]
    weights = {linear.weight.data_ptr() for pair in pairs for linear in pair}
    if not pairs or len(weights) < 2 * len(pairs):
        raise Unsupported("rotate_values=True: no layers, or layers that share their weights")
    return pairs


def check_value_rotation(decoder: Decoder) -> None:
    """Raise unless the values of every layer can be rotated."""
    for _, dim in decoder.dims:
        check_rotation(True, dim, "rotate_values")


def unfolded(model: Any) -> str:
    """Why the weights of a model cannot take the rotation; "" where they can, or have it."""
    decoder = Decoder(model)
    check_value_rotation(decoder)
    try:
        layers_to_rotate(decoder)
    except (InvalidArgument, Unsupported) as error:
        return str(error)
    return ""


@torch.no_grad()
def rotate_values_of(decoder: Decoder, layers: list[tuple[nn.Linear, nn.Linear]]) -> None:
    """Rotate the values of these layers, as `layers_to_rotate` gives them, in place. Computed in float64, rounded once."""
    dim = decoder.dims[0][1]
    for v_proj, o_proj in layers:
        for t, axis in ((v_proj.weight, 0), (v_proj.bias, 0), (o_proj.weight, 1)):
            if t is not None:
                heads = t.double().movedim(axis, -1).unflatten(-1, (-1, dim))
                t.copy_(rotate(heads).flatten(-2).movedim(-1, axis))
    setattr(decoder.model.config, SAVED, True)
    for scales in (kv_scales(decoder.config) or {"layers": ()})["layers"]:
        scales[1] = None  # of values that were not rotated


def _projections(block: nn.Module, what: str, sizes: tuple[int, int, int]) -> tuple[nn.Linear, nn.Linear]:
    """v_proj and o_proj of a layer, if nothing but attention stands between them; `sizes`: what they take and give, and q_proj."""
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
    features = (v_proj.out_features, o_proj.in_features, getattr(attention.q_proj, "out_features", 0))
    if features != sizes:
        raise Unsupported(f"{what}: v_proj, o_proj and q_proj have {features} features; its heads make that {sizes}")
    return v_proj, o_proj
