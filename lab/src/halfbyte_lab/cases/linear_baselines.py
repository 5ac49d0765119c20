"""What linear layers are held against in the same run: cuBLAS in bf16, tinygemm, the published split-K kernel.

Humming (0.1.19) joins where `humming-kernels` is installed: at its first call it compiles a kernel for each size.

A peer's result is right when its relative L2 error against float64 on its own dequantized weights is at most 1 %: fp16 atomics and
rounded scales are part of a peer's accuracy, and no reason to leave it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

import halfbyte
from halfbyte.packing import unpack_codes
from halfbyte.settings import interpreted
from halfbyte.tensors import QuantTensor
from halfbyte_lab.cases.linear_targets import INT4, PUBLISHED
from halfbyte_lab.cases.literature import code_of
from halfbyte_lab.measure.checks import Accuracy

CUBLAS, TINYGEMM = "cuBLAS", "tinygemm"
#: What Humming reads of our formats, by the names of its schemas.
HUMMING: dict[str, dict[str, Any]] = {
    INT4: {"dtype": "int4"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "nvfp4"},
    "mxfp4": {"quant_method": "mxfp4"},
}
#: Most relative L2 error of a peer.
BASELINE_ERROR = 0.01
Call = Callable[[torch.Tensor], torch.Tensor]
Judge = Callable[[torch.Tensor], Accuracy]


@dataclass(frozen=True)
class LinearBaseline:
    """An implementation with its rotation of weights; each call takes x [rows, K] in bf16.

    nbytes  of the stored weight
    values  [N, K], what the weight means: float64 references are made from it
    before  what is done to x outside of what is timed: a cast
    """

    name: str
    formats: str
    nbytes: int
    calls: Sequence[Call]
    values: torch.Tensor
    before: Call = torch.Tensor.contiguous


def cublas(w: torch.Tensor, copies: Callable[[int], int]) -> LinearBaseline:
    """torch's linear layer on w [N, K], bf16."""
    rotation = [w, *(w.clone() for _ in range(copies(w.nbytes) - 1))]
    return LinearBaseline(CUBLAS, "bf16", w.nbytes, [partial(_times, weight=one) for one in rotation], w)


def _times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def low_bit(weight: QuantTensor, copies: Callable[[int], int]) -> list[LinearBaseline]:
    """The 4-bit baselines that run here, on the numbers of a weight."""
    on_gpu, peers = weight.device.type == "cuda", []
    if weight.format.name == INT4:
        peers.append(tinygemm(weight, copies))
        if on_gpu or interpreted():
            peers.append(published_split_k(weight, copies))
    if weight.format.name in HUMMING and on_gpu and find_spec("humming"):
        peers.append(humming(weight, copies))
    return peers


def tinygemm(weight: QuantTensor, copies: Callable[[int], int]) -> LinearBaseline:
    """torch's own int4 product: W = (q - 8) s + z with s and z in bf16, here z = 0."""
    q, (s, values) = unpack_codes(weight.codes, 4), int4_values(weight)
    scales = torch.stack([s, torch.zeros_like(s)], -1).transpose(0, 1).contiguous()  # [G, N, 2]
    if weight.device.type == "cuda":
        packed = torch.ops.aten._convert_weight_to_int4pack(((q[:, ::2] << 4) | q[:, 1::2]).contiguous(), 8)
        run = torch.ops.aten._weight_int4pack_mm
    else:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)
        run = torch.ops.aten._weight_int4pack_mm_for_cpu
    group = weight.format.group_size(weight.shape[1])
    nbytes = packed.nbytes + scales.nbytes
    pairs = [(packed.clone(), scales.clone()) for _ in range(copies(nbytes))]
    return LinearBaseline(TINYGEMM, "int4", nbytes, [partial(_tinygemm, run, group, *pair) for pair in pairs], values)


def _tinygemm(run: Call, group: int, packed: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return run(x, packed, group, scales)  # type: ignore[call-arg]


def published_split_k(weight: QuantTensor, copies: Callable[[int], int]) -> LinearBaseline:
    """The published Triton kernel, in fp16, split as its authors ship it."""
    from halfbyte_lab.cases.published_split_k import GptqWeight, published

    first = GptqWeight.of(weight)
    rotation = [first, *(first.clone() for _ in range(copies(first.nbytes) - 1))]
    calls = [partial(published, weight=one) for one in rotation]
    return LinearBaseline(PUBLISHED, "int4", first.nbytes, calls, weight.dequantize(), torch.Tensor.half)


def int4_values(weight: QuantTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales [N, G] of a weight in symmetric int4 in bf16, and what its codes mean with these: (q - 8) s, [N, K]."""
    assert weight.scales is not None
    scales, group = weight.scales.bfloat16(), weight.format.group_size(weight.shape[1])
    return scales, (unpack_codes(weight.codes, 4).float() - 8) * scales.float().repeat_interleave(group, 1)


def humming(weight: QuantTensor, copies: Callable[[int], int]) -> LinearBaseline:
    """Humming's layer over our codes, which are laid out as GPTQ's, modelopt's and MXFP4's are."""
    assert weight.scales is not None
    config, name, (n, k) = dict(HUMMING[weight.format.name]), weight.format.name, weight.shape
    if name == INT4:
        scales, values = int4_values(weight)
        config["group_size"] = weight.format.group_size(k)
        parts = {"weight": weight.codes.view(torch.int32), "weight_scale": scales}
    elif weight.tensor_scale is None:
        parts, values = {"weight": weight.codes, "weight_scale": weight.scales}, weight.dequantize()
    else:
        scales, values = weight.scales.view(torch.float8_e4m3fn), weight.dequantize()
        parts = {"weight": weight.codes, "weight_scale": scales, "weight_scale_2": weight.tensor_scale}

    def layer() -> Call:
        make = import_module("humming.layer").HummingLayer
        module = make(shape_n=n, shape_k=k, weight_config=dict(config), torch_dtype=torch.bfloat16).to(weight.device)
        module.load_from_tensors(parts)
        module.transform()
        return module  # type: ignore[no-any-return]

    nbytes = sum(part.nbytes for part in parts.values())
    try:
        layers = [layer() for _ in range(copies(nbytes))]
    except Exception as error:  # another release of it; its record says why, and the others are measured
        layers = [partial(_refuse, error)]
    code = code_of(name)
    return LinearBaseline("humming" if name == INT4 else f"humming {code}", code, nbytes, layers, values)


def _refuse(error: Exception, x: torch.Tensor) -> torch.Tensor:
    raise error


def dequantize_rows(weights: Sequence[QuantTensor], out: torch.Tensor, first: int = 0) -> None:
    """out [rows, K], fp16 or bf16: rows first, first + 1, ... of one to three weights [N, K], one below the other; in one launch.

    The bits are those of `halfbyte.dequantize`, which runs on a CPU. The last axis of `out` is dense. Formats may differ.
    """
    if out.device.type == "cpu":
        out.copy_(torch.cat([halfbyte.dequantize(w, out.dtype) for w in weights])[first : first + len(out)])
        return
    from halfbyte.kernels.dequantize import launch

    with torch.cuda.device_of(out):
        launch(weights, out, first)


def judged_loosely(values: torch.Tensor, x: torch.Tensor) -> Judge:
    """Judges a peer's y [rows, N], for any number of rows of x, by its relative L2 error."""
    ref = F.linear(x.double(), values.double())

    def judge(y: torch.Tensor) -> Accuracy:
        target = ref[: y.shape[0]]
        return Accuracy(float((y.double() - target).norm() / target.norm()), BASELINE_ERROR, "relative L2")

    return judge
