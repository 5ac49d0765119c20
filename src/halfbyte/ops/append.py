"""`append`: quantise new keys and values and write them into a cache, in place."""

from __future__ import annotations

import functools
from typing import Any

import torch

from halfbyte.arguments import as_int32, check_tensor
from halfbyte.device import describe
from halfbyte.errors import InvalidArgument, Unsupported, check
from halfbyte.formats import key_format, value_format
from halfbyte.kv_buffer import KVBuffer, Rope
from halfbyte.ops._launch_cache import Signature, replay
from halfbyte.ops._library import define, level, refuse_capture
from halfbyte.ops._relaunch_append import remember
from halfbyte.reference import append as reference
from halfbyte.reference.rope import apply_rope
from halfbyte.settings import pair_launches

_SCHEMA = (
    "append_(Tensor k, Tensor v, Tensor? counts, "
    "Tensor(a!) k_codes, Tensor(b!)? k_scales, Tensor(c!)? k_offsets, Tensor(d!)? k_tail, Tensor(e!)? k_saturated, "
    "Tensor(f!) v_codes, Tensor(g!)? v_scales, Tensor(h!)? v_offsets, Tensor(i!)? v_saturated, "
    "Tensor lengths, Tensor? page_table, str key_format, str value_format, bool rotate_keys, "
    'Tensor? cos=None, Tensor? sin=None, bool measure=True, str level="reference", Tensor? q=None, Tensor(j!)? q_out=None) -> ()'
)


def _run(
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor | None,
    k_codes: torch.Tensor,
    k_scales: torch.Tensor | None,
    k_offsets: torch.Tensor | None,
    k_tail: torch.Tensor | None,
    k_saturated: torch.Tensor | None,
    v_codes: torch.Tensor,
    v_scales: torch.Tensor | None,
    v_offsets: torch.Tensor | None,
    v_saturated: torch.Tensor | None,
    lengths: torch.Tensor,
    page_table: torch.Tensor | None,
    keys: str,
    values: str,
    rotate_keys: bool,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    measure: bool = True,
    level: str = "reference",
    q: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
) -> None:
    key_buffer = KVBuffer(key_format(keys), k_codes, k_scales, k_offsets, k_tail, k_saturated)
    value_buffer = KVBuffer(value_format(values), v_codes, v_scales, v_offsets, None, v_saturated)
    if level == "triton":
        _launch(k, v, counts, key_buffer, value_buffer, lengths, page_table, rotate_keys, cos, sin, measure, False, q, q_out)
        return
    refuse_capture("append", k.device)
    if cos is not None and sin is not None:
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
        k = apply_rope(k, cos, sin)
        if q is not None and q_out is not None:
            q_out.copy_(apply_rope(q, cos, sin))
    reference.append_(k, v, counts, key_buffer, value_buffer, lengths, page_table, rotate_keys)


def _fake(k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor | None, k_codes: torch.Tensor, *rest: Any, **more: object) -> None:
    v_codes, lengths, (keys, values) = rest[4], rest[8], rest[10:12]
    check_new(k, v, KVBuffer(key_format(keys), k_codes), KVBuffer(value_format(values), v_codes), lengths, counts)


_op = define(_SCHEMA, _run, _fake)

#: The tensors of a cache, flat: codes, scales, offsets, tail and counter of keys, the same without tail of values, lengths.
Stored = tuple[torch.Tensor | None, ...]


def stored(keys: KVBuffer, values: KVBuffer, lengths: torch.Tensor) -> Stored:
    """What `append_parts` and `decode_parts` take of a contiguous cache."""
    return (*keys.tensors(), keys.saturated, *values.tensors()[:3], values.saturated, lengths)


def append_parts(
    k: torch.Tensor, v: torch.Tensor, parts: Stored, formats: tuple[str, str], rotate_keys: bool, measure: bool
) -> None:
    """`append_` as compiled code calls it, on `stored` tensors of a contiguous cache and the names of its formats.

    Every object and property that is traced is looked at again before every call of the compiled code, so there are none.
    """
    *planes, lengths = parts
    assert lengths is not None
    chosen = level("append", "auto", lengths.device)
    _op(k, v, None, *planes, lengths, None, *formats, rotate_keys, None, None, measure, chosen)
    lengths.add_(k.shape[2])  # as in `store`


def append_(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: KVBuffer,
    values: KVBuffer,
    lengths: torch.Tensor,
    *,
    counts: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    rotate_keys: bool = False,
    rope: Rope | None = None,
    q: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor | None:
    """Quantise k [B, H, L, D] and v [B, H, L, Dv] (any floating dtype) and write them behind each sequence's tokens, in place.

    `counts`, int32 [B] in 0..L: how many of the L tokens of each sequence are real; None: all. `lengths`, int32 [B], advances.
    `rope`, (cos, sin) float32 [B, L, D/2] or [L, D/2]: the keys are rotated by position first, pairs (x[i], x[i + D/2]).
    `q` [B, Hq, L, D] is rotated alike, in the same launch on a GPU, into a new tensor, which is returned.
    Raises `CapacityError` past the capacity and `InvalidArgument` for NaN or infinity; then nothing has changed. A GPU kernel does
    not look at numbers: there a block with NaN or infinity becomes NaN, and tokens that do not fit are not written.
    """
    check_new(k, v, keys, values, lengths, counts, rope, q)
    return store(k, v, keys, values, lengths, counts, page_table, rotate_keys, rope, q, impl)


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: KVBuffer,
    values: KVBuffer,
    lengths: torch.Tensor,
    counts: torch.Tensor | None,
    page_table: torch.Tensor | None,
    rotate_keys: bool,
    rope: Rope | None,
    q: torch.Tensor | None = None,
    impl: str = "auto",
    measure: bool = True,
    request: Signature | None = None,
) -> torch.Tensor | None:
    """`append_` without its checks. `measure`: a per-tensor scale may still be 0, which says that it is to be measured.

    `request`: what this append may be like, and is to be remembered as.
    """
    done: tuple[torch.Tensor | None] | None = None if request is None else replay(request)
    if done is not None:
        return done[0]
    chosen = level("append", impl, lengths.device)
    counts = None if counts is None else as_int32(counts)
    cos, sin = (None, None) if rope is None else rope
    q_out = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if chosen == "triton" and not torch.compiler.is_compiling():
        if _launch(k, v, counts, keys, values, lengths, page_table, rotate_keys, cos, sin, measure, True, q, q_out, request):
            return q_out
    else:
        k_parts, v_parts = (*keys.tensors(), keys.saturated), (*values.tensors()[:3], values.saturated)
        names = (keys.format.name, values.format.name)
        _op(k, v, counts, *k_parts, *v_parts, lengths, page_table, *names, rotate_keys, cos, sin, measure, chosen, q, q_out)
    if chosen == "triton" and counts is not None:
        counts = counts.clamp(0, k.shape[2])  # which only the reference has looked at
    # Here and not in the op: Inductor may compute what it needs of the old lengths (positions) after an op that changes them.
    lengths.add_(k.shape[2] if counts is None else counts)
    return q_out


def _launch(
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor | None,
    keys: KVBuffer,
    values: KVBuffer,
    lengths: torch.Tensor,
    page_table: torch.Tensor | None,
    rotate_keys: bool,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    measure: bool,
    advance: bool,
    q: torch.Tensor | None,
    q_out: torch.Tensor | None,
    request: Signature | None = None,
) -> bool:
    """Write, without a look at the device. Returns whether the lengths have advanced too, which takes `advance` and few tokens."""
    from halfbyte.kernels.append.tokens import launch, one_program

    if not k.numel() or not v.numel():
        return False
    in_kernel = advance and one_program(k.shape[1], k.shape[2], max(k.shape[3], v.shape[3]))
    unknown = measure and "tensor" in (keys.format.granularity, values.format.granularity)
    amax = torch.zeros(2, dtype=torch.int32, device=k.device) if unknown else None
    counts, cos, sin = (None if t is None else t.contiguous() for t in (counts, cos, sin))
    pdl = pair_launches() and _paired(k.device)
    with torch.cuda.device_of(k):
        made = launch(k, v, counts, keys, values, lengths, page_table, rotate_keys, cos, sin, amax, in_kernel, pdl, q, q_out)
    if request is not None and in_kernel and len(made) == 1:
        remember(request, *made[0], q_out)
    return in_kernel


@functools.cache
def _paired(device: torch.device) -> bool:
    """Whether this GPU lets a kernel start while the one before it ends (programmatic dependent launch): Hopper and later."""
    return (describe(device).capability or (0, 0)) >= (9, 0)


def check_new(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: KVBuffer,
    values: KVBuffer,
    lengths: torch.Tensor,
    counts: torch.Tensor | None,
    rope: Rope | None = None,
    q: torch.Tensor | None = None,
) -> None:
    """Shapes, dtypes and devices of what is to be appended. What the numbers are is looked at when they are read."""
    batch = lengths.shape[0]
    check_tensor("k", k, (batch, keys.heads, "L", keys.dim), device=keys.codes.device)
    check_tensor("v", v, (batch, values.heads, "L", values.dim), device=keys.codes.device)
    check(k.shape[2] == v.shape[2], f"k has {k.shape[2]} tokens and v {v.shape[2]}; they must have the same number")
    if counts is not None:
        check_tensor("counts", counts, (batch,), "integer", lengths.device)
    if rope is not None:
        _check_rope(rope, k)
    if q is not None:
        check(
            rope is not None, "q was given without rope, so there is nothing to rotate it by; pass rope=(cos, sin), or leave q out"
        )
        check_tensor("q", q, (batch, "Hq", k.shape[2], keys.dim), device=keys.codes.device)
        if q.requires_grad and torch.is_grad_enabled():
            raise Unsupported(
                "append has no gradient, and q asks for one: halfbyte is for inference; wrap the call in torch.no_grad()"
            )


def _check_rope(rope: Rope, k: torch.Tensor) -> None:
    if not isinstance(rope, tuple | list) or len(rope) != 2:
        raise InvalidArgument(f"rope is a {type(rope).__name__}; expected two tensors (cos, sin)")
    batch, _, tokens, dim = k.shape
    check(dim % 2 == 0, f"rope was given, but keys of an odd head_dim={dim} have no halves to rotate; leave it out")
    for name, t in zip(("rope[0] (cos)", "rope[1] (sin)"), rope, strict=True):
        shape = (tokens, dim // 2) if isinstance(t, torch.Tensor) and t.ndim == 2 else (batch, tokens, dim // 2)
        check_tensor(name, t, shape, device=k.device)
        check(t.dtype is torch.float32, f"{name} is {t.dtype}; expected torch.float32: halfbyte rotates in fp32")
    check(rope[0].shape == rope[1].shape, f"rope: cos has shape {list(rope[0].shape)} and sin {list(rope[1].shape)}")
