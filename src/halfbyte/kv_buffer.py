"""Plain data for every level of an op: stored keys and values, and the calls of append and attention."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, Protocol

import torch

from halfbyte.arguments import Mark, Without
from halfbyte.errors import check
from halfbyte.formats import Format, Shape, key_format, value_format
from halfbyte.tensors import expected_parts


class Rope(NamedTuple):
    """Rotary embedding of the first R elements of a head, in pairs (x[i], x[i + R/2]); a plain (cos, sin) says the same.

    cos, sin      float32 [..., R/2]
    interleaved   pairs are (x[2 i], x[2 i + 1]), as in GPT-J and GLM-4
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False


#: The widest window that kernels count with, as they count tokens in 32 bits.
WIDEST = 2**30

RopeLike = Rope | tuple[torch.Tensor, torch.Tensor]


class HeadNorms(NamedTuple):
    """RMSNorm of each head of queries and keys before it is rotated by position, as in Qwen3.

    q, k        weights [D]
    eps, kind   of both: see `halfbyte.reference.block.Norm`
    """

    q: torch.Tensor
    k: torch.Tensor
    eps: Annotated[float, Mark.COMPILED]
    kind: str


@dataclass(frozen=True)
class KVBuffer:
    """The stored keys (or values) of one layer.

    Contiguous: codes [B, H, T, D / codes per byte]; scales and offsets of shape `format.scale_shape([B, H, T, D])`.
    Paged: the same with pages in place of the batch axis and the tokens of a page in place of T: codes [P, H, page, ...]; token
    p*page + j of sequence b is row j of page `page_table[b, p]`. Any strides.
    `tail`: [B, H, rows, D], tokens in 16 bits. It belongs to a sequence, so it is never paged. Two kinds of cache have one:
    - per-channel keys: `block` rows. The last `length % block` tokens are not quantized yet; codes cover whole blocks only.
    - caches with S `sink_tokens` and W recent tokens, keys and values: S + W rows. The first S rows hold the first S tokens of a
      sequence, the others are a ring of the last W. A token is quantized from its 16 bits when the W-th token after it arrives, so
      codes do not depend on how tokens were split into appends. Codes of tokens in the tail are never read.
    In both, from token `coded(length)` on, token t >= S is in row S + t % ring, the ring being the rows after the first S.
    Per-tensor scales are [1]; 0 means not calibrated yet. `saturated`, int64 [1], counts values that exceeded them.
    """

    format: Format
    codes: Annotated[torch.Tensor, Mark.DIFFERENTIABLE]
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    tail: torch.Tensor | None = None
    saturated: torch.Tensor | None = None
    sink_tokens: int = field(default=0, kw_only=True)

    def __repr__(self) -> str:
        return f"KVBuffer({self.format}, codes={list(self.codes.shape)}, {self.nbytes:,} bytes, device={str(self.codes.device)!r})"

    @property
    def heads(self) -> int:
        return self.codes.shape[1]

    @property
    def dim(self) -> int:
        """Logical size of one head."""
        return self.codes.shape[-1] * self.format.code.per_byte

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """(codes, scales, offsets, tail), in the order of the flat ops' arguments."""
        return self.codes, self.scales, self.offsets, self.tail

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors() if t is not None)

    @property
    def ring(self) -> int:
        """Rows of the tail after those of the sink tokens."""
        return 0 if self.tail is None else self.tail.shape[2] - self.sink_tokens

    @property
    def recent_tokens(self) -> int:
        """How many of the newest tokens stay in 16 bits."""
        return 0 if self.format.token_block else self.ring

    def coded(self, lengths: torch.Tensor) -> torch.Tensor:
        """Where the quantized tokens of sequences of these lengths end (ignoring sink tokens)."""
        block = self.format.token_block
        return lengths // block * block if block else (lengths - self.ring).clamp_min(0)

    def tail_tokens(self, lengths: torch.Tensor) -> torch.Tensor:
        """The token that each row of the tail holds, int64 [B, rows]; -1 for none."""
        assert self.tail is not None
        row = torch.arange(self.tail.shape[2], device=lengths.device)
        lengths = lengths.long().unsqueeze(1)
        first, ring = self.coded(lengths), max(self.ring, 1)
        token = torch.where(row < self.sink_tokens, row, first + (row - self.sink_tokens - first) % ring)
        in_tail = (token < lengths) & ((row < self.sink_tokens) | (token >= self.sink_tokens))
        return token.masked_fill(~in_tail, -1)

    def select(self, index: torch.Tensor) -> KVBuffer:
        """A copy of the sequences `index` of a contiguous buffer, per-tensor scale and `saturated` included."""
        rest = (None if t is None else t[index] if t.ndim > 1 else t.clone() for t in (*self.tensors()[1:], self.saturated))
        return KVBuffer(self.format, self.codes[index], *rest, sink_tokens=self.sink_tokens)


class AttentionOptions(NamedTuple):
    """Options of one attention call, as in `decode_attention`. They apply to a score in this order: scale, softcap, ALiBi, mask.

    starts        int32 [B]; keys before starts[b] are padding and masked; None: 0
    ends          int32 [B]; keys from ends[b] on are masked; None: none. Lengths cannot express this, because they also determine
                  which tokens of per-channel keys are in the tail
    rotate_keys   the cached keys are Hadamard-rotated: the query is rotated the same way before q . k
    """

    sm_scale: float
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    window: int | None = None
    starts: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    rotate_keys: bool = False

    def limit(self, lengths: torch.Tensor) -> torch.Tensor:
        """The position from which on keys are masked, [B]."""
        return lengths if self.ends is None else torch.minimum(lengths, self.ends)


class DecodeCall(NamedTuple):
    """One call of decode attention, made once from its arguments and passed on: the declaration of the op.

    q [B, Hq, L, query_dim]; lengths, query_start int32 [B]; page_table int32 [B, pages], None where the cache is contiguous.
    query_start None: lengths - L, the newest tokens. `impl`: as requested, later the level that runs.
    cu_seqlens_q, int32 [B + 1]: q is [1, Hq, T, D], and its tokens cu_seqlens_q[b] .. cu_seqlens_q[b + 1] are the newest ones of
    sequence b, at most max_query_len. Tokens after the last one are padding: out = 0 and lse = -inf.
    latent: a token's key is its value, a latent, followed by its cached key, the rotary part (MLA).
    """

    q: Annotated[torch.Tensor, Mark.DIFFERENTIABLE]
    keys: Annotated[KVBuffer, Without("saturated")]
    values: Annotated[KVBuffer, Without("saturated")]
    lengths: torch.Tensor
    query_start: torch.Tensor | None
    page_table: torch.Tensor | None
    options: AttentionOptions
    impl: str = "auto"
    deterministic_batch: bool = False
    cu_seqlens_q: torch.Tensor | None = None
    max_query_len: int = 0
    latent: bool = False

    @property
    def replayable(self) -> bool:
        """Whether an unchecked call could be launches of the tuned kernel like those of an earlier one."""
        return not self.deterministic_batch and self.impl in ("auto", "gluon")

    def numbers(self) -> tuple[float, float, int]:
        """sm_scale, softcap and window as kernels take them."""
        o = self.options
        return o.sm_scale, o.softcap or 1.0, min(o.window or 0, WIDEST)

    def new_results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for out [B, Hq, L, Dv] and lse fp32 [B, Hq, L]; ragged queries have token-major memory."""
        batch, heads, length, _ = self.q.shape
        ragged = self.cu_seqlens_q is not None
        out = self.q.new_empty((length, heads, self.values.dim) if ragged else (batch, heads, length, self.values.dim))
        lse = torch.empty(out.shape[:-1], dtype=torch.float32, device=out.device)
        return (out.transpose(0, 1)[None], lse.t()[None]) if ragged else (out, lse)

    @property
    def query_dim(self) -> int:
        """Dims of a query: those of a key, and with `latent` those of the value before them."""
        return self.keys.dim + self.values.dim * self.latent

    @property
    def first_query(self) -> torch.Tensor:
        """Position of the first query of each sequence, [B]."""
        return self.lengths - self.q.shape[2] if self.query_start is None else self.query_start

    @property
    def capacity(self) -> int:
        """Maximum tokens of a sequence."""
        rows = self.keys.codes.shape[2]
        return rows if self.page_table is None else rows * self.page_table.shape[1]


class AppendCall(NamedTuple):
    """One append, made once and passed on, with the arguments of `KVCache.append`: the declaration of the op.

    lengths      int32 [B]: tokens that each sequence has so far
    page_table   int32 [B, pages], where keys and values are paged
    measure      a per-tensor scale may still be 0, that is, not calibrated
    by_slot      `lengths`, int32 or int64 [B], are slots, which do not advance: the one token of each sequence (L = 1) goes to row
                 i % N of page i // N, with pages of N tokens; negative slots are skipped
    transform    a `KeyTransform` of keys and q, after rope; empty: none
    impl         as requested, later the level that runs
    rotated_q    memory for what q becomes, contiguous
    """

    k: torch.Tensor
    v: torch.Tensor
    keys: Annotated[KVBuffer, Mark.WRITTEN]
    values: Annotated[KVBuffer, Mark.WRITTEN]
    lengths: torch.Tensor
    counts: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    rotate_keys: bool = False
    rope: Annotated[Rope | None, Mark.DIFFERENTIABLE] = None
    q: Annotated[torch.Tensor | None, Mark.DIFFERENTIABLE] = None
    measure: bool = True
    by_slot: bool = False
    norms: Annotated[HeadNorms | None, Mark.DIFFERENTIABLE] = None
    transform: Sequence[torch.Tensor | None] = ()
    impl: str = "auto"
    rotated_q: Annotated[torch.Tensor | None, Mark.RESULT] = None

    @property
    def replayable(self) -> bool:
        """Whether an unchecked call could be one launch like an earlier one."""
        return not self.measure and self.impl in ("auto", "triton")

    def new_results(self) -> tuple[torch.Tensor, ...]:
        """Memory for what q becomes, if it is given."""
        return () if self.q is None else (torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device),)


class Cache(Protocol):
    """What the attention ops need of a cache: two buffers, int32 [B] lengths, and a page table when the buffers are paged.

    `page_table`, int32 [B, pages]: entry p is the page of tokens p*page and following. `rotate_keys`: keys are stored rotated.
    """

    @property
    def keys(self) -> KVBuffer: ...
    @property
    def values(self) -> KVBuffer: ...
    @property
    def lengths(self) -> torch.Tensor: ...
    @property
    def page_table(self) -> torch.Tensor | None: ...
    @property
    def rotate_keys(self) -> bool: ...


class PagedView(NamedTuple):
    """A `Cache` over an engine's pages, created for each batch: lengths int32 [B], page_table int32 [B, pages]."""

    keys: KVBuffer
    values: KVBuffer
    lengths: torch.Tensor
    page_table: torch.Tensor | None
    rotate_keys: bool = False


def outside_inference_mode() -> AbstractContextManager[object]:
    """A context for memory that outlives the caller's `torch.inference_mode`, whose tensors are read-only outside of it."""
    inside = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inside else nullcontext()


def new_kv_buffer(
    fmt: Format,
    shape: Shape,
    tail: Shape,
    dtype: torch.dtype,
    device: torch.device | str,
    scale: float | None = None,
    sink_tokens: int = 0,
) -> KVBuffer:
    """A buffer for a tensor of shape [B or pages, H, T or page, D], zeroed: memory that was never written holds finite numbers.

    `tail`: the shape of its 16-bit tail; 0 rows: none.
    """
    fmt.check_shape(shape, "the cache")
    per_tensor = fmt.granularity == "tensor"

    def zeros(s: Shape, dt: torch.dtype) -> torch.Tensor:
        return torch.zeros(s, dtype=dt, device=device)

    def of_tokens(dt: torch.dtype) -> torch.Tensor:
        """Scales or offsets. Each head is padded to a multiple of 16 tokens, so that kernels copy aligned 16-byte pieces."""
        s, axis = fmt.scale_shape(shape), 1 if fmt.granularity == "token" else 2
        if len(s) == 1:
            return zeros(s, dt)
        room = (*s[:axis], -(-s[axis] // 16) * 16, *s[axis + 1 :])
        return zeros(room, dt).narrow(axis, 0, s[axis])

    scales = None if fmt.scale is None else of_tokens(fmt.scale.storage)
    if scales is not None and scale is not None:
        scales.fill_(scale)
    return KVBuffer(
        fmt,
        zeros(fmt.codes_shape(shape), fmt.storage),
        scales,
        None if fmt.offset_dtype is None else of_tokens(fmt.offset_dtype),
        zeros(tail, dtype) if tail[2] else None,
        zeros((1,), torch.int64) if per_tensor else None,
        sink_tokens=sink_tokens,
    )


# ------------------------------------------------------------------------------------------------- memory of an engine


def check_buffers(keys: KVBuffer, values: KVBuffer, lengths: torch.Tensor, page_table: torch.Tensor | None) -> None:
    """Raise unless `KVCache.from_buffers` can take these."""
    for name, side in (("keys", keys), ("values", values)):
        check(isinstance(side, KVBuffer), f"{name} is a {type(side).__name__}; expected a KVBuffer")
    check(isinstance(lengths, torch.Tensor), f"lengths is a {type(lengths).__name__}; expected a tensor int32 [B]")
    check(
        lengths.dtype is torch.int32 and lengths.ndim == 1, f"lengths is {lengths.dtype} {list(lengths.shape)}; expected int32 [B]"
    )
    batch = lengths.shape[0]
    for name, t in (("keys", keys.codes), ("values", values.codes), ("page_table", lengths if page_table is None else page_table)):
        check(t.device == lengths.device, f"{name} is on {t.device} and lengths on {lengths.device}; move one of them")
    if page_table is not None:
        check(
            page_table.dtype is torch.int32 and page_table.ndim == 2 and page_table.shape[0] == batch,
            f"page_table is {page_table.dtype} {list(page_table.shape)}; expected int32 [{batch}, pages]",
        )
    key_format(keys.format), value_format(values.format)
    for name, buffer in (("keys", keys), ("values", values)):
        _check_buffer(name, buffer, batch)
        rows = buffer.codes.shape[0]
        check(page_table is not None or rows == batch, f"{name}.codes holds {rows} sequences and lengths {batch}")
    check(keys.codes.shape[:3] == values.codes.shape[:3], "keys and values differ in batch (or pages), heads or tokens")


def _check_buffer(name: str, buffer: KVBuffer, batch: int) -> None:
    """Raise unless the buffer has exactly the tensors that its format stores."""
    fmt = buffer.format
    check(
        buffer.codes.ndim == 4,
        f"{name}.codes has shape {list(buffer.codes.shape)}; expected [B or pages, H, tokens, D / codes per byte]",
    )
    shape = (*buffer.codes.shape[:3], buffer.dim)
    fmt.check_shape(shape, name)
    check(
        not buffer.sink_tokens and (fmt.token_block is not None or buffer.tail is None),
        f"{name}.tail was given, for sink or recent tokens; memory of an engine holds codes alone: leave it out, or use a KVCache",
    )
    expected = dict(expected_parts(fmt, shape))
    if fmt.token_block:
        tail_type = buffer.tail.dtype if buffer.tail is not None and buffer.tail.dtype is torch.float16 else torch.bfloat16
        expected["tail"] = ((batch, buffer.heads, fmt.token_block, buffer.dim), tail_type)
    for part in ("codes", "scales", "offsets", "tail"):
        t = getattr(buffer, part)
        actual = "missing" if t is None else f"{t.dtype} {list(t.shape)}"
        if part not in expected:
            check(t is None, f"{name}.{part} was given, but {fmt} stores none")
            continue
        want, dtype = expected[part]
        check(
            t is not None and tuple(t.shape) == want and t.dtype is dtype and t.device == buffer.codes.device,
            f"{name}.{part} is {actual}; {fmt} needs {dtype} {list(want)} on {buffer.codes.device}",
        )


def expanded(keys: KVBuffer, values: KVBuffer, lengths: torch.Tensor) -> str:
    """The name of a tensor with a stride of 0, whose elements share memory and cannot be written; "" for none."""
    by_name = {"lengths": lengths} | {
        f"{name}.{part}": t
        for name, buffer in (("keys", keys), ("values", values))
        for part, t in zip(("codes", "scales", "offsets", "tail"), buffer.tensors(), strict=True)
        if t is not None
    }
    return next(
        (name for name, t in by_name.items() if any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride(), strict=True))), ""
    )
