"""Independent numpy decoders for 4-bit checkpoint layouts: a second opinion that shares no code with the library.

Written from the formats' own descriptions: GPTQ v1 and v2 (with act-order), AWQ gemm, compressed-tensors int4, bitsandbytes NF4 and
FP4 (plain and nested scales), MXFP4, gpt-oss MXFP4, NVFP4 (modelopt and compressed-tensors).

Every function returns float32 W[N, K] (out features, in features); a gpt-oss stack keeps its leading axes. Shapes are trusted, not
validated; N and K must be multiples of the pack width. GPTQ v1 zeros are raised by ONE 32-bit addition of 0x11111111, the inverse
of how v1 files are exported; kernels add 1 to each nibble, mod 16. The two agree unless a stored nibble is 15: keep 15 out of
random v1 test data, or test that case on its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.generic]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
# bitsandbytes FP4 is NOT E2M1: values/12 in bit order
BNB_FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)


def e4m3(b: ArrayLike) -> Array:
    """float8_e4m3fn bytes -> fp32."""
    b = np.asarray(b, np.uint8).astype(np.int32)
    s, e, m = np.where(b & 0x80, -1.0, 1.0), (b >> 3) & 15, b & 7
    v = np.where(e == 0, m * 2.0**-9, (8 + m) * 2.0 ** (e - 10.0))
    v = np.where((e == 15) & (m == 7), np.nan, v)
    return (s * v).astype(np.float32)


def e8m0(b: ArrayLike) -> Array:
    """Bytes -> fp32 powers of two; 255 is NaN."""
    b = np.asarray(b, np.uint8).astype(np.int32)
    return np.where(b == 255, np.nan, np.ldexp(1.0, b - 127)).astype(np.float32)


def nib_lo_first(p: Array) -> Array:
    """uint8[..., K/2] -> codes[..., K]; low nibble = even k."""
    return np.stack([p & 15, p >> 4], -1).reshape(*p.shape[:-1], -1)


def nib_hi_first(p: Array) -> Array:
    """As bitsandbytes: HIGH nibble = even element."""
    return np.stack([p >> 4, p & 15], -1).reshape(*p.shape[:-1], -1)


def unpack32(q: Array, axis: int) -> Array:
    """int32, 8 nibbles, field j at bits 4j, along axis."""
    q = np.asarray(q).view(np.uint32) if q.dtype == np.int32 else q
    f = [(q >> np.uint32(4 * j)) & np.uint32(15) for j in range(8)]
    return np.stack(f, axis + 1).reshape(*q.shape[:axis], q.shape[axis] * 8, *q.shape[axis + 1 :]).astype(np.int32)


def gptq(qweight: Array, qzeros: Array, scales: Array, g_idx: ArrayLike, v1: bool = True) -> Array:
    """qweight i32[K/8,N], qzeros i32[G,N/8], scales f16[G,N], g_idx i32[K]."""
    q = unpack32(qweight, 0)  # [K,N]
    if v1:
        with np.errstate(over="ignore"):
            qzeros = (np.asarray(qzeros).view(np.uint32) + np.uint32(0x11111111)).view(np.int32)
    z = unpack32(qzeros, 1)  # [G,N]
    g = np.asarray(g_idx)
    return ((q - z[g]).astype(np.float32) * scales.astype(np.float32)[g]).T.copy()


AWQ_REVERSE = [0, 4, 1, 5, 2, 6, 3, 7]  # field j of a word holds column 8c+[0,2,4,6,1,3,5,7][j]


def awq_gemm(qweight: Array, qzeros: Array, scales: Array, group: int) -> Array:
    """qweight i32[K,N/8], qzeros i32[K/g,N/8], scales f16[K/g,N]."""

    def un(t: Array) -> Array:
        u = unpack32(t, 1)
        return u.reshape(u.shape[0], -1, 8)[:, :, AWQ_REVERSE].reshape(u.shape[0], -1)

    q, z = un(qweight), un(qzeros)
    g = np.arange(q.shape[0]) // group
    return ((q - z[g]).astype(np.float32) * scales.astype(np.float32)[g]).T.copy()


def ct_pack_quantized(packed: Array, scale: Array, group: int, zp: Array | None = None, g_idx: ArrayLike | None = None) -> Array:
    """compressed-tensors int4: packed i32[N,K/8], scale[N,K/g], zp i32[N/8,K/g] or None (=8)."""
    q = unpack32(packed, 1) - 8
    g = np.arange(q.shape[1]) // group if g_idx is None else np.asarray(g_idx)
    zeros = 0 if zp is None else (unpack32(zp, 0) - 8)[:, g]
    return (q - zeros).astype(np.float32) * scale.astype(np.float32)[:, g]


def bnb_4bit(
    packed: Array,
    absmax: Array,
    shape: tuple[int, int],
    blocksize: int = 64,
    code: Array = NF4,
    nested: tuple[Array, Array, float, int] | None = None,
) -> Array:
    """packed u8[N*K/2,1]; absmax f32, or u8 with nested=(code256, absmax2, offset, blocksize2)."""
    if nested is not None:
        code2, absmax2, offset, bs2 = nested
        idx = np.asarray(absmax, np.uint8).astype(np.int64)
        absmax = code2[idx] * np.repeat(absmax2, bs2)[: idx.size] + np.float32(offset)
    c = nib_hi_first(np.asarray(packed, np.uint8).reshape(-1))[: int(np.prod(shape))]
    return (code[c] * np.repeat(absmax.astype(np.float32), blocksize)[: c.size]).reshape(shape)


def mxfp4(w_u8: Array, s_u8: Array) -> Array:
    """[N,K/2], [N,K/32] (quark, compressed-tensors mxfp4-pack-quantized)."""
    return E2M1[nib_lo_first(w_u8)] * np.repeat(e8m0(s_u8), 32, -1)


def gptoss_mxfp4(blocks: Array, scales: Array) -> Array:
    """[...,R,K/32,16], [...,R,K/32] -> [...,R,K]."""
    b = nib_lo_first(blocks)  # [...,R,K/32,32]
    return (E2M1[b] * e8m0(scales)[..., None]).reshape(*scales.shape[:-1], -1)


def nvfp4_modelopt(w_u8: Array, s_e4m3: Array, scale_2: ArrayLike) -> Array:
    """W = e2m1 * (e4m3 * weight_scale_2)."""
    return E2M1[nib_lo_first(w_u8)] * (np.repeat(e4m3(s_e4m3), 16, -1) * np.float32(scale_2))


def nvfp4_ct(w_u8: Array, s_e4m3: Array, global_scale: ArrayLike) -> Array:
    """W = e2m1 * (e4m3 / weight_global_scale)."""
    return E2M1[nib_lo_first(w_u8)] * (np.repeat(e4m3(s_e4m3), 16, -1) / np.float32(global_scale))


def fp8_blocks(w_e4m3: Array, scale: Array, block: tuple[int, int]) -> Array:
    """DeepSeek: each element times the factor of its block, one after the other."""
    out = e4m3(w_e4m3)
    for i, j in np.ndindex(out.shape):
        out[i, j] = np.float32(out[i, j]) * np.float32(scale[i // block[0], j // block[1]])
    return out
