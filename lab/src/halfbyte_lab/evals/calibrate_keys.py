"""Calibrated keys by measurement: `halfbyte calibrate MODEL -o keys.safetensors`.

Uniform noise in k' = (k - c) M, stored as k M + s with s = -c M, gives the scores of queries q' = q M^-T a noise of tr(M^-1 Sq
M^-T) tr(M^T Sk M) / D, with Sq and Sk the second moments of queries and centered keys of a KV head, as attention gets them. It is
least where M M^T is the geometric mean of Sq and Sk^-1, G = Sq^1/2 (Sq^1/2 Sk Sq^1/2)^-1/2 Sq^1/2; so M = G^1/2 H, where the
Hadamard matrix H spreads what is left over the dims of a head.

A pair of query and key counts as the noise of its score changes the output of the head: p^2 |v - o|^2, with p its share of
attention, v its value and o the output. Moments are sums in float64 of [H, D, D] a layer, whatever the text's length. The first
tokens of a window, whose keys are unlike all others, are left out: a cache keeps them in 16 bits (`sink_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from halfbyte.calibrated_keys import CalibratedKeys, digest_of_norms, key_transform
from halfbyte.errors import check
from halfbyte.formats import plain_format
from halfbyte.reference.hadamard import rotate
from halfbyte.tensors import KeyTransform
from halfbyte_lab.evals.calibrate import sizes_of

if TYPE_CHECKING:
    from halfbyte.hf.attention import Attended

#: Tokens of each window that are left out.
FIRST = 4
#: The least eigenvalue of a moment, and of a geometric mean, by its largest: the inverse of M, bfloat16, stays accurate.
FLOOR, MEAN_FLOOR = 1e-5, 1e-4


class Moments:
    """Sums over the keys and queries of one layer, in place of `PackedLayer.calls`: attention appends each of its calls."""

    def __init__(self) -> None:
        self.tokens, self.shifts = 0, True
        self.k = self.kk = self.qq = self.by_key = self.by_query = torch.zeros(())
        self.begin()

    def begin(self) -> None:
        """What is appended from now on is another window."""
        self.window: list[tuple[torch.Tensor, torch.Tensor]] = []

    def append(self, call: Attended) -> None:
        """Add the queries of a call, with all keys of its window so far."""
        self.window.append((call.k, call.v))
        keys, values = (torch.cat(x, 2).float() for x in zip(*self.window, strict=True))  # [B, H, T, D]
        weights = sensitivity(call, keys, values)
        weights[..., :FIRST] = 0
        by_query, by_key = weights.sum(-1), weights.sum((2, 3))  # [B, H, G, L], [B, H, T]
        queries = call.q.float().unflatten(1, (keys.shape[1], -1)).transpose(0, 1).flatten(1, 3)  # [H, n, D]
        keys, by_query, by_key = (x.transpose(0, 1).flatten(1, last) for x, last in ((keys, 2), (by_query, 3), (by_key, 2)))
        products = keys * by_key[..., None]
        self.tokens += call.k.shape[0] * call.k.shape[2]
        self.k = self.k + products.sum(1, dtype=torch.float64).cpu()
        self.kk = self.kk + (products.mT @ keys).double().cpu()
        self.qq = self.qq + ((queries * by_query[..., None]).mT @ queries).double().cpu()
        self.by_key, self.by_query = (
            a + b.sum(1, dtype=torch.float64).cpu() for a, b in ((self.by_key, by_key), (self.by_query, by_query))
        )
        self.shifts = self.shifts and call.options["softcap"] is None and call.options["s_aux"] is None

    def transform(self) -> KeyTransform:
        """M and c of the layer; no center where scores are more than an input of the softmax."""
        check(self.tokens >= 4 * self.kk.shape[-1], f"text has {self.tokens} tokens; expected at least {4 * self.kk.shape[-1]}")
        by_key, by_query = (x.clamp_min(1e-30)[:, None, None] for x in (self.by_key, self.by_query))
        center, keys = self.k / by_key[:, 0], self.kk / by_key
        if self.shifts:
            keys = keys - center[:, :, None] * center[:, None]
        matrix = _power(geometric_mean(self.qq / by_query, keys), 0.5, MEAN_FLOOR)
        matrix = matrix * (_trace(keys) / _trace(matrix @ keys @ matrix)).sqrt()  # keys stay as long as they were
        if matrix.shape[-1] % 16 == 0:
            matrix = rotate(matrix)
        matrix = matrix.bfloat16()
        return key_transform(matrix, -(center[:, None] @ matrix.double())[:, 0].float() if self.shifts else None)


def sensitivity(call: Attended, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """p^2 |v - o|^2 [B, H, G, L, T] of the queries of a call, the newest tokens of keys and values [B, H, T, D]."""
    options, (length, total) = call.options, (call.q.shape[2], keys.shape[2])
    q = call.q.float().unflatten(1, (keys.shape[1], -1)) * (
        call.q.shape[3] ** -0.5 if options["scaling"] is None else options["scaling"]
    )
    scores = q @ keys[:, :, None].mT
    if options["softcap"] is not None:
        scores = options["softcap"] * (scores / options["softcap"]).tanh()
    place = torch.arange(total, device=q.device)
    back = place[total - length :, None] - place
    visible = (back >= 0) & (back < (options["sliding_window"] or total))
    scores = scores.masked_fill(~visible, -torch.inf)
    top = scores.logsumexp(-1, keepdim=True)
    if options["s_aux"] is not None:
        top = torch.logaddexp(top, options["s_aux"].float().view(1, keys.shape[1], -1, 1, 1))
    share = (scores - top).exp()
    out = share @ values[:, :, None]
    distance = values.square().sum(-1)[:, :, None, None] - 2 * out @ values[:, :, None].mT + out.square().sum(-1, keepdim=True)
    weights: torch.Tensor = share.square() * distance.clamp_min(0)
    return weights


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
    from halfbyte.hf.cache import PackedCache
    from halfbyte.hf.every_forward import part_of_text
    from halfbyte.hf.model_support import CACHE, check_no_latents, half_type, inner_model, text_config

    check_no_latents(text_config(model))
    sizes, plain = sizes_of(model), plain_format(half_type(model)).name
    moments = [Moments() for _ in range(sizes.layers)]
    for window in windows.to(model.device):
        cache = PackedCache(model, len(window), keys=plain, values=plain)
        for layer, sums in zip(cache.packed, moments, strict=True):
            layer.calls = sums
            sums.begin()
        for piece in window[None].split(chunk, 1):
            with part_of_text(model, len(window) - 1):
                model(input_ids=piece, **{CACHE: cache}, use_cache=True)
            on_step()
    digest = digest_of_norms(inner_model(model))
    return CalibratedKeys(sizes, digest, tuple(sums.transform() for sums in moments))
