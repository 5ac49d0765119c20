"""Peers of decode attention: torch's own, FlexAttention, transformers' quantized cache, FlashInfer and FBGEMM.

Run on an H200: FlashInfer 0.5.3 and FBGEMM 1.6.0 (fbgemm-gpu-genai), beside torch's own. transformers' quantized caches were run on
a CPU only; that of fp8 is refused by transformers 5.17, which the H200 had.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfbyte_lab.baselines import Baseline, Copies, Prepared

#: Tokens of a page of FlashInfer's cache.
_PAGE = 64
#: FBGEMM's parts of a sequence, of which the fastest counts; groups with a scale of their own in a vector of 128, by format.
_SPLITS, _GROUPS = (2, 4, 8, 16, 32, 64, 128), {"int4": ("row-wise fbgemm", 1), "int4_g32": ("grouped fbgemm", 4)}

Pair = tuple[torch.Tensor, torch.Tensor]


def _rotation(k: torch.Tensor, v: torch.Tensor, copies: Copies) -> list[Pair]:
    """k, v, and as many copies of them as leave the cache."""
    return [(k, v), *((k.clone(), v.clone()) for _ in range(copies(k.nbytes + v.nbytes) - 1))]


def _on_16_bits(attend: Callable[..., torch.Tensor]) -> Callable[..., Prepared]:
    """A peer that takes q, k and v as they are."""

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, copies: Copies) -> Prepared:
        return Prepared([partial(attend, q, *pair) for pair in _rotation(k, v, copies)], k.nbytes + v.nbytes, (k, v))

    return prepare


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's memory-efficient attention, which knows no groups of heads: they become rows of queries."""
    rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(rows, k, v).reshape(q.shape)


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, copies: Copies) -> Prepared:
    """FlexAttention, compiled on a GPU; on a CPU as it is without compilation, which takes a minute there."""
    from torch.nn.attention.flex_attention import flex_attention

    attend = torch.compile(flex_attention, dynamic=False) if q.is_cuda else _quietly(flex_attention)
    return _on_16_bits(partial(attend, enable_gqa=q.shape[1] > k.shape[1]))(q, k, v, copies)


def _quietly(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Without the warning that it is not compiled."""

    def attended(*given: torch.Tensor, **options: bool) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            out: torch.Tensor = attend(*given, **options)
        return out

    return attended


# --------------------------------------------------------------------------------------------------------------------- transformers


def _quantized_cache(backend: str, **options: int) -> Callable[..., Prepared]:
    """A step of transformers' `QuantizedCache`: the token is appended, the whole cache dequantized, then attention follows."""

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, copies: Copies) -> Prepared:
        from transformers import LlamaConfig, QuantizedCache

        def layer() -> Any:
            cache = QuantizedCache(backend, LlamaConfig(num_hidden_layers=1), **options)
            cache.update(k[:, :, :-1], v[:, :, :-1], 0)
            return cache.layers[0]

        first = layer()
        full, new = dict(vars(first)), (k[:, :, -1:], v[:, :, -1:])
        kv = first.update(*new)
        nbytes = sum(_stored_bytes(full[name]) for name in ("_quantized_keys", "_quantized_values"))
        vars(first).update(full)
        layers = [first, *(layer() for _ in range(copies(nbytes) - 1))]
        return Prepared([partial(_step, q, new, one, dict(vars(one))) for one in layers], nbytes, kv)

    return prepare


def _step(q: torch.Tensor, new: Pair, layer: Any, before: dict[str, Any]) -> torch.Tensor:
    """Append and attend, as on the first call: what an earlier call appended is forgotten."""
    vars(layer).update(before)
    keys, values = layer.update(*new)
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=q.shape[1] > keys.shape[1])


def _stored_bytes(stored: Any) -> int:
    """Bytes of what a backend holds: (codes, scale) of fp8, or a tensor of quanto made of several."""
    if isinstance(stored, tuple):
        return sum(part.nbytes for part in stored)
    return int(stored._data._data.nbytes + stored._scale.nbytes + stored._shift.nbytes)


# --------------------------------------------------------------------------------------------------------------- FlashInfer, FBGEMM


def _flashinfer(dtype: torch.dtype) -> Callable[..., Prepared]:
    """FlashInfer's decode over pages, planned outside of what is timed; fp8 has a scale of 1."""

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, copies: Copies) -> Prepared:
        flashinfer: Any = import_module("flashinfer")
        (batch, heads, tokens, dim), device = k.shape, q.device
        each = -(-tokens // _PAGE)
        pages = [F.pad(x.to(dtype).transpose(1, 2), (0, 0, 0, 0, 0, each * _PAGE - tokens)) for x in (k, v)]
        k_pages, v_pages = (x.reshape(batch * each, _PAGE, heads, dim).contiguous() for x in pages)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(2**27, dtype=torch.uint8, device=device), "NHD", use_tensor_cores=True
        )
        wrapper.plan(
            torch.arange(0, (batch + 1) * each, each, dtype=torch.int32, device=device),
            torch.arange(batch * each, dtype=torch.int32, device=device),
            torch.full((batch,), tokens - (each - 1) * _PAGE, dtype=torch.int32, device=device),
            q.shape[1],
            heads,
            dim,
            _PAGE,
            q_data_type=q.dtype,
            kv_data_type=dtype,
        )

        def run(pair: Pair) -> torch.Tensor:
            out: torch.Tensor = wrapper.run(q[:, :, 0], pair)
            return out[:, :, None]

        rotation = _rotation(k_pages, v_pages, copies)
        kv = (k.to(dtype).to(k.dtype), v.to(dtype).to(v.dtype))
        return Prepared([partial(run, pair) for pair in rotation], k_pages.nbytes + v_pages.nbytes, kv)

    return prepare


def _fbgemm(groups: int, splits: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, copies: Copies) -> Prepared:
    """FBGEMM's `gqa_attn_splitk` on int4 caches, one KV head a batch entry as it asks."""
    spec = find_spec("fbgemm_gpu")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        # The library alone: importing the package asks for much else.
        torch.ops.load_library(str(Path(folder) / "experimental" / "gen_ai" / "fbgemm_gpu_experimental_gen_ai.so"))
    batch, heads, tokens, dim = k.shape
    (k_stored, k_held), (v_stored, v_held) = (fbgemm_int4(x.reshape(batch * heads, tokens, dim), groups) for x in (k, v))
    rows = q.reshape(batch * heads, 1, -1, dim)
    last = torch.full((batch * heads,), tokens - 1, dtype=torch.int32, device=q.device)

    def run(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = torch.ops.fbgemm.gqa_attn_splitk(rows, keys, values, last, dim**-0.5, splits, groups, True, 2)[0]
        return out.reshape(q.shape)  # type: ignore[no-any-return]

    rotation = _rotation(k_stored, v_stored, copies)
    kv = (k_held.reshape(k.shape), v_held.reshape(v.shape))
    return Prepared([partial(run, *pair) for pair in rotation], k_stored.nbytes + v_stored.nbytes, kv)


def fbgemm_int4(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, T, D] as FBGEMM stores it, uint8 [B, T, 1, 4 groups + D / 2]: scale and shift of each group in fp16, then two codes a
    byte, the even one low; and the numbers that this means.
    """
    parts = x.float().unflatten(-1, (groups, -1))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    scale, shift = ((high - low) / 15).clamp_min(1e-6).half(), low.half()
    codes = ((parts - shift.float()) / scale.float()).round().clamp(0, 15)
    values = (codes * scale.float() + shift.float()).flatten(-2).to(x.dtype)
    pairs = codes.flatten(-2).to(torch.uint8).unflatten(-1, (-1, 2))
    head = torch.cat([scale, shift], -1).flatten(-2).contiguous().view(torch.uint8)
    return torch.cat([head, pairs[..., 0] | pairs[..., 1] << 4], -1)[:, :, None].contiguous(), values


_FLASHINFER: dict[str, Any] = {"packages": ("flashinfer",), "install": "flashinfer-python", "gpu": True}

BASELINES = (
    Baseline("torch sdpa", "attention", "bf16"),
    Baseline("torch sdpa cudnn", "attention", "bf16", gpu=True),
    Baseline("torch sdpa flash", "attention", "bf16", gpu=True),
    Baseline("torch sdpa efficient, folded heads", "attention", "bf16", _on_16_bits(_efficient), gpu=True),
    Baseline("flex attention", "attention", "bf16", _flex),
    Baseline("hf quantized cache, fp8", "attention", "fp8", _quantized_cache("fp8"), ("transformers",), "'halfbyte[hf]'"),
    Baseline(
        "hf quantized cache, quanto",
        "attention",
        "int4",
        _quantized_cache("quanto", nbits=4),
        ("transformers", "optimum.quanto"),
        "'halfbyte[hf]' optimum-quanto",
    ),
    Baseline("flashinfer", "attention", "bf16", _flashinfer(torch.bfloat16), **_FLASHINFER),
    Baseline("flashinfer fp8", "attention", "fp8", _flashinfer(torch.float8_e4m3fn), **_FLASHINFER),
    *(
        Baseline(
            *(f"{name}, {splits} splits", "attention", formats, partial(_fbgemm, groups, splits)),
            packages=("fbgemm_gpu",),
            install="fbgemm-gpu-genai",
            gpu=True,
        )
        for formats, (name, groups) in _GROUPS.items()
        for splits in _SPLITS
    ),
)
