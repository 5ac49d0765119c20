"""Multi-head latent attention (MLA) over a packed cache: from a model's attention module to its `LatentHeads`, and to its layer.

transformers caches latents and rotary keys, one KV head of them, and expands what the cache's `update` returns (`expand_kv`)
before it calls the attention function. A packed layer returns the newest tokens alone, so the function gets their keys and values
expanded: a prompt's own, exact. What reads the rest is the layer, which the function finds by `newest_layer`.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from halfbyte.errors import Unsupported
from halfbyte.ops.transform_heads import transform_heads
from halfbyte.tensors import LatentHeads

#: The method of an attention module that expands latents [B, 1, T, R] and rotary keys [B, 1, T, rotary dims].
EXPANDS = "expand_kv"
#: Why some families are refused.
SPARSE = "an indexer with keys of its own picks the cached latents (MLA) that a query reads"


class _Newest(threading.local):
    """The layer whose `update` was called last in this thread, and what that returned, as long as the model's forward has it."""

    layer: Any = None
    latents: weakref.ref[torch.Tensor] | None = None


_newest = _Newest()


def announce(layer: Any, latents: torch.Tensor) -> torch.Tensor:
    """Let the next attention in this thread read `layer`; returns a view of the latents, for the model that calls it."""
    view = latents.view_as(latents)
    _newest.layer, _newest.latents = layer, weakref.ref(view)
    return view


def newest_layer(module: Any) -> Any:
    """The layer that this module's forward has just updated, or None. `Unsupported` for a module that expands latents by itself."""
    layer, latents, _newest.layer, _newest.latents = _newest.layer, _newest.latents, None, None
    if latents is None or latents() is None:
        return None
    if not hasattr(module, EXPANDS):
        raise Unsupported(
            f"{type(module).__name__} has no method {EXPANDS}, by which latents (MLA) are expanded; use transformers' own cache "
            f"for it (keys=None, values=None)"
        )
    return layer


def is_latent(config: Any) -> bool:
    """Whether the decoder of this configuration caches latents and rotary keys, of one KV head."""
    return bool(getattr(config, "kv_lora_rank", None) and getattr(config, "qk_rope_head_dim", None))


def latent_refusal(config: Any) -> str:
    """Why a packed cache cannot hold the latents of this configuration's decoder; "" where it can, and where there are none."""
    if is_latent(config) and getattr(config, "index_topk", None):
        return SPARSE
    return "it has a sliding window over latents (MLA)" if is_latent(config) and getattr(config, "sliding_window", None) else ""


def check_no_latents(config: Any) -> None:
    """Raise `Unsupported` where keys to calibrate are made of latents."""
    if is_latent(config):
        raise Unsupported("calibrated keys over a cache of latents (MLA) are not implemented; leave the calibration out")


@torch.no_grad()
def heads_of(module: Any, rank: int, rotary_dims: int, like: torch.Tensor, is_rotated: bool) -> LatentHeads:
    """What a module multiplies latents of `rank` dims by, in the dtype of `like`: its `expand_kv` of unit latents.

    is_rotated: the cache holds latents Hadamard-rotated, so the matrices are those of rotated ones. Raises `Unsupported` where keys
    are not a product with the latent followed by the rotary key, except within a CUDA graph, which cannot look.
    """
    units = like.new_zeros(1, 1, rank + rotary_dims + 1, rank + rotary_dims)
    units[0, 0].fill_diagonal_(1)
    keys, values = (t[0] for t in module.expand_kv(*units.split([rank, rotary_dims], -1)))
    own = keys.shape[-1] - rotary_dims
    rotary = keys.new_zeros(rotary_dims + 1, keys.shape[-1])
    rotary[:, own:].fill_diagonal_(1)
    if not like.is_cuda or not torch.cuda.is_current_stream_capturing():
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
