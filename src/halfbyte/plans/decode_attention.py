"""What decode attention is compiled for and how its work is cut: pure functions of the problem and the device.

`gluon_plan` says how the tuned kernel would run a problem, or in words why it cannot. Lengths are not part of a problem: the host
fixes the number of programs, and each takes its share of the true lengths on the device, so that a captured graph stays right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from halfbyte.formats import KV_FORMATS, Format, plain_format
from halfbyte.plans.decode_spec import DecodeWgmmaSpec, KVSpec, Spec, padded
from halfbyte.plans.decode_wgmma import MOST_ROWS, wide_spec
from halfbyte.plans.toolchain import EQUAL_PARTS, takes_any_part

#: Shared memory a block may use, bytes, by compute capability; what is not listed is as sm_80.
_SHARED = {(8, 6): 99 << 10, (8, 9): 99 << 10, (8, 0): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (12, 0): 99 << 10}


#: The tuned kernel counts tokens in 32 bits: a window is cut to this, and so much work of a call is what it can share out.
WIDEST, MOST_TOKENS, MOST_SEQUENCES = 2**30, 2**32, 4096
#: Query rows of a KV head times the size of a head that the registers of the kernel for few rows hold.
MOST_NUMBERS = 4096
#: What the tuned kernel calls the codes that it reads.
_CODES = {"int4": "nibbles", "int8": "bytes", "e4m3": "e4m3", "fp16": "fp16", "bf16": "bf16"}


def side(fmt: Format, dim: int, apart: int = 1, scale_stride: int = 1) -> KVSpec | str:
    """How the tuned kernel reads a plane of `fmt` with heads of `dim`; in words, why it cannot."""
    code = _CODES.get(fmt.code.name)
    if code is None:
        return f"{fmt.name} is read by the portable kernel only"
    words = dim * fmt.code.bits // 16
    groups = dim // fmt.group_size(dim)
    if dim * fmt.code.bits % 128:
        return f"rows of {dim * fmt.code.bits / 8:g} bytes are not whole 16-byte pieces"
    if groups & (groups - 1) or (groups > 1 and padded(words) != words):
        return f"{groups} groups in a head are not a power of two"
    if padded(words) < 16 or dim > 256:
        return f"a head of {dim} is outside of what the tuned kernel holds in registers"
    scale = {None: "none", "tensor": "tensor", "channel": "channel"}.get(fmt.granularity, "token")
    if scale == "channel" and scale_stride == 0:
        return f"scales of {fmt.name} do not lie a head, or a token of heads, apart, or not in whole aligned 16-byte pieces"
    scale_stride = scale_stride if scale in ("token", "channel") else 1
    return KVSpec(code, words, padded(words), groups, scale, fmt.offset == "float", apart, scale_stride, fmt.token_block or 0)


def programs(units: int, slots: int) -> int:
    """How many programs share the work of `units` units when `slots` of them run at once.

    A whole number of programs a unit (or of units a program) lets no share straddle two units when lengths are equal; it is taken
    unless it would leave more than an eighth of the slots idle.
    """
    whole = slots // units * units if units <= slots else -(-units // -(-units // slots))
    return whole if 8 * whole >= 7 * slots else slots


def neighbours(programs: int, units: int) -> int:
    """How many parts of a unit are added in the first of two steps: about as many as there are sums to add in the second."""
    return 16 if programs > 128 * units else 8


@dataclass(frozen=True)
class Problem:
    """One call of decode attention, without its tensors: everything that the choice of a kernel may depend on.

    keys, values    format names
    aligned         codes lie in whole 16-byte pieces
    page            tokens of a page; 0: contiguous
    k_apart, v_apart    codes of neighbouring tokens lie so many rows apart: 1, `heads` with tokens first, 0 otherwise
    k_scales_apart, v_scales_apart  the same of scales; 0, too, where they are not aligned for cp.async
    """

    dtype: str
    batch: int
    heads: int
    group: int
    queries: int
    dim: int
    value_dim: int
    capacity: int
    keys: str
    values: str
    page: int
    aligned: bool
    window: bool
    alibi: bool
    softcap: bool
    deterministic_batch: bool
    k_apart: int = 1
    v_apart: int = 1
    k_scales_apart: int = 1
    v_scales_apart: int = 1

    @property
    def rows(self) -> int:
        """Query rows that share one KV head."""
        return self.group * self.queries


def dense_problem(
    dtype: str,
    batch: int,
    heads: int,
    group: int,
    queries: int,
    dim: int,
    capacity: int,
    keys: str,
    values: str,
    page: int = 0,
    deterministic_batch: bool = False,
) -> Problem:
    """A call without options on memory as caches allocate it: aligned, nothing between what lies side by side."""
    return Problem(
        *(dtype, batch, heads, group, queries, dim, dim, capacity, keys, values, page),
        *(True, False, False, False, deterministic_batch),
    )


@dataclass(frozen=True)
class DecodePlan:
    """A launch of the tuned kernel: what it is compiled for, how many programs share the work, and what they scribble in."""

    spec: Spec
    programs: int
    units: int  # KV heads of sequences, or pairs of them
    why: str

    @property
    def floats(self) -> int:
        """fp32 numbers of a workspace: a program leaves two partial results at most."""
        return 2 * self.programs * self.spec.part_floats

    @property
    def counters(self) -> int:
        """Counters of a workspace: one a unit, two for every `gather` programs."""
        return self.units + 2 * -(-self.programs // self.spec.gather)


def shared_memory_of_block(capability: tuple[int, int]) -> int:
    """Bytes that a block may use."""
    return _SHARED.get(capability, _SHARED[8, 0])


def format_of(name: str) -> Format:
    """A format of keys or values, those that only pass through included."""
    return KV_FORMATS.get(name) or plain_format(name)


def gluon_plan(p: Problem, sm_count: int, capability: tuple[int, int], pair: bool) -> DecodePlan | str:
    """How the tuned kernel runs this problem; in words, why it cannot."""
    refusal = _refusal(p, capability)
    keys = side(format_of(p.keys), p.dim, p.k_apart, p.k_scales_apart)
    values = side(format_of(p.values), p.value_dim, p.v_apart, p.v_scales_apart)
    if refusal or isinstance(keys, str) or isinstance(values, str):
        return refusal or next(s for s in (keys, values) if isinstance(s, str))
    rows, limit = max(8, padded(p.rows)), shared_memory_of_block(capability)
    flags = {"window": p.window, "alibi": p.alibi, "softcap": p.softcap, "pair": pair and capability >= (9, 0)}
    if rows * max(p.dim, p.value_dim) > MOST_NUMBERS:
        if capability != (9, 0):
            dim = max(p.dim, p.value_dim)
            return f"{p.rows} query rows of {dim} a KV head are more than the tuned kernel of this GPU holds in registers"
        wide = wide_spec(keys, values, p.rows, p.queries, padded(p.batch), p.page, flags, limit)
        return wide if isinstance(wide, str) else _wide(*wide, p.batch * p.heads, sm_count)
    lean = p.queries == 1 and not p.alibi and not p.softcap
    even = not (p.page or p.window) and all(s.apart == 1 and s.scale_stride == 1 for s in (keys, values))
    heads = _heads(keys, values, p.heads)
    warps, tokens, stages, per_sm = shape_of(keys, values, heads, rows, lean, lean and even, limit)
    spec = Spec(keys, values, warps, tokens, stages, p.rows, rows, p.queries, padded(p.batch), p.page, **flags, heads=heads)
    if spec.shared_bytes > limit:
        return f"its ring takes {spec.shared_bytes} bytes of shared memory and this GPU has {limit}"
    units = p.batch * p.heads // heads
    alone = _one_each(spec, lean, units, sm_count, limit)
    if alone is None and lean and even:
        alone = _many_parts(spec, units, p.capacity, sm_count, limit)
    spec, per_sm = alone or (_filled(spec, per_sm, limit), per_sm)
    count = programs(units, sm_count * per_sm)
    spec = summed_somewhere(replace(spec, gather=neighbours(count, units)))
    if spec.shared_bytes > limit:
        return EQUAL_PARTS
    return DecodePlan(spec, count, units, _why(spec, count, units))


def queries_of_a_block(p: Problem, capability: tuple[int, int]) -> int:
    """New tokens whose query rows a tuned kernel holds, of a call that has more of them; 0: take the call as it is.

    On Hopper as many as warp-group products take, if they take these keys and values at all.
    """
    narrow = MOST_NUMBERS // max(p.dim, p.value_dim)
    if p.rows <= narrow:
        return 0
    for rows in (MOST_ROWS, narrow) if capability == (9, 0) else (narrow,):
        queries = min(p.queries, rows // p.group)
        # Whether it takes them does not depend on the number of multiprocessors.
        if queries and isinstance(gluon_plan(replace(p, queries=queries), 1, capability, True), DecodePlan):
            return queries if queries < p.queries else 0
    return 0


def _wide(spec: DecodeWgmmaSpec, per_sm: int, units: int, sm_count: int) -> DecodePlan:
    """The plan of a launch of the kernel for many rows."""
    count = programs(units, sm_count * per_sm)
    spec = replace(spec, gather=neighbours(count, units))
    return DecodePlan(spec, count, units, f"warp-group products of up to {spec.padded_rows} rows; " + _why(spec, count, units))


def _why(spec: Spec, count: int, units: int) -> str:
    tiles, unit = f"{spec.stages} stages of {spec.tile} tokens", "a KV head" if spec.heads == 1 else "two KV heads"
    return f"{count} programs of {spec.warps} warps, {tiles}; {units} units ({unit} of a sequence each)"


def summed_somewhere(spec: Spec) -> Spec:
    """The same, its warps summed in memory of their own, where Triton does not see such a part of the ring."""
    return spec if spec.equal_parts or takes_any_part() else replace(spec, apart=True)


def _refusal(p: Problem, capability: tuple[int, int]) -> str:
    """Why the tuned kernel cannot run a problem, apart from its formats; "" if nothing is in the way."""
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}; the tuned kernel needs 8.0"
    if p.deterministic_batch:
        return "deterministic_batch: the tuned kernel shares the work of a whole batch"
    if not p.aligned:
        codes = "codes are not aligned to 16 bytes, not contiguous along a head, or queries are spread over 2^31 numbers and more"
        return codes + (", or the tail of the keys is not dense" if format_of(p.keys).token_block else "")
    for name in (p.keys, p.values):
        fmt = format_of(name)
        if not fmt.is_quantized and fmt.name != p.dtype:
            return f"{p.dtype} queries over {fmt.name} keys or values"
    if p.page and (p.page & (p.page - 1) or p.page < 16):
        return f"pages of {p.page} tokens; the tuned kernel reads pages of 16, 32, 64, ... tokens"
    if p.batch * p.heads * p.capacity > MOST_TOKENS:
        return f"{p.batch} x {p.heads} x {p.capacity} tokens are more than it counts"
    if p.batch > MOST_SEQUENCES:
        return f"{p.batch} sequences are more than a program looks through"
    return ""


def _heads(keys: KVSpec, values: KVSpec, heads: int) -> int:
    """KV heads of a unit: two, where a head's codes of a token are less than 128 bytes, between other heads' codes.

    Such pieces are read at less than the speed of memory; those of two neighbours are whole lines of it. Where
    only values are narrow it makes no difference.
    """
    return 2 if heads % 2 == 0 and all(s.pairs and 2 * s.words < 128 for s in (keys, values)) else 1


def shape_of(
    keys: KVSpec, values: KVSpec, heads: int, padded_rows: int, lean: bool, leanest: bool, shared_limit: int
) -> tuple[int, int, int, int]:
    """(warps, tokens of a stream, stages, programs of a multiprocessor): two programs hide each other's waits.

    Tiles are as large as a warp's registers allow, beside its queries and its output: found by compiling for every format and head
    size (with scales of channels no more than share a block). `lean`: scores need no more than a mask; `leanest`: one of the length
    alone, and addresses lie constants apart.

    Stages: the most that fit 100 KB (160, if there is but one program). With 8 rows the fewest that keep 50 KB in flight and leave
    no room for a program more: with more stages programs end further apart.
    """
    plain_int4 = all(side.code == "nibbles" and side.groups == 1 for side in (keys, values))
    narrow = all(side.planes * side.padded <= 128 for side in (keys, values))
    light = plain_int4 and narrow and leanest
    for per_sm, tokens in product((2, 1), (64, 32, 16)):
        spec = Spec(keys, values, 4, tokens, 2, padded_rows, padded_rows, 1, 1, 0, False, False, False, False, heads=heads)
        most = 64 if spec.numbers <= 1024 or light else 32 if plain_int4 or (narrow and lean) else 16
        most = min(most, keys.block or most)  # a warp's tokens share their scales
        if tokens > 16 and (tokens > most or tokens * padded_rows // spec.across > (1024 if light else 512)):
            continue
        most_bytes, rings = (100 if per_sm == 2 else 160) << 10, [replace(spec, stages=stages) for stages in (2, 3, 4)]
        rings = [s for s in rings if s.ring_bytes <= most_bytes and per_sm * (s.shared_bytes + 1024) <= shared_limit]
        enough = [s for s in rings if padded_rows == 8 and s.ring_bytes >= 50 << 10]
        enough = [s for s in enough if (per_sm + 1) * (_filled(s, per_sm, shared_limit).shared_bytes + 1024) > shared_limit]
        if rings:
            return 4, tokens, (enough[:1] or rings[-1:])[0].stages, per_sm
    return 4, 16, 2, 1


def _filled(spec: Spec, per_sm: int, limit: int) -> Spec:
    """The spec with sums of warps in memory of their own, where `per_sm` programs have room for it; with 8 rows none for one more.

    With 168 registers or fewer one program more would fit in where the ring is small, and do harm: the next call's programs, which
    start early, would crowd the multiprocessors that end first. The sums take that place, or an empty slot of the ring.
    """
    tried = [replace(spec, apart=apart, pad_slots=pad_slots) for pad_slots in (0, 1) for apart in (True, False)]
    fitting = [s for s in tried if per_sm * (s.shared_bytes + 1024) <= limit] or [spec]
    alone = [s for s in fitting if spec.padded_rows == 8 and (per_sm + 1) * (s.shared_bytes + 1024) > limit]
    return (alone or fitting)[0]


def _one_each(spec: Spec, lean: bool, units: int, sm_count: int, limit: int) -> tuple[Spec, int] | None:
    """The spec, for one program a multiprocessor, where each has about one unit: it computes that alone, and nothing is added up.

    Its tiles are larger, and its ring takes more than half of the shared memory: else the next call's program, which starts early,
    would move in beside it. With 8-bit keys and values in groups tiles stay. None where that was slower or hardly faster (other
    groups, scales of channels, single heads of 64, heads of 256, INT4 in pages), or not tried (16 bits, more than 8 rows, windows,
    ALiBi, softcap, several new tokens).
    """
    sides = spec.keys, spec.values
    whole = programs(units, sm_count) == units and spec.padded_rows == 8 and lean and not spec.window
    dims = [side.planes * side.padded for side in sides]
    suits = all(side.planes > 1 for side in sides) and spec.heads * min(dims) > 64 and max(dims) <= 128
    if (
        not whole
        or not suits
        or spec.keys.groups > 1
        or spec.keys.block
        or (spec.page and any(side.code == "nibbles" for side in sides))
    ):
        return None
    if spec.values.groups > 1:
        return None if spec.keys.code == "nibbles" else _alone(spec, 3, limit)
    larger = [replace(spec, tokens=min(64, 2 * spec.tokens), stages=stages) for stages in range(2, 8)]
    return next(((one, 1) for one in larger if limit // 2 < one.shared_bytes <= limit - 1024), None)


def _many_parts(spec: Spec, units: int, capacity: int, sm_count: int, limit: int) -> tuple[Spec, int] | None:
    """The spec, for one program a multiprocessor, where many of them share a unit, so that adding up takes long.

    That leaves half as many parts, and a stage more hides the waits, but where INT4 has no more than 1,024 tokens a program. As
    measured for heads of 128 and 8 rows: from 16 parts a unit on, with INT4 from 4; groups of keys gained nothing, and scales of
    channels lost (docs/decode_attention.md).
    """
    sides = spec.keys, spec.values
    suits = spec.padded_rows == 8 and all(side.planes > 1 and side.planes * side.padded == 128 for side in sides)
    plain_int4 = all(side.code == "nibbles" and side.groups == 1 for side in sides)
    if not suits or spec.keys.groups > 1 or spec.keys.block or units * (4 if plain_int4 else 16) > sm_count:
        return None
    short = plain_int4 and units * capacity <= 1024 * programs(units, sm_count)
    return _alone(spec, 2 if short else 3, limit)


def _alone(spec: Spec, stages: int, limit: int) -> tuple[Spec, int] | None:
    """The spec with so many stages, for one program a multiprocessor, warps summed in memory of their own; None: no room."""
    one = replace(spec, stages=stages, apart=True)
    return (one, 1) if one.shared_bytes <= limit - 1024 else None
