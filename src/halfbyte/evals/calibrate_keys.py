"""Calibrated keys by measurement: `halfbyte calibrate MODEL -o keys.safetensors`.

Uniform noise in k' = (k - c) M gives the scores of queries q' = q M^-T a noise of tr(M^-1 Sq M^-T) tr(M^T Sk M) / D, with Sq and Sk
the second moments of queries and centered keys of a KV head, as attention gets them. It is least where M M^T is the geometric mean
of Sq and Sk^-1, G = Sq^1/2 (Sq^1/2 Sk Sq^1/2)^-1/2 Sq^1/2; so M = G^1/2, and the Hadamard rotation of the cache behind it spreads
what is left over the dims of a head.

Moments are sums in float64 of [H, D, D] a layer, whatever the text's length. The first tokens of a window, whose keys are unlike
all others, are left out: a cache keeps them in 16 bits (`sink_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from halfbyte.calibrated_keys import CalibratedKeys, KeyTransform, digest_of_norms, key_transform
from halfbyte.errors import check
from halfbyte.evals.calibrate import sizes_of
from halfbyte.formats import plain_format

if TYPE_CHECKING:
    from halfbyte.hf.attention import Attended

#: Tokens of each window that are left out.
FIRST = 4
#: The least eigenvalue of a moment, and of a geometric mean, by its largest: the inverse of M, float16, stays accurate.
FLOOR, MEAN_FLOOR = 1e-5, 1e-4


class Moments:
    """Sums over the keys and queries of one layer, in place of `PackedLayer.calls`: attention appends each of its calls."""

    def __init__(self) -> None:
        self.tokens, self.skip, self.shifts = 0, FIRST, True
        self.k = self.kk = self.qq = torch.zeros(())

    def append(self, call: Attended) -> None:
        """Add the tokens of a call, but for those that are still to be skipped."""
        first = min(self.skip, call.k.shape[2])
        self.skip -= first
        k, q = call.k[:, :, first:].float(), call.q[:, :, first:].float()  # [B, H, L, D], [B, H * G, L, D]
        by_head = q.unflatten(1, (k.shape[1], -1)).transpose(0, 1)  # [H, B, G, L, D]
        keys, queries = k.transpose(0, 1).flatten(1, 2), by_head.flatten(1, 3)  # [H, n, D], [H, n * G, D]
        self.tokens += keys.shape[1]
        self.k = self.k + keys.sum(1, dtype=torch.float64).cpu()
        self.kk = self.kk + (keys.mT @ keys).double().cpu()
        self.qq = self.qq + (queries.mT @ queries).double().cpu() / by_head.shape[2]
        self.shifts = self.shifts and call.options["softcap"] is None and call.options["s_aux"] is None

    def transform(self) -> KeyTransform:
        """M and c of the layer; no center where scores are more than an input of the softmax."""
        check(self.tokens >= 4 * self.kk.shape[-1], f"text has {self.tokens} tokens; expected at least {4 * self.kk.shape[-1]}")
        center = (self.k / self.tokens).float() if self.shifts else None
        keys = self.kk / self.tokens
        if center is not None:
            keys = keys - center.double()[:, :, None] * center.double()[:, None]
        matrix = _power(geometric_mean(self.qq / self.tokens, keys), 0.5, MEAN_FLOOR)
        scale = _trace(keys) / _trace(matrix @ keys @ matrix)  # keys stay as long as they were
        return key_transform((matrix * scale.sqrt()).half(), center)


def geometric_mean(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """G of second moments [H, D, D], float64."""
    root = _power(queries, 0.5)
    return root @ _power(root @ keys @ root, -0.5) @ root


def _power(moment: torch.Tensor, exponent: float, floor: float = FLOOR) -> torch.Tensor:
    """A power of symmetric matrices, their eigenvalues at least `floor` of the largest."""
    values, vectors = torch.linalg.eigh((moment + moment.mT) / 2)
    values = values.clamp_min(values.amax(-1, keepdim=True) * floor).clamp_min(1e-30)
    powers = values**exponent
    power: torch.Tensor = (vectors * powers[..., None, :]) @ vectors.mT
    return power


def _trace(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]


@torch.no_grad()
def calibrate_keys(
    model: Any, windows: torch.Tensor, chunk: int = 256, on_step: Callable[[], None] = lambda: None
) -> CalibratedKeys:
    """Transforms of every layer, from windows int64 [n, T] that the model reads one after the other, in chunks.

    `model` has the halfbyte attention (`halfbyte.hf.quantize`). `on_step` is called after every chunk of a window.
    """
    from halfbyte.hf.attention import CACHE
    from halfbyte.hf.cache import PackedCache
    from halfbyte.hf.every_forward import part_of_text
    from halfbyte.hf.latents import check_no_latents
    from halfbyte.hf.model_support import half_type, inner_model, text_config

    check_no_latents(text_config(model))
    sizes, plain = sizes_of(model), plain_format(half_type(model)).name
    moments = [Moments() for _ in range(sizes.layers)]
    for window in windows.to(model.device):
        cache = PackedCache(model, len(window), keys=plain, values=plain)
        for layer, sums in zip(cache.packed, moments, strict=True):
            layer.calls, sums.skip = sums, FIRST
        for piece in window[None].split(chunk, 1):
            with part_of_text(model, len(window) - 1):
                model(input_ids=piece, **{CACHE: cache}, use_cache=True)
            on_step()
    digest = digest_of_norms(inner_model(model))
    return CalibratedKeys(sizes, digest, tuple(sums.transform() for sums in moments))
