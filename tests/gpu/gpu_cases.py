"""Attention calls to try on a GPU, and the promise they are held to.

A `Variant` is what may be compiled into a kernel; there is a bounded number of them. A `Case` is one call: a variant with sizes,
lengths and strides. `build` makes its tensors, in which everything that no token owns holds NaN (integers: the largest). All are
drawn from a seed, so that a case printed by a failure can be built again: `build(Case(...), "cuda")`.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

import halfbyte as hb
from accuracy import attention_errors
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.formats import Format, key_format
from halfbyte.kv_buffer import AttentionOptions, KVBuffer
from halfbyte.reference import attention as reference
from halfbyte.reference.hadamard import rotate, rotate_end

T = TypeVar("T")

KEYS = list(hb.KV_FORMATS)
VALUES = [name for name, fmt in hb.KV_FORMATS.items() if not fmt.token_block]
DIMS = (64, 80, 96, 128, 192, 256, 512)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
QUERIES = (1, 1, 1, 2, 3, 4, 5, 7, 8, 11, 16)
PAGES = (None, None, None, 16, 32, 64, 128, 256)
DTYPES = ("bfloat16", "bfloat16", "bfloat16", "float16", "float16", "float32")
BATCHES = (1, 1, 2, 4, 4, 8, 32)
LAYOUTS = ("BHTD", "BTHD", "slice")
OPTIONS = ("alibi", "window", "softcap", "sinks", "starts", "rotate")
#: (keys, values, head size): a head's codes of a token are 64 bytes or 32.
NARROW = (
    ("int4", "int4", 128),
    ("int8", "int4", 64),
    ("int4", "fp8_tensor", 64),
    ("int8", "int8", 64),
    ("int4", "int4", 64),
    ("int2", "int2", 128),
    ("fp8", "int8_tensor", 64),
)
EDGES = sorted({0, 1, 2, 3, *(n + d for n in (16, 32, 64, 128, 256, 512, 1024) for d in (-1, 0, 1))})
PRIMES = (5, 7, 13, 31, 61, 97, 127, 251, 509, 997, 2003, 4093, 8191)


@dataclass(frozen=True)
class Variant:
    """What a kernel may be compiled for.

    value_dim  head size of the values, if it differs
    group      query heads of one KV head
    batch      sequences, rounded up to a power of two
    page       tokens of a page; None: contiguous
    odd        the capacity is no multiple of anything, and strides with it
    exact      sink tokens and recent tokens in 16 bits
    latent     values are latents, and the first dims of keys (MLA)
    """

    keys: str
    values: str
    dim: int = 128
    value_dim: int | None = None
    group: int = 4
    queries: int = 1
    batch: int = 4
    page: int | None = None
    dtype: str = "bfloat16"
    layout: str = "BHTD"
    odd: bool = False
    options: frozenset[str] = frozenset()
    exact: tuple[int, int] = (0, 0)
    latent: bool = False

    @property
    def widest(self) -> int:
        return max(self.dim, self.value_dim or 0)


@dataclass(frozen=True)
class Case:
    """One call. `slack`: tokens of capacity behind the longest sequence. `early`: the queries are not the newest tokens.

    key_bias  what is added to the first dim of every key, as models with large biases do
    """

    variant: Variant
    heads: int
    lengths: tuple[int, ...]
    slack: int = 0
    early: bool = False
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    seed: int = 0
    key_bias: float = 0.0


# ---------------------------------------------------------------------------------------------------------------- drawing


def _deck(rng: random.Random, cards: Sequence[T]) -> Iterator[T]:
    """Cards for ever, shuffled anew each time all were seen: what is drawn often covers everything evenly."""
    while True:
        yield from rng.sample(cards, len(cards))


def fits(fmt: Format, dim: int, page: int | None) -> bool:
    """Whether heads of `dim`, and pages of so many tokens, can be stored."""
    try:
        fmt.check_shape((1, 1, page or 32, dim))
    except hb.HalfbyteError:
        return False
    return page is None or page % (fmt.token_block or 1) == 0


def variants(count: int, seed: int = 1) -> list[Variant]:
    """`count` variants; every format, head size, ratio, page size and so on is among them if `count` is a few dozen."""
    rng = random.Random(seed)
    keys, values, dims, groups = _deck(rng, KEYS), _deck(rng, VALUES), _deck(rng, DIMS), _deck(rng, GROUPS)
    queries, batches, pages = _deck(rng, QUERIES), _deck(rng, BATCHES), _deck(rng, PAGES)
    dtypes, layouts, options = _deck(rng, DTYPES), _deck(rng, LAYOUTS), _deck(rng, OPTIONS)
    made = []
    for i in range(count):
        key = next(keys)
        dim, page = next((d, p) for d, p in zip(dims, pages, strict=False) if fits(key_format(key), d, p))
        value_dim = next(dims) if i % 16 == 15 else None
        value = next(v for v in values if fits(key_format(v), value_dim or dim, page))
        chosen = {next(options) for _ in range(rng.choice((0, 0, 1, 1, 2, 4)))}
        made.append(
            Variant(
                *(key, value, dim, value_dim, next(groups), next(queries), next(batches), page, next(dtypes), next(layouts)),
                *(rng.random() < 0.25, frozenset(chosen)),
            )
        )
    return made


def narrow_variants(count: int, seed: int = 2) -> list[Variant]:
    """Tokens first, in formats whose heads are less than 128 bytes of a token: what units of two heads are for."""
    formats = _deck(random.Random(seed), NARROW)
    plain = {"value_dim": None, "layout": "BTHD", "dtype": "bfloat16"}
    drawn = zip(variants(count, seed), formats, strict=False)
    return [replace(v, keys=keys, values=values, dim=dim, **plain) for v, (keys, values, dim) in drawn]  # type: ignore[arg-type]


def exact_variants(count: int, seed: int = 3) -> list[Variant]:
    """With sink and recent tokens in 16 bits, of formats that can have them."""
    quantized = [name for name in VALUES if key_format(name).is_quantized]
    rng, drawn = random.Random(seed), iter(variants(8 * count, seed))
    suited = (v for v in drawn if v.keys in quantized and v.values in quantized)
    return [replace(v, exact=rng.choice(((4, 16), (64, 256), (0, 100), (5, 0)))) for v in itertools.islice(suited, count)]


def latent_variants(count: int, seed: int = 5) -> list[Variant]:
    """Latents of 512 dims and rotary keys of 64, for as many heads as models with MLA have."""
    rng, drawn = random.Random(seed), iter(variants(8 * count, seed))
    suited = (v for v in drawn if fits(key_format(v.keys), 64, v.page))
    sizes = {"dim": 64, "value_dim": 512, "latent": True}
    return [replace(v, group=rng.choice((16, 20, 64, 128)), **sizes) for v in itertools.islice(suited, count)]  # type: ignore[arg-type]


def draw(count: int, grid: Sequence[Variant], *, longest: int, elements: int, seed: int = 1) -> list[Case]:
    """`count` cases over the variants in turn, about `elements` large at most. Every hundredth is one long sequence."""
    rng = random.Random(seed)
    return [
        _long(rng, grid[i % len(grid)], longest, i) if i % 100 == 99 else _case(rng, grid[i % len(grid)], longest, elements, i)
        for i in range(count)
    ]


def _case(rng: random.Random, variant: Variant, longest: int, elements: int, seed: int) -> Case:
    batch = rng.randint(variant.batch // 2 + 1, variant.batch) * (rng.random() > 0.02)  # now and then there is no sequence
    heads, top = rng.choice((1, 1, 2, 3, 4, 5, 8)), round(2 ** rng.uniform(0, longest.bit_length() - 1))
    while batch * heads * variant.group * variant.widest * top > elements and (heads > 1 or top > 64):
        heads, top = (heads, top // 2) if top > 64 else (heads // 2, top)
    return Case(
        variant,
        heads,
        _lengths(rng, batch, max(1, top)),
        slack=rng.choice((0, 1, 7, 64)),
        early=rng.random() < 0.1,
        q_scale=rng.choice((1.0, 1.0, 8.0)),
        k_scale=rng.choice((1.0, 1.0, 4.0)),
        v_scale=rng.choice((1.0, 1.0, 1e-3, 100.0)),
        seed=seed,
    )


def _long(rng: random.Random, variant: Variant, longest: int, seed: int) -> Case:
    """One sequence of about twelve times the usual length (100,000 where that is 8,192), shorter for very many heads."""
    length = longest * 12 // max(1, variant.group // 8) + rng.choice((-1, 0, 1, 17))
    return Case(variant, 1, (length,), seed=seed)


def _lengths(rng: random.Random, batch: int, top: int) -> tuple[int, ...]:
    match rng.choice(("edges", "primes", "any", "skewed", "equal")):
        case "edges":
            return tuple(rng.choice([n for n in EDGES if n <= top]) for _ in range(batch))
        case "primes":
            return tuple(rng.choice([n for n in PRIMES if n <= top] or [1]) for _ in range(batch))
        case "skewed":
            return tuple(top if i == batch // 2 else rng.randint(0, 3) for i in range(batch))
        case "equal":
            return (top,) * batch
    return tuple(rng.randint(0, top) for _ in range(batch))


# --------------------------------------------------------------------------------------------------------------- building


def junk(t: torch.Tensor) -> torch.Tensor:
    """What unused memory holds: NaN, or the largest code (which for FP8 is NaN too)."""
    return torch.full_like(t, torch.nan if t.is_floating_point() else torch.iinfo(t.dtype).max)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty hands out NaN: outputs and workspaces that are not fully written are seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def stored(x: torch.Tensor, name: str, lengths: torch.Tensor, dtype: torch.dtype, exact: tuple[int, int] = (0, 0)) -> KVBuffer:
    """x [B, H, T, D] as a plane, junk wherever no token of `lengths` is; `dtype` is that of a tail, `exact` as in a `Variant`."""
    fmt = key_format(name)
    made = hb.quantize(x, fmt)
    token = torch.arange(x.shape[2], device=x.device)
    beyond = token >= lengths.view(-1, 1)  # [B, T]
    if sum(exact):
        tail, in_tail = _exact_rows(x.to(dtype), lengths, *exact)
        plane = KVBuffer(fmt, made.codes, made.scales, made.offsets, tail, sink_tokens=exact[0])
        return _with_junk(plane, beyond | in_tail)
    if (block := fmt.token_block) is None:
        return _with_junk(KVBuffer(fmt, made.codes, made.scales, made.offsets), beyond)
    flushed = (lengths // block * block).view(-1, 1, 1, 1)
    rows = (flushed + torch.arange(block, device=x.device).view(1, 1, -1, 1)).long()
    tail = x.to(dtype).gather(2, rows.clamp_max(x.shape[2] - 1).expand(-1, x.shape[1], -1, x.shape[3]))
    tail = tail.masked_fill(rows >= lengths.view(-1, 1, 1, 1), torch.nan)
    return _with_junk(KVBuffer(fmt, made.codes, made.scales, made.offsets, tail), token >= flushed.view(-1, 1))


def _exact_rows(x: torch.Tensor, lengths: torch.Tensor, sinks: int, recent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tail [B, H, sinks + recent, D], NaN where it holds no token of x, and which tokens it holds, [B, T]."""
    token = torch.arange(x.shape[2], device=x.device)
    held = (token < lengths.view(-1, 1)) & ((token < sinks) | (token >= lengths.view(-1, 1) - recent))
    tail = x.new_full((*x.shape[:2], sinks + recent, x.shape[3]), torch.nan)
    sequence, place = held.nonzero(as_tuple=True)
    row = torch.where(place < sinks, place, sinks + place % max(recent, 1))
    tail.transpose(1, 2)[sequence, row] = x.transpose(1, 2)[sequence, place]
    return tail, held


def _with_junk(plane: KVBuffer, beyond: torch.Tensor) -> KVBuffer:
    """`plane` with junk in the tokens where `beyond` [B, T]. What belongs to several tokens follows the first of them."""

    def spoil(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None or t.ndim == 1:
            return t
        axis = 1 if t.ndim == 2 else 2
        rows = beyond[:, :: beyond.shape[1] // t.shape[axis]] if t.shape[axis] else beyond
        rows = rows if t.ndim == 2 else rows.view(rows.shape[0], 1, rows.shape[1], *[1] * (t.ndim - 3))
        return torch.where(rows, junk(t), t)

    codes, scales, offsets = (spoil(t) for t in plane.tensors()[:3])
    assert codes is not None
    return replace(plane, codes=codes, scales=scales, offsets=offsets)


def mapped(plane: KVBuffer, change: Callable[[torch.Tensor], torch.Tensor]) -> KVBuffer:
    """`plane` with `change` applied to codes, scales and offsets that have a token axis."""
    parts = {n: getattr(plane, n) for n in ("codes", "scales", "offsets")}
    return replace(plane, **{n: t if t is None or t.ndim == 1 else change(t) for n, t in parts.items()})


def token_axis(t: torch.Tensor) -> int:
    """Where the tokens are: [B, T] or [B, H, T, ...]."""
    return 1 if t.ndim == 2 else 2


def paged(keys: KVBuffer, values: KVBuffer, lengths: torch.Tensor, page: int, seed: int) -> tuple[KVBuffer, KVBuffer, torch.Tensor]:
    """Both buffers in pages of a pool, in no order, with some left over; and the table, which holds nonsense where no code is."""
    batch, count = lengths.shape[0], keys.codes.shape[2] // page
    pool = batch * count + 3
    order = torch.tensor(random.Random(seed).sample(range(pool), batch * count), dtype=torch.int32, device=lengths.device)
    table = order.view(batch, count)
    first = torch.arange(count, device=lengths.device) * page
    nonsense = torch.where(first // page % 2 == 0, -1, 10**6)
    coded = (lengths - keys.recent_tokens).view(-1, 1)
    shown = torch.where(first < coded, table, nonsense).int()
    in_pages = (mapped(p, lambda t: into_pages(t, table, pool)) for p in (keys, values))
    return next(in_pages), next(in_pages), shown


def into_pages(t: torch.Tensor, order: torch.Tensor, pool: int) -> torch.Tensor:
    """The tokens of t in a pool of so many pages: page order[b, p] holds the p-th piece of sequence b, the others junk."""
    axis = token_axis(t)
    rows = t.unflatten(axis, (order.shape[1], -1)).movedim(axis, 1).flatten(0, 1)
    pages = junk(rows.new_empty(pool, *rows.shape[1:]))
    pages[order.flatten().long()] = rows
    return pages


def laid_out(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers with other strides: tokens before heads, or cut out of a buffer that is longer and full of junk."""
    if layout == "BTHD" and t.ndim > 2:
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "slice":
        axis = token_axis(t)
        wide = torch.cat([t, junk(t)], axis)
        return wide.narrow(axis, 0, t.shape[axis])
    return t


@dataclass
class Call:
    """One call of `decode_attention` on a device, and what it should give."""

    q: torch.Tensor
    cache: hb.KVCache
    options: dict[str, Any]

    def run(self, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of the public function, with poisoned outputs and workspaces."""
        with poisoned():
            got = hb.decode_attention(self.q, self.cache, return_lse=True, impl=impl, **self.options)
        assert isinstance(got, tuple)
        return got

    def attend(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The formula in one dtype over the dequantized cache: the truth in float64, eager PyTorch's answer otherwise.

        Rotated keys are rotated back: both know of no rotation.
        """
        cache, given = self.cache, dict(self.options)
        start, latent = given.pop("query_start", cache.lengths - self.q.shape[2]), given.pop("latent", False)
        options = AttentionOptions(**{"sm_scale": cache.head_dim**-0.5} | given)
        oldest = reference.oldest_visible(start, options)
        held = max(cache.lengths.tolist(), default=0)  # no query sees what lies beyond, which may be most of the memory
        k, v = (reference.read(p, cache.lengths, cache.page_table, oldest)[:, :, :held] for p in (cache.keys, cache.values))
        k = rotate(k.double()) if cache.rotate_keys else k
        k = torch.cat([v, k], -1) if latent else k
        return reference.attend(self.q.to(dtype), k.to(dtype), v.to(dtype), cache.lengths, start, options)

    def wrong(self, out: torch.Tensor, lse: torch.Tensor, kernel: bool = True) -> str:
        """What of a result breaks the promise, in words; "" when nothing does. kernel: kernels round a rotated query to 16 bits."""
        # A sum of up to 256 terms is off by about sqrt(256) roundings, which matters where scores are in the ten thousands.
        rounds = kernel and self.cache.rotate_keys and bool(out.numel())
        return attention_errors(
            out, lse, *self.expected, lse_roundings=16, rotation=self._rounded_rotation if rounds else (0.0, 0.0)
        )

    def check(self, impl: str) -> bool:
        """Holds it to the promise; False where the implementation refuses the call."""
        try:
            result = self.run(impl)
        except (Unsupported, InvalidArgument):
            return False
        assert not (why := self.wrong(*result)), f"{self.cache.keys.format}, {self.cache.values.format}: {why}"
        return True

    @cached_property
    def _rounded_rotation(self) -> tuple[float, float]:
        """Twice what out and lse are off by in float64 if only a rotated query is rounded: to bf16 over bf16 keys, else to fp16."""
        if self.q.element_size() > 2:
            return 0.0, 0.0
        kind = torch.bfloat16 if self.cache.keys.codes.dtype is torch.bfloat16 else torch.float16
        dim = self.cache.head_dim
        rounded = rotate_end(rotate_end(self.q.double(), dim).to(kind).double(), dim)
        found, truth = replace(self, q=rounded).attend(torch.float64), self.expected[0]
        out, lse = (2 * (a - b).nan_to_num(0, 0, 0).abs().max().item() for a, b in zip(found, truth, strict=True))
        return out, lse

    @cached_property
    def expected(self) -> tuple[Any, Any]:
        """(out, lse) in float64, and by eager PyTorch."""
        with torch.backends.mkldnn.flags(enabled=False):  # oneDNN keeps a matmul for every shape: 10 MB for 20 drawn calls
            base = self.attend(self.q.dtype)
            if not base[0].isfinite().all():  # scores beyond fp16: what eager PyTorch makes of them in the 16 bits that hold them
                base = self.attend(torch.bfloat16)
        return self.attend(torch.float64), base


def build(case: Case, device: str) -> Call:
    """The tensors of a case."""
    v, rng = case.variant, torch.Generator(device).manual_seed(case.seed)
    dtype, step = getattr(torch, v.dtype), v.page or key_format(v.keys).token_block or (1 if v.odd else 16)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    rows = (len(case.lengths), case.heads, -(-max((1, *case.lengths)) // step) * step + -(-case.slack // step) * step)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device=device)

    tail = torch.float16 if v.dtype == "float16" else torch.bfloat16
    k = normal(*rows, v.dim) * case.k_scale
    k[..., 0] += case.key_bias
    keys = stored(k, v.keys, lengths, tail, v.exact)
    values = stored(normal(*rows, v.value_dim or v.dim) * case.v_scale, v.values, lengths, tail, v.exact)
    table = None
    if v.page is not None:
        keys, values, table = paged(keys, values, lengths, v.page, case.seed)
    keys, values = (mapped(p, lambda t: laid_out(t, v.layout)) for p in (keys, values))
    cache = wrapped(keys, values, lengths, table, "rotate" in v.options)
    query_dim = v.dim + (v.value_dim or v.dim) * v.latent
    q = (normal(rows[0], v.queries, case.heads * v.group, query_dim) * case.q_scale).to(dtype).transpose(1, 2)
    return Call(q if case.seed % 2 else q.contiguous(), cache, _options(case, normal, lengths))


def some_of(call: Call, rows: list[int], slack: int = 0) -> Call:
    """Sequences of a call, with `slack` more tokens of capacity, which hold junk. Pages stay, and the table has more of them."""
    index, cache = torch.tensor(rows, device=call.q.device), call.cache
    _, per_head, per_token, _ = cache.keys.codes.stride()

    def kept(t: torch.Tensor) -> torch.Tensor:
        t, more = t[index], list(t.shape)
        more[0], more[token_axis(t)] = len(rows), 0 if cache.keys.format.token_block else slack
        return laid_out(torch.cat([t, junk(t.new_empty(more))], token_axis(t)), "BTHD" if per_head < per_token else "BHTD")

    def side(buffer: KVBuffer) -> KVBuffer:
        tail = None if buffer.tail is None else buffer.tail[index]
        return replace(buffer if cache.page_table is not None else mapped(buffer, kept), tail=tail)

    table = None if cache.page_table is None else cache.page_table[index]
    if table is not None:
        table = torch.nn.functional.pad(table, (0, -(-slack // cache.keys.codes.shape[2])))
    options = {n: x[index] if n in ("starts", "query_start") else x for n, x in call.options.items()}
    made = wrapped(side(cache.keys), side(cache.values), cache.lengths[index], table, cache.rotate_keys)
    return Call(call.q[index], made, options)


def wrapped(
    keys: KVBuffer, values: KVBuffer, lengths: torch.Tensor, page_table: torch.Tensor | None, rotate_keys: bool
) -> hb.KVCache:
    """A cache of these buffers. Memory of an engine has no tokens in 16 bits, so that they come in afterwards."""
    bare = (p if p.format.token_block else replace(p, tail=None, sink_tokens=0) for p in (keys, values))
    cache = hb.KVCache.from_buffers(*bare, lengths, page_table=page_table, rotate_keys=rotate_keys)
    cache.keys, cache.values = keys, values
    return cache


def _options(case: Case, normal: Callable[..., torch.Tensor], lengths: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of `decode_attention`."""
    chosen, rng, heads = case.variant.options, random.Random(case.seed), case.heads * case.variant.group
    found: dict[str, Any] = {"latent": True, "sm_scale": case.variant.dim**-0.5} if case.variant.latent else {}
    if case.early:
        found["query_start"] = (normal(len(lengths)).abs() * lengths / 2).int()
    if "alibi" in chosen:
        found["alibi_slopes"] = torch.exp2(-8 * torch.arange(1, heads + 1, device=lengths.device) / heads)
    if "window" in chosen:
        found["window"] = rng.choice((1, 2, 31, 64, 100, 1000, 4096))
    if "softcap" in chosen:
        found["softcap"] = rng.choice((5.0, 30.0))
    if "sinks" in chosen:
        found["sinks"] = normal(heads) * 3
    if "starts" in chosen:
        found["starts"] = (normal(len(lengths)).abs() * (lengths + 2) / 3).int()
    return found


def simple(
    k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, keys: str, values: str, lengths: list[int] | None = None, **options: Any
) -> Call:
    """A call over a contiguous cache of k, v [B, H, T, D], full unless `lengths` are given."""
    held = torch.tensor(lengths or [k.shape[2]] * k.shape[0], dtype=torch.int32, device=k.device)
    tail = torch.float16 if q.dtype is torch.float16 else torch.bfloat16
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % 32)) for x in (k, v))  # whole blocks, for per-channel keys
    return Call(q, hb.KVCache.from_buffers(stored(k, keys, held, tail), stored(v, values, held, tail), held), options)


def with_scale(plane: KVBuffer, scale: float) -> KVBuffer:
    """The same codes, all with one scale, which is what the offsets and the tail are of too."""
    assert plane.scales is not None
    offsets = None if plane.offsets is None else plane.offsets.sign() * min(scale, 6000) * 10
    tail = None if plane.tail is None else plane.tail * min(scale, 6000)
    return KVBuffer(plane.format, plane.codes, torch.full_like(plane.scales, scale), offsets, tail)


def same_stores(there: hb.KVCache, here: hb.KVCache) -> bool:
    """Bit for bit, but for the sign of an offset of 0 (where a block holds both zeros, either is its smallest number), and but for
    the rows of a tail that hold no token."""

    def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
        a, b = (t.cpu() + 0 if t.is_floating_point() else t.cpu() for t in (a, b))
        if here.keys.tail is not None and b.shape == here.keys.tail.shape:
            held = torch.arange(b.shape[2]) < (here.lengths % b.shape[2]).view(-1, 1)
            a, b = (t.masked_fill(~held[:, None, :, None], 0) for t in (a, b))
        return same_bits(a, b)

    return all(alike(a, b) for a, b in zip(there.tensors(), here.tensors(), strict=True))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN and the sign of zero included."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype is b.dtype and torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether any bit differs, as a tensor on the device: nobody waits for it."""
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return (a.view(integers) != b.view(integers)).any()
