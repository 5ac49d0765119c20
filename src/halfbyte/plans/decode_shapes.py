"""The shapes that a launch of the tuned decode kernels may have: candidates, one cost, and the least. Pure functions.

For few query rows a cost is a time over that of two programs per SM, which hide each other's latency. Where something was measured
(on an H200, docs/internals/log/attention.md), the measurement is the cost, and its date stands with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from halfbyte.plans.decode_problem import DecodeProblem
from halfbyte.plans.decode_spec import DecodeLatentSpec, DecodeLatentWgmmaSpec, DecodePlan, DecodeSpec, DecodeWgmmaSpec
from halfbyte.plans.toolchain import takes_any_part

#: Query rows of a KV head that a program of the wgmma kernel holds: 16 per warp.
MOST_ROWS = 128
#: With `deterministic_batch`: tokens of a split, and how many splits the first reduction step adds.
FIXED_SPLIT, FIXED_FANIN = 1024, 16
#: Shared memory that the driver takes of each block.
_DRIVER_BYTES = 1024
#: Bytes that should be in flight, from which on more stages only let programs end at more different times.
_IN_FLIGHT = 50 << 10


class Shape(NamedTuple):
    """What a program is compiled for, how many run at once on an SM, and its cost."""

    spec: DecodeSpec
    per_sm: int
    cost: float = 1.0

    def fits(self, limit: int) -> bool:
        """Whether so many programs fit into the shared memory of an SM."""
        return self.per_sm * (self.spec.shared_bytes + _DRIVER_BYTES) <= limit

    def fills(self, limit: int) -> bool:
        """Whether no further program fits, with 8 query rows.

        With 168 registers or fewer it would if the ring is small, and do harm: the next call's programs, which start early (PDL),
        would crowd the SMs that end first.
        """
        return self.spec.padded_rows == 8 and not self._replace(per_sm=self.per_sm + 1).fits(limit)


def programs(items: int, slots: int) -> int:
    """How many programs share `items` work items when `slots` of them run at once.

    With a whole number of programs per item (or items per program), no share spans two items of equal length; it is used unless it
    leaves more than an eighth of the slots idle.
    """
    whole = slots // items * items if items <= slots else -(-items // -(-items // slots))
    return whole if 8 * whole >= 7 * slots else slots


def reduce_fanin_of(programs: int, items: int) -> int:
    """Partial results of a work item that the first of two reduction steps adds: about as many as are left for the second."""
    return 16 if programs > 128 * items else 8


def fastest(base: DecodeSpec, p: DecodeProblem, num_sms: int, limit: int) -> DecodePlan | str:
    """The plan of least cost for few query rows, or why none fits. base: all but tiles and stages; limit: of shared memory."""
    several = _several(base, p, limit)
    several = _in_fixed_splits(several, limit) if p.deterministic_batch else several
    if several.spec.shared_bytes > limit:
        return f"its ring takes {several.spec.shared_bytes} bytes of shared memory and this GPU has {limit}"
    if p.deterministic_batch:
        return _planned(several, p, num_sms, limit)
    shapes = _filled(several, limit), *_alone(several.spec, p, num_sms, limit)
    return _planned(min(shapes, key=lambda shape: shape.cost), p, num_sms, limit)


def _planned(shape: Shape, p: DecodeProblem, num_sms: int, limit: int) -> DecodePlan:
    """The plan of a shape: how many programs share the work."""
    spec, items = shape.spec, p.batch * p.heads * p.rows // shape.spec.rows // shape.spec.heads
    count = programs(items, num_sms * shape.per_sm)
    tiles, item = f"{spec.stages} stages of {spec.tile} tokens", "a KV head" if spec.heads == 1 else "two KV heads"
    why = f"{count} programs of {spec.warps} warps, {tiles}; {items} work items ({item} of a sequence each)"
    if spec.split:
        return DecodePlan(spec, count, items, why, -(-p.capacity // (spec.split * spec.reduce_fanin)))
    spec = replace(spec, reduce_fanin=reduce_fanin_of(count, items))
    if spec.latent:
        return DecodePlan(spec, count, items, why)
    if spec.wgmma:
        return DecodePlan(spec, count, items, f"wgmma with up to {spec.padded_rows} rows; {why}")
    return DecodePlan(with_reduce_smem(spec, limit), count, items, why)


def _several(base: DecodeSpec, p: DecodeProblem, limit: int) -> Shape:
    """Two programs per SM, which hide each other's latency, or else one; with the largest tiles and the best ring."""
    shapes = [shape for per_sm, tokens in product((2, 1), (64, 32, 16)) for shape in _rings(base, p, per_sm, tokens, limit)]

    def order(shape: Shape) -> tuple[int, int, bool, int]:
        """With 8 rows, the fewest stages that keep enough in flight and leave no room for another program; else the most."""
        spec = shape.spec
        enough = spec.ring_bytes >= _IN_FLIGHT and _filled(shape, limit).fills(limit)
        return -shape.per_sm, -spec.tokens, not enough, spec.stages if enough else -spec.stages

    return min(shapes, key=order, default=Shape(replace(base, tokens=16, stages=2), 1))


def _rings(base: DecodeSpec, p: DecodeProblem, per_sm: int, tokens: int, limit: int) -> Iterator[Shape]:
    """Rings of two to four stages, as far as registers and shared memory hold them: 100 KB, or 160 KB with one program per SM."""
    if tokens > 16 and not _fits_registers(replace(base, tokens=tokens), p):
        return
    for stages in (2, 3, 4):
        shape = Shape(replace(base, tokens=tokens, stages=stages), per_sm)
        if shape.fits(limit) and shape.spec.ring_bytes <= (100 if per_sm == 2 else 160) << 10:
            yield shape


def _fits_registers(spec: DecodeSpec, p: DecodeProblem) -> bool:
    """Whether a warp's registers hold a tile's scores besides its queries and its output: found by compiling for every format and
    head size (with per-channel scales, at most one block of tokens, which share their scales)."""
    plain_int = all(side.bits <= 4 and side.groups == 1 for side in (spec.keys, spec.values))
    narrow = all(side.codes_per_word * side.padded <= 128 for side in (spec.keys, spec.values))
    light = plain_int and narrow and p.lean and _even(spec, p)
    most = 64 if spec.numbers <= 1024 or light else 32 if plain_int or (narrow and p.lean) else 16
    scores = spec.tokens * spec.padded_rows // spec.warps_q
    if 8 * spec.warps_q > spec.padded_rows:
        return False
    return spec.tokens <= min(most, spec.keys.block or most) and scores <= (1024 if light else 512)


def _even(spec: DecodeSpec, p: DecodeProblem) -> bool:
    """Whether lengths are the only mask, and strides are constants."""
    dense = all(side.token_stride == 1 and side.scale_stride == 1 for side in (spec.keys, spec.values))
    return dense and not (p.page or p.window or p.deterministic_batch)


def _filled(shape: Shape, limit: int) -> Shape:
    """The shape with separate shared memory for the sums of warps, if that fits; with 8 rows so that no further program fits, for
    which the sums take that space, or an empty slot of the ring."""
    variants = [
        shape._replace(spec=replace(shape.spec, separate_reduce_smem=own, pad_slots=slots))
        for slots, own in product((0, 1), (True, False))
    ]
    fitting = [one for one in variants if one.fits(limit)] or [shape]
    return next((one for one in fitting if one.fills(limit)), fitting[0])


def _in_fixed_splits(shape: Shape, limit: int) -> Shape:
    """The shape with splits of fixed size. Its ring keeps loading while warps are summed in other memory."""
    spec = replace(shape.spec, split=FIXED_SPLIT, reduce_fanin=FIXED_FANIN, separate_reduce_smem=True)
    for per_sm, stages in product(range(shape.per_sm, 0, -1), range(spec.stages, 1, -1)):
        variants = [Shape(replace(spec, stages=stages, pad_slots=slots), per_sm) for slots in (0, 1)]
        fitting = [one for one in variants if one.fits(limit)]
        if fitting:
            return next((one for one in fitting if one.fills(limit)), fitting[0])
    return Shape(replace(spec, stages=2), 1)


# ------------------------------------------------------------------------------------------------------------ one program per SM


class Measured(NamedTuple):
    """What one program per SM was measured to take over several, where a condition holds; infinite where it was not tried."""

    where: str
    holds: Callable[[DecodeSpec, DecodeProblem], bool]
    cost: float
    date: str


#: With about one work item for each SM, so that there are no partial results; the first that holds.
ONE_EACH = (
    Measured("16 bits", lambda s, p: min(s.keys.codes_per_word, s.values.codes_per_word) == 1, math.inf, "not tried"),
    Measured("more than 8 rows", lambda s, p: s.padded_rows > 8, math.inf, "not tried"),
    Measured("windows, ALiBi, softcap, several new tokens", lambda s, p: p.window or not p.lean, math.inf, "not tried"),
    Measured("per-channel keys", lambda s, p: s.keys.block > 0, 1.23, "2026-11-23"),
    Measured("keys in groups", lambda s, p: s.keys.groups > 1, 1.03, "2026-11-22"),
    Measured("4-bit keys, values in groups", lambda s, p: s.keys.bits <= 4 and s.values.groups > 1, 1.03, "2026-11-22"),
    Measured("single heads of 64", lambda s, p: s.heads * min(_dims(s)) <= 64, 1.0, "2026-11-22"),
    Measured("heads of 256", lambda s, p: max(_dims(s)) > 128, 1.0, "2026-11-22"),
    Measured("INT4 in pages", lambda s, p: p.page > 0 and min(s.keys.bits, s.values.bits) <= 4, 1.0, "2026-11-22"),
    Measured("everything else", lambda s, p: True, 0.96, "2026-11-22"),
)
#: With so few work items that the reduction of their partial results takes long, which this halves; the first that holds.
FEW_ITEMS = (
    Measured("16 bits", ONE_EACH[0].holds, math.inf, "not tried"),
    Measured("more than 8 rows", ONE_EACH[1].holds, math.inf, "not tried"),
    Measured("masks, pages, other strides", lambda s, p: not (p.lean and _even(s, p)), math.inf, "not tried"),
    Measured("heads of another size than 128", lambda s, p: set(_dims(s)) != {128}, math.inf, "not tried"),
    Measured("per-channel keys", lambda s, p: s.keys.block > 0, 1.23, "2026-11-23"),
    Measured("keys in groups", lambda s, p: s.keys.groups > 1, 1.0, "2026-11-22"),
    Measured("everything else", lambda s, p: True, 0.95, "2026-11-22"),
)


def _alone(spec: DecodeSpec, p: DecodeProblem, num_sms: int, limit: int) -> Iterator[Shape]:
    """One program per SM, where that may pay, with its cost."""
    items, plain_int = (
        p.batch * p.heads // spec.heads,
        all(side.bits <= 4 and side.groups == 1 for side in (spec.keys, spec.values)),
    )
    separate = replace(spec, separate_reduce_smem=True)
    if programs(items, num_sms) == items:
        # Its ring takes more than half of the shared memory: else the next call's program, which starts early, shares the SM.
        if spec.values.groups > 1:
            variants = [Shape(replace(separate, stages=3, pad_slots=slots), 1) for slots in range(4)]
            fitting = [one for one in variants if one.fits(limit) and not one._replace(per_sm=2).fits(limit)]
        else:
            larger = replace(spec, tokens=min(64, 2 * spec.tokens))
            variants = [Shape(replace(larger, stages=stages), 1) for stages in range(2, 8)]
            fitting = [one for one in variants if one.fits(limit) and one.spec.shared_bytes > limit // 2]
        yield from (one._replace(cost=_measured(ONE_EACH, spec, p)) for one in fitting[:1])
    elif items * (4 if plain_int else 16) <= num_sms:  # partial results per item from which on it pays
        # One more stage hides latency, except for INT4 with at most 1,024 tokens per program.
        short = plain_int and items * p.capacity <= 1024 * programs(items, num_sms)
        shape = Shape(replace(separate, stages=2 if short else 3), 1, _measured(FEW_ITEMS, spec, p))
        yield from [shape] if shape.fits(limit) else []


def _measured(table: Sequence[Measured], spec: DecodeSpec, p: DecodeProblem) -> float:
    return next(one.cost for one in table if one.holds(spec, p))


def _dims(spec: DecodeSpec) -> tuple[int, int]:
    """Elements of a key and of a value, rounded up."""
    return spec.keys.codes_per_word * spec.keys.padded, spec.values.codes_per_word * spec.values.padded


# -------------------------------------------------------------------------------------------------------------- many query rows


def many_rows(base: DecodeSpec, p: DecodeProblem, num_sms: int, limit: int) -> DecodePlan | str:
    """The plan of the wgmma kernel, or the reason why it cannot.

    A tile has as many tokens as padded rows: 64 for two programs of one warp group, 128 for one of two warp groups.
    """
    keys, values, rows = base.keys, base.values, base.rows
    if rows > MOST_ROWS:
        return f"{rows} query rows per KV head; tuned kernels take up to {MOST_ROWS}"
    dims = set(_dims(base))
    if len(dims) > 1 or max(dims) > 128 or keys.block or any(side.codes_per_word == 1 for side in (keys, values)):
        what = "16-bit tokens, per-channel scales, heads of more than 128, or values of another size than keys"
        return f"{rows} query rows per KV head exceed the registers of the tuned kernels with {what}"
    padded_rows, per_sm = (64, 2) if rows <= 64 else (128, 1)
    tiles = {"warps": padded_rows // 16, "tokens": 16, "padded_rows": padded_rows, "heads": 1}
    for stages in (3, 2):
        spec = DecodeWgmmaSpec(**vars(base) | tiles | {"stages": stages})
        if per_sm * (spec.shared_bytes + 2 * _DRIVER_BYTES) <= limit:
            return _planned(Shape(spec, per_sm), p, num_sms, limit)
    return f"its ring takes {spec.shared_bytes} bytes of shared memory and this GPU has {limit}"


# --------------------------------------------------------------------------------------------------------------------- latents

#: Query rows of a work item over latents (MLA) at most.
LATENT_ROWS = 32


def latents(base: DecodeSpec, p: DecodeProblem, num_sms: int, limit: int, wgmma: bool) -> DecodePlan | str:
    """The plan of the kernel over latents (MLA), or why it cannot: a work item has as many query heads as there are rows for."""
    keys, values = base.keys, base.values
    if p.heads > 1 or p.deterministic_batch or base.tail_rows:
        other = f"deterministic_batch={p.deterministic_batch}, {base.tail_rows} exact tokens"
        return f"latents (MLA) of {p.heads} KV heads, {other}; the tuned kernel takes one head, and neither of these"
    grouped = keys.groups > 1 or values.groups > 1 or keys.block
    if grouped or values.codes_per_word == 1 or _dims(base) != (p.dim, p.value_dim):
        which = f"latents (MLA) in {p.values}, rotary keys in {p.keys}"
        return f"{which}: the tuned kernel takes no groups, channels or 16-bit latents, and dims that are powers of two"
    if p.queries > LATENT_ROWS:
        return f"latents (MLA) with {p.queries} new tokens; the tuned kernel takes {LATENT_ROWS}"
    few = (16, 4, 32, 2) if values.bits <= 4 else (16, 8, 16, 1)  # measured on 2026-11-29
    for most, warps, tokens, per_sm in ((32, 8, 16, 1), few, (16, 4, 16, 2), (16, 4, 16, 1)):
        heads = max((n for n in range(1, p.group + 1) if p.group % n == 0 and n * p.queries <= most), default=0)
        rows = heads * p.queries
        tiles = {"warps": warps, "tokens": tokens, "stages": 2, "rows": rows, "padded_rows": most, "heads": 1}
        # Warp groups take 64 dims of each code of a word; for 16 rows only their products of bytes are faster.
        by_groups = wgmma and (values.kind in ("signed", "unsigned") if most == 16 else 16 * warps <= values.padded)
        shape = Shape((DecodeLatentWgmmaSpec if by_groups else DecodeLatentSpec)(**vars(base) | tiles), per_sm)
        if rows > most // 2 * (most > 16) and shape.fits(limit):
            return _planned(shape, p, num_sms, limit)
    return f"latents (MLA) in {p.values} take more than the {limit} bytes of shared memory that this GPU has"


def with_reduce_smem(spec: DecodeSpec, limit: int) -> DecodeSpec:
    """The same with separate shared memory for the sums of warps, if this Triton cannot reinterpret part of the ring for them; with
    fewer stages if it exceeds `limit` bytes."""
    if spec.equal_parts or takes_any_part():
        return spec
    apart = [replace(spec, stages=stages, separate_reduce_smem=True) for stages in range(spec.stages, 1, -1)]
    return next((one for one in apart if one.shared_bytes <= limit), apart[-1])
