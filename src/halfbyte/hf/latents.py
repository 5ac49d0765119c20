"""Latents of MLA in a packed cache: the layer that keeps them, and the matrices of heads by which attention reads them.

transformers caches the latent and the rotary key of a token and expands both to keys and values of heads, by `expand_kv` of the
family's attention module. Attention of recorded steps multiplies queries by the heads' matrices instead (the absorbed form).
"""

from __future__ import annotations

from typing import Any, cast

import torch

from halfbyte.cache import KVCache
from halfbyte.errors import Unsupported
from halfbyte.hf.cache_layers import PackedLayer
from halfbyte.hf.handles import EXPANDS, announce
from halfbyte.ops.compiling import active
from halfbyte.ops.transform_heads import transform_heads
from halfbyte.tensors import LatentHeads


class LatentLayer(PackedLayer):
    """The latents of one layer, as values of its cache, and the rotary keys, as keys; both of one KV head."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append latents [B, 1, L, R] and rotary keys [B, 1, L, rotary dims], as transformers passes them, and return them."""
        if torch.compiler.is_compiling():
            raise Unsupported(
                "a packed cache of latents (MLA) in compiled code; generate() records its steps without torch.compile"
            )
        if key_states.shape[1] != 1 or value_states.shape[1] != 1:
            raise Unsupported(
                f"this model caches {key_states.shape[1]} heads where its configuration says latents (kv_lora_rank); use "
                f"transformers' own cache (keys=None, values=None)"
            )
        super().update(value_states, key_states)
        return announce(self, key_states), value_states

    def learn(self, module: Any, like: torch.Tensor) -> None:
        """Read the heads' matrices off a module, at the beginning of every text: its weights may have changed since the last.

        They stay where they are, as recorded steps have their addresses. like: a tensor of their dtype and device.
        """
        if self.latent_heads is not None and not self.begins:
            return
        kv = cast(KVCache, self.kv)
        heads = heads_of(module, kv.value_dim, kv.head_dim, like, self.rotate_values)
        if self.latent_heads is None or [t.shape for t in self.latent_heads] != [t.shape for t in heads]:
            self.latent_heads = LatentHeads(*heads)
        else:
            for old, new in zip(self.latent_heads, heads, strict=True):
                old.copy_(new)


@torch.no_grad()
def heads_of(module: Any, rank: int, rotary_dims: int, like: torch.Tensor, is_rotated: bool) -> LatentHeads:
    """What a module multiplies latents of `rank` dims by, in the dtype of `like`: its `expand_kv` of unit latents.

    is_rotated: the cache holds latents Hadamard-rotated, so the matrices are those of rotated ones. Raises `Unsupported` where keys
    are not a product with the latent followed by the rotary key, except where they cannot be looked at: in a CUDA graph, and of
    launches that only compile.
    """
    units = like.new_zeros(1, 1, rank + rotary_dims + 1, rank + rotary_dims)
    units[0, 0].fill_diagonal_(1)
    keys, values = (t[0] for t in module.expand_kv(*units.split([rank, rotary_dims], -1)))
    own = keys.shape[-1] - rotary_dims
    rotary = keys.new_zeros(rotary_dims + 1, keys.shape[-1])
    rotary[:, own:].fill_diagonal_(1)
    if not active() and not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        is_product = not keys[:, :rank, own:].any() and not values[:, rank:].any()
        if not is_product or not bool((keys[:, rank:] == rotary).all()):
            raise Unsupported(
                f"{type(module).__name__}.{EXPANDS} makes keys that are not a product with the latent, followed by the rotary key; "
                f"use transformers' own cache for it (keys=None, values=None)"
            )
    matrices = keys[:, :rank, :own], values[:, :rank]
    return LatentHeads(*(_rotated(t) if is_rotated else t.contiguous() for t in matrices))


def _rotated(matrix: torch.Tensor) -> torch.Tensor:
    """Matrices [H, R, D] for latents that are Hadamard-rotated."""
    return transform_heads(matrix.mT[None])[0].mT.contiguous()
