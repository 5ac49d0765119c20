"""What decode attention is compiled for and how its work is cut: pure functions of the problem and the device.

`gluon_plan` says how the tuned kernel would run a problem, or in words why it cannot. Lengths are not part of a problem: the host
fixes the number of programs, and each takes its share of the true lengths on the device, so that a captured graph stays right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from halfbyte.formats import KV_FORMATS, Format, plain_format

#: Shared memory a block may use, bytes, by compute capability; what is not listed is as sm_80.
_SHARED = {(8, 6): 99 << 10, (8, 9): 99 << 10, (8, 0): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (12, 0): 99 << 10}


#: The tuned kernel counts tokens in 32 bits: a window is cut to this, and so much work of a call is what it can share out.
WIDEST, MOST_TOKENS = 2**30, 2**33
#: What the tuned kernel calls the codes that it reads.
_CODES = {"int4": "nibbles", "int8": "bytes", "e4m3": "e4m3", "fp16": "fp16", "bf16": "bf16"}


@dataclass(frozen=True)
class Side:
    """How keys (or values) are stored: one compile-time constant of the tuned kernel.

    code    what a 16-bit word holds: "nibbles" (int4), "bytes" (int8), "e4m3", "fp16" or "bf16"
    words   16-bit words of a token; `padded`, the same rounded up to a power of two
    groups  scales of one token and head
    scale   "none"; "tensor", one for everything; "token", read with every token
    offset  x = scale * code + offset
    apart   codes of neighbouring tokens lie so many rows apart: 1, or the heads of a token; 0: known at the launch only
    scales_apart    the same of scales; where it is 0 they pass through registers and not by cp.async
    """

    code: str
    words: int
    padded: int
    groups: int
    scale: str
    offset: bool
    apart: int
    scales_apart: int

    @property
    def planes(self) -> int:
        """Codes in one 16-bit word."""
        return {"nibbles": 4, "bytes": 2, "e4m3": 2}.get(self.code, 1)

    @property
    def halved(self) -> bool:
        """A group is 8 words, half of an mma's depth: two planes share an operand."""
        return self.padded // self.groups == 8

    @property
    def operands(self) -> int:
        """mma operands of one group."""
        return self.planes // 2 if self.halved else self.planes

    @property
    def rows(self) -> int:
        """Rows (of one plane, or of two halves of planes) in one operand."""
        return 16 if self.halved else self.padded // self.groups

    @property
    def unit(self) -> float:
        """What an accumulated code must be multiplied by."""
        return {"nibbles": 2.0**24, "bytes": 2.0**24, "e4m3": 2.0**8}.get(self.code, 1.0)

    @property
    def shifted(self) -> bool:
        """Whether products with values are owed a multiple of the sum of weights: codes made unsigned, or with offsets."""
        return self.offset or self.code == "bytes"

    @property
    def staged(self) -> bool:
        """Whether scales pass through registers."""
        return self.scale == "token" and self.scales_apart == 0

    @property
    def paired(self) -> bool:
        """Whether scales are copied in words of two: of two groups, or of two heads. cp.async copies nothing smaller."""
        return self.scale == "token" and self.scales_apart > 1

    @property
    def scale_columns(self) -> int:
        """What is copied for each token: a scale for each group, or a word for two."""
        return max(1, self.groups // 2) if self.paired else self.groups

    @property
    def token_bytes(self) -> int:
        """Shared memory of one token."""
        return 2 * self.padded + (4 if self.paired else 2) * self.scale_columns * ((self.scale == "token") + self.offset)


@dataclass(frozen=True)
class Spec:
    """Everything the tuned kernel is compiled for."""

    keys: Side
    values: Side
    warps: int
    tokens: int  # of one stream (a warp, or `across` of them) in one tile
    stages: int
    rows: int  # G * L
    padded_rows: int
    queries: int  # L
    batch: int  # sequences, rounded up to a power of two
    page: int  # tokens of a page, 0: contiguous
    window: bool
    alibi: bool
    softcap: bool
    pair: bool  # launched while its predecessor is still finishing (programmatic dependent launch)
    gather: int = 16  # parts of a unit that are added up by themselves, where they are more than one step adds
    apart: bool = False  # warps are summed in memory of their own and not in the ring

    @property
    def across(self) -> int:
        """Warps that share their tokens and divide the query rows, so that each holds 2048 numbers of its output at most."""
        return max(1, self._output // 2048)

    @property
    def numbers(self) -> int:
        """Numbers of its output (or of its queries, if they are more) that one warp holds."""
        return self._output // self.across

    @property
    def _output(self) -> int:
        return self.padded_rows * max(s.planes * s.padded for s in (self.keys, self.values))

    @property
    def streams(self) -> int:
        """Warps, or groups of `across` of them, that work on tokens of their own."""
        return self.warps // self.across

    @property
    def one_page(self) -> bool:
        """Whether the tokens of a stream in a tile lie in one page."""
        return self.page > 0 and self.page % self.tokens == 0

    @property
    def tile(self) -> int:
        """Tokens of one tile."""
        return self.streams * self.tokens

    @property
    def part_floats(self) -> int:
        """fp32 numbers of one partial result."""
        return (self.values.groups * self.values.operands * self.values.rows + 2) * self.padded_rows

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the ring of tiles."""
        return self.stages * self.tile * (self.keys.token_bytes + self.values.token_bytes)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, bytes: the ring of tiles, and what the warps are summed in."""
        return (
            self.ring_bytes
            + (0 if self.reuses_ring else self._sum_bytes)
            + 4 * self.streams * self.padded_rows * (2 + self.values.groups)
        )

    @property
    def reuses_ring(self) -> bool:
        """Whether warps are summed in the ring of keys, which must be large enough for that."""
        return not self.apart and 2 * self.stages * self.tile * self.keys.padded >= self._sum_bytes

    @property
    def _sum_bytes(self) -> int:
        return 4 * self.streams * self.padded_rows * self.values.planes * self.values.padded


def padded(n: int) -> int:
    """The power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def side(fmt: Format, dim: int, apart: int = 1, scales_apart: int = 1) -> Side | str:
    """How the tuned kernel reads a plane of `fmt` with heads of `dim`; in words, why it cannot."""
    code = _CODES.get(fmt.code.name)
    if code is None or fmt.token_block:
        return f"{fmt.name} is read by the portable kernel only"
    words = dim * fmt.code.bits // 16
    groups = dim // fmt.group_size(dim)
    if dim * fmt.code.bits % 128:
        return f"rows of {dim * fmt.code.bits / 8:g} bytes are not whole 16-byte pieces"
    if groups & (groups - 1) or (groups > 1 and padded(words) != words):
        return f"{groups} groups in a head are not a power of two"
    if padded(words) < 16 or dim > 256:
        return f"a head of {dim} is outside of what the tuned kernel holds in registers"
    scale = {None: "none", "tensor": "tensor"}.get(fmt.granularity, "token")
    return Side(code, words, padded(words), groups, scale, fmt.offset == "float", apart, scales_apart if scale == "token" else 1)


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
class GluonPlan:
    """A launch of the tuned kernel: what it is compiled for, how many programs share the work, and what they scribble in."""

    spec: Spec
    programs: int
    units: int  # KV heads of sequences
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


def gluon_plan(p: Problem, sm_count: int, capability: tuple[int, int], pair: bool) -> GluonPlan | str:
    """How the tuned kernel runs this problem; in words, why it cannot."""
    refusal = _refusal(p, capability)
    keys = side(format_of(p.keys), p.dim, p.k_apart, p.k_scales_apart)
    values = side(format_of(p.values), p.value_dim, p.v_apart, p.v_scales_apart)
    if refusal or isinstance(keys, str) or isinstance(values, str):
        return refusal or next(s for s in (keys, values) if isinstance(s, str))
    rows = max(8, padded(p.rows))
    if rows * max(p.dim, p.value_dim) > 4096:
        return f"{p.rows} query rows of {max(p.dim, p.value_dim)} a KV head are more than the tuned kernel holds in registers"
    limit = shared_memory_of_block(capability)
    lean = p.queries == 1 and not p.alibi and not p.softcap
    even = not (p.page or p.window) and all(s.apart == 1 and s.scales_apart == 1 for s in (keys, values))
    warps, tokens, stages, per_sm = shape_of(keys, values, rows, lean, lean and even, limit)
    flags = {"window": p.window, "alibi": p.alibi, "softcap": p.softcap, "pair": pair and capability >= (9, 0)}
    spec = Spec(keys, values, warps, tokens, stages, p.rows, rows, p.queries, padded(p.batch), p.page, **flags)
    if spec.shared_bytes > limit:
        return f"its ring takes {spec.shared_bytes} bytes of shared memory and this GPU has {limit}"
    units = p.batch * p.heads
    one = _one_each(spec, lean, units, sm_count, limit)
    count = programs(units, sm_count * per_sm) if one is None else units
    spec = replace(one or _filled(spec, per_sm, limit), gather=neighbours(count, units))
    tiles = f"{spec.stages} stages of {spec.tile} tokens"
    why = f"{count} programs of {warps} warps, {tiles}; {units} units (a KV head of a sequence each)"
    return GluonPlan(spec, count, units, why)


def _refusal(p: Problem, capability: tuple[int, int]) -> str:
    """Why the tuned kernel cannot run a problem, apart from its formats; "" if nothing is in the way."""
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}; the tuned kernel needs 8.0"
    if p.deterministic_batch:
        return "deterministic_batch: the tuned kernel shares the work of a whole batch"
    if not p.aligned:
        return "codes are not aligned to 16 bytes, or not contiguous along a head"
    for name in (p.keys, p.values):
        fmt = format_of(name)
        if not fmt.is_quantized and fmt.name != p.dtype:
            return f"{p.dtype} queries over {fmt.name} keys or values"
    if p.page and (p.page & (p.page - 1) or p.page < 16):
        return f"pages of {p.page} tokens; the tuned kernel reads pages of 16, 32, 64, ... tokens"
    if p.batch * p.heads * p.capacity > MOST_TOKENS:
        return f"{p.batch} x {p.heads} x {p.capacity} tokens are more than it counts"
    if p.batch > 4096:
        return f"{p.batch} sequences are more than a program looks through"
    return ""


def shape_of(keys: Side, values: Side, padded_rows: int, lean: bool, leanest: bool, shared_limit: int) -> tuple[int, int, int, int]:
    """(warps, tokens of a stream, stages, programs of a multiprocessor): two programs hide each other's waits.

    Tiles are as large as a warp's registers allow, beside its queries and its output: found by compiling for every format and head
    size. `lean`: scores need no more than a mask; `leanest`: one of the length alone, and addresses lie constants apart.

    Stages: the most that fit 100 KB (160, if there is but one program). With 8 rows the fewest that keep 50 KB in flight and leave
    no room for a program more: with more stages programs end further apart.
    """
    plain_int4 = all(side.code == "nibbles" and side.groups == 1 for side in (keys, values))
    narrow = all(side.planes * side.padded <= 128 for side in (keys, values))
    light = plain_int4 and narrow and leanest
    for per_sm, tokens in product((2, 1), (64, 32, 16)):
        spec = Spec(keys, values, 4, tokens, 2, padded_rows, padded_rows, 1, 1, 0, False, False, False, False)
        most = 64 if spec.numbers <= 1024 or light else 32 if plain_int4 or (narrow and lean) else 16
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
    """The spec with sums of warps in memory of their own, where `per_sm` programs have room for it.

    With 168 registers or fewer one program more would fit in where the ring is small, and do harm: the next call's programs, which
    start early, would crowd the multiprocessors that end first. The sums take that place.
    """
    apart = replace(spec, apart=True)
    return apart if per_sm * (apart.shared_bytes + 1024) <= limit else spec


def _one_each(spec: Spec, lean: bool, units: int, sm_count: int, limit: int) -> Spec | None:
    """The spec where every multiprocessor has about one unit: one program computes it alone, and nothing is added up.

    Its tiles are larger, and its ring takes more than half of the shared memory: else the next call's program, which starts early,
    would move in beside it. None where that was slower or hardly faster (groups, heads of 64 and 256, INT4 in pages) or not tried
    (16 bits, more than 8 rows, windows, ALiBi, softcap, several new tokens).
    """
    sides = spec.keys, spec.values
    whole = programs(units, sm_count) == units and spec.padded_rows == 8 and lean and not spec.window
    suits = all(side.groups == 1 and side.planes > 1 and 64 < side.planes * side.padded <= 128 for side in sides)
    if not whole or not suits or (spec.page and any(side.code == "nibbles" for side in sides)):
        return None
    larger = [replace(spec, tokens=min(64, 2 * spec.tokens), stages=stages) for stages in (2, 3, 4)]
    return next((one for one in larger if limit // 2 < one.shared_bytes <= limit - 1024), None)
