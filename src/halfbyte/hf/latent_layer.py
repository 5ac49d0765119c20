"""`LatentLayer`: the layer of a `PackedCache` for multi-head latent attention (MLA)."""

from __future__ import annotations

from typing import Any, cast

import torch

from halfbyte.cache import KVCache
from halfbyte.errors import Unsupported
from halfbyte.hf.cache_layers import PackedLayer
from halfbyte.hf.latents import announce, heads_of
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
