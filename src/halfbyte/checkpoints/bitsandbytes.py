"""bitsandbytes in 4 bits: NF4 and its FP4, with plain or nested (doubly quantized) block scales.

weight                 bytes [N * K / 2, 1]    the flattened weight [N, K], the even element in the HIGH nibble
weight.absmax          f32 [N * K / block], or bf16 [K / block, N]; nested: u8
weight.quant_map       f32 [16]                what the codes mean
weight.nested_absmax, weight.nested_quant_map  f32 [blocks / 256], f32 [256]
weight.quant_state.bitsandbytes__nf4           JSON as bytes: quant_type, blocksize, shape, nested_offset, ...

absmax = nested_quant_map[u8] * nested_absmax[block / 256] + nested_offset
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.checkpoints.layer import Adapter, StoredLayer, only, setting
from halfbyte.checkpoints.safetensors_files import json_object
from halfbyte.errors import CheckpointError, Unsupported
from halfbyte.formats import BNB_FP4, NF4, WEIGHT_FORMATS, Code, Format
from halfbyte.reference.dequantize import dynamic_map
from halfbyte.tensors import QuantTensor

_CODES = {"nf4": NF4, "fp4": BNB_FP4}
_STATE = "weight.quant_state.bitsandbytes__"
#: A weight may be stored as another type of the same bytes (`bnb_4bit_quant_storage`).
_STORAGE = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class _State:
    """What the JSON of one layer says."""

    kind: str
    block: int
    nested_block: int | None
    offset: float


class BitsAndBytes(Adapter):
    """4 bits; codes and nested scales are kept as they are where the stored tables are those of our formats."""

    docs = (
        (
            "`bitsandbytes`",
            "NF4 and FP4, plain or nested, blocks of 64 and multiples, any `bnb_4bit_quant_storage`",
            "`nf4`, `nf4_dq`, `fp4_bnb`",
        ),
    )
    marker = "weight.absmax"
    parts = (
        *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
        *(f"{_STATE}{kind}" for kind in _CODES),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        name = "a bitsandbytes checkpoint"
        only(config, "load_in_8bit" if "load_in_8bit" in config else "_load_in_8bit", (False,), False, name)
        self.code = _CODES.get(str(config.get("bnb_4bit_quant_type", "fp4")))
        self.nested = config.get("bnb_4bit_use_double_quant") is True

    def expected(self) -> Format | None:
        formats = [f for f in WEIGHT_FORMATS.values() if f.code == self.code and f.scale is not None]
        return next((f for f in formats if f.scale is not None and (f.scale.nested is not None) is self.nested), None)

    def rows(self, layer: StoredLayer) -> int:
        info = layer.info("weight")
        return 0 if info is None else 2 * math.prod(info.shape) * info.dtype.itemsize // layer.in_features

    def weight(self, layer: StoredLayer) -> QuantTensor:
        shape, state = (layer.out_features, layer.in_features), _read_state(layer)
        code = _CODES[state.kind]
        base = next(f for f in WEIGHT_FORMATS.values() if f.code == code and f.scale is not None and f.scale.nested is None)
        assert base.scale is not None and base.scale.group is not None
        if state.block % base.scale.group or shape[1] % base.scale.group:
            raise Unsupported(
                f"{layer.name}.weight: blocks of {state.block} over rows of {shape[1]}; halfbyte reads blocks of "
                f"{base.scale.group} and multiples of it, in rows that {base.scale.group} divides"
            )
        _check_map(layer, "weight.quant_map", code)
        codes = _swap(_bytes(layer, shape))
        if state.nested_block is None:
            absmax = layer.check_scales("weight.absmax", _absmax(layer, shape, state.block), 1)
            return QuantTensor(base, shape, codes, _per_group(absmax, state.block // base.scale.group, base, shape))
        return _nested(layer, state, base, codes)


def _absmax(layer: StoredLayer, shape: tuple[int, int], block: int) -> torch.Tensor:
    """The scale of each block, fp32. A forward on a CPU leaves them in bf16 and transposed, and so they are saved."""
    blocks = (shape[1] // block, shape[0])
    info = layer.info("weight.absmax")
    if shape[1] % block or info is None or info.dtype is not torch.bfloat16:
        return layer.tensor("weight.absmax", (_blocks(shape, block),), torch.float32)
    return layer.tensor("weight.absmax", blocks, torch.bfloat16).T.float().flatten()


def _nested(layer: StoredLayer, state: _State, base: Format, codes: torch.Tensor) -> QuantTensor:
    """With nested scales: as they are, if a format of ours has the same blocks and table; else the fp32 numbers they stand for."""
    assert base.scale is not None and base.scale.group is not None and state.nested_block is not None
    shape = (layer.out_features, layer.in_features)
    count = _blocks(shape, state.block)
    absmax = layer.tensor("weight.absmax", (count,), torch.uint8)
    second = layer.tensor("weight.nested_absmax", (math.ceil(count / state.nested_block),), torch.float32)
    table = layer.tensor("weight.nested_quant_map", (256,), torch.float32)
    layer.check_scales("weight.nested_absmax", second, 1)
    layer.check_scales("weight.nested_quant_map", table, 1)
    offset = torch.tensor(state.offset, dtype=torch.float64, device="cpu").float()
    spread = second.repeat_interleave(state.nested_block)[:count]
    plain = layer.check_scales("weight.absmax", table[absmax.int()] * spread + offset, 1)
    for fmt in WEIGHT_FORMATS.values():
        same = fmt.code == base.code and fmt.scale is not None and fmt.scale.nested == state.nested_block
        if same and fmt.group_size(shape[1]) == state.block and torch.equal(table, dynamic_map(table.device)):
            return QuantTensor(fmt, shape, codes, absmax.view(fmt.scale_shape(shape)), nested=torch.cat([second, offset.view(1)]))
    return QuantTensor(base, shape, codes, _per_group(plain, state.block // base.scale.group, base, shape))


def _read_state(layer: StoredLayer) -> _State:
    """The JSON of a layer, each entry checked; what it says of the shape must be what the model says."""
    kinds = [kind for kind in _CODES if layer.info(_STATE + kind) is not None]
    if len(kinds) != 1:
        raise CheckpointError(f"{layer.name}: {len(kinds)} quantization states of {', '.join(_CODES)}; a 4-bit layer has one")
    part = _STATE + kinds[0]
    raw = layer.tensor(part, layer.shape(part, 1), torch.uint8)
    state = json_object(f"{layer.name}.{part}", bytes(raw.tolist()), "state")
    if state.get("quant_type") != kinds[0]:
        layer.refuse(part, f"has the quant_type {str(state.get('quant_type'))[:40]!r}; its name says {kinds[0]!r}")
    shape = [layer.out_features, layer.in_features]
    if state.get("shape") != shape:
        layer.refuse(part, f"has the shape {str(state.get('shape'))[:80]}; the model has {shape}")
    nested = layer.info("weight.nested_absmax") is not None
    try:
        offset = setting(state, "nested_offset", (int, float), 0.0) if nested else 0.0
        block, second = setting(state, "blocksize", int, 64), setting(state, "nested_blocksize", int, 256)
    except CheckpointError as error:
        raise CheckpointError(f"{layer.name}.{part}: {error}") from error
    if not (0 < block < 2**31 and 0 < second < 2**31 and abs(offset) < 3e38):
        layer.refuse(part, f"has blocks of {block} and {second}, and an offset of {offset}")
    return _State(kinds[0], block, second if nested else None, float(offset))


def _check_map(layer: StoredLayer, part: str, code: Code) -> None:
    """The stored table must hold the numbers that our code of this name stands for."""
    table = layer.tensor(part, (16,), torch.float32)
    if not torch.equal(table, code.codebook()):
        raise Unsupported(f"{layer.name}.{part} is not the table of {code.name}; halfbyte has no format for other tables")


def _bytes(layer: StoredLayer, shape: tuple[int, int]) -> torch.Tensor:
    """The packed codes, uint8 [N, K / 2], in whatever type of the same bytes they are stored."""
    info = layer.info("weight")
    item = info.dtype.itemsize if info is not None else 1
    return layer.tensor("weight", (math.prod(shape) // 2 // item, 1), *_STORAGE).view(torch.uint8).view(shape[0], shape[1] // 2)


def _swap(packed: torch.Tensor) -> torch.Tensor:
    """The even element from the high nibble to the low one."""
    return (packed >> 4) | (packed << 4)


def _blocks(shape: tuple[int, int], block: int) -> int:
    return math.ceil(math.prod(shape) / block)


def _per_group(absmax: torch.Tensor, repeat: int, fmt: Format, shape: tuple[int, int]) -> torch.Tensor:
    """Block scales as [N, K / group]; a wider block repeats its scale, the last one may be cut short."""
    scales = fmt.scale_shape(shape)
    return absmax.repeat_interleave(repeat)[: math.prod(scales)].view(scales)
