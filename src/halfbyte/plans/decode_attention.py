"""How decode attention is compiled and partitioned: pure functions of the problem and the device.

`gluon_plan` says how the tuned kernel would run a problem, or why it cannot. Lengths are not part of a problem: the host fixes
the number of programs, and each takes its share of the true lengths on the device, so that a captured graph stays valid.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from halfbyte.device import Capability, block_shared_memory, supports_pdl, supports_wgmma
from halfbyte.formats import KV_FORMATS, kv_format
from halfbyte.plans.decode_spec import DecodeSpec, DecodeWgmmaSpec, KVSpec, kv_spec, padded
from halfbyte.plans.decode_wgmma import MOST_ROWS, wgmma_spec
from halfbyte.plans.toolchain import takes_any_part
from halfbyte.reference.hadamard import block_size, rotated

#: The tuned kernel counts tokens in 32 bits: the most tokens (of all heads) and sequences of a call.
MOST_TOKENS, MOST_SEQUENCES = 2**32, 4096
#: Query rows per KV head times head_dim that the registers of the kernel for few rows hold.
MOST_NUMBERS = 4096
#: With `deterministic_batch`: tokens of a split, and how many splits the first reduction step adds.
FIXED_SPLIT, FIXED_FANIN = 1024, 16


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


@dataclass(frozen=True)
class DecodeProblem:
    """One call of decode attention, without its tensors: everything that the choice of a kernel may depend on.

    group           query heads per KV head
    keys, values    format names
    aligned         codes lie in whole 16-byte pieces
    page            tokens of a page; 0: contiguous
    sink_tokens, recent_tokens      tokens that are read in 16 bits
    k_token_stride, v_token_stride  rows from a token's codes to the next one's: 1, `heads` with tokens first, 0 otherwise
    k_scale_stride, v_scale_stride  the same for scales; 0, too, where they are not aligned for cp.async
    rotate_keys     keys are stored rotated; the kernel rotates queries
    ragged          `queries` counts those of all sequences
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
    k_token_stride: int = 1
    v_token_stride: int = 1
    k_scale_stride: int = 1
    v_scale_stride: int = 1
    rotate_keys: bool = False
    ragged: bool = False
    sink_tokens: int = 0
    recent_tokens: int = 0

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
) -> DecodeProblem:
    """A call without options on a cache as `KVCache` allocates it: aligned, with dense strides."""
    return DecodeProblem(
        *(dtype, batch, heads, group, queries, dim, dim, capacity, keys, values, page),
        *(True, False, False, False, deterministic_batch),
        rotate_keys=rotated(None, KV_FORMATS[keys], dim),
    )


@dataclass(frozen=True)
class DecodePlan:
    """A launch of the tuned kernel: what it is compiled for, how many programs share the work, and their workspace."""

    spec: DecodeSpec
    programs: int
    work_items: int  # KV heads of sequences, or pairs of them
    why: str
    groups: int = 0  # of `reduce_fanin` splits of fixed size, in a full work item

    @property
    def floats(self) -> int:
        """fp32 numbers of a workspace: two partial results per program, or two groups of splits, and sums of groups."""
        partials = 2 * self.programs * (self.spec.reduce_fanin if self.spec.split else 1) + self.work_items * self.groups
        return partials * self.spec.partial_floats

    @property
    def counters(self) -> int:
        """Counters of a workspace: a semaphore a work item, and two per `reduce_fanin` programs (fixed splits: one a program)."""
        if self.spec.split:
            return self.work_items + self.programs
        return self.work_items + 2 * -(-self.programs // self.spec.reduce_fanin)

    def describe(self) -> dict[str, str]:
        """The plan in words, in reading order."""
        spec = self.spec
        wgmma = isinstance(spec, DecodeWgmmaSpec)
        divided = f"16 of {spec.padded_rows} query rows" if wgmma else f"{spec.tokens} by {spec.padded_rows} query rows"
        exact = f"{spec.chunks} chunks of {spec.chunk} tokens in 16 bits, each shared out as {spec.chunk_cost / 8:g} tiles"
        tail = {"tail": exact} if spec.tail_rows else {}
        splits = "where shares meet inside a work item; the last program to arrive reduces, in fixed order"
        if spec.split:
            splits = f"{spec.split} tokens each, whatever the batch; the last program to arrive reduces, in the order of tokens"
        return {
            "kernel": "gluon (tuned)" + ", wgmma for many query rows" * wgmma,
            "tile": f"{spec.tile} tokens: {spec.warps} warps of {divided}",
            **tail,
            "ring": f"{spec.stages} tiles, {spec.shared_bytes / 1024:.0f} KB of shared memory a program",
            "programs": f"{self.programs}; each takes an equal share of the tokens, by the lengths on the device",
            "splits": splits,
        }


def gluon_plan(p: DecodeProblem, num_sms: int, capability: Capability, use_pdl: bool) -> DecodePlan | str:
    """How the tuned kernel runs this problem, or the reason why it cannot."""
    refusal = _refusal(p, capability)
    keys = kv_spec(kv_format(p.keys), p.dim, p.k_token_stride, p.k_scale_stride)
    values = kv_spec(kv_format(p.values), p.value_dim, p.v_token_stride, p.v_scale_stride)
    if refusal or isinstance(keys, str) or isinstance(values, str):
        return refusal or next(s for s in (keys, values) if isinstance(s, str))
    rows, limit = max(8, padded(p.rows)), block_shared_memory(capability)
    flags = {"window": p.window, "alibi": p.alibi, "softcap": p.softcap, "use_pdl": use_pdl and supports_pdl(capability)}
    rotate = block_size(p.dim) if p.rotate_keys else 0
    if rows * max(p.dim, p.value_dim) > MOST_NUMBERS:
        if p.sink_tokens or p.recent_tokens:
            exact = f"sink_tokens={p.sink_tokens}, recent_tokens={p.recent_tokens}"
            return (
                f"{exact}; the tuned kernel reads them for {MOST_NUMBERS // max(p.dim, p.value_dim)} query rows per KV head at most"
            )
        if p.deterministic_batch or not supports_wgmma(capability):
            dim = max(p.dim, p.value_dim)
            where = "with deterministic_batch" if p.deterministic_batch else "on this GPU"
            return f"{p.rows} query rows of {dim} per KV head exceed the registers of the tuned kernel {where}"
        wgmma = wgmma_spec(keys, values, p.rows, p.queries, padded(p.batch), p.page, flags, limit)
        if isinstance(wgmma, str):
            return wgmma
        return _wgmma_plan(replace(wgmma[0], rotate=rotate), wgmma[1], p.batch * p.heads, num_sms)
    lean = (p.queries == 1 or p.deterministic_batch) and not p.alibi and not p.softcap
    even = not (p.page or p.window or p.deterministic_batch) and all(
        s.token_stride == 1 and s.scale_stride == 1 for s in (keys, values)
    )
    heads = _heads(keys, values, p.heads)
    warps, tokens, stages, per_sm = shape_of(keys, values, heads, rows, lean, lean and even, limit)
    spec = DecodeSpec(keys, values, warps, tokens, stages, p.rows, rows, p.queries, padded(p.batch), p.page, **flags, heads=heads)
    spec = replace(spec, sink_tokens=p.sink_tokens, recent_tokens=p.recent_tokens)
    items = p.batch * p.heads // heads
    if p.deterministic_batch:
        spec, per_sm = _in_fixed_splits(replace(spec, rotate=rotate), per_sm, limit)
    if spec.shared_bytes > limit:
        return f"its ring takes {spec.shared_bytes} bytes of shared memory and this GPU has {limit}"
    if spec.split:
        count = programs(items, num_sms * per_sm)
        return DecodePlan(spec, count, items, _why(spec, count, items), -(-p.capacity // (spec.split * spec.reduce_fanin)))
    alone = _one_each(spec, lean, items, num_sms, limit)
    if alone is None and lean and even:
        alone = _many_partials(spec, items, p.capacity, num_sms, limit)
    spec, per_sm = alone or (_filled(spec, per_sm, limit), per_sm)
    count = programs(items, num_sms * per_sm)
    spec = with_reduce_smem(replace(spec, reduce_fanin=reduce_fanin_of(count, items), rotate=rotate), limit)
    return DecodePlan(spec, count, items, _why(spec, count, items))


def queries_of_a_block(p: DecodeProblem, capability: Capability) -> int:
    """New tokens per block, for a call with more query rows than a tuned kernel holds; 0: do not divide the call.

    On Hopper as many as the wgmma kernel takes, if it reads these keys and values: not with sink or recent tokens, for instance.
    """
    narrow = MOST_NUMBERS // max(p.dim, p.value_dim)
    if p.rows <= narrow:
        many = p.batch > MOST_SEQUENCES or p.batch * p.heads * p.capacity > MOST_TOKENS
        one = replace(p, batch=1)
        return p.queries if many and p.deterministic_batch and isinstance(gluon_plan(one, 1, capability, True), DecodePlan) else 0
    if p.deterministic_batch:
        p = replace(p, batch=1)  # blocks are launched in several pieces if necessary
    for rows in (MOST_ROWS, narrow) if supports_wgmma(capability) else (narrow,):
        queries = min(p.queries, rows // p.group)
        # The answer does not depend on the number of SMs.
        if queries and isinstance(gluon_plan(replace(p, queries=queries), 1, capability, True), DecodePlan):
            return queries if queries < p.queries else 0
    return 0


def ragged_blocks(p: DecodeProblem, most: int, capability: Capability) -> DecodeProblem:
    """Ragged queries, at most `most` per sequence, as a tuned kernel takes them: each block of them becomes a sequence."""
    even = replace(p, ragged=False, batch=1, queries=min(most, p.queries))
    if p.deterministic_batch:  # as many as fill 8 query rows, in every call
        return replace(even, queries=max(1, 8 // p.group))
    queries = queries_of_a_block(even, capability) or even.queries
    return replace(even, queries=queries, batch=p.queries // queries + p.batch)


def for_many_sequences(plan: DecodePlan) -> DecodePlan:
    """The plan with a kernel for up to 64 or `MOST_SEQUENCES` sequences: prompts of all lengths share those two."""
    return replace(plan, spec=replace(plan.spec, batch=64 if plan.spec.batch <= 64 else MOST_SEQUENCES))


def _wgmma_plan(spec: DecodeWgmmaSpec, per_sm: int, items: int, num_sms: int) -> DecodePlan:
    """The plan of a launch of the wgmma kernel."""
    count = programs(items, num_sms * per_sm)
    spec = replace(spec, reduce_fanin=reduce_fanin_of(count, items))
    return DecodePlan(spec, count, items, f"wgmma with up to {spec.padded_rows} rows; " + _why(spec, count, items))


def _why(spec: DecodeSpec, count: int, items: int) -> str:
    tiles, item = f"{spec.stages} stages of {spec.tile} tokens", "a KV head" if spec.heads == 1 else "two KV heads"
    return f"{count} programs of {spec.warps} warps, {tiles}; {items} work items ({item} of a sequence each)"


def with_reduce_smem(spec: DecodeSpec, limit: int) -> DecodeSpec:
    """The same with separate shared memory for the sums of warps, if this Triton cannot reinterpret part of the ring for them; with
    fewer stages if it exceeds `limit` bytes."""
    if spec.equal_parts or takes_any_part():
        return spec
    apart = [replace(spec, stages=stages, separate_reduce_smem=True) for stages in range(spec.stages, 1, -1)]
    return next((one for one in apart if one.shared_bytes <= limit), apart[-1])


def _refusal(p: DecodeProblem, capability: Capability) -> str:
    """Why the tuned kernel cannot run a problem, most checks of formats aside; "" if it can."""
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}; the tuned kernel needs 8.0"
    if p.ragged:
        return "ragged queries; the tuned kernel takes blocks of them, over pages of keys without a tail"
    if not p.aligned:
        codes = "codes are not aligned to 16 bytes, not contiguous along a head, or the queries span 2^31 elements or more"
        return codes + (", or the tail of the keys is not contiguous" if kv_format(p.keys).token_block else "")
    for name, dim in ((p.keys, p.dim), (p.values, p.value_dim)):
        fmt = kv_format(name)
        row = dim * fmt.code.bits // 8
        if p.deterministic_batch and not p.page and row % 32:
            return f"deterministic_batch: the capacity decides whether heads of {row} bytes are aligned"
        if not fmt.is_quantized and fmt.name != p.dtype:
            return f"{p.dtype} queries over {fmt.name} keys or values"
    if p.page and (p.page & (p.page - 1) or p.page < 16):
        return f"pages of {p.page} tokens; the tuned kernel reads pages of a power of two from 16 on"
    if p.batch * p.heads * p.capacity > MOST_TOKENS:
        return f"{p.batch} x {p.heads} x {p.capacity} tokens exceed the limit of {MOST_TOKENS}"
    if p.batch > MOST_SEQUENCES:
        return f"{p.batch} sequences exceed the limit of {MOST_SEQUENCES}"
    return ""


def _heads(keys: KVSpec, values: KVSpec, heads: int) -> int:
    """KV heads per work item: two, where the codes of a head and token are under 128 bytes, between other heads' codes.

    Such pieces do not reach full memory bandwidth; those of two adjacent heads do. If only values are narrow, it makes no
    difference.
    """
    return 2 if heads % 2 == 0 and all(s.pairs and 2 * s.words < 128 for s in (keys, values)) else 1


def shape_of(
    keys: KVSpec, values: KVSpec, heads: int, padded_rows: int, lean: bool, leanest: bool, shared_limit: int
) -> tuple[int, int, int, int]:
    """(warps, tokens of a stream, stages, programs per SM): two programs hide each other's latency.

    Tiles are as large as a warp's registers allow, besides its queries and its output: found by compiling for every format and head
    size (with per-channel scales, at most one block of tokens). `lean`: scores need no more than a mask; `leanest`: only a mask by
    length, and strides are constants.

    Stages: the most that fit 100 KB (160 KB with one program per SM). With 8 rows, the fewest that keep 50 KB in flight and leave
    no room for another program: with more stages, programs end at more different times.
    """
    plain_int = all(side.bits <= 4 and side.groups == 1 for side in (keys, values))
    narrow = all(side.codes_per_word * side.padded <= 128 for side in (keys, values))
    light = plain_int and narrow and leanest
    for per_sm, tokens in product((2, 1), (64, 32, 16)):
        spec = DecodeSpec(keys, values, 4, tokens, 2, padded_rows, padded_rows, 1, 1, 0, False, False, False, False, heads=heads)
        most = 64 if spec.numbers <= 1024 or light else 32 if plain_int or (narrow and lean) else 16
        most = min(most, keys.block or most)  # a warp's tokens share their scales
        if tokens > 16 and (tokens > most or tokens * padded_rows // spec.warps_q > (1024 if light else 512)):
            continue
        most_bytes, rings = (100 if per_sm == 2 else 160) << 10, [replace(spec, stages=stages) for stages in (2, 3, 4)]
        rings = [s for s in rings if s.ring_bytes <= most_bytes and per_sm * (s.shared_bytes + 1024) <= shared_limit]
        enough = [s for s in rings if padded_rows == 8 and s.ring_bytes >= 50 << 10]
        enough = [s for s in enough if (per_sm + 1) * (_filled(s, per_sm, shared_limit).shared_bytes + 1024) > shared_limit]
        if rings:
            return 4, tokens, (enough[:1] or rings[-1:])[0].stages, per_sm
    return 4, 16, 2, 1


def _in_fixed_splits(spec: DecodeSpec, per_sm: int, limit: int) -> tuple[DecodeSpec, int]:
    """The spec with splits of fixed size, and programs per SM. Its ring keeps loading while warps are summed in other memory."""
    one = replace(spec, split=FIXED_SPLIT, reduce_fanin=FIXED_FANIN, separate_reduce_smem=True)
    for together, stages in product(range(per_sm, 0, -1), range(spec.stages, 1, -1)):
        padded = [replace(one, stages=stages, pad_slots=slots) for slots in (0, 1)]
        fitting = [s for s in padded if together * (s.shared_bytes + 1024) <= limit]
        alone = [s for s in fitting if spec.padded_rows == 8 and (together + 1) * (s.shared_bytes + 1024) > limit]
        if fitting:
            return (alone or fitting)[0], together
    return replace(one, stages=2), 1


def _filled(spec: DecodeSpec, per_sm: int, limit: int) -> DecodeSpec:
    """The spec with separate shared memory for the sums of warps, if `per_sm` programs fit; with 8 rows, no more than these.

    With 168 registers or fewer, one more program would fit if the ring is small, and do harm: the next call's programs, which
    start early (PDL), would crowd the SMs that end first. The sums take that space, or an empty slot of the ring.
    """
    tried = [replace(spec, separate_reduce_smem=own, pad_slots=pad_slots) for pad_slots in (0, 1) for own in (True, False)]
    fitting = [s for s in tried if per_sm * (s.shared_bytes + 1024) <= limit] or [spec]
    alone = [s for s in fitting if spec.padded_rows == 8 and (per_sm + 1) * (s.shared_bytes + 1024) > limit]
    return (alone or fitting)[0]


def _one_each(spec: DecodeSpec, lean: bool, items: int, num_sms: int, limit: int) -> tuple[DecodeSpec, int] | None:
    """The spec for one program per SM, if each has about one work item: there are no partial results.

    Its tiles are larger, and its ring takes more than half of the shared memory: otherwise the next call's program, which starts
    early, would share the SM. With 8-bit keys and group-wise values, tiles stay, and empty slots take that space. None where that
    was slower or hardly faster (other groups, per-channel scales, single heads of 64, heads of 256, INT4 in pages), or not tried
    (16 bits, more than 8 rows, windows, ALiBi, softcap, several new tokens).
    """
    sides = spec.keys, spec.values
    whole = programs(items, num_sms) == items and spec.padded_rows == 8 and lean and not spec.window
    dims = [side.codes_per_word * side.padded for side in sides]
    suits = all(side.codes_per_word > 1 for side in sides) and spec.heads * min(dims) > 64 and max(dims) <= 128
    if not whole or not suits or spec.keys.groups > 1 or spec.keys.block or (spec.page and any(side.bits <= 4 for side in sides)):
        return None
    if spec.values.groups > 1:
        padded = (_alone(replace(spec, pad_slots=slots), 3, limit) for slots in range(4))
        roomy = (found for found in padded if found is not None and 2 * (found[0].shared_bytes + 1024) > limit)
        return None if spec.keys.bits <= 4 else next(roomy, None)
    larger = [replace(spec, tokens=min(64, 2 * spec.tokens), stages=stages) for stages in range(2, 8)]
    return next(((one, 1) for one in larger if limit // 2 < one.shared_bytes <= limit - 1024), None)


def _many_partials(spec: DecodeSpec, items: int, capacity: int, num_sms: int, limit: int) -> tuple[DecodeSpec, int] | None:
    """The spec for one program per SM, if many programs share a work item, so that the reduction takes long.

    This halves the partial results; one more stage hides latency, except for INT4 with at most 1,024 tokens per program. As
    measured for heads of 128 and 8 rows: from 16 partial results per item on (INT4: from 4); group-wise keys gained nothing, and
    per-channel scales lost (docs/internals/log/attention.md).
    """
    sides = spec.keys, spec.values
    suits = spec.padded_rows == 8 and all(side.codes_per_word > 1 and side.codes_per_word * side.padded == 128 for side in sides)
    plain_int = all(side.bits <= 4 and side.groups == 1 for side in sides)
    if not suits or spec.keys.groups > 1 or spec.keys.block or items * (4 if plain_int else 16) > num_sms:
        return None
    short = plain_int and items * capacity <= 1024 * programs(items, num_sms)
    return _alone(spec, 2 if short else 3, limit)


def _alone(spec: DecodeSpec, stages: int, limit: int) -> tuple[DecodeSpec, int] | None:
    """The spec with `stages` stages, one program per SM, and separate shared memory for the sums of warps; None: no room."""
    one = replace(spec, stages=stages, separate_reduce_smem=True)
    return (one, 1) if one.shared_bytes <= limit - 1024 else None
