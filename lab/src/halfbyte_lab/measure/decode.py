"""`halfbyte bench decode`: attention of one new token over a cache, low-bit formats compared with torch's own in 16 bits."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import halfbyte
from halfbyte.errors import check
from halfbyte.formats import Format, key_format, value_format
from halfbyte.plans import plan
from halfbyte_lab.measure.checks import Accuracy, eager_attention, float64_attention, timed_attention_accuracy
from halfbyte_lab.measure.session import Candidate, Case, Session

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DecodeShape:
    """A decode step: q [batch, q_heads, 1, dim] over a cache [batch, kv_heads, context, dim]."""

    batch: int = 1
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    context: int = 8192

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check(value > 0, f"{name}={value}; it must be above 0")
        check(self.q_heads % self.kv_heads == 0, f"q_heads={self.q_heads} is not a multiple of kv_heads={self.kv_heads}")

    def __str__(self) -> str:
        return f"B{self.batch} H{self.q_heads}/{self.kv_heads} D{self.dim} T{self.context}"

    @property
    def sizes(self) -> dict[str, int]:
        """The shape as a record keeps it."""
        return {"B": self.batch, "Hq": self.q_heads, "H": self.kv_heads, "D": self.dim, "T": self.context}


#: The first is the target of the foundation: 8,192 tokens of a Llama-3-8B layer on two CPU threads.
DEFAULT_SHAPES = (DecodeShape(), DecodeShape(context=1024), DecodeShape(batch=4, context=2048))
QUICK_SHAPES = DEFAULT_SHAPES[:1]
DEFAULT_FORMATS = ("int8", "int4_g32", "int8+int4_g32")


def parse_formats(text: str) -> tuple[Format, Format]:
    """ "int8" for keys and values alike, or "int8+int4_g32" for keys and values."""
    keys, _, values = text.partition("+")
    return key_format(keys, "formats"), value_format(values or keys, "formats")


def cases(
    session: Session, shapes: Sequence[DecodeShape] = (), formats: Sequence[str] = (), impls: Sequence[str] = ()
) -> list[Case]:
    """One case for each shape; its candidates are made when it is measured. What is not chosen is that of the default cases."""
    shapes = shapes or (QUICK_SHAPES if session.options.quick else DEFAULT_SHAPES)
    formats = formats or DEFAULT_FORMATS
    for text in formats:
        parse_formats(text)
    impls = impls or (("cpu",) if session.device.kind == "cpu" else ("auto",))
    for impl in impls:
        plan("decode_attention", impl, session.device.kind)

    def build(shape: DecodeShape) -> Case:
        return Case("decode_attention", str(shape), shape.sizes, lambda: candidates(session, shape, formats, impls))

    return [build(shape) for shape in shapes]


def candidates(session: Session, shape: DecodeShape, formats: Sequence[str], impls: Sequence[str]) -> list[Candidate]:
    """torch's attention in bf16 in each way there is, then each format with each implementation."""
    q, k, v = inputs(shape, session.device.torch)
    return _peers(session, q, k, v) + [_ours(session, q, k, v, pair, impl) for pair, impl in itertools.product(formats, impls)]


def inputs(shape: DecodeShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v in bf16, random normal, the same every time."""
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, tokens: int) -> torch.Tensor:
        x = torch.randn(shape.batch, heads, tokens, shape.dim, generator=generator)
        return x.bfloat16().to(device)

    # Four times larger queries see a few keys rather than the mean of all, so the output is far above the promise's slack.
    return 4 * random(shape.q_heads, 1), random(shape.kv_heads, shape.context), random(shape.kv_heads, shape.context)


def _ours(session: Session, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pair: str, impl: str) -> Candidate:
    """halfbyte on caches that hold the same tokens; judged against float64 over what those caches hold after quantization."""
    keys, values = parse_formats(pair)
    cache = halfbyte.KVCache(
        k.shape[0],
        k.shape[1],
        k.shape[3],
        k.shape[2],
        keys=keys.name,
        values=values.name,
        dtype=q.dtype,
        device=q.device,
    )
    cache.append(k, v)
    nbytes = round(k.shape[0] * k.shape[2] * cache.bytes_per_token) + 2 * q.nbytes  # not a 16-bit tail, of which nothing is read
    rotation = [cache, *(copy.deepcopy(cache) for _ in range(session.copies(nbytes) - 1))]
    fns = [partial(attend, q, cache, impl) for cache in rotation]
    return Candidate(f"halfbyte {impl}", pair, nbytes, fns, _judge(q, *cache.dequantized()))


def attend(q: torch.Tensor, cache: halfbyte.KVCache, impl: str) -> torch.Tensor:
    """`halfbyte.decode_attention`, its output alone; over latents (MLA) where queries have more dims than cached keys."""
    latent = q.shape[-1] > cache.head_dim
    out = halfbyte.decode_attention(q, cache, impl=impl, latent=latent, sm_scale=q.shape[-1] ** -0.5)
    assert isinstance(out, torch.Tensor)  # the pair with lse comes only on request
    return out


def _peers(session: Session, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Candidate]:
    nbytes = k.nbytes + v.nbytes + 2 * q.nbytes
    rotation = [(k, v), *((k.clone(), v.clone()) for _ in range(session.copies(nbytes) - 1))]
    judge = _judge(q, k, v)

    def candidate(name: str, attend: Attend) -> Candidate:
        return Candidate(name, "bf16", nbytes, [partial(attend, q, *kv) for kv in rotation], judge)

    variants = sdpa_variants(session.device.kind, q.shape[1] > k.shape[1])
    return [candidate(name, attend) for name, attend in variants.items()]


def sdpa_variants(kind: str, groups: bool, bias: torch.Tensor | None = None) -> dict[str, Attend]:
    """torch's attention: with grouped heads as torch does them, and with the query heads of one KV head folded into query rows.

    For one new token the two mean the same; the second reads each key once, and is what a careful user would write. Without groups
    they are the same. On a GPU cuDNN and flash are requested by name, as which of them torch picks is not always the faster.
    bias: added to the scores, [1, H, Hq / H, T]; heads are folded then, and in place of flash, which takes none, efficient runs.
    """
    if bias is not None:
        ways: dict[str, Attend] = {", folded heads, bias": partial(_folded, bias=bias)}
    else:
        ways = {"": _grouped, ", folded heads": _folded} if groups else {"": _grouped}
    if kind != "cuda":
        return {f"torch sdpa{how}": attend for how, attend in ways.items()}
    second = ("flash", SDPBackend.FLASH_ATTENTION) if bias is None else ("efficient", SDPBackend.EFFICIENT_ATTENTION)
    backends = dict([("cudnn", SDPBackend.CUDNN_ATTENTION), second])
    return {f"torch sdpa {name}{how}": _pinned(b, attend) for name, b in backends.items() for how, attend in ways.items()}


def _grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] > k.shape[1])


def _folded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    mask = None if bias is None else bias.expand(len(q), -1, -1, -1)
    return F.scaled_dot_product_attention(rows, k, v, mask).reshape(q.shape)


def _pinned(backend: SDPBackend, attend: Attend) -> Attend:
    def pinned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return attend(q, k, v)

    return pinned


def _judge(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[torch.Tensor], Accuracy]:
    """The promise over keys and values as a cache holds them; the reference is computed once, when it is first needed."""
    scale = q.shape[-1] ** -0.5
    references: list[tuple[torch.Tensor, torch.Tensor]] = []

    def judge(out: torch.Tensor) -> Accuracy:
        if not references:
            references.append((eager_attention(q, k, v, scale), float64_attention(q, k, v, scale)))
        return timed_attention_accuracy(out, *references[0])

    return judge
