"""The GPU levels of `linear` and `qkv_projection`: from tensors to a plan, to a launch. Nothing here waits for the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from halfbyte.device import describe
from halfbyte.errors import Unsupported
from halfbyte.formats import Format
from halfbyte.ops._workspace import counters, floats
from halfbyte.plans.triton_linear import GATHERED_ROWS, LinearTiles, linear_tiles
from halfbyte.tensors import QuantTensor


def run(
    x: torch.Tensor,
    weights: Sequence[QuantTensor],
    biases: Sequence[torch.Tensor | None],
    level: str,
    row_invariant: bool,
    compiled: bool = False,
) -> list[torch.Tensor]:
    """[..., N] in x's dtype for each weight, by the level asked for, in one launch.

    `compiled`: called from compiled code, behind whose back nothing may be kept.
    """
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise Unsupported(f"x is {x.dtype}; the {level} kernel takes float16 and bfloat16; use impl='auto'")
    outs = [x.new_empty(*x.shape[:-1], w.shape[0]) for w in weights]
    if not x.numel():  # nothing to add up
        for out, bias in zip(outs, biases, strict=True):
            out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    elif any(out.numel() for out in outs):
        with torch.cuda.device_of(x):
            _launch_triton(x.reshape(-1, x.shape[-1]), weights, biases, outs, row_invariant, compiled)
    return outs


def _launch_triton(
    x: torch.Tensor,
    weights: Sequence[QuantTensor],
    biases: Sequence[torch.Tensor | None],
    outs: Sequence[torch.Tensor],
    row_invariant: bool,
    own: bool,
) -> None:
    from halfbyte.kernels.linear_triton import launch, tile_count, workspace_floats

    features = [w.shape[0] for w in weights]
    facts = tuple((w.format, w.shape[0]) for w in weights)
    tiles = _tiles(facts, x.shape[0], x.shape[1], -1 if x.device.type == "cpu" else x.device.index, row_invariant)
    part = count = None
    if tiles.splits > 1:
        part = floats(x.device, workspace_floats(features, x.shape[0], tiles), own)
        count = counters(x.device, tile_count(features, x.shape[0], tiles), own)
    biases = [None if b is None else b.contiguous() for b in biases]
    gather = tiles.block_m <= GATHERED_ROWS
    xs, weights = zip(*((x, w) if gather else _in_stored_order(x, w) for w in map(_dense_vectors, weights)), strict=True)
    launch(xs, weights, biases, outs, tiles, part, count)


def _in_stored_order(x: torch.Tensor, w: QuantTensor) -> tuple[torch.Tensor, QuantTensor]:
    """x copied so that its columns are neighbours, in the order that the weight stores them.

    The kernel reads them in any order, but numbers of 16 bits one by one cannot be copied asynchronously and fill its registers.
    """
    if w.perm is not None:
        return x.index_select(1, w.perm.clamp(0, x.shape[1] - 1)), replace(w, perm=None)
    return (x if x.stride(1) == 1 else x.contiguous()), w


@functools.lru_cache(maxsize=4096)
def _tiles(weights: tuple[tuple[Format, int], ...], rows: int, width: int, device: int, row_invariant: bool) -> LinearTiles:
    """The plan on GPU number `device` (-1: the interpreter)."""
    facts = None if device < 0 else describe(f"cuda:{device}")
    capability, processors = (facts.capability or (8, 0), facts.sm_count or 1) if facts else ((8, 0), 8)
    return linear_tiles(weights, rows=rows, width=width, processors=processors, capability=capability, row_invariant=row_invariant)


def _dense_vectors(w: QuantTensor) -> QuantTensor:
    """The weight with the tensors that have one axis in one piece, as kernels read them."""
    dense = [None if t is None else t.contiguous() for t in (w.nested, w.perm)]
    return w if dense[0] is w.nested and dense[1] is w.perm else replace(w, nested=dense[0], perm=dense[1])
