"""`experts_linear` for decoding, its second launch: the weighted sum of a token's experts.

    out[t, n] = sum_i gate[t, i] y[(t, i), n],  in the order of i, in fp32

A program adds one token's rows in one piece of N, several loads in flight. In the first launch the last program at a tile of N
would have to wait for all others to be done with it, and few programs would add while the rest of the GPU is idle.
"""

# ruff: noqa: RUF005
# Triton compiles a part of Python: tuples are joined with `+`.

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.common.launch import Launch

#: Warps of a program; a thread adds four neighbours.
_WARPS = 2


@gluon.jit(do_not_specialize=["E"])
def weighted_sums(
    Rows,  # fp32 [T * top_k, N]; zeros where the id is no expert
    ids,  # [T * top_k]
    gates,  # [T * top_k]
    out,  # [T, N]
    E,
    N,
    top_k: gl.constexpr,
    together: gl.constexpr,  # rows in flight
    use_pdl: gl.constexpr,
):
    """One token's sum in one piece of N."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    size: gl.constexpr = 128 * gl.num_warps()
    n = gl.program_id(0) * size + gl.arange(0, size, layout=layout)
    token = gl.program_id(1)
    total = gl.full([size], 0.0, gl.float32, layout)
    for begin in range(0, top_k, together):
        weights = ()
        for j in gl.static_range(together):
            pair = token * top_k + begin + j
            expert = gl.load(ids + pair, mask=begin + j < top_k, other=-1)
            gate = gl.load(gates + pair, mask=begin + j < top_k, other=0.0).to(gl.float32)
            weights = weights + (gl.where((expert >= 0) & (expert < E), gate, 0.0),)
        if use_pdl and begin == 0:  # the kernel before has itself waited for those that wrote ids and gates
            gdc_wait()
            gdc_launch_dependents()
        parts = ()
        for j in gl.static_range(together):
            pair = token * top_k + begin + j
            there = (n < N) & (begin + j < top_k)
            parts = parts + (gl.load(Rows + (pair.to(gl.int64) * N + n), mask=there, other=0.0, cache_modifier=".cg"),)
        for j in gl.static_range(together):
            total += weights[j] * parts[j]
    gl.store(out + (token.to(gl.int64) * N + n), total.to(out.dtype.element_ty), mask=n < N)


def sum_of_pairs(
    rows: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, experts: int, use_pdl: bool
) -> Launch:
    """The launch behind the one that writes `rows`.

    rows: fp32, T * top_k rows of out's N; ids, gates [T, top_k] and out [T, N] contiguous. use_pdl: it may start ahead of the end
    of that launch.
    """
    (tokens, features), top_k = out.shape, ids.shape[1]
    grid = (-(-features // (128 * _WARPS)), tokens)
    arguments = (rows, ids, gates, out, experts, features, top_k, min(top_k, 8), use_pdl)
    return Launch(weighted_sums, grid, arguments, {"num_warps": _WARPS, "launch_pdl": use_pdl})
