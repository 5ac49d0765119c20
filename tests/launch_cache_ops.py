"""The ops of the launch cache as one suite sees them: calls, what else would be another call, and what is never stored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from halfbyte import KV_FORMATS, WEIGHT_FORMATS, KVCache, PagedKVCache, QuantTensor, decode_attention, linear, qkv_projection
from halfbyte.kv_buffer import AppendCall, AttentionOptions, DecodeCall, KVBuffer, new_kv_buffer
from halfbyte.ops import append as append_op
from halfbyte.ops import decode_attention as attention_op
from halfbyte.ops._linear_call import LinearCall
from halfbyte.ops.launch_cache import Signature
from halfbyte.tensors import expected_parts
from pretended_gpu import cuda_tensors

Arguments = dict[str, Any]
#: Arguments, made anew by each call of it: at addresses of their own.
Given = Callable[[], Arguments]
#: A call, or arguments, that differ in one thing.
Change = Callable[[Any], Any]


class Watched(torch.Tensor):
    """A subclass, which wants to see what is done with it."""


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """The same shape and strides, one element behind an address that is a multiple of 16."""
    made = t.new_zeros(t.untyped_storage().nbytes() // t.element_size() + 1)[1:].as_strided(t.shape, t.stride())
    assert made.data_ptr() % 16
    return made


def spread(t: torch.Tensor) -> torch.Tensor:
    """The same shape with twice the strides."""
    return t.new_zeros(2 * t.untyped_storage().nbytes()).as_strided(t.shape, [2 * s for s in t.stride()])


_OTHER_TYPE = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16, torch.float32: torch.float64}
#: Each makes a tensor of other facts.
FACTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "misaligned": misaligned,
    "strides": spread,
    "shape": lambda t: t.new_zeros(t.shape[0] + 1, *t.shape[1:]),
    "dtype": lambda t: t.to(_OTHER_TYPE.get(t.dtype, torch.int16)),
}


def at(owner: Any, path: str) -> Any:
    """What is at a path of names and positions, such as "keys.codes" or "biases.0"."""
    for name in path.split("."):
        owner = owner[name] if isinstance(owner, dict) else owner[int(name)] if name.isdigit() else getattr(owner, name)
    return owner


def changed(path: str, change: Callable[[Any], Any]) -> Change:
    """Copies a call or arguments with something else at a path. Nothing is checked."""
    name, _, rest = path.partition(".")
    inner = changed(rest, change) if rest else change

    def copied(owner: Any) -> Any:
        if name.isdigit():
            return tuple(inner(item) if i == int(name) else item for i, item in enumerate(owner))
        value = inner(at(owner, name))
        if isinstance(owner, dict):
            return {**owner, name: value}
        if isinstance(owner, tuple):
            return owner._replace(**{name: value})  # type: ignore[attr-defined]
        made = copy.copy(owner)
        made.__dict__[name] = value
        return made

    return copied


def to(path: str, value: Any) -> Change:
    return changed(path, lambda _: value)


@dataclass(frozen=True)
class Op:
    """Paths: of `full()` where they are of tensors. Given arguments are added to those of `plain`, or of `right` where they are bad.

    run        the public function; returns its results, None where there are none
    plain      the fewest arguments of a call that is stored
    right      a stored call with every option that `bad` spoils
    results    shape and dtype of each result of a call
    first      the argument on whose device the kernel is launched
    gradients  arguments that may want one; `refuses`: such a call raises
    full       a call with every tensor there is
    optional   of `tensors`, those that may be missing
    others     calls of another signature, in what is no fact of a tensor
    same       calls of the same signature
    never      calls that have no signature
    options    calls that are stored
    aliased    calls that are stored, and give one tensor twice
    unstored   calls that convert a tensor, or take more than one launch of a tuned kernel
    """

    run: Callable[..., Sequence[torch.Tensor]]
    plain: Given
    right: Given
    results: Callable[[Arguments], list[tuple[Sequence[int], torch.dtype]]]
    first: str
    gradients: tuple[str, ...]
    full: Callable[[], Any]
    find: Callable[[Any], Signature | None]
    tensors: tuple[str, ...]
    optional: tuple[str, ...]
    others: dict[str, Change]
    same: dict[str, Change]
    never: dict[str, Change]
    options: dict[str, Given]
    aliased: dict[str, Given]
    unstored: dict[str, Given]
    bad: dict[str, tuple[Given, str]]
    refuses: bool = False
    workspace: bool = True

    def signature(self, call: Any) -> Signature | None:
        with cuda_tensors(True):
            return self.find(call)

    def key(self, call: Any) -> Any:
        found = self.signature(call)
        assert found is not None
        return found.key


def paths(**names: str) -> tuple[str, ...]:
    """Of the tensors of each part of a call; `call`: of the call itself."""
    return tuple(name if part == "call" else f"{part}.{name}" for part, found in names.items() for name in found.split())


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).bfloat16()


def buffer(fmt: str) -> KVBuffer:
    """Eight pages of 16 tokens."""
    return new_kv_buffer(KV_FORMATS[fmt], (8, 2, 16, 64), (2, 2, 1, 64), torch.bfloat16, "cpu")


def cache(capacity: int = 64, paged: bool = False, keys: str = "int8") -> KVCache:
    with cuda_tensors(False):
        if paged:
            return PagedKVCache(2, 2, 64, capacity, pages=8, page_size=16, keys=keys)
        return KVCache(2, 2, 64, capacity, keys=keys)


# ------------------------------------------------------------------------------------------------------------ attention


def query(tokens: int = 1) -> torch.Tensor:
    return bf16(2, 8, tokens, 64)


def with_gaps() -> KVCache:
    """A cache whose lengths are not neighbours."""
    made = cache()
    made.lengths = ints(4)[::2]
    return made


def attended() -> DecodeCall:
    keys = replace(buffer("int8"), tail=bf16(2, 2, 32, 64))
    options = AttentionOptions(0.5, 30.0, torch.zeros(8), 20, ints(2), ints(2), torch.zeros(8))
    return DecodeCall(query(), keys, buffer("int4_g32"), ints(2), ints(2), ints(2, 4), options)


def plain_attention() -> Arguments:
    return {"q": query(), "cache": cache()}


ATTENTION = Op(
    run=lambda **given: decode_attention(**given, return_lse=True),
    plain=plain_attention,
    right=lambda: {
        **plain_attention(),
        "alibi_slopes": torch.rand(8),
        "sinks": torch.rand(8),
        "starts": ints(2),
        "query_start": ints(2),
        "window": 1,
        "softcap": 3.0,
        "sm_scale": 1.0,
    },
    results=lambda given: [(given["q"].shape, given["q"].dtype), (given["q"].shape[:3], torch.float32)],
    first="q",
    gradients=("q",),
    full=attended,
    find=attention_op._signature,
    tensors=paths(
        call="q lengths query_start page_table",
        keys="codes scales tail",
        values="codes scales offsets",
        options="starts ends alibi_slopes sinks",
    ),
    optional=paths(call="query_start page_table", keys="tail", values="offsets", options="starts ends alibi_slopes sinks"),
    others={
        "format of the keys": to("keys.format", KV_FORMATS["fp8"]),
        "format of the values": to("values.format", KV_FORMATS["int4"]),
        "a format of the same name": changed("keys.format", replace),
        "no window": to("options.window", None),
        "no softcap": to("options.softcap", None),
        "starts and ends swapped for one": lambda c: to("options.ends", None)(to("options.starts", ints(3))(c)),
        "impl": to("impl", "gluon"),
    },
    same={
        "sm_scale": to("options.sm_scale", 0.25),
        "softcap": to("options.softcap", 1.0),
        "window": to("options.window", 7),
        "sinks that could be trained": changed("options.sinks", torch.nn.Parameter),
    },
    never={
        "rotated keys": to("options.rotate_keys", True),
        "deterministic": to("deterministic_batch", True),
        "the portable kernel": to("impl", "triton"),
        "impl a list": to("impl", ["auto"]),
        "starts a list": to("options.starts", [0, 0]),
        "page_table a string": to("page_table", "abc"),
    },
    options={
        "plain": dict,
        "numbers": lambda: {"sm_scale": 0.3, "window": 9, "softcap": 20.0},
        "heads": lambda: {"alibi_slopes": torch.rand(8), "sinks": torch.rand(8)},
        "places": lambda: {"starts": ints(2) + 1, "query_start": ints(2) + 30},
        "gluon": lambda: {"impl": "gluon"},
        "a tail": lambda: {"cache": cache(keys="int4_channel")},
        "pages": lambda: {"cache": cache(paged=True)},
    },
    aliased={"starts for query_start": lambda: dict.fromkeys(("starts", "query_start"), ints(2))},
    unstored={
        "starts of 64 bits": lambda: {"starts": torch.zeros(2).long()},
        "query_start of 64 bits": lambda: {"query_start": torch.zeros(2).long()},
        "slopes of 16 bits": lambda: {"alibi_slopes": torch.rand(8).half()},
        "sinks not contiguous": lambda: {"sinks": torch.rand(16)[::2]},
        "lengths not contiguous": lambda: {"cache": with_gaps()},
        "deterministic": lambda: {"deterministic_batch": True},
    },
    bad={
        "q of another batch": (lambda: {"q": query()[:1]}, "q has shape"),
        "q of three axes": (lambda: {"q": query()[0]}, "q has shape"),
        "q of no head": (lambda: {"q": query()[:, :0]}, "q has 0 heads"),
        "q of heads that do not divide": (lambda: {"q": query()[:, :7].contiguous()}, "q has 7 heads"),
        "q of integers": (lambda: {"q": query().to(torch.int16)}, "q is"),
        "q a list": (lambda: {"q": [1.0]}, "q is a list"),
        "no cache": (lambda: {"cache": {}}, "cache is a dict"),
        "window 0": (lambda: {"window": 0}, "window=0"),
        "window True": (lambda: {"window": True}, "window=True"),
        "window 3.0": (lambda: {"window": 3.0}, "window=3.0"),
        "softcap 0": (lambda: {"softcap": 0.0}, "softcap=0"),
        "softcap NaN": (lambda: {"softcap": float("nan")}, "softcap=nan"),
        "sm_scale infinite": (lambda: {"sm_scale": float("inf")}, "sm_scale=inf"),
        "sm_scale a string": (lambda: {"sm_scale": "1"}, "sm_scale='1'"),
        "slopes too many": (lambda: {"alibi_slopes": torch.rand(9)}, "alibi_slopes has shape"),
        "slopes a list": (lambda: {"alibi_slopes": [0.0] * 8}, "alibi_slopes is a list"),
        "sinks of integers": (lambda: {"sinks": ints(8)}, "sinks is"),
        "starts floating": (lambda: {"starts": torch.zeros(2)}, "starts is"),
        "query_start of another batch": (lambda: {"query_start": ints(3)}, "query_start has shape"),
    },
)


# --------------------------------------------------------------------------------------------------------------- append


def token(tokens: int = 1, heads: int = 2) -> torch.Tensor:
    return bf16(2, heads, tokens, 64)


def run_append(cache: KVCache, **given: Any) -> Sequence[torch.Tensor]:
    rotated = cache.append(**given)
    return [] if rotated is None else [rotated]


def appended() -> AppendCall:
    where = (buffer("int8_tensor"), buffer("int4_g32"), ints(2), ints(2), ints(2, 4))
    rope = torch.zeros(1, 32), torch.zeros(1, 32)
    return AppendCall(token(), token(), *where, rotate_keys=False, rope=rope, q=token(heads=8), measure=False)


def plain_append() -> Arguments:
    return {"cache": cache(), "k": token(), "v": token()}


def rotation() -> Arguments:
    return {"rope": (torch.rand(2, 1, 32), torch.rand(2, 1, 32)), "q": token(heads=8)}


def same_token() -> Arguments:
    k = token()
    return {"k": k, "v": k}


APPEND = Op(
    run=run_append,
    plain=plain_append,
    right=lambda: {**plain_append(), "counts": ints(2) + 1, **rotation()},
    results=lambda given: [(given["q"].shape, given["q"].dtype)] if "q" in given else [],
    first="k",
    gradients=("q",),
    full=appended,
    find=append_op.signature_of,
    tensors=paths(call="k v lengths counts page_table q", keys="codes scales saturated", values="codes scales offsets", rope="0 1"),
    optional=paths(call="counts page_table q"),
    others={
        "no rope": to("rope", None),
        "format of the keys": to("keys.format", KV_FORMATS["fp8_tensor"]),
        "a format of the same name": changed("values.format", replace),
        "rotated keys": to("rotate_keys", True),
    },
    same={},
    never={
        "a tail": to("keys.tail", torch.zeros(1)),
        "a scale to measure": to("measure", True),
        "rope a list": changed("rope", list),
        "rope of three": changed("rope", lambda rope: (*rope, rope[0])),
        "no cosines": to("rope.0", None),
        "q that wants a gradient": changed("q", lambda q: q.float().requires_grad_()),
        "counts a list": to("counts", [1, 1]),
    },
    options={
        "plain": dict,
        "counts": lambda: {"counts": torch.tensor([1, 0]).int()},
        "rope": lambda: {"rope": (torch.rand(1, 32), torch.rand(1, 32))},
        "queries": rotation,
        "pages": lambda: {"cache": cache(paged=True)},
    },
    aliased={"k for v": same_token, "cosines for sines": lambda: {"rope": (torch.rand(2, 1, 32),) * 2}},
    unstored={
        "a scale to measure": lambda: {"cache": cache(keys="int8_tensor")},
        "per-channel keys": lambda: {"cache": cache(keys="int4_channel")},
        "more tokens than one program takes": lambda: {"k": token(48), "v": token(48)},
        "counts of 64 bits": lambda: {"counts": torch.ones(2).long()},
        "rope not contiguous": lambda: {"rope": (torch.rand(1, 64)[:, ::2],) * 2},
    },
    bad={
        "k of another batch": (lambda: {"k": token()[:1]}, "k has shape"),
        "v of three axes": (lambda: {"v": token()[0]}, "v has shape"),
        "k a list": (lambda: {"k": [1.0]}, "k is a list"),
        "v of integers": (lambda: {"v": token().to(torch.int16)}, "v is"),
        "more tokens of k": (lambda: {"k": token(2)}, "k has 2 tokens"),
        "counts too many": (lambda: {"counts": ints(3)}, "counts has shape"),
        "a rope of one": (lambda: {"rope": (torch.rand(1, 32),)}, "rope is"),
        "a rope in fp64": (lambda: {"rope": (torch.rand(1, 32).double(),) * 2}, "rope"),
        "q of another batch": (lambda: {"q": token(heads=8)[:1]}, "q has shape"),
    },
    refuses=True,
    workspace=False,
)


# -------------------------------------------------------------------------------------------------- linear, projections


def weight(fmt: str = "int4_g64", n: int = 64, k: int = 1024) -> QuantTensor:
    parts = expected_parts(WEIGHT_FORMATS[fmt], (n, k))
    return QuantTensor(WEIGHT_FORMATS[fmt], (n, k), **{name: torch.zeros(*of, dtype=d) for name, (of, d) in parts.items()})


def rows() -> torch.Tensor:
    return bf16(4, 1024)


def multiplied(*formats: str) -> LinearCall:
    return LinearCall(rows(), tuple(map(weight, formats)), tuple(bf16(64) for _ in formats))


#: Formats, shapes of x, and whether there is a bias: of one launch, but for the last, whose x is ordered by one ahead.
SHAPES: dict[str, tuple[str, tuple[int, ...], bool]] = {
    "one row": ("int4_sym_g128", (1, 1024), False),
    "a batch of rows, zero points and a bias": ("int4_g64", (2, 4, 1024), True),
    "a tensor scale": ("nvfp4", (16, 1024), False),
    "warp groups": ("int4_sym_g128", (2, 20, 1024), True),
}


def single(fmt: str, shape: tuple[int, ...], biased: bool) -> Given:
    return lambda: {"x": bf16(*shape), "weight": weight(fmt, 96), "bias": bf16(96) if biased else None}


def fused(fmt: str, shape: tuple[int, ...], biased: bool) -> Given:
    sizes = (96, 32, 32)
    return lambda: {
        "x": bf16(*shape),
        "weights": tuple(weight(fmt, n) for n in sizes),
        "biases": tuple(bf16(n) if biased else None for n in sizes),
    }


def three(make: Callable[[], Any]) -> tuple[Any, Any, Any]:
    return make(), make(), make()


#: Of both ops.
LINEAR_OTHERS: dict[str, Change] = {
    "another format": to("weights.0.format", WEIGHT_FORMATS["int4_g32"]),
    "a format of the same name": changed("weights.0.format", replace),
    "impl": to("impl", "gluon"),
}
LINEAR_NEVER: dict[str, Change] = {
    "row_invariant": to("row_invariant", True),
    "the portable kernel": to("impl", "triton"),
    "impl a list": to("impl", ["auto"]),
    "a bias too few": changed("biases", lambda biases: biases[1:]),
    "act-order": to("weights.0.perm", torch.arange(1024).int()),
    "nested scales": to("weights.0.nested", torch.zeros(3)),
    "a bias in a list": to("biases.0", [0.0] * 64),
    "no weight": to("weights.0", {}),
}
UNSTORED_ROWS: dict[str, Given] = {
    "x not contiguous": lambda: {"x": bf16(1024, 4).T},
    "x not aligned": lambda: {"x": misaligned(rows())},
    "row_invariant": lambda: {"row_invariant": True},
}
BAD_ROWS: dict[str, tuple[Given, str]] = {
    "x of another width": (lambda: {"x": bf16(4, 512)}, r"x .*has shape"),
    "x of integers": (lambda: {"x": rows().to(torch.int16)}, r"x .*is torch.int16"),
    "x a list": (lambda: {"x": [1.0]}, r"x .*is a list"),
}

LINEAR = Op(
    run=lambda **given: [linear(**given)],
    plain=lambda: {"x": rows(), "weight": weight()},
    right=lambda: {"x": rows(), "weight": weight(), "bias": bf16(64)},
    results=lambda given: [((*given["x"].shape[:-1], given["weight"].shape[0]), given["x"].dtype)],
    first="x",
    gradients=("x", "bias"),
    full=lambda: multiplied("int4_g64"),
    find=LinearCall.signature,
    tensors=("x", "weights.0.codes", "weights.0.scales", "weights.0.offsets", "biases.0"),
    optional=("weights.0.offsets", "biases.0"),
    others=LINEAR_OTHERS,
    same={},
    never=LINEAR_NEVER,
    options={name: single(*of) for name, of in SHAPES.items()},
    aliased={},
    unstored={**UNSTORED_ROWS, "a bias not contiguous": lambda: {"bias": bf16(128)[::2]}},
    bad={
        **BAD_ROWS,
        "no weight": (lambda: {"weight": torch.zeros(64, 1024)}, "weight is Tensor"),
        "a bias too long": (lambda: {"bias": bf16(65)}, "bias has shape"),
        "a bias of integers": (lambda: {"bias": ints(64)}, "bias is"),
        "a bias in a list": (lambda: {"bias": [0.0] * 64}, "bias is a list"),
    },
)
PROJECTIONS = Op(
    run=lambda **given: qkv_projection(**given),
    plain=lambda: {"x": rows(), "weights": three(weight)},
    right=lambda: {"x": rows(), "weights": three(weight), "biases": three(lambda: bf16(64))},
    results=lambda given: [((*given["x"].shape[:-1], w.shape[0]), given["x"].dtype) for w in given["weights"]],
    first="x",
    gradients=("x", "biases.1"),
    full=lambda: multiplied("int4_g64", "nvfp4", "nf4"),
    find=LinearCall.signature,
    tensors=("x", *(f"weights.{i}.{name}" for i in range(3) for name in ("codes", "scales")), "weights.0.offsets")
    + ("weights.1.tensor_scale", "biases.0", "biases.1", "biases.2"),
    optional=("weights.0.offsets", "weights.1.tensor_scale", "biases.0", "biases.1", "biases.2"),
    others={
        **LINEAR_OTHERS,
        "another last format": to("weights.2.format", WEIGHT_FORMATS["fp4_bnb"]),
        "two weights swapped": changed("weights", lambda w: (w[1], w[0], w[2])),
    },
    same={},
    never={**LINEAR_NEVER, "nested scales of the last": to("weights.2.nested", torch.zeros(3)), "no second": to("weights.1", {})},
    options={name: fused(*of) for name, of in SHAPES.items()},
    aliased={"one weight": lambda: {"weights": (weight(),) * 3}, "one bias": lambda: {"biases": (bf16(64),) * 3}},
    unstored={
        **UNSTORED_ROWS,
        "a bias missing": lambda: {"biases": (bf16(64), None, bf16(64))},
        "formats mixed": lambda: {"weights": (weight(), weight("nf4"), weight())},
    },
    bad={**BAD_ROWS, "a bias too long": (lambda: {"biases": (bf16(64), bf16(65), bf16(64))}, "the k bias has shape")},
)

OPS = {"attention": ATTENTION, "append": APPEND, "linear": LINEAR, "projections": PROJECTIONS}
