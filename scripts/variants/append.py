"""The variants of the append kernels: every format of keys with one of values, the options in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from halfbyte.formats import KV_FORMATS
from halfbyte.kernels.append import rotation
from halfbyte.kernels.append.launch import launches, plan_of
from halfbyte.kernels.compiling import Configuration, empty, kv_buffer, recorded
from halfbyte.kv_buffer import AppendCall, HeadNorms, Rope
from halfbyte.reference.transform import TransformCall
from halfbyte.tensors import KeyTransform

#: Values that come with keys of another format. They come with keys of their own format where nothing is said.
_VALUES = {
    "int8_channel": "fp8",
    "fp8": "fp8_tensor",
    "fp8_tensor": "int4",
    "int4": "int4_g32",
    "int4_g32": "int4_g64",
    "int4_g64": "fp16",
    "int4_channel": "bf16",
    "int2": "int2_g32",
    "int2_g32": "int2_g64",
    "int2_g64": "int2",
}
#: Keys that come in fp16; others come in bf16.
_FP16 = {"fp16", "int8", "int8_token", "int8_g64", "fp8", "int4", "int4_g64", "int2"}


def configurations() -> list[Configuration]:
    """Every format of keys: decoding over contiguous memory, and a prompt over pages with rotation. Tokens that go to
    slots. Heads with norms. Rotation alone. Calibrated keys."""
    found = [c for keys in KV_FORMATS for prompt in (False, True) for c in _variant(keys, prompt)]
    found += [c for keys in ("int4", "int8_token", "int2") for prompt in (False, True) for c in _variant(keys, prompt, (4, 32))]
    found += [c for keys, values in (("int8", "int4_g32"), ("int4", "int4")) for c in _by_slot(keys, values)]
    rotary = {"": (64, False), "-R64": (32, False), "-neighbors": (64, True), "-R64-neighbors": (32, True)}
    found += [c for name, (half, interleaved) in rotary.items() for c in _normalized("int8", "rounded", name, half, interleaved)]
    found += _normalized("int4_channel", "offset", "", 64, False)
    found += [c for dim in (64, 80, 128, 256) for batch in (4, 64) for c in _calibrated(("int4", "int4"), dim, batch)]
    found += _calibrated(("int2_g32", "int4_g32"), 128, window=(4, 32))
    return found + [c for dim, dtype in ((128, torch.bfloat16), (80, torch.float16)) for c in _rotated(dim, dtype)]


def _rotated(dim: int, dtype: torch.dtype) -> list[Configuration]:
    """Values, or an output of attention, rotated on their own. Calibrated keys, and queries of a prompt."""
    x, q = (empty(*shape, dim, dtype=dtype) for shape in ((16, 8, 1), (1, 32, 128)))
    matrix, shift = empty(8, dim, dim, dtype=torch.bfloat16), empty(8, dim, dtype=torch.float32)
    return [
        *recorded(f"rotate-heads-D{dim}", lambda: rotation.launch(x, x)),
        *recorded(f"transform-keys-D{dim}", lambda: rotation.launch_product(TransformCall(x, matrix, shift), x)),
        *recorded(f"transform-queries-D{dim}", lambda: rotation.launch_product(TransformCall(q, matrix), q)),
    ]


def _calibrated(formats: tuple[str, str], dim: int, batch: int = 64, window: tuple[int, int] = (0, 0)) -> Iterator[Configuration]:
    """A decode step whose keys and queries are multiplied by a matrix, behind norms and rotation by position."""
    buffers = [kv_buffer(KV_FORMATS[name], (64, 8, 64, dim), batch, torch.bfloat16, window) for name in formats]
    k, q = (empty(batch, heads, 1, dim, dtype=torch.bfloat16) for heads in (8, 32))
    table, weight = empty(batch, 1, dim // 2, dtype=torch.float32), empty(dim, dtype=torch.bfloat16)
    matrix, shift = empty(8, dim, dim, dtype=torch.bfloat16), empty(8, dim, dtype=torch.float32)
    options = {"norms": HeadNorms(weight, weight, 1e-6, "rounded"), "transform": KeyTransform(matrix, matrix, shift)}
    call = AppendCall(k, k, *buffers, lengths=empty(batch), rope=Rope(table, table), q=q, measure=False, **options)
    plan = plan_of(call, advance=True, use_pdl=False)
    for launch in launches(call, plan, [torch.empty_like(q)], (empty(1, dtype=torch.float32), empty(plan.counters))):
        yield from recorded(f"{'-'.join(formats)}-calibrated-D{dim}-B{batch}{'-recent' * any(window)}", launch)


def _normalized(keys: str, kind: str, name: str, half: int, interleaved: bool) -> Iterator[Configuration]:
    """A decode step whose heads of 128 are normalized before twice `half` of their elements are rotated by position."""
    buffers = [kv_buffer(KV_FORMATS[name], (64, 8, 64, 128), 16, torch.bfloat16) for name in (keys, "int4_g32")]
    k, q = (empty(16, heads, 1, 128, dtype=torch.bfloat16) for heads in (8, 32))
    table = empty(16, 1, half, dtype=torch.float32)
    weight = empty(128, dtype=torch.bfloat16)
    norms = HeadNorms(weight, weight, 1e-6, kind)
    rope = Rope(table, table, interleaved)
    call = AppendCall(k, k, *buffers, lengths=empty(16), rope=rope, q=q, measure=False, norms=norms)
    for launch in launches(call, plan_of(call, advance=True, use_pdl=False), [torch.empty_like(q)], ()):
        yield from recorded(f"{keys}-int4_g32-norms{name}", launch)


def _by_slot(keys: str, values: str) -> Iterator[Configuration]:
    """An engine's step: INT4 keys come as the projection leaves them, others are rotated with their queries."""
    buffers = [kv_buffer(KV_FORMATS[name], (64, 8, 64, 128), 16, torch.bfloat16) for name in (keys, values)]
    k, table = empty(16, 8, 1, 128, dtype=torch.bfloat16), empty(16, 1, 64, dtype=torch.float32)
    call = AppendCall(k, k, *buffers, lengths=empty(16, dtype=torch.int64), measure=False, by_slot=True)
    results = []
    if KV_FORMATS[keys].code.bits == 8:
        results = [empty(16, 32, 1, 128, dtype=torch.bfloat16)]
        call = call._replace(rope=Rope(table, table), q=results[0])
    for launch in launches(call, plan_of(call, advance=False, use_pdl=False), results, ()):
        yield from recorded(f"{keys}-{values}-slots", launch)


def _variant(keys: str, prompt: bool, window: tuple[int, int] = (0, 0)) -> Iterator[Configuration]:
    """The launches of one append; `window`: sink and recent tokens.

    Every prompt has rotary embedding of keys and queries; decoding, where k is in bf16.
    """
    formats = KV_FORMATS[keys], KV_FORMATS[_VALUES.get(keys, keys)]
    dtype, tokens = torch.float16 if keys in _FP16 else torch.bfloat16, 48 if prompt else 1
    buffers = [kv_buffer(fmt, (64, 8, 64, 128), 16, dtype, window) for fmt in formats]
    k, rotary = empty(16, 8, tokens, 128, dtype=dtype), prompt or dtype is torch.bfloat16
    call = AppendCall(k, k, *buffers, lengths=empty(16), rotate_keys=prompt)
    results = []
    if prompt:
        call = call._replace(counts=empty(16), page_table=empty(16, 4))
    if rotary:
        table = empty(tokens, 64, dtype=torch.float32)
        call = call._replace(rope=Rope(table, table), q=empty(16, tokens, 32, 128, dtype=dtype).transpose(1, 2))
        results = [empty(16, 32, tokens, 128, dtype=dtype)]
    name = f"{formats[0]}-{formats[1]}-{'prompt' if prompt else 'decode'}" + "-recent" * any(window)
    for launch in launches(call, plan_of(call, advance=True, use_pdl=False), results, ()):
        for found in recorded(name, launch):
            yield replace(found, name=found.name.replace(" ", "-"))
