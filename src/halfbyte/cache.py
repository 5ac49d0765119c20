"""KVCache: the keys and values of one layer, quantized as they arrive.

Memory is laid out [B, H, T, ...] (see `halfbyte.kv_buffer.KVBuffer`) and allocated once. `halfbyte.paging` has the paged cache.
"""

from __future__ import annotations

import copy
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, Unpack, overload

import torch

from halfbyte.arguments import as_int32, check_sizes, check_tensor, device_of, integer
from halfbyte.cache_options import DEFAULTS, CacheOptions, shows_options, token_bytes
from halfbyte.cache_pickle import restorable
from halfbyte.device import check_room
from halfbyte.errors import InvalidArgument, check
from halfbyte.formats import check_window, key_format, value_format
from halfbyte.kv_buffer import (
    AppendCall,
    HeadNorms,
    KVBuffer,
    RopeLike,
    check_buffers,
    expanded,
    new_kv_buffer,
    outside_inference_mode,
)
from halfbyte.ops.append import APPEND, check_new, rope_of, store
from halfbyte.ops.launch_cache import Signature
from halfbyte.ops.workspace import prepare
from halfbyte.reference.append import check_capacity
from halfbyte.reference.hadamard import check_rotation, rotated
from halfbyte.reference.quantize import fixed_scale
from halfbyte.reference.reopen import reopen
from halfbyte.tensors import KeyTransform


@restorable
@shows_options
class KVCache:
    """A cache of fixed capacity for one layer: `batch` sequences, `kv_heads` heads of `head_dim`, `capacity` tokens each.

    Options are those of `CacheOptions`. With per-channel keys the capacity is rounded up to whole blocks. With sink or recent
    tokens, attention of a chunk of several tokens sees the state after its append.
    `append`, `reset`, `crop` and `reorder` are thread-safe. Attention takes no lock: the caller must order it with changes of
    the cache by other threads, or on other streams of a GPU.
    """

    page_table: torch.Tensor | None = None
    #: An upper bound on the tokens of a sequence, counted on the host, so that `append` checks the capacity without a GPU
    #: synchronization; None: unknown.
    _bound: int | None = None
    #: A CUDA graph captured an append to this cache. Its replays advance `lengths`, and the host does not see them.
    _captured = False
    #: This object allocated the memory, and every append was an eager call on it: only then can the bound be trusted.
    _counts_all = False
    #: `lengths` and its version (torch counts in-place writes) after the last append or reset here. Another version: something
    #: else wrote to it. None: not tracked, as in copies of a cache, whose lengths are another tensor.
    _version: tuple[torch.Tensor, int] | None = None
    #: The name of an engine's tensor with a stride of 0, whose elements share memory: such a cache is read-only.
    _expanded = ""
    #: Held while the cache is changed. Caches made in compiled code share one, all others have their own.
    _lock: AbstractContextManager[object] = threading.RLock()

    def __new__(cls, *args: Any, **options: Any) -> Self:
        cache = super().__new__(cls)
        if not torch.compiler.is_compiling():
            cache._lock = threading.RLock()
        return cache

    def __init__(self, batch: int, kv_heads: int, head_dim: int, capacity: int, **options: Unpack[CacheOptions]) -> None:
        check_sizes(batch=batch, kv_heads=kv_heads, head_dim=head_dim, capacity=capacity)
        block = key_format((DEFAULTS | options)["keys"]).token_block or 1
        self._allocate(batch, (batch, kv_heads, -(-capacity // block) * block), head_dim, capacity, options)

    def _allocate(self, batch: int, rows: tuple[int, int, int], head_dim: int, capacity: int, options: CacheOptions) -> None:
        """KV buffers for `rows` (sequences or pages, heads, tokens of each), and everything with one entry a sequence."""
        unknown = set(options) - set(CacheOptions.__annotations__)
        check(not unknown, f"{', '.join(sorted(unknown))}: no such option; a cache has {', '.join(CacheOptions.__annotations__)}")
        settings = DEFAULTS | options
        k_fmt, v_fmt = key_format(settings["keys"]), value_format(settings["values"])
        value_dim, dtype = head_dim if settings["value_dim"] is None else settings["value_dim"], settings["dtype"]
        device, self.rotate_keys = device_of(settings["device"]), rotated(settings["rotate_keys"], k_fmt, head_dim)
        check_sizes(value_dim=value_dim)
        check(dtype in (torch.float16, torch.bfloat16), f"dtype={dtype}; the 16-bit type is torch.float16 or torch.bfloat16")
        sinks, recent = settings["sink_tokens"], settings["recent_tokens"]
        check_window(sinks, recent, k_fmt, v_fmt, capacity)
        k_scale, v_scale = settings["k_scale"], settings["v_scale"]
        for name, fmt, scale in (("k_scale", k_fmt, k_scale), ("v_scale", v_fmt, v_scale)):
            if scale is not None:
                fixed_scale(scale, fmt, device, name)
        token = token_bytes(k_fmt, rows[1], head_dim) + token_bytes(v_fmt, rows[1], value_dim)
        check_room(rows[0] * rows[2] * token, device, f"capacity: {rows[0] * rows[2]:,} tokens")
        with outside_inference_mode():
            k_tail, v_tail = ((batch, rows[1], f.token_block or sinks + recent) for f in (k_fmt, v_fmt))
            self.keys = new_kv_buffer(k_fmt, (*rows, head_dim), (*k_tail, head_dim), dtype, device, k_scale, sinks)
            self.values = new_kv_buffer(v_fmt, (*rows, value_dim), (*v_tail, value_dim), dtype, device, v_scale, sinks)
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._given = [_scale_of_tensor(buffer) for buffer in (self.keys, self.values)]
        self._measures = "tensor" in (f.granularity for f, scale in ((k_fmt, k_scale), (v_fmt, v_scale)) if scale is None)
        self._bound, self._counts_all, self._version = 0, True, _version_of(self.lengths)
        if self.lengths.is_cuda and not torch.compiler.is_compiling() and not self._capturing():
            prepare(self.lengths.device)

    @classmethod
    def from_buffers(
        cls,
        keys: KVBuffer,
        values: KVBuffer,
        lengths: torch.Tensor,
        *,
        page_table: torch.Tensor | None = None,
        rotate_keys: bool = False,
    ) -> KVCache:
        """Wrap memory that an engine owns, without a copy: see `KVBuffer` for shapes. Any strides work.

        lengths int32 [B]; page_table int32 [B, pages] when the buffers are paged. A tensor with a stride of 0 makes the cache
        read-only. rotate_keys: whether the memory holds rotated keys; `append` then rotates new ones. The engine manages pages
        and lengths: on a GPU, `append` reads the lengths once, counts tokens on the host from then on, and does not see lengths
        that the engine raises later.
        """
        check_buffers(keys, values, lengths, page_table)
        cache = cls.__new__(cls)
        cache.keys, cache.values, cache.lengths, cache.page_table = keys, values, lengths, page_table
        cache.rotate_keys = check_rotation(rotate_keys, keys.dim)
        cache._expanded = expanded(keys, values, lengths)
        cache._given = [_scale_of_tensor(buffer) for buffer in (keys, values)]
        cache._measures = "tensor" in (keys.format.granularity, values.format.granularity)
        return cache

    # ------------------------------------------------------------------------------------------------------ what it is

    @property
    def capacity(self) -> int:
        """Most tokens one sequence can hold."""
        return self.keys.codes.shape[2] * (1 if self.page_table is None else self.page_table.shape[1])

    @property
    def length_bound(self) -> int | None:
        """An upper bound on the longest sequence; None: unknown without reading the device, or the call is being traced."""
        if not torch.compiler.is_compiling() and self.lengths.device.type == "cpu" and not self.lengths.is_cuda:
            return int(self.lengths.max()) if self.batch else 0
        return self._bound if self._counted() and not self._capturing() else None

    def _counted(self) -> bool:
        """Whether every token was counted here, and only this object wrote the lengths."""
        if torch.compiler.is_compiling() or not self._counts_all or self._version is None:
            return False
        lengths, version = self._version
        return lengths is self.lengths and version == lengths._version

    def forget_length_bound(self) -> None:
        """Stop counting tokens on the host: something other than this object's `append` will add some, such as compiled code."""
        self._bound, self._counts_all = None, False

    def expect_replays(self, expected: bool) -> None:
        """Whether CUDA graphs that captured an append may be replayed from now on: the host does not see their tokens.

        If not, the host counts tokens again from the next `reset` on.
        """
        self._captured, self._counts_all = expected, not expected

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.keys.heads

    @property
    def head_dim(self) -> int:
        return self.keys.dim

    @property
    def value_dim(self) -> int:
        return self.values.dim

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    @property
    def nbytes(self) -> int:
        """Bytes allocated for codes, scales, offsets and tails, those of sink and recent tokens included."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token of one sequence, scales and offsets included, tails not."""
        return sum(token_bytes(side.format, self.kv_heads, side.dim) for side in (self.keys, self.values))

    def tensors(self) -> list[torch.Tensor]:
        """Every buffer, for marking addresses as static or moving memory."""
        parts = [*self.keys.tensors(), self.keys.saturated, *self.values.tensors(), self.values.saturated]
        return [t for t in (*parts, self.lengths, self.page_table) if t is not None]

    def __repr__(self) -> str:
        shape = f"batch={self.batch}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, capacity={self.capacity}"
        formats = f"keys={self.keys.format}{' rotated' * self.rotate_keys}, values={self.values.format}"
        return f"{type(self).__name__}({shape}, {formats}, {self.nbytes:,} bytes)"

    @overload
    def append(
        self, k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor | None = None, rope: RopeLike | None = None, *, q: None = None
    ) -> None: ...

    @overload
    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        counts: torch.Tensor | None = None,
        rope: RopeLike | None = None,
        *,
        q: torch.Tensor,
        norms: HeadNorms | None = None,
        transform: KeyTransform | tuple[()] = (),
    ) -> torch.Tensor: ...

    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        counts: torch.Tensor | None = None,
        rope: RopeLike | None = None,
        *,
        q: torch.Tensor | None = None,
        norms: HeadNorms | None = None,
        transform: KeyTransform | tuple[()] = (),
    ) -> torch.Tensor | None:
        """Quantize k [B, H, L, D] and v [B, H, L, Dv] and store them after each sequence's tokens.

        counts  int32 [B], how many of the L tokens of each sequence are real; None: all
        rope    (cos, sin), float32 [B, L, R/2] or [L, R/2], or a `halfbyte.kv_buffer.Rope`: apply rotary embedding to the first R
                elements of each key first; R is D in Llama
        q       [B, Hq, L, D], queries of the same tokens: rotated too, on a GPU in the same launch, and returned as a new tensor
        norms   `halfbyte.kv_buffer.HeadNorms`: RMSNorm of each head of q and k, before the rotation
        transform   calibrated keys (`halfbyte.tensors.KeyTransform`): of q and k, after the rotation

        Raises `CapacityError` when a sequence would outgrow the capacity, `InvalidArgument` for NaN, infinity or a wrong shape;
        the cache is then unchanged. On a GPU lengths are read only when the tokens counted on the host no longer fit, and a block
        with NaN or infinity becomes NaN. In CUDA graphs and compiled code, tokens beyond the capacity are not written.
        """
        call = AppendCall(
            k, v, self.keys, self.values, self.lengths, counts, self.page_table, self.rotate_keys,
            None if rope is None else rope_of(rope), q, self._measures, False, norms, transform,
        )  # fmt: skip
        signature = APPEND.signature(call)
        if signature is None or not signature.known:
            check_new(call)
        with self._changing():
            return self._append(call, signature)

    def _append(self, call: AppendCall, signature: Signature | None) -> torch.Tensor | None:
        """`append` of checked arguments; `PagedKVCache` allocates pages here."""
        self._check_capacity(call.k.shape[2], call.counts)
        certain = self._counted()
        rotated = store(call, signature)
        self._version = _version_of(self.lengths) if certain else None
        return rotated

    def _check_capacity(self, count: int, counts: torch.Tensor | None) -> None:
        """Raise `CapacityError` on a GPU, whose lengths are read only when the bound does not show that `count` more tokens fit."""
        if not self.lengths.is_cuda:
            return  # the op reads the lengths itself
        if torch.compiler.is_compiling():
            self.forget_length_bound()
            return
        if self._capturing():
            self._captured, self._counts_all = True, False
            return
        bound = None if self._captured else self._bound
        if bound is None or bound + count > self.capacity:
            new = torch.full_like(self.lengths, count) if counts is None else as_int32(counts)
            check_capacity(self.lengths, new, self.capacity)
            bound = int(self.lengths.max()) if self.batch else 0
        self._bound = bound + count

    def reset(self) -> None:
        """Remove all tokens. Measured per-tensor scales are measured again by the next append."""
        with self._changing():
            self.lengths.zero_()
            self._bound, self._version = (None, None) if self._capturing() else (0, _version_of(self.lengths))
            for buffer, scale in zip((self.keys, self.values), self._given, strict=True):
                if buffer.scales is not None and scale is not None:
                    buffer.scales.copy_(scale)
                if buffer.saturated is not None:
                    buffer.saturated.zero_()

    def crop(self, length: int | torch.Tensor) -> None:
        """Keep at most the first `length` tokens (one number, or an integer tensor [B]); shorter sequences are unchanged.

        Lossy within a finished block of per-channel keys: what is left of it is dequantized into the 16-bit tail, and quantized
        again with other tokens. So are tokens that become recent ones again.
        """
        if isinstance(length, torch.Tensor) and length.ndim == 1:
            check_tensor("length", length, (self.batch,), "integer", self.device)
            target = as_int32(length)
        else:
            number = length.item() if isinstance(length, torch.Tensor) and length.ndim == 0 else length
            count = integer("length", number, 0, 2**63, "a number of tokens to keep, 0 or more, or an integer tensor [B] of them")
            target = torch.full_like(self.lengths, min(count, 2**31 - 1))
        check(not bool((target < 0).any()), f"length={length}; expected 0 or more tokens to keep")
        with self._changing():
            left = torch.minimum(self.lengths, target)
            check(not bool((left > self.capacity).any()), f"lengths holds more than the capacity of {self.capacity}")
            for buffer in (self.keys, self.values):
                reopen(buffer, self.lengths, left, self.page_table)
            self.lengths.copy_(left)
            if self._bound is not None and not isinstance(length, torch.Tensor):
                self._bound = min(self._bound, int(length))

    def _capturing(self) -> bool:
        return self.lengths.is_cuda and torch.cuda.is_current_stream_capturing()

    def reorder(self, index: torch.Tensor) -> None:
        """Sequence b becomes what sequence index[b] was (beam search), in place. index: integer [B]."""
        index = self._index(index)
        check(index.shape[0] == self.batch, f"index has {index.shape[0]} entries; reorder needs {self.batch}; see select")
        self._check_owned("reorder")
        with self._changing():
            for t in (*self.keys.tensors(), *self.values.tensors(), self.lengths):
                if t is not None and (t.ndim > 1 or t is self.lengths):  # not a per-tensor scale
                    t.copy_(t[index])

    def select(self, index: torch.Tensor) -> KVCache:
        """A new cache whose sequence i is a copy of this one's index[i]."""
        index = self._index(index)
        self._check_owned("select")
        cache = copy.copy(self)
        with outside_inference_mode():
            cache.keys, cache.values = (buffer.select(index) for buffer in (self.keys, self.values))
            cache.lengths, cache._expanded = self.lengths[index], ""
        return cache

    def repeat_interleave(self, repeats: int) -> KVCache:
        """A new cache with every sequence `repeats` times in a row."""
        integer("repeats", repeats, 0, 2**31 - 1, "a number of copies, 0 or more")
        return self.select(torch.arange(self.batch, device=self.device).repeat_interleave(repeats))

    def grown(self, capacity: int) -> KVCache:
        """A new cache with room for `capacity` tokens (at least this one's) that holds the same codes."""
        check_sizes(capacity=capacity)
        self._check_owned("grown")
        dtype = torch.bfloat16 if self.keys.tail is None else self.keys.tail.dtype
        options: CacheOptions = {"keys": self.keys.format, "values": self.values.format, "value_dim": self.value_dim}
        options |= {"sink_tokens": self.keys.sink_tokens, "recent_tokens": self.keys.recent_tokens, "dtype": dtype}
        options |= {"rotate_keys": self.rotate_keys, "device": self.device}
        cache = KVCache(self.batch, self.kv_heads, self.head_dim, max(capacity, self.capacity), **options)
        for new, old in zip(cache.tensors(), self.tensors(), strict=True):
            new[tuple(slice(size) for size in old.shape)] = old
        cache._given, cache._measures = self._given, self._measures
        cache._bound = None if self._captured else self._bound
        return cache

    def dequantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys [B, H, T, D] and values [B, H, T, Dv] as float32, 0 beyond each length. For inspection, not for attention."""
        from halfbyte.reference.attention import read
        from halfbyte.reference.hadamard import rotate

        k, v = (read(buffer, self.lengths, self.page_table) for buffer in (self.keys, self.values))
        return (rotate(k) if self.rotate_keys else k).float(), v.float()

    # --------------------------------------------------------------------------------------------------------- details

    def _index(self, index: torch.Tensor) -> torch.Tensor:
        check_tensor("index", index, ("n",), "integer", self.device)
        index = index.long()
        inside = index.numel() == 0 or (int(index.min()) >= 0 and int(index.max()) < self.batch)
        check(inside, f"index names a sequence outside 0..{self.batch - 1}")
        return index

    def _changing(self) -> AbstractContextManager[object]:
        """The lock for changes of the cache, which is checked to be writable. Compiled code cannot hold a lock."""
        check(
            not self._expanded,
            f"{self._expanded} holds several elements in one place (a stride of 0), so the cache is read-only; give every "
            f"sequence memory of its own",
        )
        return nullcontext() if torch.compiler.is_compiling() else self._lock

    def _check_owned(self, what: str) -> None:
        if self.page_table is not None:
            raise InvalidArgument(f"{what}: the pages of this cache belong to an engine; change its page table instead")


def _version_of(lengths: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """A GPU's tensor and its version counter; None for a tensor of inference mode, which has none, and while compiling."""
    has_version = not torch.compiler.is_compiling() and lengths.is_cuda and not lengths.is_inference()
    return (lengths, lengths._version) if has_version else None


def _scale_of_tensor(buffer: KVBuffer) -> torch.Tensor | None:
    """A copy of a per-tensor scale, restored by `reset`: 0 if it is yet to be measured. None for other formats."""
    return buffer.scales.clone() if buffer.scales is not None and buffer.format.granularity == "tensor" else None
