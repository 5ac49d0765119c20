"""`append`: quantize new keys and values and write them into a cache, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from halfbyte.arguments import as_int32, check_tensor
from halfbyte.errors import InvalidArgument, Unsupported, check
from halfbyte.formats import Shape, key_format, value_format
from halfbyte.kv_buffer import AppendCall, HeadNorms, KVBuffer, Rope, RopeLike
from halfbyte.ops._library import define, level, pairs_launches, refuse_capture
from halfbyte.ops.launch_cache import Signature, layout, replay, signature
from halfbyte.ops.launch_cache import store as store_launch
from halfbyte.ops.workspace import stream_of
from halfbyte.reference import append as reference
from halfbyte.reference.block import KINDS, Norm, rms_norm
from halfbyte.reference.rope import apply_rope
from halfbyte.transforms import refuse_transforms

# ------------------------------------------------------------------------------------------------- the torch.library op

_SCHEMA = (
    "append_(Tensor k, Tensor v, Tensor? counts, "
    "Tensor(a!) k_codes, Tensor(b!)? k_scales, Tensor(c!)? k_offsets, Tensor(d!)? k_tail, Tensor(e!)? k_saturated, "
    "Tensor(f!) v_codes, Tensor(g!)? v_scales, Tensor(h!)? v_offsets, Tensor(k!)? v_tail, Tensor(i!)? v_saturated, "
    "Tensor lengths, Tensor? page_table, str key_format, str value_format, bool rotate_keys, "
    'Tensor? cos=None, Tensor? sin=None, bool measure=True, str level="reference", Tensor? q=None, Tensor(j!)? q_out=None, '
    "bool by_slot=False, int sink_tokens=0, "
    'Tensor? q_weight=None, Tensor? k_weight=None, float norm_eps=0.0, str norm_kind="", bool interleaved=False) -> ()'
)
#: Defaults of the schema's arguments after `rotate_keys`.
_DEFAULTS = (None, None, True, "reference", None, None, False, 0, None, None, 0.0, "", False)

#: The tensors of a cache, flat: codes, scales, offsets, tail and counter of keys, the same of values, lengths.
Stored = tuple[torch.Tensor | None, ...]


def stored(keys: KVBuffer, values: KVBuffer, lengths: torch.Tensor) -> Stored:
    """What `append_parts` and `decode_parts` take of a contiguous cache."""
    return (*keys.tensors(), keys.saturated, *values.tensors(), values.saturated, lengths)


def _flatten(c: AppendCall, chosen: str, q_out: torch.Tensor | None) -> tuple[Any, ...]:
    """The arguments of the op, in the order of its schema."""
    cos, sin, interleaved = (None, None, False) if c.rope is None else Rope(*c.rope)
    names = (c.keys.format.name, c.values.format.name)
    buffers = stored(c.keys, c.values, c.lengths)
    options = (c.rotate_keys, cos, sin, c.measure, chosen, c.q, q_out, c.by_slot, c.keys.sink_tokens)
    norms = _DEFAULTS[-5:-1] if c.norms is None else c.norms
    return (c.k, c.v, c.counts, *buffers, c.page_table, *names, *options, *norms, interleaved)


def _unflatten(k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor | None, *rest: Any) -> tuple[AppendCall, str, Any]:
    """The call, the level and q_out from the arguments of the op, of which torch leaves out defaults at the end."""
    lengths, page_table, key_name, value_name, rotate_keys = rest[10:15]
    options: tuple[Any, ...] = (*rest[15:], *_DEFAULTS[len(rest) - 15 :])
    cos, sin, measure, chosen, q, q_out, by_slot, sink_tokens, *norms, interleaved = options
    keys = KVBuffer(key_format(key_name), *rest[:5], sink_tokens=sink_tokens)
    values = KVBuffer(value_format(value_name), *rest[5:10], sink_tokens=sink_tokens)
    rope = None if cos is None else Rope(cos, sin, interleaved)
    last = (measure, by_slot, None if norms[0] is None else HeadNorms(*norms))
    return AppendCall(k, v, keys, values, lengths, counts, page_table, rotate_keys, rope, q, *last), chosen, q_out


def _run(*flat: Any) -> None:
    c, chosen, q_out = _unflatten(*flat)
    if chosen == "triton":
        _launch(c, q_out, advance=False)
        return
    refuse_capture("append", c.k.device)
    if c.norms is not None and c.q is not None:
        norms = c.norms
        q, k = (rms_norm(x, Norm(weight, norms.eps, norms.kind)) for x, weight in zip((c.q, c.k), norms[:2], strict=True))
        c = c._replace(q=q, k=k)
    if c.rope is not None:
        cos, sin, interleaved = Rope(*c.rope)
        by = cos.unsqueeze(-3), sin.unsqueeze(-3), interleaved
        if c.q is not None and q_out is not None:
            q_out.copy_(apply_rope(c.q, *by))
        c = c._replace(k=apply_rope(c.k, *by))
    if c.by_slot:
        reference.append_slots_(c.k, c.v, c.keys, c.values, c.lengths, c.rotate_keys)
        return
    reference.append_(c.k, c.v, c.counts, c.keys, c.values, c.lengths, c.page_table, c.rotate_keys)


def _fake(*flat: Any) -> None:
    check_new(_unflatten(*flat)[0]._replace(rope=None, q=None, norms=None))


_op = define(_SCHEMA, _run, _fake)


def append_parts(
    k: torch.Tensor, v: torch.Tensor, parts: Stored, formats: tuple[str, str], rotate_keys: bool, measure: bool, sink_tokens: int
) -> None:
    """`append_` as compiled code calls it, on `stored` tensors of a contiguous cache and the names of its formats.

    Every traced object or property becomes a guard that is re-evaluated on each call, so there are none.
    """
    lengths = parts[-1]
    assert lengths is not None
    chosen = level("append", "auto", lengths.device)
    _op(k, v, None, *parts, None, *formats, rotate_keys, None, None, measure, chosen, None, None, False, sink_tokens)
    lengths.add_(k.shape[2])  # as in `store`


# ------------------------------------------------------------------------------------------------------- eager calls


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
    rope: RopeLike | None = None,
    q: torch.Tensor | None = None,
    norms: HeadNorms | None = None,
    impl: str = "auto",
) -> torch.Tensor | None:
    """`KVCache.append` on buffers: quantize k [B, H, L, D], v [B, H, L, Dv] and write them after each sequence's tokens, in place.

    `lengths`, int32 [B], advances. Raises `CapacityError` beyond the capacity and `InvalidArgument` for NaN or infinity; nothing
    has changed then. A GPU kernel checks neither: a block with NaN or infinity becomes NaN, tokens that do not fit are not written.
    """
    c = AppendCall(k, v, keys, values, lengths, counts, page_table, rotate_keys, rope, q, norms=norms)
    check_new(c)
    return store(c, impl)


def store(c: AppendCall, impl: str = "auto", s: Signature | None = None) -> torch.Tensor | None:
    """Append a checked call, or replay it if `s` is its signature; returns q rotated."""
    done: tuple[torch.Tensor | None] | None = None if s is None else replay(s)
    if done is not None:
        return done[0]
    chosen = level("append", impl, c.lengths.device)
    if c.counts is not None:
        c = c._replace(counts=as_int32(c.counts))
    q_out = None if c.q is None else torch.empty(c.q.shape, dtype=c.q.dtype, device=c.q.device)
    if chosen == "triton" and not torch.compiler.is_compiling():
        if _launch(c, q_out, advance=not c.by_slot, s=s):
            return q_out
    else:
        _op(*_flatten(c, chosen, q_out))
    if c.by_slot:
        return q_out
    counts = c.counts
    if chosen == "triton" and counts is not None:
        counts = counts.clamp(0, c.k.shape[2])  # only the reference has checked them
    # Not in the op: Inductor may read the old lengths (for positions) after an op that changes them.
    c.lengths.add_(c.k.shape[2] if counts is None else counts)
    return q_out


# ------------------------------------------------------------------------------------------------------- on a GPU


def _launch(c: AppendCall, q_out: torch.Tensor | None, advance: bool, s: Signature | None = None) -> bool:
    """Write, without synchronizing. Returns whether the kernel advanced the lengths too: with `advance` and few tokens."""
    from halfbyte.kernels.append.launch import launches

    if not c.k.numel() or not c.v.numel():
        return False
    unknown = c.measure and "tensor" in (c.keys.format.granularity, c.values.format.granularity)
    amax = torch.zeros(2, dtype=torch.int32, device=c.k.device) if unknown else None
    if c.counts is not None:
        c = c._replace(counts=c.counts.contiguous())
    if c.rope is not None:
        cos, sin, interleaved = Rope(*c.rope)
        c = c._replace(rope=Rope(cos.contiguous(), sin.contiguous(), interleaved))
    made = launches(c, q_out, amax, advance, pairs_launches(c.k.device))
    with torch.cuda.device_of(c.k):
        compiled = [launch() for launch in made]
    advanced = made[-1].advances
    if s is not None and (advanced or c.by_slot) and len(made) == 1 and s.covers(_tensors(c) + (c.norms or ())[:2]):
        store_launch(s, _replayed(compiled[0], made[0].programs, made[0].arguments, q_out))
    return advanced


#: Where q is among `_tensors`.
_Q = 2


def _tensors(c: AppendCall) -> tuple[torch.Tensor | None, ...]:
    """The tensors of a call that measures no scale, in the order in which the kernel takes them, but for q rotated."""
    keys, values, (cos, sin) = c.keys, c.values, c.rope[:2] if c.rope else (None, None)
    return (
        *(c.k, c.v, c.q, c.counts, c.lengths, c.page_table, cos, sin, keys.codes, keys.scales, keys.offsets, keys.saturated),
        *(values.codes, values.scales, values.offsets, values.saturated, keys.tail, values.tail),
    )


def signature_of(c: AppendCall) -> Signature | None:
    """The signature of an unchecked call; None if it may take more than one launch."""
    rope: Any = c.rope  # unchecked
    if c.measure or torch.compiler.is_compiling() or not c.lengths.is_cuda or c.keys.format.token_block:
        return None
    if rope is not None and (not isinstance(rope, tuple) or len(rope) < 2 or rope[0] is None):
        return None
    if forward_ad._current_level >= 0 or (torch.is_grad_enabled() and _requires_grad(c.q, rope)):
        return None
    options: tuple[Any, ...] = (c.rotate_keys, c.keys.sink_tokens)
    if rope is not None and len(rope) > 2:
        if len(rope) > 3 or not isinstance(rope[2], bool):
            return None
        options += rope[2:]
    tensors, norms = _tensors(c), c.norms
    if norms is not None:
        if not isinstance(norms, HeadNorms) or (torch.is_grad_enabled() and _requires_grad(c.q, norms[:2])):
            return None
        options, tensors = options + norms[2:], tensors + norms[:2]
    return signature("append", options, (c.keys.format, c.values.format), tensors)


def _replayed(
    compiled: Any, programs: int, arguments: tuple[Any, ...], q_out: torch.Tensor | None
) -> Callable[[Signature], tuple[torch.Tensor | None] | None]:
    """A function that replays this launch with the addresses of another call, and returns q rotated or None."""
    from halfbyte.kernels.common.compat import launcher

    launch, constants = launcher(compiled, (programs, 1, 1)), arguments[10:]
    like, no_norms = None if q_out is None else layout(q_out), (None, None)

    def again(s: Signature) -> tuple[torch.Tensor | None] | None:
        a, made, address = s.addresses, None, None
        if like is not None:
            made = s.tensors[_Q].new_empty_strided(*like)
            address = made.data_ptr()
            if address % 16:
                return None  # no allocator of torch does that, and the kernel may have been compiled for it
        stored = (a[6:8] + (a[18:] or no_norms), a[8:12], a[12:16], a[16:18])
        launch(stream_of(s.tensors[0].device), a[0], a[1], a[_Q], address, a[3:5], a[5], *stored, *constants)
        return (made,)

    return again


# ------------------------------------------------------------------------------------------------------- checks


def check_new(c: AppendCall) -> None:
    """Check shapes, dtypes and devices of new tokens; contents are checked when they are read."""
    (k, v, keys, values, lengths), q, batch = c[:5], c.q, c.lengths.shape[0]
    if not torch.compiler.is_compiling():
        refuse_transforms("append", (k, v, q, c.rope))
    check_tensor("k", k, (batch, keys.heads, "L", keys.dim), device=keys.codes.device)
    check_tensor("v", v, (batch, values.heads, "L", values.dim), device=keys.codes.device)
    # Messages are built only when raised: formatting a dynamic size would make compiled code specialize on it.
    if k.shape[2] != v.shape[2]:
        raise InvalidArgument(f"k has {k.shape[2]} tokens and v {v.shape[2]}; they must have the same number")
    if c.counts is not None:
        check_tensor("counts", c.counts, (batch,), "integer", lengths.device)
    if c.rope is not None:
        check_rope(c.rope, k, k.shape[2:3], (batch, k.shape[2]))
    if q is not None:
        check_query(q, (batch, "Hq", k.shape[2], keys.dim), c.rope, keys.codes.device, c.norms)
    if c.norms is not None:
        check_norms(c)


def check_query(
    q: torch.Tensor, shape: Sequence[int | str], rope: RopeLike | None, device: torch.device, norms: HeadNorms | None = None
) -> None:
    """q, to be rotated along with the keys."""
    check(rope is not None, "q was given without rope, so there is nothing to rotate it by; pass rope=(cos, sin), or leave q out")
    check_tensor("q", q, shape, device=device)
    if torch.is_grad_enabled() and _requires_grad(q, rope, norms):
        which = "q" if q.requires_grad else "rope" if _requires_grad(q, rope) else "norms"
        raise Unsupported(
            f"append has no gradient, and {which} requires one: halfbyte is for inference; wrap the call in torch.no_grad()"
        )


def _requires_grad(q: torch.Tensor | None, rope: RopeLike | None, norms: HeadNorms | None = None) -> bool:
    """Whether q, once it is rotated, would have a gradient."""
    return q is not None and any(getattr(t, "requires_grad", False) for t in (q, *(rope or ()), *(norms or ())))


def check_norms(c: AppendCall) -> None:
    """norms, of keys and of queries that are both given and rotated."""
    norms: Any = c.norms
    if not isinstance(norms, HeadNorms):
        raise InvalidArgument(f"norms is a {type(norms).__name__}; expected a halfbyte.kv_buffer.HeadNorms(q, k, eps, kind)")
    check(c.q is not None, "norms was given without q and rope, for whose heads they are; pass both, or leave norms out")
    for name, weight in (("norms.q", norms.q), ("norms.k", norms.k)):
        check_tensor(name, weight, c.k.shape[-1:], device=c.k.device)
    check(norms.kind in KINDS, f"norms.kind={norms.kind!r}; choose one of: {', '.join(KINDS)}")
    check(norms.eps > 0, f"norms.eps={norms.eps}; expected a positive number: heads of zeros stay zeros")


def check_rope(rope: RopeLike, k: torch.Tensor, *shapes: Shape) -> None:
    """rope, for keys k [..., D]: each of its tensors has one of these shapes, with R / 2 behind it, where R <= D."""
    if not isinstance(rope, tuple | list) or len(rope) not in (2, 3):
        raise InvalidArgument(f"rope is a {type(rope).__name__}; expected two tensors (cos, sin), or a halfbyte.kv_buffer.Rope")
    cos, sin, interleaved = Rope(*rope)
    check(isinstance(interleaved, bool), f"rope.interleaved={interleaved!r}; expected True or False")
    for name, t in (("rope[0] (cos)", cos), ("rope[1] (sin)", sin)):
        shape = next((s for s in shapes if isinstance(t, torch.Tensor) and t.ndim == len(s) + 1), shapes[-1])
        check_tensor(name, t, (*shape, "R/2"), device=k.device)
        check(t.dtype is torch.float32, f"{name} is {t.dtype}; expected torch.float32: halfbyte rotates in fp32")
    if cos.shape != sin.shape:
        raise InvalidArgument(f"rope: cos has shape {list(cos.shape)} and sin {list(sin.shape)}")
    half, dim = cos.shape[-1], k.shape[-1]
    if not 0 < 2 * half <= dim:
        raise InvalidArgument(
            f"rope: cos and sin have {half} columns; expected 1 to {dim // 2}, half of what is rotated of head_dim={dim}"
        )
