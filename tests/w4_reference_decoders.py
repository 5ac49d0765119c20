# ruff: noqa: E501, E731, PT018
"""Independent numpy decoders for 4-bit checkpoint layouts: GPTQ v1/v2 (with act-order), AWQ gemm, compressed-tensors int4,
bitsandbytes NF4/FP4 (plain and nested scales), MXFP4, gpt-oss MXFP4, NVFP4 (modelopt and compressed-tensors).

For tests: a second opinion on the loaders, sharing no code with the library. Written from the format descriptions
(see formats.md), numpy only. Every function returns float32 W[N, K] (out features, in features); a gpt-oss stack keeps its leading axes.

Limits. Shapes are trusted, not validated; N and K must be multiples of the pack width. GPTQ v1 zeros are raised by ONE 32-bit addition of
0x11111111, the inverse of how v1 files are exported; kernels (and formats.md) add 1 to each nibble, mod 16. The two agree unless
a stored nibble is 15 (a zero point of 0): keep 15 out of random v1 test data, or test that case on its own.
The self-test (run this file) checks the decoders against packers in this file, not against files written by other libraries.
"""

import numpy as np

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


def e4m3(b):  # float8_e4m3fn byte -> fp32
    b = np.asarray(b, np.uint8).astype(np.int32)
    s, e, m = np.where(b & 0x80, -1.0, 1.0), (b >> 3) & 15, b & 7
    v = np.where(e == 0, m * 2.0**-9, (8 + m) * 2.0 ** (e - 10.0))
    v = np.where((e == 15) & (m == 7), np.nan, v)
    return (s * v).astype(np.float32)


def e8m0(b):  # byte -> fp32 power of two; 255 is NaN
    b = np.asarray(b, np.uint8).astype(np.int32)
    return np.where(b == 255, np.nan, np.ldexp(1.0, b - 127)).astype(np.float32)


def nib_lo_first(p):  # uint8[...,K/2] -> codes[...,K]; low nibble = even k
    return np.stack([p & 15, p >> 4], -1).reshape(*p.shape[:-1], -1)


def nib_hi_first(p):  # bitsandbytes: HIGH nibble = even element
    return np.stack([p >> 4, p & 15], -1).reshape(*p.shape[:-1], -1)


def unpack32(q, axis):  # int32, 8 nibbles, field j at bits 4j, along axis
    q = np.asarray(q).view(np.uint32) if q.dtype == np.int32 else q
    f = [(q >> np.uint32(4 * j)) & np.uint32(15) for j in range(8)]
    return np.stack(f, axis + 1).reshape(*q.shape[:axis], q.shape[axis] * 8, *q.shape[axis + 1 :]).astype(np.int32)


def gptq(qweight, qzeros, scales, g_idx, v1=True):
    """qweight i32[K/8,N], qzeros i32[G,N/8], scales f16[G,N], g_idx i32[K]."""
    q = unpack32(qweight, 0)  # [K,N]
    if v1:  # word add = exact inverse of GPTQModel's v2->v1 export; equals the
        with np.errstate(over="ignore"):  # kernels' per-nibble "+1" whenever no stored nibble is 15 (see Limits)
            qzeros = (np.asarray(qzeros).view(np.uint32) + np.uint32(0x11111111)).view(np.int32)
    z = unpack32(qzeros, 1)  # [G,N]
    g = np.asarray(g_idx)
    return ((q - z[g]).astype(np.float32) * scales.astype(np.float32)[g]).T.copy()


AWQ_REVERSE = [0, 4, 1, 5, 2, 6, 3, 7]  # field j of a word holds column 8c+[0,2,4,6,1,3,5,7][j]


def awq_gemm(qweight, qzeros, scales, group):
    """qweight i32[K,N/8], qzeros i32[K/g,N/8], scales f16[K/g,N]."""

    def un(t):
        u = unpack32(t, 1)
        return u.reshape(u.shape[0], -1, 8)[:, :, AWQ_REVERSE].reshape(u.shape[0], -1)

    q, z = un(qweight), un(qzeros)
    g = np.arange(q.shape[0]) // group
    return ((q - z[g]).astype(np.float32) * scales.astype(np.float32)[g]).T.copy()


def ct_pack_quantized(packed, scale, group, zp=None, g_idx=None):
    """compressed-tensors int4: packed i32[N,K/8], scale[N,K/g], zp i32[N/8,K/g] or None (=8)."""
    q = unpack32(packed, 1) - 8
    z = 0 if zp is None else unpack32(zp, 0) - 8
    g = np.arange(q.shape[1]) // group if g_idx is None else np.asarray(g_idx)
    zz = 0 if zp is None else z[:, g]
    return (q - zz).astype(np.float32) * scale.astype(np.float32)[:, g]


def bnb_4bit(packed, absmax, shape, blocksize=64, code=NF4, nested=None):
    """packed u8[N*K/2,1]; absmax f32, or u8 with nested=(code256, absmax2, offset, blocksize2)."""
    if nested is not None:
        code2, absmax2, offset, bs2 = nested
        idx = np.asarray(absmax, np.uint8).astype(np.int64)
        absmax = code2[idx] * np.repeat(absmax2, bs2)[: idx.size] + np.float32(offset)
    c = nib_hi_first(np.asarray(packed, np.uint8).reshape(-1))[: int(np.prod(shape))]
    return (code[c] * np.repeat(absmax.astype(np.float32), blocksize)[: c.size]).reshape(shape)


def mxfp4(w_u8, s_u8):  # [N,K/2], [N,K/32]  (quark / ct mxfp4-pack-quantized)
    return E2M1[nib_lo_first(w_u8)] * np.repeat(e8m0(s_u8), 32, -1)


def gptoss_mxfp4(blocks, scales):  # [...,R,K/32,16], [...,R,K/32] -> [...,R,K]
    b = nib_lo_first(blocks)  # [...,R,K/32,32]
    return (E2M1[b] * e8m0(scales)[..., None]).reshape(*scales.shape[:-1], -1)


def nvfp4_modelopt(w_u8, s_e4m3, scale_2):  # W = e2m1 * e4m3 * weight_scale_2
    return E2M1[nib_lo_first(w_u8)] * (np.repeat(e4m3(s_e4m3), 16, -1) * np.float32(scale_2))


def nvfp4_ct(w_u8, s_e4m3, global_scale):  # W = e2m1 * e4m3 / weight_global_scale
    return E2M1[nib_lo_first(w_u8)] * (np.repeat(e4m3(s_e4m3), 16, -1) / np.float32(global_scale))


if __name__ == "__main__":
    r = np.random.default_rng(0)
    N, K, g = 32, 256, 64
    q = r.integers(0, 16, (K, N))
    z = r.integers(1, 16, (K // g, N))
    s = r.random((K // g, N)).astype(np.float16)
    gi = np.arange(K) // g
    W = ((q - z[gi]) * s.astype(np.float32)[gi]).T

    def pk(a, ax):
        a = np.moveaxis(a, ax, -1)
        a = a.reshape(*a.shape[:-1], -1, 8).astype(np.uint64)
        w = sum(a[..., j] << np.uint64(4 * j) for j in range(8)).astype(np.uint32).view(np.int32)
        return np.moveaxis(w, -1, ax).copy()

    assert np.array_equal(gptq(pk(q, 0), pk(z - 1, 1), s, gi, True), W)
    assert np.array_equal(gptq(pk(q, 0), pk(z, 1), s, gi, False), W)
    perm = r.permutation(K)
    assert np.array_equal(gptq(pk(q, 0), pk(z, 1), s, gi[perm], False), ((q - z[gi[perm]]) * s.astype(np.float32)[gi[perm]]).T)
    o = [0, 2, 4, 6, 1, 3, 5, 7]
    ap = lambda a: pk(a.reshape(a.shape[0], -1, 8)[:, :, o].reshape(a.shape[0], -1), 1)
    assert np.array_equal(awq_gemm(ap(q), ap(z), s, g), W)
    assert np.array_equal(ct_pack_quantized(pk(q.T, 1), s.T, g, pk(z.T, 0)), W)
    c = r.integers(0, 16, N * K).astype(np.uint8)
    am = r.random(N * K // 64).astype(np.float32)
    p = (c[0::2] << 4) | c[1::2]
    assert np.array_equal(bnb_4bit(p, am, (N, K)), (NF4[c] * np.repeat(am, 64)).reshape(N, K))
    assert e4m3(0x7E) == 448 and e4m3(1) == 2**-9 and e8m0(127) == 1 and np.isnan(e8m0(255)) and e4m3(0x38) == 1
    w = r.integers(0, 256, (N, K // 2)).astype(np.uint8)
    e = r.integers(100, 130, (N, K // 32)).astype(np.uint8)
    assert np.array_equal(mxfp4(w, e), gptoss_mxfp4(w.reshape(N, K // 32, 16), e))
    sc = r.integers(1, 0x7F, (N, K // 16)).astype(np.uint8)
    assert np.allclose(nvfp4_modelopt(w, sc, 0.25), nvfp4_ct(w, sc, 4.0))
    assert E2M1[nib_lo_first(np.array([[0x17]], np.uint8))].tolist() == [[6.0, 0.5]]
    print("ok")
