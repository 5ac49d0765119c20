"""Peers of linear layers: cuBLAS, tinygemm and the published split-K kernel, which are always measured, and optional libraries.

bitsandbytes was run on a CPU only, Humming (0.1.19) on an H200. gemlite and Marlin of GPTQModel (7.7.0) are written after their
public sources and were not run by us: what Marlin reaches is quoted in `benchmarks.literature`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

import halfbyte
from benchmarks import linear_baselines
from benchmarks.baselines import Baseline, Copies, Prepared
from benchmarks.linear_targets import INT4, PUBLISHED
from halfbyte.packing import unpack_codes
from halfbyte.tensors import QuantTensor

#: Numbers that share a scale in bitsandbytes.
_BLOCK = 64


def _of_int4(make: Callable[[QuantTensor, Copies], linear_baselines.LinearBaseline]) -> Callable[..., Prepared]:
    """A peer of `linear_peers` on the numbers of a weight in symmetric int4."""

    def prepare(x: torch.Tensor, w: torch.Tensor, copies: Copies) -> Prepared:
        peer = make(halfbyte.quantize(w, INT4), copies)
        given = peer.before(x)
        return Prepared([partial(call, given) for call in peer.calls], peer.nbytes, (peer.values,))

    return prepare


def _bitsandbytes(x: torch.Tensor, w: torch.Tensor, copies: Copies) -> Prepared:
    """bitsandbytes' NF4 in blocks of 64 with scales in fp32, by its own quantizer and its own choice of kernel."""
    bitsandbytes: Any = import_module("bitsandbytes")
    functional = bitsandbytes.functional

    def run(packed: torch.Tensor, state: Any) -> torch.Tensor:
        out: torch.Tensor = bitsandbytes.matmul_4bit(x, packed.t(), quant_state=state)
        return out

    def quantized() -> tuple[torch.Tensor, Any]:
        packed, state = functional.quantize_4bit(w.bfloat16(), blocksize=_BLOCK, quant_type="nf4")
        return packed, state

    packed, state = quantized()
    nbytes = packed.nbytes + state.absmax.nbytes
    rotation = [(packed, state), *(quantized() for _ in range(copies(nbytes) - 1))]
    return Prepared([partial(run, *one) for one in rotation], nbytes, (functional.dequantize_4bit(packed, state),))


def _int4(w: torch.Tensor, dtype: torch.dtype) -> tuple[QuantTensor, torch.Tensor, torch.Tensor]:
    """A weight in symmetric int4, its scales in 16 bits, and what codes and these scales mean: (q - 8) s."""
    weight = halfbyte.quantize(w, INT4)
    assert weight.scales is not None
    scales = weight.scales.to(dtype)
    group = weight.format.group_size(w.shape[1])
    return weight, scales, (unpack_codes(weight.codes, 4).float() - 8) * scales.float().repeat_interleave(group, 1)


def _gemlite(x: torch.Tensor, w: torch.Tensor, copies: Copies) -> Prepared:
    """gemlite's int4 on our codes: W = (q - 8) s, with its own default tuning, which the first call waits for. Not run by us."""
    weight, scales, values = _int4(w, torch.bfloat16)
    q = unpack_codes(weight.codes, 4)
    # It keeps what it is given, so that every copy is made of memory of its own.
    make = import_module("gemlite.helper").A16W4_HQQ_INT(device=str(x.device), dtype=x.dtype)
    nbytes = weight.codes.nbytes + 2 * scales.nbytes
    layers = [make.from_weights(q.clone(), scales.clone(), torch.full_like(scales, 8)) for _ in range(copies(nbytes))]
    return Prepared([partial(layer, x) for layer in layers], nbytes, (values,))


def _humming(fmt: str) -> Callable[..., Prepared]:
    """Humming's layer over our codes, which are laid out as GPTQ's, modelopt's and MXFP4's are."""

    def given(w: torch.Tensor, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]:
        if fmt == INT4:
            weight, scales, values = _int4(w, dtype)
            config = {"dtype": "int4", "group_size": weight.format.group_size(w.shape[1])}
            return config, {"weight": weight.codes.view(torch.int32), "weight_scale": scales}, values
        weight = halfbyte.quantize(w, fmt)
        assert weight.scales is not None
        if weight.tensor_scale is None:
            return {"quant_method": "mxfp4"}, {"weight": weight.codes, "weight_scale": weight.scales}, weight.dequantize()
        scales = weight.scales.view(torch.float8_e4m3fn)
        parts = {"weight": weight.codes, "weight_scale": scales, "weight_scale_2": weight.tensor_scale}
        return {"quant_method": "modelopt", "quant_algo": "nvfp4"}, parts, weight.dequantize()

    def prepare(x: torch.Tensor, w: torch.Tensor, copies: Copies) -> Prepared:
        config, parts, values = given(w, x.dtype)
        make, (n, k) = import_module("humming.layer").HummingLayer, w.shape

        def layer() -> Any:
            made = make(shape_n=n, shape_k=k, weight_config=dict(config), torch_dtype=x.dtype).to(x.device)
            made.load_from_tensors(parts)
            made.transform()
            return made

        nbytes = sum(part.nbytes for part in parts.values())
        return Prepared([partial(layer(), x) for _ in range(copies(nbytes))], nbytes, (values,))

    return prepare


def _marlin(x: torch.Tensor, w: torch.Tensor, copies: Copies) -> Prepared:
    """GPTQModel's Marlin over our codes in GPTQ's layout: 8 of K in a word, K first. Not run by us."""
    weight, scales, values = _int4(w, x.dtype)
    make, (n, k) = import_module("gptqmodel.nn_modules.qlinear.marlin").MarlinLinear, w.shape
    group = weight.format.group_size(k)

    def layer() -> Any:
        made = make(4, group, False, True, k, n, dtype=x.dtype).to(x.device)
        words = {"qweight": weight.codes.view(torch.int32), "scales": scales}
        for name, part in words.items():
            getattr(made, name).data = part.mT.contiguous()
        made.post_init()
        return made

    nbytes = weight.codes.nbytes + scales.nbytes
    return Prepared([partial(layer(), x) for _ in range(copies(nbytes))], nbytes, (values,))


BASELINES = (
    Baseline("torch linear (cuBLAS on a GPU)", "linear", "bf16"),
    Baseline(linear_baselines.TINYGEMM, "linear", "int4", _of_int4(linear_baselines.tinygemm)),
    Baseline(PUBLISHED, "linear", "int4", _of_int4(linear_baselines.published_split_k), ("triton",), "triton", gpu=True),
    Baseline("bitsandbytes", "linear", "nf4", _bitsandbytes, ("bitsandbytes",), "bitsandbytes"),
    Baseline("gemlite", "linear", "int4", _gemlite, ("gemlite",), "gemlite", gpu=True),
    Baseline("humming", "linear", "int4", _humming(INT4), ("humming",), "humming-kernels", gpu=True),
    Baseline("humming nvfp4", "linear", "nvfp4", _humming("nvfp4"), ("humming",), "humming-kernels", gpu=True),
    Baseline("humming mxfp4", "linear", "mxfp4", _humming("mxfp4"), ("humming",), "humming-kernels", gpu=True),
    Baseline("Marlin, of GPTQModel", "linear", "int4", _marlin, ("gptqmodel",), "gptqmodel", gpu=True),
)
