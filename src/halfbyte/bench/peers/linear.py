"""Peers of linear layers: cuBLAS, tinygemm and the published split-K kernel, which are always measured, bitsandbytes and gemlite.

bitsandbytes was run on a CPU only, and gemlite is written after its public documentation and was not run by us. Humming and Marlin
need builds of their own and have no adapter: what they reach is quoted in `halfbyte.bench.quoted`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

import halfbyte
from halfbyte.bench import linear_peers
from halfbyte.bench.linear_bars import INT4, PUBLISHED
from halfbyte.bench.peers import Copies, Peer, Prepared
from halfbyte.packing import unpack_nibbles
from halfbyte.tensors import QuantTensor

_QUOTED = "no adapter; quoted in halfbyte.bench.quoted"
#: Numbers that share a scale in bitsandbytes.
_BLOCK = 64


def _of_int4(make: Callable[[QuantTensor, Copies], linear_peers.Peer]) -> Callable[..., Prepared]:
    """A peer of `linear_peers` on the numbers of a weight in symmetric int4."""

    def prepare(x: torch.Tensor, w: torch.Tensor, copies: Copies) -> Prepared:
        peer = make(halfbyte.quantize(w, INT4), copies)
        given = peer.before(x)
        return Prepared([partial(call, given) for call in peer.calls], peer.nbytes, (peer.values,))

    return prepare


def _bitsandbytes(x: torch.Tensor, w: torch.Tensor, copies: Copies) -> Prepared:
    """bitsandbytes' NF4 in blocks of 64 with scales in fp32, by its own quantiser and its own choice of kernel."""
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
    assert weight.scales is not None
    q, scales = unpack_nibbles(weight.codes), weight.scales.bfloat16()
    # It keeps what it is given, so that every copy is made of memory of its own.
    make = import_module("gemlite.helper").A16W4_HQQ_INT(device=str(x.device), dtype=x.dtype)
    nbytes = weight.codes.nbytes + 2 * scales.nbytes
    layers = [make.from_weights(q.clone(), scales.clone(), torch.full_like(scales, 8)) for _ in range(copies(nbytes))]
    values = (q.float() - 8) * scales.float().repeat_interleave(weight.format.group_size(w.shape[1]), 1)
    return Prepared([partial(layer, x) for layer in layers], nbytes, (values,))


PEERS = (
    Peer("torch linear (cuBLAS on a GPU)", "linear", "bf16"),
    Peer(linear_peers.TINYGEMM, "linear", "int4", _of_int4(linear_peers.tinygemm)),
    Peer(PUBLISHED, "linear", "int4", _of_int4(linear_peers.published_split_k), ("triton",), "triton", gpu=True),
    Peer("bitsandbytes", "linear", "nf4", _bitsandbytes, ("bitsandbytes",), "bitsandbytes"),
    Peer("gemlite", "linear", "int4", _gemlite, ("gemlite",), "gemlite", gpu=True),
    Peer("humming", "linear", "int4, nvfp4, mxfp4", why_not=_QUOTED),
    Peer("Marlin, of GPTQModel", "linear", "int4, nvfp4, mxfp4", why_not=_QUOTED),
)
