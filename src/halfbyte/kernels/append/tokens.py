"""Quantise-and-append: new keys and values enter a cache in one launch.

Token i of sequence b goes to position lengths[b] + i. `encode.py` has the arithmetic.

A program takes TOKENS new tokens of one sequence with all their heads, keys and values, as a tile [TOKENS * HEADS, D]; sequences of
few new tokens have one program each, which then also advances the length. Behind those, in the same launch, come programs for
queries that are to be rotated by position like the keys. Per-channel keys have a kernel of their own: a program takes one block of
tokens of one head, from the tail and from what is new, and quantises it once it is whole.

Tokens beyond the capacity or whose page is not in the pool are not written, but counted in the length. Under a scale of a whole
tensor, what saturates is counted, NaN and infinity with it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.append.rows import (
    fresh,
    load_rows,
    rotate_queries,
    slot,
    store_codes,
    store_rows,
    tensor_scale,
    top_of_tokens,
)
from halfbyte.kernels.common.encode import as_dtype, codec, encode, measure
from halfbyte.kv_buffer import KVBuffer

#: Elements of a tile; a thread takes 4 of it, or 8. A warp that has one head of 128 reduces it in one instruction.
TILE = 4096

# ------------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def _tile(pid, tiles, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """(sequence, token and head of each row) of a program; a sequence has so many `tiles`, None: one."""
    r = tl.arange(0, TOKENS * HEADS)
    b, t = pid, r // HEADS
    if tiles is not None:  # a division takes long, and nothing has been asked for yet
        b, t = pid // tiles, (pid % tiles) * TOKENS + t
    return b.to(tl.int64), t, (r % HEADS).to(tl.int64)


@triton.jit(do_not_specialize=["L", "H", "tiles", "capacity", "pages", "s_lengths", "s_tb", "s_tp", "batch", "q_heads"])
def append_tokens(
    k, v, counts, lengths, page_table, cos, sin, amax, q, q_out,
    k_codes, k_scales, k_offsets, k_saturated, v_codes, v_scales, v_offsets, v_saturated,
    L, H, tiles, capacity, pages, s_lengths, s_tb, s_tp, s_rope, batch, q_heads, q0, q1, q2, q3,
    k0, k1, k2, k3, kc0, kc1, kc2, kc3, ks0, ks1, ks2, ks3, ko0, ko1, ko2, ko3,
    v0, v1, v2, v3, vc0, vc1, vc2, vc3, vs0, vs1, vs2, vs3, vo0, vo1, vo2, vo3,
    K: tl.constexpr, V: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, CHUNKS: tl.constexpr, PAGE: tl.constexpr, ALIGN: tl.constexpr,
    LOG: tl.constexpr, FACTOR: tl.constexpr, ADVANCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every format that quantises token by token; K is None where the keys are per channel."""
    pid = tl.program_id(0)
    b, t, head = _tile(pid, tiles, TOKENS, HEADS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if q is not None:
        first = batch if tiles is None else batch * tiles
        if pid >= first:
            rotate_queries(q, (q0, q1, q2, q3), q_out, pid - first, batch, L, q_heads, cos, sin, s_rope,
                           TOKENS * HEADS, DK, PAD_K, ALIGN)  # fmt: skip
            return
    length, new, fit = fresh(lengths, s_lengths, counts, b, L, capacity)
    where, row, paged = slot(b, length.to(tl.int64) + t, t < fit, page_table, s_tb, s_tp, pages, PAGE)
    k_top, v_top, k_scale, v_scale = 0, 0, 0, 0
    if K is not None and K.granularity == "token":
        k_top = top_of_tokens(k, (k0, k1, k2, k3), b, t, head, L, H, cos, sin, s_rope, LOG, FACTOR, DK, PAD_K, ALIGN, HEADS, CHUNKS)
    if V.granularity == "token":
        v_top = top_of_tokens(v, (v0, v1, v2, v3), b, t, head, L, H, None, None, 0, 0, 1.0, DV, PAD_V, 1, HEADS, CHUNKS)
    if K is not None and K.granularity == "tensor":
        k_scale = tensor_scale(k_scales, amax, 0, pid, K)
    if V.granularity == "tensor":
        v_scale = tensor_scale(v_scales, amax, 1, pid, V)
    for chunk in range(CHUNKS):
        h = head + chunk * HEADS
        read = (t < L) & (h < H)  # the length is on its way meanwhile; what does not fit is not stored
        ok = paged & (h < H)
        if K is not None:
            x = load_rows(k, (k0, k1, k2, k3), b, t, h, read, cos, sin, s_rope, LOG, FACTOR, DK, PAD_K, ALIGN)
        y = load_rows(v, (v0, v1, v2, v3), b, t, h, read, None, None, 0, 0, 1.0, DV, PAD_V, 1)
        if K is not None:
            store_rows(x, (where, row), h, ok, k_top, k_scale, k_codes, (kc0, kc1, kc2, kc3), k_scales, (ks0, ks1, ks2, ks3),
                        k_offsets, (ko0, ko1, ko2, ko3), k_saturated, DK, K)  # fmt: skip
        store_rows(y, (where, row), h, ok, v_top, v_scale, v_codes, (vc0, vc1, vc2, vc3), v_scales, (vs0, vs1, vs2, vs3),
                    v_offsets, (vo0, vo1, vo2, vo3), v_saturated, DV, V)  # fmt: skip
    if ADVANCE:  # one program a sequence: once all its warps have read the length
        tl.debug_barrier()
        tl.store(lengths + b * s_lengths, length + new)


@triton.jit
def _measure_tensor(
    amax, scales, x, s, b, t, head, fit, H, cos, sin, s_rope,
    LOG: tl.constexpr, FACTOR: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, ALIGN: tl.constexpr,
    HEADS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    if tl.load(scales) == 0:
        top = top_of_tokens(x, s, b, t, head, fit, H, cos, sin, s_rope, LOG, FACTOR, D, PAD, ALIGN, HEADS, CHUNKS, True)
        tl.atomic_max(amax, tl.max(top), sem="relaxed")


@triton.jit(do_not_specialize=["L", "H", "tiles", "capacity", "s_lengths"])
def measure_tensors(
    k, v, counts, lengths, cos, sin, amax, k_scales, v_scales,
    L, H, tiles, capacity, s_lengths, s_rope, k0, k1, k2, k3, v0, v1, v2, v3,
    K: tl.constexpr, V: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, CHUNKS: tl.constexpr, ALIGN: tl.constexpr,
    LOG: tl.constexpr, FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Where the scale of a whole tensor is still 0: amax [2], the bits of the largest finite magnitude of new keys and values."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b, t, head = _tile(tl.program_id(0), tiles, TOKENS, HEADS)
    fit = fresh(lengths, s_lengths, counts, b, L, capacity)[2]
    if K is not None and K.granularity == "tensor":
        _measure_tensor(amax, k_scales, k, (k0, k1, k2, k3), b, t, head, fit, H, cos, sin, s_rope,
                        LOG, FACTOR, DK, PAD_K, ALIGN, HEADS, CHUNKS)  # fmt: skip
    if V.granularity == "tensor":
        _measure_tensor(amax + 1, v_scales, v, (v0, v1, v2, v3), b, t, head, fit, H, None, None, 0,
                        0, 1.0, DV, PAD_V, 1, HEADS, CHUNKS)  # fmt: skip


@triton.jit
def _block_rows(
    k, s, b, h, t, L, cos, sin, s_rope,
    LOG: tl.constexpr, FACTOR: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, ALIGN: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """f32 rows [BLOCK, PAD] of new keys t [BLOCK], rounded to the 16 bits of the tail."""
    x = load_rows(k, s, b, t, t * 0 + h, (t >= 0) & (t < L), cos, sin, s_rope, LOG, FACTOR, D, PAD, ALIGN)
    return as_dtype(x, dtype).to(tl.float32)


@triton.jit(do_not_specialize=["L", "H", "tiles", "capacity", "pages", "s_lengths", "s_tb", "s_tp"])
def append_blocks(
    k, counts, lengths, page_table, cos, sin, codes, scales, offsets, tail,
    L, H, tiles, capacity, pages, s_lengths, s_tb, s_tp, s_rope,
    k0, k1, k2, k3, c0, c1, c2, c3, s0, s1, s2, s3, o0, o1, o2, o3, t0, t1, t2, t3,
    K: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, PAGE: tl.constexpr, ALIGN: tl.constexpr,
    LOG: tl.constexpr, FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Per-channel keys. A sequence's run is its tail and then its new tokens; a program quantises block j of one head's run, if it
    is whole. The program of block 0, which alone reads the tail, then fills it with what is new behind the last whole block.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    j, pair = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    length, _, fit = fresh(lengths, s_lengths, counts, b, L, capacity)
    old = tl.maximum(length, 0) % K.block
    total = old + fit
    i, d = tl.arange(0, K.block), tl.arange(0, PAD)
    inside = (d < D)[None, :]
    in_tail = (tail + (b * t0 + h * t1 + i.to(tl.int64) * t2))[:, None] + d.to(tl.int64)[None, :] * t3
    s_k = (k0, k1, k2, k3)
    x = _block_rows(k, s_k, b, h, j * K.block + i - old, L, cos, sin, s_rope, LOG, FACTOR, D, PAD, ALIGN, tail.dtype.element_ty)

    if (j + 1) * K.block <= total:
        kept = (j * K.block + i < old)[:, None] & inside
        block = tl.where(kept, tl.load(in_tail, mask=kept, other=0.0).to(tl.float32), x)
        first = (length // K.block + j).to(tl.int64)  # index of this block in its sequence
        where, row, ok = slot(b, first * K.block, first >= 0, page_table, s_tb, s_tp, pages, PAGE)
        factor, offset, zero = measure(block, inside, 0, K)  # [PAD]
        q = encode(block, factor[None, :], offset[None, :], zero[None, :], K)
        rows = codes + (where * c0 + h * c1 + (row + i) * c2)
        store_codes(q, rows, c3, ok & (i >= 0), D, K)
        mask, at = ok & (d < D), row // K.block
        tl.store(scales + (where * s0 + h * s1 + at * s2) + d.to(tl.int64) * s3, factor, mask=mask)
        if K.offset:
            tl.store(offsets + (where * o0 + h * o1 + at * o2) + d.to(tl.int64) * o3, offset, mask=mask)
    if j == 0:
        last = total // K.block
        if last > 0:
            tl.debug_barrier()  # every warp has read the tail
            x = _block_rows(
                k, s_k, b, h, last * K.block + i - old, L, cos, sin, s_rope, LOG, FACTOR, D, PAD, ALIGN, tail.dtype.element_ty
            )
        position = last * K.block + i
        added = ((position >= old) & (position < total))[:, None] & inside
        tl.store(in_tail, as_dtype(x, tail.dtype.element_ty), mask=added)


# ------------------------------------------------------------------------------------------------------- the launch


@dataclass(frozen=True)
class _Plan:
    """What follows from formats and sizes alone.

    tiles, blocks: programs a sequence (of one head, for blocks); rows: of a tile; the others: constexpr arguments of the three
    kernels
    """

    tiles: int
    rows: int
    blocks: int
    warps: int
    warps_of_block: int
    options: dict[str, Any]
    to_tokens: tuple[Any, ...]
    to_measure: tuple[Any, ...]
    to_blocks: tuple[Any, ...]


def _warps(elements: int, each: int, most: int) -> int:
    """Warps of a program: each has so many elements, more where there would be too many warps."""
    return max(1, min(most, elements // each))


@functools.cache
def _tiling(heads: int, tokens: int, pad: int) -> tuple[int, int, int, int]:
    """(tokens, heads, passes over the heads, warps) of a program."""
    whole = triton.next_power_of_2(heads)
    some = max(1, min(whole, TILE // pad))
    count = max(1, min(triton.next_power_of_2(tokens), TILE // (some * pad))) if some == whole else 1
    return count, some, -(-heads // some), _warps(count * some * pad, 128, 16)


@functools.lru_cache(4096)
def _plan(
    keys: str, values: str, heads: int, tokens: int, dk: int, dv: int, page: int, rotate: bool, advance: bool, pdl: bool
) -> _Plan:
    pad_k, pad_v = max(16, triton.next_power_of_2(dk)), max(16, triton.next_power_of_2(dv))
    count, some, passes, warps = _tiling(heads, tokens, max(pad_k, pad_v))
    tiles, size, half = -(-tokens // count), dk & -dk, dk // 2
    align = max(1, min(16, half & -half))
    rotation = (size.bit_length() - 1, size**-0.5) if rotate else (0, 1.0)
    key, value = codec(keys), codec(values)
    planes = (None if key.block else key, value, dk, dv, pad_k, pad_v, count, some, passes)
    return _Plan(
        tiles=tiles,
        rows=count * some,
        blocks=-(-(key.block - 1 + tokens) // key.block) if key.block else 0,
        warps=warps,
        warps_of_block=_warps(key.block * pad_k, 256, 8),
        options={"enable_fp_fusion": False, "enable_reflect_ftz": False, **({"launch_pdl": True} if pdl else {})},
        to_tokens=(*planes, page, align, *rotation, advance and tiles == 1, pdl),
        to_measure=(*planes, align, *rotation, pdl),
        to_blocks=(key, dk, pad_k, page, align, *rotation, pdl),
    )


def one_program(heads: int, tokens: int, dim: int) -> bool:
    """Whether one program handles all new tokens of a sequence, and can so advance its length. `dim`: the larger head size."""
    return tokens <= _tiling(heads, tokens, max(16, triton.next_power_of_2(dim)))[0]


def _strides(t: torch.Tensor | None) -> tuple[int, ...]:
    """Four strides of a part of a plane. Scales of tokens [B, T] have none for heads; what is not there has zeros."""
    if t is None or t.ndim == 1:
        return 0, 0, 0, 0
    if t.ndim == 2:
        return t.stride(0), 0, t.stride(1), 0
    return (*t.stride(), 0)[:4]


def _launches(
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor | None,
    keys: KVBuffer,
    values: KVBuffer,
    lengths: torch.Tensor,
    page_table: torch.Tensor | None,
    rotate_keys: bool,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    amax: torch.Tensor | None,
    advance: bool,
    pdl: bool,
    q: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
) -> list[tuple[Any, int, tuple[Any, ...], int, dict[str, Any]]]:
    """(kernel, programs, arguments, warps, options), in order."""
    batch, heads, tokens, dk = k.shape
    rows = keys.codes.shape[2]
    page, columns = (0, 1) if page_table is None else (rows, page_table.shape[1])
    s_table = (0, 0) if page_table is None else page_table.stride()
    s_rope = cos.stride(0) if cos is not None and cos.ndim == 3 else 0
    s_length = lengths.stride(0)
    plan = _plan(keys.format.name, values.format.name, heads, tokens, dk, v.shape[3], page, rotate_keys, advance, pdl)
    tiles = plan.tiles if plan.tiles > 1 else None
    where = (rows * columns, keys.codes.shape[0], s_length, *s_table, s_rope)
    k_parts, v_parts = keys.tensors(), values.tensors()[:3]
    s_k, s_v = k.stride(), v.stride()
    s_q = (0, 0, 0, 0) if q is None else q.stride()
    q_heads = 0 if q is None else q.shape[1]
    made: list[tuple[Any, int, tuple[Any, ...], int, dict[str, Any]]] = []
    if amax is not None:
        arguments = (
            *(k, v, counts, lengths, cos, sin, amax, keys.scales, values.scales),
            *(tokens, heads, tiles, rows * columns, s_length, s_rope, *s_k, *s_v, *plan.to_measure),
        )
        made.append((measure_tensors, batch * plan.tiles, arguments, plan.warps, plan.options))
    if plan.blocks:
        arguments = (
            *(k, counts, lengths, page_table, cos, sin, *k_parts, tokens, heads, plan.blocks, *where),
            *(*s_k, *(s for t in k_parts for s in _strides(t)), *plan.to_blocks),
        )
        made.append((append_blocks, batch * heads * plan.blocks, arguments, plan.warps_of_block, plan.options))
    arguments = (
        *(k, v, counts, lengths, page_table, cos, sin, amax, q, q_out),
        *(*k_parts[:3], keys.saturated, *v_parts, values.saturated, tokens, heads, tiles, *where, batch, q_heads, *s_q),
        *(*s_k, *(s for t in k_parts[:3] for s in _strides(t)), *s_v, *(s for t in v_parts for s in _strides(t))),
        *plan.to_tokens,
    )
    of_queries = -(-batch * tokens * q_heads // plan.rows)
    made.append((append_tokens, batch * plan.tiles + of_queries, arguments, plan.warps, {**plan.options, "maxnreg": 128}))
    return made


def launch(*arguments: Any) -> list[tuple[Any, int, tuple[Any, ...]]]:
    """Append k [B, H, L, D] and v [B, H, L, Dv]; nothing may be empty. The arguments are those of `_launches`.

    Returns of each launch what was compiled, the number of programs and all arguments.

    counts, cos and sin ([L, D/2] or [B, L, D/2]) are contiguous. `amax`, int32 [2] of zeros: measure the scales of whole tensors
    that are 0 (None: they are known). `advance`: lengths advance too, if `one_program` says so. `pdl`: programmatic dependent
    launch, for sm_90 and later. q [B, Hq, L, D] is rotated by cos and sin into q_out, contiguous.
    """
    return [
        (kernel[(programs,)](*given, num_warps=warps, **options), programs, given)
        for kernel, programs, given, warps, options in _launches(*arguments)
    ]
