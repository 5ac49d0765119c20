"""`append_`, `append_slots`: quantize new keys and values and write them into a cache, or into the slots of an engine, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from halfbyte.arguments import as_int32, check_tensor
from halfbyte.cpu import append as cpu
from halfbyte.errors import InvalidArgument, Unsupported, check, warn_once
from halfbyte.formats import Shape
from halfbyte.kv_buffer import AppendCall, HeadNorms, KVBuffer, Rope, RopeLike
from halfbyte.ops import launch_cache
from halfbyte.ops._library import level, pairs_launches, refuse_capture
from halfbyte.ops.declare import Op
from halfbyte.ops.launch_cache import Signature, replay
from halfbyte.ops.self_check import refusal, untested
from halfbyte.ops.small_calls import append_error
from halfbyte.ops.transform_heads import transform_heads
from halfbyte.plans.append import LARGEST, takes_matrix
from halfbyte.reference import append as reference
from halfbyte.reference.block import KINDS, Norm, rms_norm
from halfbyte.reference.rope import apply_rope
from halfbyte.reference.transform import transformed
from halfbyte.tensors import KeyTransform
from halfbyte.transforms import refuse_transforms

#: The op; compiled code calls it by `append_of_parts`.
APPEND = Op("append_", AppendCall)


def _run(c: AppendCall) -> None:
    if c.impl == "triton" and _is_one_launch(c) and not _refused(c, advance=False):
        _launch(c, advance=False)
    else:
        _run_reference(c)


def _run_reference(c: AppendCall) -> None:
    refuse_capture("append", c.k.device)
    c = _normalized(c)
    if c.transform:
        c, transform = _placed(c), _transform_of(c)
        k = transformed(c.k, transform.keys, transform.shift)
        c = c._replace(k=k, q=None if c.q is None else transformed(c.q, transform.queries))
        if c.q is not None and c.rotated_q is not None:
            c.rotated_q.copy_(c.q)
            c = c._replace(q=None, rotated_q=None)
    if c.impl == "cpu" and cpu.append_(c):
        return
    if c.rope is not None:
        c = _placed(c)
        if c.q is not None and c.rotated_q is not None:
            c.rotated_q.copy_(c.q)
    if c.by_slot:
        reference.append_slots_(c.k, c.v, c.keys, c.values, c.lengths, c.rotate_keys)
        return
    reference.append_(c.k, c.v, c.counts, c.keys, c.values, c.lengths, c.page_table, c.rotate_keys)


def _normalized(c: AppendCall) -> AppendCall:
    """With the heads of k and q normalized."""
    if c.norms is None or c.q is None:
        return c
    norms = c.norms
    q, k = (rms_norm(x, Norm(weight, norms.eps, norms.kind)) for x, weight in zip((c.q, c.k), norms[:2], strict=True))
    return c._replace(q=q, k=k, norms=None)


def _placed(c: AppendCall) -> AppendCall:
    """With k and q rotated by position."""
    if c.rope is None:
        return c
    by = c.rope.cos.unsqueeze(-3), c.rope.sin.unsqueeze(-3), c.rope.interleaved
    return c._replace(k=apply_rope(c.k, *by), q=None if c.q is None else apply_rope(c.q, *by), rope=None)


def _transform_of(c: AppendCall) -> KeyTransform:
    """The transform of a call that has one, whose type the op's flat form loses."""
    return KeyTransform(*c.transform)  # type: ignore[arg-type]


def _fake(c: AppendCall) -> None:
    check_new(c._replace(rope=None, q=None, norms=None, transform=()))


APPEND.register(_run, _fake)


def append_of_parts(k: torch.Tensor, v: torch.Tensor, parts: Mapping[str, Any]) -> None:
    """`append_` as compiled code calls it, with the `Op.parts` of a contiguous cache."""
    lengths = parts["lengths"]
    APPEND.of_parts({**parts, "k": k, "v": v, "impl": level("append", "auto", lengths.device)})
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
    rope: RopeLike | None = None,
    q: torch.Tensor | None = None,
    norms: HeadNorms | None = None,
    transform: KeyTransform | tuple[()] = (),
    impl: str = "auto",
) -> torch.Tensor | None:
    """`KVCache.append` on buffers: quantize k [B, H, L, D], v [B, H, L, Dv] and write them after each sequence's tokens, in place.

    `lengths`, int32 [B], advances. Raises `CapacityError` beyond the capacity and `InvalidArgument` for NaN or infinity; nothing
    has changed then. A GPU kernel checks neither: a block with NaN or infinity becomes NaN, tokens that do not fit are not written.
    """
    where = (keys, values, lengths, counts, page_table, rotate_keys)
    c = AppendCall(k, v, *where, rope_of(rope), q, norms=norms, transform=transform, impl=impl)
    check_new(c)
    return store(c)


def append_slots(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: KVBuffer,
    values: KVBuffer,
    slot_mapping: torch.Tensor,
    *,
    rotate_keys: bool = False,
    rope: RopeLike | None = None,
    q: torch.Tensor | None = None,
    transform: KeyTransform | tuple[()] = (),
    impl: str = "auto",
) -> torch.Tensor | None:
    """Quantize k [T, H, D] and v [T, H, Dv] (any floating dtype and strides) and write token t to slot_mapping[t], in place.

    slot_mapping  int64 or int32 [T]: page * N + row in pages of N tokens. Negative: the token is skipped, whatever it holds. Slots
                  must be distinct
    rotate_keys   keys are stored Hadamard-rotated
    rope          (cos, sin), float32 [T, R/2], or a `halfbyte.kv_buffer.Rope`: apply rotary embedding to the first R elements of
                  each key
    q             [T, Hq, D]: rotated by position and transformed too, on a GPU in the same launch; returned as a new tensor
    transform     of calibrated keys (`KeyTransform`): keys are multiplied by a matrix and shifted, after rope

    Lengths and page tables stay with the engine. On a CPU NaN, infinity and slots beyond the pages raise `InvalidArgument`, and
    nothing changes. On a GPU a block with NaN or infinity becomes NaN, and tokens with slots beyond the pages are not written.
    """
    if not isinstance(keys, KVBuffer):
        raise _no_buffer("keys", keys)
    if not isinstance(values, KVBuffer):
        raise _no_buffer("values", values)
    measure = "tensor" in (keys.format.granularity, values.format.granularity)
    rotation = None if rope is None else rope_of(rope)
    c = AppendCall(k, v, keys, values, slot_mapping, None, None, rotate_keys, rotation, q, measure, True, None, transform, impl)
    signature = APPEND.signature(c)
    results: tuple[torch.Tensor, ...] | None = None if signature is None else replay(signature)
    if results is None:
        _check_slots(c)
        rotated = store(_as_sequences(c), signature)
    else:
        rotated = results[0] if results else None
    return None if rotated is None else rotated.squeeze(2)


def _as_sequences(c: AppendCall) -> AppendCall:
    """Each token as a sequence of its own, [T, H, 1, D]."""
    rope = None if c.rope is None else Rope(c.rope[0].unsqueeze(1), c.rope[1].unsqueeze(1), *c.rope[2:])
    q = None if c.q is None else c.q.unsqueeze(2)
    return c._replace(k=c.k.unsqueeze(2), v=c.v.unsqueeze(2), rope=rope, q=q)


def store(c: AppendCall, signature: Signature | None = None) -> torch.Tensor | None:
    """Append a checked call, or replay it if this is its signature; returns q rotated."""
    results: tuple[torch.Tensor, ...] | None = None if signature is None else replay(signature)
    if results is not None:
        return results[0] if results else None
    best = level("append", c.impl, c.lengths.device)
    if best == "triton" and not torch.compiler.is_compiling():
        if not _is_one_launch(c):
            return _in_parts(c)
        if c.impl == "auto" and _refused(c, advance=not c.by_slot):
            best = "reference"
    c = c._replace(impl=best)
    if c.counts is not None:
        c = c._replace(counts=as_int32(c.counts))
    results = c.new_results()
    rotated = results[0] if results else None
    c = c._replace(rotated_q=rotated)
    if c.impl == "triton" and not torch.compiler.is_compiling():
        if _launch(c, advance=not c.by_slot, signature=signature):
            return rotated
    else:
        APPEND(c)
    if c.by_slot:
        return rotated
    counts = c.counts
    if c.impl == "triton" and counts is not None:
        counts = counts.clamp(0, c.k.shape[2])  # only the reference has checked them
    # Not in the op: Inductor may read the old lengths (for positions) after an op that changes them.
    c.lengths.add_(c.k.shape[2] if counts is None else counts)
    return rotated


def _is_one_launch(c: AppendCall) -> bool:
    """Whether the kernel applies the transform, if there is one."""
    if not c.transform:
        return True
    dtypes = {x.dtype for x in (c.k, c.q, *c.transform[:2]) if x is not None}
    narrow = len(dtypes) == 1 and c.k.element_size() == 2
    return narrow and takes_matrix((c.keys.format.name, c.values.format.name), (c.k.shape[3], c.v.shape[3]))


def _in_parts(c: AppendCall) -> torch.Tensor | None:
    """Keys and queries in launches of their own, and then the append."""
    transform = _transform_of(c)
    warn_once(
        f"calibrated keys in {c.keys.format}, values in {c.values.format}, {c.k.dtype}, heads of {c.k.shape[3]}: each step takes "
        f"more launches than in 16 bits, with scales of a head or a group, and heads of at most {LARGEST}"
    )
    c = _placed(_normalized(c))
    store(c._replace(k=transform_heads(c.k, transform.keys, transform.shift), q=None, transform=()))
    return None if c.q is None else transform_heads(c.q, transform.queries)


def _refused(c: AppendCall, advance: bool) -> bool:
    """Whether the kernel was found to be wrong on this GPU."""
    device = c.k.device
    if not untested(device) or not c.k.numel() or not c.v.numel():
        return False
    from halfbyte.kernels.append.launch import plan_of

    spec = plan_of(c, advance, pairs_launches(device)).spec
    return bool(refusal("append", spec, device, lambda: append_error(c, partial(_launch, advance=advance), _run_reference)))


def _launch(c: AppendCall, advance: bool, signature: Signature | None = None) -> bool:
    """Write, without synchronizing. Returns whether the kernel advanced the lengths too: with `advance` and few tokens."""
    from halfbyte.kernels.append.launch import launches, plan_of

    if not c.k.numel() or not c.v.numel():
        return False
    if c.counts is not None:
        c = c._replace(counts=c.counts.contiguous())
    if c.rope is not None:
        c = c._replace(rope=Rope(c.rope.cos.contiguous(), c.rope.sin.contiguous(), c.rope.interleaved))
    plan = plan_of(c, advance, pairs_launches(c.k.device))
    alone = plan.launches == 1 and not c.measure and (plan.spec.advance or c.by_slot)
    results = () if c.rotated_q is None else (c.rotated_q,)
    with torch.cuda.device_of(c.k):
        launch_cache.launch(APPEND, c, plan, launches, results, signature=signature if alone else None)
    return plan.spec.advance


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
        check_query(c, (batch, "Hq", k.shape[2], keys.dim))
    if c.transform:
        check_transform(c)
    if c.norms is not None:
        check_norms(c)


def check_query(c: AppendCall, shape: Sequence[int | str]) -> None:
    """q, to be rotated or transformed along with the keys."""
    q, rope, norms = c.q, c.rope, c.norms
    assert q is not None
    check(
        rope is not None or bool(c.transform),
        "q was given without rope, so there is nothing to rotate it by; pass rope=(cos, sin), or leave q out",
    )
    check_tensor("q", q, shape, device=c.keys.codes.device)
    if torch.is_grad_enabled() and _requires_grad(q, rope, norms):
        which = "q" if q.requires_grad else "rope" if _requires_grad(q, rope) else "norms"
        raise Unsupported(
            f"append has no gradient, and {which} requires one: halfbyte is for inference; wrap the call in torch.no_grad()"
        )


def _requires_grad(q: torch.Tensor | None, rope: Rope | None, norms: HeadNorms | None = None) -> bool:
    """Whether q, once it is rotated, would have a gradient."""
    return q is not None and any(getattr(t, "requires_grad", False) for t in (q, *(rope or ()), *(norms or ())))


def check_transform(c: AppendCall) -> None:
    """transform, of all KV heads."""
    transform: Any = c.transform
    if not isinstance(transform, KeyTransform):
        raise InvalidArgument(f"transform is a {type(transform).__name__}; expected a halfbyte.tensors.KeyTransform")
    heads, dim = c.k.shape[1], c.k.shape[-1]
    for part, t, shape in zip(transform._fields, transform, ((heads, dim, dim), (heads, dim, dim), (heads, dim)), strict=True):
        if t is not None:
            check_tensor(f"transform.{part}", t, shape, device=c.k.device)
            check(t.is_contiguous(), f"transform.{part} is not contiguous; pass transform.like(k)")


def check_norms(c: AppendCall) -> None:
    """norms, of keys and of queries that are both given and rotated."""
    norms: Any = c.norms
    if not isinstance(norms, HeadNorms):
        raise InvalidArgument(f"norms is a {type(norms).__name__}; expected a halfbyte.kv_buffer.HeadNorms(q, k, eps, kind)")
    check(c.q is not None, "norms was given without q, for whose heads they are; pass q with rope or transform, or leave norms out")
    for name, weight in (("norms.q", norms.q), ("norms.k", norms.k)):
        check_tensor(name, weight, c.k.shape[-1:], device=c.k.device)
    check(norms.kind in KINDS, f"norms.kind={norms.kind!r}; choose one of: {', '.join(KINDS)}")
    check(norms.eps > 0, f"norms.eps={norms.eps}; expected a positive number: heads of zeros stay zeros")


def rope_of(rope: RopeLike | None) -> Rope | None:
    """`rope`, which may be a plain (cos, sin)."""
    if rope is None:
        return None
    if not isinstance(rope, tuple | list) or len(rope) not in (2, 3):
        raise InvalidArgument(f"rope is a {type(rope).__name__}; expected two tensors (cos, sin), or a halfbyte.kv_buffer.Rope")
    whole = Rope(*rope)
    if not isinstance(whole.interleaved, bool):
        raise InvalidArgument(f"rope.interleaved={whole.interleaved!r}; expected True or False")
    return whole


def check_rope(rope: Rope, k: torch.Tensor, *shapes: Shape) -> None:
    """rope, for keys k [..., D]: each of its tensors has one of these shapes, with R / 2 behind it, where R <= D."""
    cos, sin, _ = rope
    for name, t in (("rope[0] (cos)", cos), ("rope[1] (sin)", sin)):
        if not isinstance(t, torch.Tensor) or t.shape[:-1] not in shapes or t.device != k.device:
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


def _no_buffer(name: str, value: object) -> InvalidArgument:
    return InvalidArgument(f"{name} is a {type(value).__name__}; expected a KVBuffer (PageLayout.buffers)")


def _check_slots(c: AppendCall) -> None:
    """Check dtypes, shapes and devices; contents are checked when they are read."""
    (k, v, keys, values, slots), rope, q = c[:5], c.rope, c.q
    if not torch.compiler.is_compiling():
        refuse_transforms("append_slots", (k, v, q, rope))
    if keys.format.token_block:
        raise Unsupported(f"{keys.format} keys keep a tail for each sequence, and slots know no sequences; use KVCache.append")
    if keys.tail is not None or values.tail is not None:
        raise Unsupported("sink and recent tokens are in the tail of a sequence, and slots know no sequences; use KVCache.append")
    device = keys.codes.device
    check_tensor("k", k, ("T", keys.heads, keys.dim), device=device)
    check_tensor("v", v, (len(k), values.heads, values.dim), device=device)
    check_tensor("slot_mapping", slots, (len(k),), "integer", device)
    if rope is not None:
        check_rope(rope, k, (len(k),))
    if q is not None:
        check_query(c, (len(k), "Hq", keys.dim))
    if c.transform:
        check_transform(c)
