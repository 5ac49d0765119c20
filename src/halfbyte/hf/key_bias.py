"""A warning about large key biases, which ruin 4-bit keys.

A key is W x + b. When b is large, every key of a head is b plus a little, and a 4-bit code with one scale a token spends its 16
levels on b: Qwen2 and Qwen2.5 break down (their first and last layers have key biases with norms of 600 to 900, against 22
elsewhere). A rotation spreads b over all dims: the step shrinks, to about a fifth where b lies in one pair of 128 dims, which is
not enough for such norms.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfbyte.formats import Format
from halfbyte.hf.layer_options import one_each
from halfbyte.hf.model_support import blocks, kv_heads, text_config
from halfbyte.nn import QuantLinear, dense_weight
from halfbyte.reference.hadamard import block_size

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
    config = text_config(model)
    rotations = one_each("rotate_keys", rotate_keys, int(config.num_hidden_layers))
    found = []
    for layer, block in enumerate(blocks(model)):
        heads = kv_heads(config, layer)
        for projection, rows in _key_projections(block, config, heads):
            bias, weight = _rows(projection, rows)
            if bias is not None and weight is not None:
                found.append(_measure(layer, bias, weight, _gain(block), heads, rotations[layer]))
    return found


def check_key_bias(model: nn.Module, keys: Sequence[Format], rotate_keys: Sequence[bool]) -> list[KeyBias]:
    """Warn about layers whose keys have 4 bits or fewer and scales per token that their bias ruins; returns them.

    keys, rotate_keys: of each layer.
    """
    if not any(_is_ruined(fmt) for fmt in keys):
        return []
    bad = [b for b in key_biases(model, rotate_keys) if b.ratio > 1 and _is_ruined(keys[b.layer])]
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


def _key_projections(block: nn.Module, config: Any, heads: int) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """(module, the numbers of its rows that make keys, head by head)."""
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
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
    turned = torch.hypot(bias, bias.roll(bias.shape[1] // 2, -1))  # what RoPE makes of a dim at most
    blocks = turned.unflatten(-1, (-1, size))
    normal = 3 * (blocks.square().sum(-1) / 2).sqrt()  # half of a pair's square in each of its dims, on average
    return torch.mul(torch.minimum(blocks.sum(-1), normal).amax(-1), size**-0.5)
