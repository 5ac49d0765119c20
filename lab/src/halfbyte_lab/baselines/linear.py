"""Peers of linear layers: cuBLAS, tinygemm and the published split-K kernel, which are always measured, and optional libraries.

bitsandbytes was run on a CPU only, Humming (0.1.19) on an H200. gemlite and Marlin of GPTQModel (7.7.0) are written after their
public sources and were not run by us: what Marlin reaches is quoted in `halfbyte_lab.cases.literature`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

import halfbyte
from halfbyte.packing import unpack_codes
from halfbyte.tensors import QuantTensor
from halfbyte_lab.baselines import Baseline, Copies, Prepared
from halfbyte_lab.cases import linear_baselines
from halfbyte_lab.cases.linear_targets import INT4, PUBLISHED

#: Numbers that share a scale in bitsandbytes.
_BLOCK = 64


def _of(make: Callable[[QuantTensor, Copies], linear_baselines.LinearBaseline], fmt: str = INT4) -> Callable[..., Prepared]:
    """A peer of `linear_baselines` on the numbers of a weight in one of our formats."""

    def prepare(x: torch.Tensor, w: torch.Tensor, copies: Copies) -> Prepared:
        peer = make(halfbyte.quantize(w, fmt), copies)
        operand = peer.before(x)
        return Prepared([partial(call, operand) for call in peer.calls], peer.nbytes, (peer.values,))

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


def _gemlite(x: torch.Tensor, w: torch.Tensor, copies: Copies) -> Prepared:
    """gemlite's int4 on our codes: W = (q - 8) s, with its own default tuning, which the first call waits for. Not run by us."""
    weight = halfbyte.quantize(w, INT4)
    scales, values = linear_baselines.int4_values(weight)
    q = unpack_codes(weight.codes, 4)
    # It keeps what it is given, so that every copy is made of memory of its own.
    make = import_module("gemlite.helper").A16W4_HQQ_INT(device=str(x.device), dtype=x.dtype)
    nbytes = weight.codes.nbytes + 2 * scales.nbytes
    layers = [make.from_weights(q.clone(), scales.clone(), torch.full_like(scales, 8)) for _ in range(copies(nbytes))]
    return Prepared([partial(layer, x) for layer in layers], nbytes, (values,))


def _marlin(x: torch.Tensor, w: torch.Tensor, copies: Copies) -> Prepared:
    """GPTQModel's Marlin over our codes in GPTQ's layout: 8 of K in a word, K first. Not run by us."""
    weight = halfbyte.quantize(w, INT4)
    scales, values = linear_baselines.int4_values(weight)
    make, (n, k) = import_module("gptqmodel.nn_modules.qlinear.marlin").MarlinLinear, w.shape
    group = weight.format.group_size(k)

    def layer() -> Any:
        module = make(4, group, False, True, k, n, dtype=x.dtype).to(x.device)
        words = {"qweight": weight.codes.view(torch.int32), "scales": scales}
        for name, part in words.items():
            getattr(module, name).data = part.mT.contiguous()
        module.post_init()
        return module

    nbytes = weight.codes.nbytes + scales.nbytes
    return Prepared([partial(layer(), x) for _ in range(copies(nbytes))], nbytes, (values,))


BASELINES = (
    Baseline("torch linear (cuBLAS on a GPU)", "linear", "bf16"),
    Baseline(linear_baselines.TINYGEMM, "linear", "int4", _of(linear_baselines.tinygemm)),
    Baseline(PUBLISHED, "linear", "int4", _of(linear_baselines.published_split_k), ("triton",), "triton", gpu=True),
    Baseline("bitsandbytes", "linear", "nf4", _bitsandbytes, ("bitsandbytes",), "bitsandbytes"),
    Baseline("gemlite", "linear", "int4", _gemlite, ("gemlite",), "gemlite", gpu=True),
    Baseline("humming", "linear", "int4", _of(linear_baselines.humming), ("humming",), "humming-kernels", gpu=True),
    Baseline("humming nvfp4", "linear", "nvfp4", _of(linear_baselines.humming, "nvfp4"), ("humming",), "humming-kernels", gpu=True),
    Baseline("humming mxfp4", "linear", "mxfp4", _of(linear_baselines.humming, "mxfp4"), ("humming",), "humming-kernels", gpu=True),
    Baseline("Marlin, of GPTQModel", "linear", "int4", _marlin, ("gptqmodel",), "gptqmodel", gpu=True),
)
