"""A few configurations for compute-sanitizer, see `make gpu-sanitize`: every kernel, every kind of format, odd sizes.

Small, because the tools slow kernels down up to a hundredfold. Everything but the kernels happens on the CPU, so that the tools
watch nothing else. Exits with 1 if a result breaks its promise.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from gpu_cases import Call, Case, Variant, build, same_stores, wrapped
from gpu_place import PLACE

import halfbyte as hb
from accuracy import linear_accuracy, products
from experts_cases import OAI, Mixture, normal, routed, stack
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.kv_buffer import KVBuffer
from halfbyte.ops.block_linear import add_projection, gated_projection
from halfbyte.reference.block import Norm

ALL = frozenset({"alibi", "window", "softcap", "sinks", "starts"})
MARKED = [
    Case(Variant("int8", "int4_g32"), 2, (300, 65, 0, 1), slack=7),
    Case(Variant("int4", "int4", group=8, layout="BTHD"), 1, (1025, 127)),
    Case(Variant("int4", "int2", group=8, exact=(4, 100)), 1, (300, 65)),
    Case(Variant("int4_channel", "int8", dim=64, group=7, queries=2, dtype="float16"), 2, (97, 31, 64)),
    Case(Variant("int8_token", "int8_token", group=2, queries=3, page=16, layout="slice"), 3, (33, 200)),
    Case(Variant("fp8", "fp8", dim=256, group=1, queries=4, page=64, dtype="float16", options=ALL), 2, (130, 1, 64)),
    Case(Variant("bf16", "bf16", dim=96, group=5, queries=5, odd=True, options=ALL), 1, (251,)),
    Case(Variant("int4_g32", "int4_g64", dim=192, group=32, page=256, options=ALL), 1, (513, 255)),
    Case(Variant("int8_channel", "fp8_tensor", group=12, queries=16, page=32), 1, (95, 63)),
    Case(Variant("int4", "int8_g32", group=8, queries=5, page=16), 2, (300, 65, 0)),
    Case(Variant("fp8", "int4_g64", group=8, queries=16, layout="BTHD", options=ALL), 1, (513, 129)),
]
#: Formats of the weights (three: q, k and v), rows, K, type of x: splits and large tiles, K that no step divides.
PRODUCTS = [
    (("int4_g128",), 1, 1280, torch.bfloat16),
    (("int4_sym_g32",), 17, 1056, torch.float16),
    (("int4_g128",), 20, 1280, torch.bfloat16),
    (("int4_sym_g128",), 40, 1280, torch.float16),
    (("int4_sym_g128",), 200, 1280, torch.bfloat16),
    (("int8_col",), 70, 202, torch.bfloat16),
    (("nvfp4",), 130, 208, torch.float16),
    (("int4_g64", "nf4_dq", "mxfp4"), 5, 1088, torch.bfloat16),
    (("nf4", "fp4_bnb", "int4_col"), 300, 320, torch.bfloat16),
]
#: The same of the tuned kernel for up to 16 rows, which must take them: streams that share scales, with few and with many slots for
#: them, warps that share a stream, zero points, no scales, ends of K within a step, rows of scales 2 bytes off a multiple of 4.
FEW = [
    (("nf4",), 1, 1280, torch.bfloat16),
    (("nf4",), 1, 8192, torch.bfloat16),
    (("int4_g32",), 4, 1280, torch.bfloat16),
    (("int4_sym_g128",), 16, 2048, torch.bfloat16),
    (("mxfp4",), 2, 1280, torch.bfloat16),
    (("int8_col",), 3, 208, torch.float16),
    (("int4_g128",), 2, 1280, torch.bfloat16),
]
#: Mixtures: format and tokens, of which 300 are sorted for dequantized experts and torch's grouped GEMM. That one stores by TMA,
#: which initcheck does not see: it takes results for memory that was never written.
MIXTURES = [("int4_g128", 1), ("mxfp4", 5), ("nf4", 17), ("nvfp4", 300)]
UNSEEN = {"initcheck": MIXTURES[3:]}
#: Halves of a decoder's block: format and M.
BLOCKS = [("int4_g128", 1), ("mxfp4", 16)]


def moved(t: torch.Tensor | None, device: str) -> torch.Tensor | None:
    """A tensor on another device, with the strides it had."""
    if t is None:
        return None
    empty = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    return empty.copy_(t)


def on_device(call: Call, device: str) -> Call:
    """The same call elsewhere."""
    cache = call.cache
    keys, values = (
        KVBuffer(p.format, *(moved(t, device) for t in p.tensors()), sink_tokens=p.sink_tokens)  # type: ignore[arg-type]
        for p in (cache.keys, cache.values)
    )
    there = wrapped(keys, values, cache.lengths.to(device), moved(cache.page_table, device), cache.rotate_keys)
    options: dict[str, Any] = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in call.options.items()}
    return Call(call.q.to(device), there, options)


def attention(case: Case, impl: str) -> str:
    """What is wrong with a call, in words."""
    call = build(case, "cpu")
    there = on_device(call, PLACE.device)
    try:
        out, lse = hb.decode_attention(there.q, there.cache, return_lse=True, impl=impl, **there.options)
    except (Unsupported, InvalidArgument) as error:
        print(f"  {impl} refused: {error}")
        return ""
    return call.wrong(out.cpu(), lse.cpu())


def append(case: Case) -> str:
    """Two appends there and here."""
    v = case.variant
    k, x = torch.randn(2, 2, case.heads, 37, v.dim, generator=torch.Generator().manual_seed(case.seed))
    caches = [hb.KVCache(2, case.heads, v.dim, 64, keys=v.keys, values=v.values, device=d) for d in ("cpu", PLACE.device)]
    for cache in caches:
        for first, last in ((0, 34), (34, 37)):
            cache.append(k[:, :, first:last].to(cache.device), x[:, :, first:last].to(cache.device))
    return "" if same_stores(caches[1], caches[0]) else "stores other bytes than on a CPU"


def product(names: tuple[str, ...], rows: int, width: int, dtype: torch.dtype, impl: str, features: int = 131) -> str:
    """What is wrong with products of so many features, in words."""
    rng = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=rng).to(dtype)
    weights = [hb.quantize(torch.randn(features, width, generator=rng), name) for name in names]
    there = tuple(w.to(PLACE.device) for w in weights)
    if len(there) == 1:
        outs: tuple[torch.Tensor, ...] = (hb.linear(x.to(PLACE.device), there[0], impl=impl),)
    else:
        outs = hb.qkv_projection(x.to(PLACE.device), there, impl=impl)  # type: ignore[arg-type]
    for out, w in zip(outs, weights, strict=True):
        truth, base = products(x, w)
        if why := wrong(out.cpu(), base, truth):
            return f"{w.format}: {why}"
    return ""


def mixture(name: str, tokens: int) -> str:
    """What is wrong with a projection of a mixture of five experts, in words."""
    gates = normal(tokens, 2, seed=2).softmax(1)
    call = Mixture(normal(tokens, 256).bfloat16(), stack(name, 5, 66, 256), routed(tokens, 2, 5), gates, activation=OAI)
    x, weight, ids, gates = (t.to(PLACE.device) for t in call[:4])
    out = hb.experts_linear(x, weight, ids, gates, activation=OAI).cpu()
    return wrong(out, call.expected(torch.bfloat16), call.expected(torch.float64))


def block(name: str, rows: int) -> str:
    """What is wrong with a sum, the norm behind it, and a gated projection, in words."""
    x, residual, norm = (normal(*shape, seed=3).bfloat16() for shape in ((rows, 1280), (rows, 512), (512,)))
    weights = [hb.quantize(normal(512, width, seed=width) * width**-0.5, name) for width in (1280, 512, 512)]
    there = [w.to(PLACE.device) for w in weights]
    before = Norm(norm.to(PLACE.device), 1e-5, "rounded")
    left = add_projection(x.to(PLACE.device), there[0], None, residual.to(PLACE.device), before)[1]
    assert left is not None
    out = gated_projection(left, there[1:], [None, None], "silu").cpu()

    def expected(dtype: torch.dtype) -> torch.Tensor:
        down, gate, up = (w.dequantize(dtype) for w in weights)
        h = residual.to(dtype) + x.to(dtype) @ down.mT
        h = h * (h.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.to(dtype)
        return torch.nn.functional.silu(h @ gate.mT) * (h @ up.mT)

    return wrong(out, expected(torch.bfloat16), expected(torch.float64))


def wrong(out: torch.Tensor, base: torch.Tensor, truth: torch.Tensor) -> str:
    """What of a result breaks the promise of linear layers, in words."""
    found = linear_accuracy(out, base, truth)
    return "" if found.ok else f"error {found.error:.3g}, allowed {found.allowed:.3g}"


def main(tool: str = "") -> int:
    """Run all that a tool can watch; the number of failures becomes the exit status."""
    failures, mixtures = 0, [case for case in MIXTURES if case not in UNSEEN.get(tool, [])]
    for case in MARKED:
        for what, why in (*((impl, attention(case, impl)) for impl in PLACE.impls), ("append", append(case))):
            failures += bool(why)
            print(f"{what}: {why or 'ok'}: {case.variant.keys}, {case.variant.values}, {case.variant.dim}")
    few = [] if PLACE.dry else [(call, "gluon", 134) for call in FEW]  # without a GPU there is no such kernel
    for call, impl, features in [*((call, impl, 131) for call in PRODUCTS for impl in PLACE.impls), *few]:
        why = product(*call, impl, features)
        failures += bool(why)
        print(f"{impl}: {why or 'ok'}: linear, {call}")
    for check, cases in ((mixture, mixtures), (block, BLOCKS)):
        for name, rows in cases:
            why = check(name, rows)
            failures += bool(why)
            print(f"{check.__name__}: {why or 'ok'}: {name}, M = {rows}")
    PLACE.sync()
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
