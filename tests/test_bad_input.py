"""Bad input: every public function answers with an error of the library's own that names the argument, or with the right result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import halfbyte
from halfbyte import (
    KV_FORMATS,
    WEIGHT_FORMATS,
    HalfbyteError,
    KVCache,
    PagedKVCache,
    QuantTensor,
    decode_attention,
    dequantize,
    experts_linear,
    key_format,
    linear,
    merge_states,
    prefill_attention,
    qkv_projection,
    quantize,
)
from halfbyte.kv_buffer import KVBuffer
from halfbyte.ops.linear import projections
from halfbyte.reference.experts import Activation

META = torch.device("meta")
FP8 = torch.float8_e4m3fn
Call = Callable[[], object]


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cache(**options: Any) -> KVCache:
    """Two sequences of 5 tokens, 2 heads of 64, room for 64."""
    made = KVCache(2, 2, 64, 64, **options)
    made.append(r(2, 2, 5, 64), r(2, 2, 5, 64))
    return made


def paged(**options: Any) -> PagedKVCache:
    return PagedKVCache(2, 2, 64, 64, page_size=32, **options)


def wrapped(lengths: torch.Tensor, table: torch.Tensor | None = None) -> KVCache:
    c = cache()
    return KVCache.from_buffers(c.keys, c.values, lengths, page_table=table)


def with_queries(q: Any, **options: Any) -> Call:
    """An append of two tokens, with queries."""
    k, angle = r(2, 2, 2, 64), torch.zeros(2, 32)
    given = {"rope": (angle, angle), **options}
    return lambda: cache().append(k, k, q=q, **given)


def kv(k: Any, v: Any = None, counts: Any = None, *, into: type[KVCache] = KVCache, **options: Any) -> Call:
    """An append of k and v to a new cache."""
    make = cache if into is KVCache else paged
    return lambda: make(**options).append(k, r(2, 2, 1, 64) if v is None else v, counts)


def attend(q: Any = None, **options: Any) -> Call:
    """decode_attention over a new cache."""
    return lambda: decode_attention(r(2, 4, 1, 64) if q is None else q, cache(), **options)


def prefill(q: Any, k: Any, v: Any, **options: Any) -> Call:
    return lambda: prefill_attention(q, k, v, cache(), **options)


def merge(outs: Any, lses: Any, sinks: Any = None) -> Call:
    return lambda: merge_states(outs, lses, sinks)


def weight(name: str = "nf4") -> QuantTensor:
    return quantize(r(8, 128), name)


def stack() -> QuantTensor:
    return quantize(r(2, 8, 128), "nf4")


def fixed(scale: Any, name: str = "int8_tensor") -> Call:
    return lambda: quantize(r(1, 1, 2, 64), key_format(name), scale=scale)


def odd_shape() -> object:
    made = quantize(r(2, 32), "nvfp4")
    return QuantTensor(made.format, (2, 33), **made.parts()).dequantize()


def ordered(perm: torch.Tensor) -> Call:
    return lambda: replace(weight(), perm=perm)


def negative_lengths_append() -> object:
    return wrapped(ints(-1, 0)).append(r(2, 2, 1, 64), r(2, 2, 1, 64))


def mixed_devices() -> object:
    c = cache()
    meta = KVCache(2, 2, 64, 64, device="meta")
    return KVCache.from_buffers(c.keys, meta.values, c.lengths)


IDS = torch.tensor([[0, 1], [1, 0]])
one = r(2, 2, 1, 64)
out4, lse4 = r(2, 4, 1, 64), r(2, 4, 1)
#: name: (the call, what the message must hold). A name says what is wrong.
REFUSED: dict[str, tuple[Call, str]] = {
    # -- KVCache, PagedKVCache
    "cache: batch -1": (lambda: KVCache(-1, 2, 64, 64), "batch=-1"),
    "cache: kv_heads 0": (lambda: KVCache(1, 0, 64, 64), "kv_heads=0"),
    "cache: head_dim 0": (lambda: KVCache(1, 1, 0, 64), "head_dim=0"),
    "cache: capacity 0": (lambda: KVCache(1, 1, 64, 0), "capacity=0"),
    "cache: capacity beyond lengths": (lambda: KVCache(1, 1, 64, 2**31), "capacity=2147483648; .* below 2.31"),
    "cache: capacity a float": (lambda: KVCache(1, 1, 64, 2.5), "capacity=2.5"),  # type: ignore[arg-type]
    "cache: keys unknown": (lambda: cache(keys="int5"), r"keys='int5' is not a format; choose one of: fp16.*int4_channel"),
    "cache: keys None": (lambda: cache(keys=None), "keys=None"),
    "cache: values per channel": (lambda: cache(values="int8_channel"), "values='int8_channel' is for keys only"),
    "cache: weight format by name": (lambda: cache(keys="nf4"), "keys='nf4'"),
    "cache: groups do not divide": (lambda: KVCache(1, 1, 40, 8), "groups of 32"),
    "cache: int4 and an odd head": (lambda: KVCache(1, 1, 59, 8, values="int4"), "multiple of 2"),
    "cache: dtype fp32": (lambda: cache(dtype=torch.float32), "dtype=torch.float32"),
    "cache: dtype by name": (lambda: cache(dtype="float16"), "dtype=float16"),
    "cache: rotation of 40": (lambda: KVCache(1, 1, 40, 8, values="int8", rotate_keys=True), "head_dim=40"),
    "cache: a GPU that is not there": (lambda: cache(device="cuda:99"), "device='cuda:99'"),
    "cache: rotate_keys a word": (lambda: cache(rotate_keys="no"), "rotate_keys='no'"),
    "attend: no cache": (lambda: decode_attention(r(2, 4, 1, 64), None), "cache is a NoneType"),  # type: ignore[arg-type]
    "append: counts of 8 bits": (kv(r(2, 2, 1, 64), counts=torch.ones(2, dtype=torch.uint8)), "counts is torch.uint8"),
    "append: counts beyond 32 bits": (kv(r(2, 2, 1, 64), counts=torch.tensor([2**32 + 1, 1])), "counts runs from"),
    "attend: query_start of 8 bits": (attend(query_start=torch.ones(2, dtype=torch.uint8)), "query_start is torch.uint8"),
    "merge: no lists": (lambda: merge_states(None, None), "must be lists"),  # type: ignore[arg-type]
    "dequantize: a plain tensor": (lambda: dequantize(r(2, 2)), "q is a Tensor"),  # type: ignore[arg-type]
    "from_buffers: nothing": (lambda: KVCache.from_buffers(None, None, None), "keys is a NoneType"),  # type: ignore[arg-type]
    "cache: k_scale of per head": (lambda: cache(k_scale=1.0), "k_scale"),
    "cache: k_scale NaN": (lambda: cache(keys="int8_tensor", k_scale=float("nan")), "k_scale=nan"),
    "cache: k_scale 0": (lambda: cache(keys="int8_tensor", k_scale=0.0), "k_scale=0.0"),
    "cache: k_scale too large": (lambda: cache(keys="int8_tensor", k_scale=1e6), "k_scale=1000000.0"),
    "cache: an option that does not exist": (lambda: cache(key="int4"), "key"),
    "cache: value_dim 0": (lambda: cache(value_dim=0), "value_dim"),
    "cache: device unknown": (lambda: cache(device="foo"), "device"),
    "cache: k_scale a string": (lambda: cache(keys="int8_tensor", k_scale="a"), "scale"),
    "cache: a weight format for keys": (lambda: cache(keys=WEIGHT_FORMATS["int4_g32"]), "keys"),
    "cache: nf4 for values": (lambda: KVCache(2, 2, 64, 64, values=WEIGHT_FORMATS["nf4"]), "values"),
    "paged: page_size 48": (lambda: PagedKVCache(1, 1, 64, 64, page_size=48), "page_size=48"),
    "paged: pages -1": (lambda: paged(pages=-1), "pages=-1"),
    "paged: pages True": (lambda: paged(pages=True), "pages=True"),
    "paged: pages a string": (lambda: paged(pages="a"), "pages='a'"),
    # -- append
    "append: k of rank 2": (kv(r(2, 64)), r"k has shape \[2, 64\]"),
    "append: k of other heads": (kv(r(2, 3, 1, 64)), "k has shape"),
    "append: k of another batch": (kv(r(3, 2, 1, 64)), "k has shape"),
    "append: v of another head_dim": (kv(one, r(2, 2, 1, 32)), "v has shape"),
    "append: k and v of other lengths": (kv(one, r(2, 2, 2, 64)), "k has 1 tokens and v 2"),
    "append: k of integers": (kv(one.int()), r"k is torch\.int32"),
    "append: k complex": (kv(one.to(torch.complex64)), r"k is torch\.complex64"),
    "append: k on another device": (kv(one.to(META)), "k is on meta"),
    "append: v on another device": (kv(one, one.to(META)), "v is on meta"),
    "append: counts too short": (kv(one, counts=ints(1)), "counts has shape"),
    "append: counts floating": (kv(one, counts=torch.ones(2)), "counts is"),
    "append: counts on another device": (kv(one, counts=ints(1, 1).to(META)), "counts is"),
    "append: counts of rank 2": (kv(one, counts=torch.ones(2, 1, dtype=torch.int32)), "counts has shape"),
    "append: counts negative": (kv(one, counts=ints(-1, 1)), "counts runs from -1"),
    "append: counts above L": (kv(one, counts=ints(2, 1)), "counts runs from 1 to 2"),
    "append: k of float8": (kv(one.to(FP8)), "k is"),
    "append: k beyond fp32": (kv(one.double() * 1e300, keys="fp16"), "k rounded to fp32"),
    "append: k beyond fp32, per head": (kv(one.double() * 1e300), "k rounded to fp32"),
    "append: k beyond fp32, per tensor": (kv(one.double() * 1e300, keys="int8_tensor", k_scale=1.0), "k"),
    "append: q without rope": (with_queries(r(2, 4, 2, 64), rope=None), "q was given without rope"),
    "append: q of other tokens": (with_queries(r(2, 4, 3, 64)), r"q has shape \[2, 4, 3, 64\]; expected \[2, Hq, 2, 64\]"),
    "append: q of another head_dim": (with_queries(r(2, 4, 2, 32)), "q has shape"),
    "append: q of integers": (with_queries(r(2, 4, 2, 64).int()), "q is torch.int32"),
    "append: q on another device": (with_queries(r(2, 4, 2, 64).to(META)), "q is on meta"),
    "append: q that asks for a gradient": (with_queries(r(2, 4, 2, 64).requires_grad_()), "q requires one"),
    "append: negative lengths of an engine": (negative_lengths_append, "lengths"),
    "append: lengths beyond the capacity": (lambda: wrapped(ints(65, 0)).append(one, one), "capacity"),
    "paged append: k of rank 2": (kv(r(2, 64), into=PagedKVCache), "k has shape"),
    "paged append: counts of rank 0": (kv(one, counts=torch.tensor(1), into=PagedKVCache), "counts"),
    "paged append: counts of rank 2": (kv(one, counts=torch.ones(2, 1, dtype=torch.int32), into=PagedKVCache), "counts"),
    "paged append: counts on another device": (kv(one, counts=ints(1, 1).to(META), into=PagedKVCache), "counts"),
    "paged append: counts NaN": (kv(one, counts=torch.tensor([1, torch.nan]), into=PagedKVCache), "counts"),
    "paged append: counts too long": (kv(one, counts=ints(1, 1, 1), into=PagedKVCache), "counts has shape"),
    "paged append: counts negative": (kv(one, counts=ints(-1, 1), into=PagedKVCache), "counts runs from -1"),
    # -- the rest of a cache
    "paged: more pages than int32 counts": (lambda: PagedKVCache(1, 1, 64, 64, pages=2**31), "pages=2147483648"),
    "crop: beyond 64 bits": (lambda: cache().crop(2**63 + 1), "length="),
    "crop: -1": (lambda: cache().crop(-1), "length=-1"),
    "crop: a negative entry": (lambda: cache().crop(ints(1, -1)), "length="),
    "crop: a fraction": (lambda: cache().crop(2.5), "length"),  # type: ignore[arg-type]
    "crop: a floating tensor": (lambda: cache().crop(torch.tensor([1.5, 2.0])), "length"),
    "crop: of another batch": (lambda: cache().crop(ints(1, 2, 3)), "length"),
    "crop: rank 2": (lambda: cache().crop(torch.ones(2, 1, dtype=torch.int32)), "length"),
    "crop: NaN": (lambda: cache().crop(float("nan")), "length"),  # type: ignore[arg-type]
    "crop: None": (lambda: cache().crop(None), "length"),  # type: ignore[arg-type]
    "reorder: out of range": (lambda: cache().reorder(ints(0, 2)), "index names a sequence outside"),
    "reorder: negative": (lambda: cache().reorder(ints(0, -1)), "index names a sequence outside"),
    "reorder: too short": (lambda: cache().reorder(ints(0)), "index has 1"),
    "reorder: floating": (lambda: cache().reorder(torch.zeros(2)), r"index is torch\.float32"),
    "reorder: rank 0": (lambda: cache().reorder(torch.tensor(0)), "index has shape"),
    "reorder: a mask": (lambda: cache().reorder(torch.tensor([True, False])), "index"),
    "reorder: complex": (lambda: cache().reorder(torch.tensor([0, 1j])), "index"),
    "reorder: another device": (lambda: cache().reorder(ints(0, 1).to(META)), "index"),
    "paged reorder: out of range": (lambda: paged().reorder(ints(0, 2)), "index names a sequence outside"),
    "select: a mask": (lambda: cache().select(torch.tensor([True, False])), "index"),
    "select: out of range": (lambda: cache().select(ints(2)), "index names a sequence outside"),
    "repeat_interleave: -1": (lambda: cache().repeat_interleave(-1), "repeats"),
    "repeat_interleave: 1.5": (lambda: cache().repeat_interleave(1.5), "repeats"),  # type: ignore[arg-type]
    "from_buffers: lengths on another device": (lambda: wrapped(ints(0, 0).to(META)), "lengths"),
    "from_buffers: page table on another device": (lambda: wrapped(ints(0, 0), torch.zeros(2, 1).int().to(META)), "page_table"),
    "from_buffers: planes on two devices": (mixed_devices, "values"),
    "from_buffers: lengths of 64 bits": (lambda: wrapped(ints(0, 0).long()), "lengths is"),
    "from_buffers: page table of another batch": (lambda: wrapped(ints(0, 0), torch.zeros(3, 1).int()), "page_table is"),
    # -- decode_attention
    "attend: q of rank 3": (attend(r(2, 4, 64)), "q has shape"),
    "attend: q of another batch": (attend(r(3, 4, 1, 64)), r"q has shape \[3, 4, 1, 64\]; expected \[2"),
    "attend: q of another head_dim": (attend(r(2, 4, 1, 32)), r"q has shape .* 64\]"),
    "attend: heads do not divide": (attend(r(2, 3, 1, 64)), "q has 3 heads"),
    "attend: no heads": (attend(r(2, 0, 1, 64)), "q has 0 heads"),
    "attend: q of integers": (attend(r(2, 4, 1, 64).int()), r"q is torch\.int32"),
    "attend: q of float8": (attend(r(2, 4, 1, 64).to(FP8)), "q is"),
    "attend: q complex": (attend(r(2, 4, 1, 64).to(torch.complex64)), "q is"),
    "attend: q on another device": (attend(r(2, 4, 1, 64).to(META)), "q is on meta"),
    "attend: latents without a scale": (attend(r(2, 4, 1, 128), latent=True), "sm_scale is None; with latent=True"),
    "attend: q without its part for latents": (attend(latent=True, sm_scale=1.0), r"q has shape .* 128\]"),
    "attend: window 0": (attend(window=0), "window=0"),
    "attend: window -3": (attend(window=-3), "window=-3"),
    "attend: window a fraction": (attend(window=2.5), "window"),
    "attend: window beyond 64 bits": (attend(window=2**40), r"window=1099511627776; expected 1 .* to 2\^31 - 1"),
    "attend: window a string": (attend(window="a"), "window"),
    "attend: softcap 0": (attend(softcap=0.0), "softcap=0"),
    "attend: softcap NaN": (attend(softcap=float("nan")), "softcap=nan"),
    "attend: softcap infinite": (attend(softcap=float("inf")), "softcap"),
    "attend: softcap a string": (attend(softcap="a"), "softcap"),
    "attend: sm_scale NaN": (attend(sm_scale=float("nan")), "sm_scale=nan"),
    "attend: sm_scale infinite": (attend(sm_scale=float("inf")), "sm_scale=inf"),
    "attend: sm_scale a string": (attend(sm_scale="a"), "sm_scale"),
    "attend: slopes too few": (attend(alibi_slopes=r(2)), "alibi_slopes has shape"),
    "attend: slopes of integers": (attend(alibi_slopes=ints(1, 1, 1, 1)), "alibi_slopes is"),
    "attend: slopes on another device": (attend(alibi_slopes=r(4).to(META)), "alibi_slopes is"),
    "attend: sinks too many": (attend(sinks=r(5)), "sinks has shape"),
    "attend: sinks of rank 2": (attend(sinks=r(1, 4)), "sinks has shape"),
    "attend: starts floating": (attend(starts=r(2)), "starts is"),
    "attend: starts a mask": (attend(starts=torch.tensor([True, False])), "starts"),
    "attend: starts too long": (attend(starts=ints(0, 0, 0)), "starts has shape"),
    "attend: query_start floating": (attend(query_start=r(2)), "query_start is"),
    "attend: impl unknown": (attend(impl="cuda"), "impl='cuda' does not exist"),
    "attend: impl of a GPU": (attend(impl="gluon"), "impl='gluon' of decode_attention runs on an NVIDIA GPU"),
    "attend: negative lengths": (lambda: decode_attention(r(2, 4, 1, 64), wrapped(ints(-1, 0))), "lengths run from -1"),
    "attend: lengths beyond the capacity": (lambda: decode_attention(r(2, 4, 1, 64), wrapped(ints(0, 65))), "to 65"),
    # -- prefill_attention
    "prefill: chunk longer than the cache's": (prefill(r(2, 4, 6, 64), r(2, 2, 6, 64), r(2, 2, 6, 64)), "append the chunk first"),
    "prefill: k of rank 3": (prefill(r(2, 4, 5, 64), r(2, 5, 64), r(2, 2, 5, 64)), "k has shape"),
    "prefill: k of query heads": (prefill(r(2, 4, 5, 64), r(2, 4, 5, 64), r(2, 2, 5, 64)), "k has shape"),
    "prefill: v shorter": (prefill(r(2, 4, 5, 64), r(2, 2, 5, 64), r(2, 2, 4, 64)), "v has shape"),
    "prefill: k on another device": (prefill(r(2, 4, 5, 64), r(2, 2, 5, 64).to(META), r(2, 2, 5, 64)), "k is on meta"),
    "prefill: k of integers": (prefill(r(2, 4, 5, 64), r(2, 2, 5, 64).int(), r(2, 2, 5, 64)), "int32"),
    "prefill: v of float8": (prefill(r(2, 4, 5, 64), r(2, 2, 5, 64), r(2, 2, 5, 64).to(FP8)), "float8"),
    "prefill: window 0": (prefill(r(2, 4, 5, 64), r(2, 2, 5, 64), r(2, 2, 5, 64), window=0), "window=0"),
    # -- merge_states
    "merge: nothing": (merge([], []), "outs and lses must be lists"),
    "merge: one lse missing": (merge([out4, out4], [lse4]), "outs and lses must be lists"),
    "merge: other shapes": (merge([out4, out4[:1]], [lse4, lse4[:1]]), r"outs\[1\] has shape"),
    "merge: lse of rank 4": (merge([out4], [lse4[..., None]]), r"lses\[0\] has shape"),
    "merge: sinks of other heads": (merge([out4], [lse4], r(3)), "sinks"),
    "merge: sinks on another device": (merge([out4], [lse4], r(4).to(META)), "sinks"),
    "merge: parts on two devices": (merge([out4, out4.to(META)], [lse4, lse4]), r"outs\[1\] is on meta"),
    "merge: outs of integers": (merge([out4.int()], [lse4]), "outs"),
    "merge: lses of integers": (merge([out4], [lse4.int()]), "lses"),
    # -- quantize, dequantize, QuantTensor
    "quantize: format unknown": (
        lambda: quantize(r(2, 128), "int3"),
        r"fmt='int3' is not a format; choose one of: int4_g32.*nvfp4",
    ),
    "quantize: a KV name": (lambda: quantize(r(2, 128), "int8"), "key_format"),
    "quantize: a scalar": (lambda: quantize(torch.tensor(1.0), "int8_col"), "x has shape"),
    "quantize: integers": (lambda: quantize(torch.ones(2, 128).int(), "nf4"), r"x is torch\.int32"),
    "quantize: complex": (lambda: quantize(torch.ones(2, 128).to(torch.complex64), "nf4"), "x is"),
    "quantize: float8": (lambda: quantize(r(2, 128).to(FP8), "nf4"), "x is"),
    "quantize: groups do not divide": (lambda: quantize(r(2, 96), "nf4"), "x has a last axis of 96"),
    "quantize: an odd axis": (lambda: quantize(r(2, 33), "int4_col"), "multiple of 2"),
    "quantize: per channel of rank 2": (lambda: quantize(r(32, 64), key_format("int8_channel")), "x has 2 axes"),
    "quantize: per token of rank 3": (lambda: quantize(r(2, 32, 64), key_format("int8_token")), "x has 3 axes"),
    "quantize: beyond fp16": (lambda: quantize(r(2, 128) * 1e6, key_format("fp16")), "x"),
    "quantize: beyond fp32, mxfp4": (lambda: quantize(torch.full((2, 128), 1e300, dtype=torch.float64), "mxfp4"), "x"),
    "quantize: beyond fp32, nvfp4": (lambda: quantize(torch.full((2, 128), 1e200, dtype=torch.float64), "nvfp4"), "x"),
    "quantize: scale of mxfp4": (lambda: quantize(r(2, 128), "mxfp4", scale=torch.ones(1)), "scale"),
    "quantize: scale of nvfp4": (lambda: quantize(r(2, 128), "nvfp4", scale=torch.ones(1)), "scale"),
    "quantize: scale of nf4": (lambda: quantize(r(2, 128), "nf4", scale=torch.ones(1)), "scale"),
    "quantize: scale of per head": (fixed(torch.ones(1), "int8"), "scale"),
    "quantize: scale 0": (fixed(torch.zeros(1)), "scale"),
    "quantize: scale negative": (fixed(-torch.ones(1)), "scale"),
    "quantize: scale NaN": (fixed(torch.tensor([torch.nan])), "scale"),
    "quantize: scale below fp16": (fixed(torch.tensor([1e-9])), "scale"),
    "quantize: scale beyond fp16": (fixed(torch.tensor([1e6])), "scale"),
    "quantize: two scales": (fixed(torch.ones(2)), "scale"),
    "quantize: on the meta device": (lambda: quantize(r(2, 128).to(META), "nf4"), "x"),
    "dequantize: to integers": (lambda: dequantize(weight(), torch.int32), "dtype"),
    "dequantize: dtype by name": (lambda: dequantize(weight(), "float16"), "dtype"),  # type: ignore[arg-type]
    "QuantTensor: scales missing": (lambda: replace(weight(), scales=None), "scales is missing"),
    "QuantTensor: offsets too many": (lambda: replace(weight(), offsets=torch.zeros(8, 2).byte()), "offsets was given"),
    "QuantTensor: codes of another type": (lambda: replace(weight(), codes=weight().codes.char()), "codes is"),
    "QuantTensor: another shape": (lambda: replace(weight(), shape=(8, 64)), "codes is"),
    "QuantTensor: two devices": (lambda: replace(weight(), scales=r(8, 2).to(META)), "scales is on meta"),
    "QuantTensor: a shape the format does not divide": (odd_shape, "33"),
    "QuantTensor: format by name": (lambda: replace(weight(), format="nf4"), "format"),  # type: ignore[arg-type]
    "QuantTensor: perm of int64": (ordered(torch.arange(128)), "perm is torch.int64"),
    "QuantTensor: perm too short": (ordered(torch.arange(64).int()), r"perm is torch.int32 \[64\]"),
    "QuantTensor: perm elsewhere": (ordered(torch.arange(128).int().to(META)), "perm is on meta"),
    "QuantTensor: perm of keys": (
        lambda: replace(quantize(r(1, 2, 3, 64), key_format("int8")), perm=torch.arange(64).int()),
        "perm was given, but int8 stores none",
    ),
    # -- linear, qkv_projection
    "linear: not quantized": (lambda: linear(r(2, 128), r(8, 128)), "weight is Tensor"),  # type: ignore[arg-type]
    "linear: weight None": (lambda: linear(r(2, 128), None), "weight is NoneType"),  # type: ignore[arg-type]
    "linear: x of integers": (lambda: linear(torch.ones(2, 128).int(), weight()), r"x is torch\.int32"),
    "linear: x of float8": (lambda: linear(r(2, 128).to(FP8), weight()), "x is"),
    "linear: x too wide": (lambda: linear(r(2, 129), weight()), "x has shape"),
    "linear: x a scalar": (lambda: linear(torch.tensor(1.0), weight()), "x has shape"),
    "linear: x on another device": (lambda: linear(r(2, 128).to(META), weight()), "x is on meta"),
    "linear: bias of another size": (lambda: linear(r(2, 128), weight(), r(3)), "bias has shape"),
    "linear: bias of integers": (lambda: linear(r(2, 128), weight(), torch.ones(8).int()), "bias is"),
    "linear: bias on another device": (lambda: linear(r(2, 128), weight(), r(8).to(META)), "bias is"),
    "linear: impl unknown": (lambda: linear(r(2, 128), weight(), impl="x"), "impl='x'"),
    "linear: a KV format": (lambda: linear(r(2, 128), quantize(r(8, 128), key_format("int8"))), "int8"),
    "linear: a KV format of a weight's name": (
        lambda: linear(r(2, 128), quantize(r(8, 128), key_format("int4_g32"))),
        "int4_g32 .a Format",
    ),
    "linear: a weight of rank 3": (lambda: linear(r(2, 128), quantize(r(2, 8, 128), "nf4")), "weight has shape"),
    "projections: a bias missing": (lambda: projections(r(2, 128), [weight(), weight()], [None]), "2 weights and 1 biases"),
    "projections: another width": (lambda: projections(r(2, 64), [weight(), weight()], [None, None]), "first weight"),
    "qkv: two weights": (lambda: qkv_projection(r(2, 128), (weight(), weight())), "weights and biases must be three"),  # type: ignore[arg-type]
    "qkv: one unquantized": (lambda: qkv_projection(r(2, 128), (weight(), weight(), r(8, 128))), "v weight"),  # type: ignore[arg-type]
    "qkv: one of another width": (lambda: qkv_projection(r(2, 128), (weight(), quantize(r(8, 64), "nf4"), weight())), "k weight"),
    "qkv: a bias of another size": (lambda: qkv_projection(r(2, 128), (weight(),) * 3, (None, None, r(3))), "v bias"),
    # -- experts_linear
    "experts: a matrix": (lambda: experts_linear(r(2, 128), weight(), IDS), r"weight is \[8, 128\]; expected a stack"),
    "experts: unquantized": (lambda: experts_linear(r(2, 128), r(2, 8, 128), IDS), "weight is Tensor"),  # type: ignore[arg-type]
    "experts: ids of one axis": (lambda: experts_linear(r(2, 128), stack(), IDS[0]), r"ids has shape \[2\]"),
    "experts: ids that are no integers": (lambda: experts_linear(r(2, 128), stack(), IDS.float()), "ids is torch.float32"),
    "experts: an id too many": (lambda: experts_linear(r(2, 128), stack(), IDS + 1), "ids holds 2; the weight has experts 0 to 1"),
    "experts: an id below 0": (lambda: experts_linear(r(2, 128), stack(), IDS - 1), "ids holds -1"),
    "experts: tokens without ids": (lambda: experts_linear(r(3, 128), stack(), IDS), r"x has shape \[3, 128\]"),
    "experts: rows of another top_k": (lambda: experts_linear(r(2, 3, 128), stack(), IDS), r"x has shape \[2, 3, 128\]"),
    "experts: another width": (lambda: experts_linear(r(2, 64), stack(), IDS), r"x has shape \[2, 64\]"),
    "experts: gates of another size": (lambda: experts_linear(r(2, 128), stack(), IDS, r(2, 1)), "gates has shape"),
    "experts: a bias for one expert": (lambda: experts_linear(r(2, 128), stack(), IDS, bias=r(8)), "bias has shape"),
    "experts: an unknown activation": (lambda: experts_linear(r(2, 128), stack(), IDS, activation="relu"), "activation='relu'"),
    "experts: a limit of 0": (lambda: experts_linear(r(2, 128), stack(), IDS, activation=Activation("silu", limit=0)), "above 0"),
    "experts: an odd number of rows": (
        lambda: experts_linear(r(2, 128), quantize(r(2, 7, 128), "nf4"), IDS, activation="silu"),
        "weight has 7 rows; an activation takes pairs",
    ),
    "experts: an unknown level": (lambda: experts_linear(r(2, 128), stack(), IDS, impl="cutlass"), "impl='cutlass' does not exist"),
    # -- memory that holds other numbers than its tensor
    "append: k negated when it is read": (kv(torch.complex(r(2, 2, 1, 64), r(2, 2, 1, 64)).conj().imag), "k is negated when it is"),
    "append: v sparse": (kv(r(2, 2, 1, 64), r(2, 2, 1, 64).to_sparse()), "v is torch.sparse_coo; pass a dense one"),
    "decode: q sparse": (lambda: decode_attention(r(2, 2, 1, 64).to_sparse(), cache()), "q is torch.sparse_coo"),
    "linear: x sparse": (lambda: linear(r(2, 128).to_sparse(), weight()), "x is torch.sparse_coo"),
    # -- format names
    "key_format: unknown": (lambda: key_format("nope"), "keys='nope' is not a format; choose one of: fp16"),
    "key_format: a number": (lambda: key_format(3), "keys=3"),  # type: ignore[arg-type]
}


#: What does not hold yet, and what comes instead.
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    call, says = REFUSED[name]
    with pytest.raises(HalfbyteError, match=says):
        call()


def test_everything_public_is_exercised() -> None:
    """A new public name must come with its bad input."""
    here = {name.split(":")[0].split()[0] for name in REFUSED}
    covered = {
        "KVCache": "cache",
        "PagedKVCache": "paged",
        "decode_attention": "attend",
        "prefill_attention": "prefill",
        "merge_states": "merge",
        "quantize": "quantize",
        "dequantize": "dequantize",
        "QuantTensor": "QuantTensor",
        "linear": "linear",
        "qkv_projection": "qkv",
        "experts_linear": "experts",
        "key_format": "key_format",
    }
    data = {"Format", "KV_FORMATS", "WEIGHT_FORMATS", "HalfbyteError"}
    assert set(halfbyte.__all__) == set(covered) | data
    assert set(covered.values()) <= here


# ---------------------------------------------------------------------------------------------------- odd, but right


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_no_queries(impl: str) -> None:
    out, lse = decode_attention(r(2, 4, 0, 64), cache(), return_lse=True, impl=impl)
    assert out.shape == (2, 4, 0, 64)
    assert lse.shape == (2, 4, 0)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_no_sequences(impl: str) -> None:
    empty = KVCache(0, 2, 64, 64)
    empty.append(r(0, 2, 3, 64), r(0, 2, 3, 64))
    empty.crop(1)
    empty.reorder(torch.zeros(0, dtype=torch.long))
    assert decode_attention(r(0, 4, 2, 64), empty, impl=impl).shape == (0, 4, 2, 64)  # type: ignore[union-attr]
    assert prefill_attention(r(0, 4, 2, 64), r(0, 2, 2, 64), r(0, 2, 2, 64), empty, impl=impl).shape == (0, 4, 2, 64)  # type: ignore[union-attr]


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_positions_outside_the_cache(impl: str) -> None:
    """Queries before everything see nothing; queries behind everything see everything; starts behind everything hide it all."""
    q = r(2, 4, 1, 64)
    everything = decode_attention(q, cache(), impl=impl)
    far = decode_attention(q, cache(), query_start=torch.tensor([-(2**40), 2**40]), impl=impl)
    assert not far[0].any()  # type: ignore[index]
    torch.testing.assert_close(far[1], everything[1])  # type: ignore[index]
    hidden = decode_attention(q, cache(), starts=ints(-7, 99), impl=impl)
    torch.testing.assert_close(hidden[0], everything[0])  # type: ignore[index]
    assert not hidden[1].any()  # type: ignore[index]


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_infinite_sinks(impl: str) -> None:
    q = r(2, 4, 1, 64)
    plain = decode_attention(q, cache(), impl=impl)
    none = decode_attention(q, cache(), sinks=torch.full((4,), -torch.inf), impl=impl)
    torch.testing.assert_close(none, plain)
    swallowed = decode_attention(q, cache(), sinks=torch.full((4,), torch.inf), impl=impl)
    assert not swallowed.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("length", [5, 10_000, 2**40, 2**63])
def test_crop_to_more_than_there_is(length: int) -> None:
    c = cache()
    c.crop(length)
    assert c.lengths.tolist() == [5, 5]


def test_nvfp4_of_subnormal_numbers() -> None:
    q = quantize(torch.full((2, 16), 1e-44), "nvfp4")
    assert dequantize(q).isfinite().all()


def test_gradients_do_not_enter_a_cache() -> None:
    for keys in KV_FORMATS:
        c = KVCache(2, 2, 64, 64, keys=keys)
        c.append(r(2, 2, 33, 64).requires_grad_(), r(2, 2, 33, 64).requires_grad_())
        assert not any(t.requires_grad for t in c.tensors())


def test_offset_views_of_an_engine_are_read_at_any_byte() -> None:
    """Codes at odd byte addresses."""
    source = cache(keys="int8", values="int8")
    for shift in (1, 2, 4, 8):
        planes = []
        for plane in (source.keys, source.values):
            codes = torch.empty(plane.codes.numel() + shift, dtype=torch.int8)[shift:].view_as(plane.codes)
            codes.copy_(plane.codes)
            planes.append(KVBuffer(plane.format, codes, plane.scales))
        moved = KVCache.from_buffers(*planes, source.lengths)
        q = r(2, 4, 1, 64)
        for impl in ("cpu", "reference"):
            assert torch.equal(decode_attention(q, moved, impl=impl), decode_attention(q, source, impl=impl))  # type: ignore[arg-type]


def test_lengths_elsewhere_than_the_queries_are_refused() -> None:
    cache = KVCache(1, 1, 64, 8, keys="int8", values="int8")
    cache.append(torch.randn(1, 1, 2, 64), torch.randn(1, 1, 2, 64))
    cache.lengths = cache.lengths.to("meta")
    with pytest.raises(HalfbyteError, match="lengths are on meta and cannot be accessed from cpu: move them"):
        decode_attention(torch.randn(1, 1, 1, 64), cache)
