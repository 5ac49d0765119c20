"""A tensor-parallel rank of Llama 2 70B: its share of a layer's weights, one decode step through it, what it holds.

Weights are random. q, k, v and o are in bf16; the feed-forward is in FP8 (E4M3, one scale a tensor, activations cast without one)
through torch's scaled product where `Model.fp8` says so, else in bf16. A rank runs by itself, without an all-reduce, or sums the
partial results of o and down over all ranks.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.spawn import ProcessException, spawn

from halfbyte.cache import KVCache
from halfbyte.device import Device, describe
from halfbyte.ops.all_reduce import AllReduce
from halfbyte.ops.block import add_norm
from halfbyte.reference.block import Norm
from halfbyte.reference.rope import rope_tables
from halfbyte_lab.measure.caches import DecodeCase, Inputs, Rotation, fill
from halfbyte_lab.measure.checks import BenchmarkRefused
from halfbyte_lab.measure.decode import Attend as Attention
from halfbyte_lab.measure.decode import DecodeShape, attend, parse_formats, sdpa_variants
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Session, reason

T = TypeVar("T")


def first_of_ranks(work: Callable[[Device], Iterable[T]], ranks: int, kind: str) -> Iterator[T]:
    """What `work` gives on the first of so many ranks, as it comes; `kind` of device: "cuda" or "cpu".

    All ranks run `work`, a picklable function of the rank's device, in a process group. Raises `BenchmarkRefused` with the error of
    a rank that fails, which ends the others.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    running = spawn(_rank, (work, ranks, kind, port, queue), nprocs=ranks, join=False)
    done, failure = False, None
    try:
        while not done:
            try:
                done = running.join(timeout=0.05)
            except ProcessException as error:
                done, failure = True, error
            while not queue.empty():
                yield queue.get()
        if failure is not None:
            raise BenchmarkRefused(f"{ranks} ranks: {str(failure).strip().splitlines()[-1]}") from failure
    finally:
        for process in running.processes:
            process.kill()  # those that still run when nobody asks for more


def _rank(rank: int, work: Callable[[Device], Iterable[object]], ranks: int, kind: str, port: int, sent: Any) -> None:
    """Work as one of the ranks; the first sends what it has."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=ranks)
    try:
        for item in work(describe(f"cuda:{rank}" if kind == "cuda" else "cpu")):
            if rank == 0:
                sent.put(item)
    except Exception:
        threading.Timer(1.0, os._exit, (1,)).start()  # a GPU that waits for other ranks would keep this process for ever
        raise
    gc.collect()  # a graph that holds collectives would be waited for
    dist.destroy_process_group()


#: "per head" and "in groups of 32": the published row-wise scales and four groups of 128 numbers.
FORMATS = ("int4", "int4_g32")
PLAIN, NOT_HELD = "bf16", "does not fit"
#: Attention of the queries [B, Hq, 1, D] over one layer's cache, [B, Hq, 1, D].
Attend = Callable[[torch.Tensor, KVCache], torch.Tensor]


@dataclass(frozen=True)
class Rank:
    """Sizes of what one rank holds: its heads, its columns of the feed-forward, its part of the vocabulary."""

    hidden: int
    q_heads: int
    kv_heads: int
    dim: int
    ffn: int
    layers: int
    vocabulary: int

    def shared(self, ranks: int) -> Rank:
        """What each of so many ranks holds of this. Raises `BenchmarkRefused` for a size that they cannot share."""
        sizes = {name: getattr(self, name) for name in ("q_heads", "kv_heads", "ffn", "vocabulary")}
        for name, size in sizes.items():
            if size % ranks:
                raise BenchmarkRefused(f"{ranks} ranks cannot share {name}={size}")
        return replace(self, **{name: size // ranks for name, size in sizes.items()})

    @property
    def qkv(self) -> int:
        """Rows of the fused projection of q, k and v."""
        return (self.q_heads + 2 * self.kv_heads) * self.dim

    @property
    def head_bytes(self) -> int:
        """Bytes of the output head, or of the embedding, in bf16."""
        return 2 * self.vocabulary * self.hidden

    def shape(self, batch: int, context: int) -> DecodeShape:
        """The attention of one layer."""
        return DecodeShape(batch, self.q_heads, self.kv_heads, self.dim, context)

    def layer_bytes(self, fp8: bool) -> int:
        """Bytes of one layer's weights."""
        attention = self.hidden * (self.qkv + self.q_heads * self.dim)
        return 2 * attention + (1 if fp8 else 2) * 3 * self.hidden * self.ffn

    def cache_bytes(self, batch: int, context: int, formats: str) -> int:
        """Bytes of one layer's cache."""
        shape = (batch, self.kv_heads, context, self.dim)
        return sum(f.nbytes(shape) for f in parse_formats(formats))

    def step_bytes(self, batch: int, context: int, formats: str, fp8: bool) -> int:
        """Bytes that a step reads at least: all layers' weights and caches, and the output head."""
        layers = self.layers * (self.layer_bytes(fp8) + self.cache_bytes(batch, context, formats))
        return layers + self.head_bytes

    def held_bytes(self, batch: int, context: int, formats: str, fp8: bool) -> int:
        """Bytes in memory: what a step reads, and the embedding. Activations and what CUDA takes for itself come on top."""
        return self.step_bytes(batch, context, formats, fp8) + self.head_bytes


#: The whole model, and one of the eight ranks of the published figure.
LLAMA_2_70B = Rank(hidden=8192, q_heads=64, kv_heads=8, dim=128, ffn=28672, layers=80, vocabulary=32000)
ONE_OF_EIGHT = LLAMA_2_70B.shared(8)


@dataclass(frozen=True)
class Entry:
    """One way to run a step: which attention over caches in which format."""

    implementation: str
    formats: str
    attend: Attend


def entries(kind: str, formats: Sequence[str] = (PLAIN, *FORMATS)) -> list[Entry]:
    """torch's attention over a BF16 cache, which on a GPU reads a key once for all query heads; then ours over other formats."""

    def over(way: Attention) -> Attend:
        return lambda q, cache: way(q, cache.keys.codes, cache.values.codes)

    peers = [Entry(name, PLAIN, over(way)) for name, way in sdpa_variants(kind, groups=kind == "cpu").items()]
    ours = [Entry("halfbyte auto", name, partial(attend, impl="auto")) for name in formats if name != PLAIN]
    return (peers if PLAIN in formats else []) + ours


@dataclass(frozen=True)
class Product:
    """y = x w^T for a weight [N, K], in bf16, or in FP8 with the scales of x and of the weight."""

    weight: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.scales is None:
            return F.linear(x, self.weight)
        x8 = x.to(self.weight.dtype)
        return torch._scaled_mm(x8, self.weight.t(), *self.scales, out_dtype=torch.bfloat16, use_fast_accum=True)


@dataclass(frozen=True)
class RankLayer:
    """The rank's part of one layer."""

    qkv: Product
    o: Product
    up: Product
    down: Product


class Model:
    """Random weights of `count` layers and of `heads` output heads to rotate over, made when they are first needed."""

    def __init__(self, rank: Rank, device: Device, count: int, heads: int = 1, seed: int = 0) -> None:
        self.rank, self.count, self._heads, self._device, self._seed = rank, count, heads, device.torch, seed
        #: Whether the feed-forward is in FP8: on GPUs that multiply it.
        self.fp8 = device.kind == "cuda" and (device.capability or (0, 0)) >= (8, 9)

    @property
    def feed_forward(self) -> str:
        """Its type, as a record says it."""
        return "FP8" if self.fp8 else "bf16"

    @cached_property
    def _generator(self) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(self._seed)

    def _normal(self, n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k, generator=self._generator, device=self._device, dtype=torch.bfloat16)

    def _product(self, n: int, k: int, fp8: bool = False) -> Product:
        """A weight whose products are about as large as what they multiply."""
        weight = self._normal(n, k)
        if not fp8:
            return Product(weight.mul_(k**-0.5))
        return Product(
            weight.to(torch.float8_e4m3fn), (torch.ones((), device=self._device), torch.tensor(k**-0.5, device=self._device))
        )

    def make(self) -> None:
        """Make the weights now."""
        _ = self.layers, self.heads

    @cached_property
    def layers(self) -> list[RankLayer]:
        """The layers, all different."""
        return [self._layer() for _ in range(self.count)]

    def _layer(self) -> RankLayer:
        r = self.rank
        qkv = self._product(r.qkv, r.hidden)
        # Four times larger queries see a few keys rather than the mean of all, as in the other benchmarks of attention.
        qkv.weight[: r.q_heads * r.dim].mul_(4)
        up, down = self._product(2 * r.ffn, r.hidden, self.fp8), self._product(r.hidden, r.ffn, self.fp8)
        return RankLayer(qkv, self._product(r.hidden, r.q_heads * r.dim), up, down)

    @cached_property
    def heads(self) -> list[Product]:
        """From hidden states to the rank's part of the logits; all the same, so that each is cold when its turn comes again."""
        first = self._product(self.rank.vocabulary, self.rank.hidden)
        return [first, *(Product(first.weight.clone()) for _ in range(self._heads - 1))]

    def inputs(self, batch: int) -> torch.Tensor:
        """Hidden states in front of the first layer, [batch, hidden]."""
        return torch.randn(batch, self.rank.hidden, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(
            self._device, torch.bfloat16
        )


@dataclass(frozen=True)
class StepCase:
    """A batch and a context of one model, as a record names them."""

    model: Model
    batch: int
    context: int
    op: str
    name: str

    def blank(self, session: Session, entry: Entry, share: float = 1.0) -> Record:
        """The record without a time; refused already where all layers do not fit into this share of the memory."""
        rank, fp8 = self.model.rank, self.model.fp8
        nbytes = rank.step_bytes(self.batch, self.context, entry.formats, fp8)
        total, memory = rank.held_bytes(self.batch, self.context, entry.formats, fp8), share * session.device.memory_bytes
        sizes = rank.shape(self.batch, self.context).sizes
        record = Record(self.op, sizes, entry.formats, entry.implementation, nbytes, session.environment, case=self.name)
        if session.device.kind != "cuda" or total <= memory:
            return record
        why = f"{NOT_HELD}: {rank.layers} layers take {total / 1e9:.1f} GB of {memory / 1e9:.1f}"
        return replace(record, refused=f"{self.name} {entry.formats}: {why}")

    def refused(self, record: Record, error: Exception) -> Record:
        """The record with the reason why it has no time."""
        why = f"{NOT_HELD}: out of memory" if isinstance(error, torch.OutOfMemoryError) else reason(error)
        return replace(record, refused=f"{self.name} {record.formats} {record.implementation}: {why}")

    def filled(self, formats: str, device: torch.device) -> Rotation:
        """A cache for each layer."""
        inputs = Inputs.random(DecodeCase(self.name, self.model.rank.shape(self.batch, self.context)), device)
        return Rotation(fill(inputs, formats), inputs, self.model.count)


#: Hidden states [B, hidden], and their RMSNorm where the launch that made them made it, too.
State = tuple[torch.Tensor, torch.Tensor | None]


class Made(NamedTuple):
    """What a whole step gives: of each layer the queries and what attention gave [B, Hq, 1, D]; the hidden states; the logits."""

    attention: list[tuple[torch.Tensor, torch.Tensor]]
    hidden: torch.Tensor
    logits: torch.Tensor


class Step:
    """One decode step: a token of every sequence through the layers, each over its own cache of `context - 1` tokens.

    reduce: sums partial results of o and down over the ranks; None: the rank runs by itself
    """

    def __init__(
        self, model: Model, caches: Sequence[KVCache], context: int, attend: Attend, reduce: AllReduce | None = None
    ) -> None:
        self._model, self.caches, self._attend, self._reduce = model, caches, attend, reduce
        self._start: State = (model.inputs(caches[0].batch), None)
        self._state: State = self._start
        start = self._start[0]
        self._norm = Norm(torch.ones_like(start[0]), 1e-5, "rounded")
        self._rope = rope_tables(torch.tensor([context - 1], device=start.device), model.rank.dim)

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer i, from the hidden states of the layer before it; the queries and what attention gave, both [B, Hq, 1, D]."""
        rank, layer, cache = self._model.rank, self._model.layers[i], self.caches[i]
        state = self._state if i else self._start
        heads = layer.qkv(_normed(state)).unflatten(-1, (-1, rank.dim)).unsqueeze(2)
        q, k, v = heads.split((rank.q_heads, rank.kv_heads, rank.kv_heads), 1)
        q = cache.append(k, v, rope=self._rope, q=q)
        out = self._attend(q, cache)
        state = self._added(state, layer.o(out.flatten(1)))
        gate, up = layer.up(_normed(state)).chunk(2, -1)
        self._state = self._added(state, layer.down(F.silu(gate) * up))
        return q, out

    def _added(self, state: State, part: torch.Tensor) -> State:
        """The hidden states with what a branch adds to them."""
        if self._reduce is None:
            return state[0] + part, None
        return add_norm(part, state[0], self._norm, all_reduce=self._reduce)

    def logits(self, i: int) -> torch.Tensor:
        """The rank's part of the logits by output head i, from the hidden states of the last layer that ran."""
        return self._model.heads[i](_normed(self._state))

    def whole(self) -> Made:
        """All layers and an output head."""
        attention = [self.layer(i) for i in range(self._model.count)]
        return Made(attention, self._state[0], self.logits(0))


def _normed(state: State) -> torch.Tensor:
    x, norm = state
    return F.rms_norm(x, x.shape[-1:], eps=1e-5) if norm is None else norm
