"""The ops of the launch cache as one suite sees them: calls, what else would be another call, and what is never stored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from halfbyte import KV_FORMATS, WEIGHT_FORMATS, KVCache, PagedKVCache, QuantTensor, decode_attention, linear, qkv_projection
from halfbyte.arguments import Mark
from halfbyte.formats import Format
from halfbyte.kv_buffer import AppendCall, AttentionOptions, DecodeCall, HeadNorms, KVBuffer, PagedView, Rope, new_kv_buffer
from halfbyte.ops import declare
from halfbyte.ops._linear_on_gpu import LINEAR as LINEAR_OP
from halfbyte.ops.append import APPEND as APPEND_OP
from halfbyte.ops.append import append_slots
from halfbyte.ops.decode_attention import DECODE
from halfbyte.ops.experts_mlp import EXPERTS_MLP, Projection, experts_mlp
from halfbyte.ops.launch_cache import Signature
from halfbyte.ops.linear import projections_of_parts
from halfbyte.ops.unpack_pages import UNPACK as UNPACK_OP
from halfbyte.ops.unpack_pages import unpack_pages
from halfbyte.reference.experts import Activation
from halfbyte.reference.linear import LinearCall
from halfbyte.tensors import KeyTransform, expected_parts
from pretended_gpu import cuda_tensors

Arguments = dict[str, Any]
#: Arguments, made anew by each call of it: at addresses of their own.
Given = Callable[[], Arguments]
#: Copies a call, or arguments, with something else in one place.
Change = Callable[[Any], Any]


class Watched(torch.Tensor):
    """A subclass, which wants to see what is done with it."""


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """The same shape and strides, one element behind an address that is a multiple of 16."""
    made = t.new_zeros(t.untyped_storage().nbytes() // t.element_size() + 1)[1:].as_strided(t.shape, t.stride())
    assert made.data_ptr() % 16
    return made


_OTHER_TYPE = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16, torch.float32: torch.float64}
#: Each makes a tensor of other facts.
FACTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "misaligned": misaligned,
    "strides": lambda t: t.new_zeros(2 * t.untyped_storage().nbytes()).as_strided(t.shape, [2 * s for s in t.stride()]),
    "shape": lambda t: t.new_zeros(t.shape[0] + 1, *t.shape[1:]),
    "dtype": lambda t: t.to(_OTHER_TYPE.get(t.dtype, torch.int16)),
}


def at(owner: Any, path: str) -> Any:
    """What is at a path of names and positions, such as "keys.codes" or "biases.0"; None within None."""
    for name in path.split("."):
        if owner is None:
            return None
        owner = owner[name] if isinstance(owner, dict) else owner[int(name)] if name.isdigit() else getattr(owner, name)
    return owner


def changed(path: str, value: Any) -> Change:
    """With `value` at a path, or with what it makes of what is there. Nothing is checked."""
    name, _, rest = path.partition(".")
    inner = changed(rest, value) if rest else value if callable(value) else lambda _: value

    def copied(owner: Any) -> Any:
        made = inner(at(owner, name))
        if isinstance(owner, dict):
            return {**owner, name: made}
        if isinstance(owner, tuple):
            if not name.isdigit():
                return owner._replace(**{name: made})
            items = (*owner[: int(name)], made, *owner[int(name) + 1 :])
            return owner._make(items) if hasattr(owner, "_make") else items
        other = copy.copy(owner)
        other.__dict__[name] = made
        return other

    return copied


@dataclass(frozen=True)
class Suite:
    """An op: a call with every tensor there is, and calls of its public function."""

    op: declare.Op[Any]
    full: Callable[[], Any]
    run: Callable[..., Sequence[torch.Tensor]]  # the public function
    plain: Given  # as few of its arguments as it takes
    options: dict[str, Given]  # added to them: calls that are stored; "all": with every argument that `bad` spoils
    unstored: dict[str, Given]  # added to them: calls that convert a tensor, or take more than one launch of a tuned kernel
    aliased: dict[str, Given]  # in place of arguments of "all": one tensor twice
    bad: dict[str, tuple[Arguments, str]]  # in place of arguments of "all", where no fact of a tensor is wrong; and the message
    results: Callable[[Arguments], list[tuple[Sequence[int], torch.dtype]]]  # shape and dtype of each
    first: str  # the argument on whose device the kernel is launched
    gradients: tuple[str, ...]  # arguments that may want one
    refuses: bool = False  # such a call raises
    workspace: bool = True

    def right(self) -> Arguments:
        return self.plain() | self.options["all"]()

    def signature(self, call: Any) -> Signature | None:
        with cuda_tensors(True):
            return self.op.signature(call)

    def key(self, call: Any) -> Any:
        signature = self.signature(call)
        assert signature is not None
        return signature.key

    # What follows is derived from the declaration of the op.

    def tensors(self) -> dict[str, bool]:
        """Paths of the tensors of `full`, and whether each may be None."""
        call, paths = self.full(), {}
        for one in self.op.arguments:
            field = at(call, one.path)
            if one.kind is torch.Tensor and field is not None:
                paths[one.path] = one.type.endswith("?") and not one.guard
            elif one.kind == Sequence[torch.Tensor | None]:
                paths |= {f"{one.path}.{i}": True for i in range(len(field))}
            elif one.kind == Sequence[QuantTensor]:
                paths |= {f"{one.path}.{i}.{part}": part == "offsets" for i, w in enumerate(field) for part in w.parts()}
        return paths

    def same(self) -> dict[str, Change]:
        """Other numbers."""
        numbers = [one.path for one in self.op.arguments if one.is_number and at(self.full(), one.path) is not None]
        return {path: changed(path, lambda number: number / 2) for path in numbers}

    def others(self) -> dict[str, Change]:
        """Everything that is no fact of a tensor, another."""
        call, changes = self.full(), dict[str, Change]()
        for one in self.op.arguments:
            value, path = at(call, one.path), one.path
            if one.guard and value is None:
                continue
            if one.is_number and value is not None and one.type.endswith("?"):
                changes[f"no {path}"] = changed(path, None)
            elif one.kind is Format:
                changes[f"another {path}"] = changed(path, KV_FORMATS["fp8"])
                changes[f"a {path} of the same name"] = changed(path, replace)
            elif one.kind is bool:
                changes[f"not {path}"] = changed(path, not value)
            elif one.kind is int or (one.kind is float and not one.is_number):
                changes[f"another {path}"] = changed(path, value + 1)
            elif one.path == "impl":
                changes |= {f"impl={impl}": changed(path, impl) for impl in ("gluon", "triton", "reference")}
            elif one.kind == Sequence[QuantTensor]:
                for i in range(len(value)):
                    changes[f"another format of {path}.{i}"] = changed(f"{path}.{i}.format", WEIGHT_FORMATS["int4_g32"])
                    changes[f"the same of {path}.{i}"] = changed(f"{path}.{i}.format", replace)
        return changes

    def differentiable(self) -> list[str]:
        """Paths of tensors of which torch may want a gradient."""
        roots = tuple(f"{one.path}." for one in self.op.arguments if Mark.DIFFERENTIABLE in one.marks)
        return [path for path in self.tensors() if f"{path}.".startswith(roots)]

    def wrong(self) -> dict[str, Change]:
        """A field of another type: an object, a tensor, the level."""
        objects = (one for one in self.op.arguments if "." in one.path or one.kind == Sequence[QuantTensor])
        roots = sorted({one.path.split(".")[0] for one in objects})
        return {path: changed(path, [[1, 0]]) for path in (*roots, *self.tensors(), "impl")}


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).bfloat16()


def token(tokens: int = 1, heads: int = 2) -> torch.Tensor:
    return bf16(2, heads, tokens, 64)


def query(tokens: int = 1) -> torch.Tensor:
    return token(tokens, 8)


def buffer(fmt: str) -> KVBuffer:
    """Eight pages of 16 tokens."""
    return new_kv_buffer(KV_FORMATS[fmt], (8, 2, 16, 64), (2, 2, 0, 64), torch.bfloat16, "cpu")


def cache(capacity: int = 64, paged: bool = False, lengths: torch.Tensor | None = None, **options: Any) -> KVCache:
    with cuda_tensors(False):
        made = PagedKVCache(2, 2, 64, capacity, pages=8, page_size=16) if paged else KVCache(2, 2, 64, capacity, **options)
    made.lengths = made.lengths if lengths is None else lengths
    return made


def attended() -> DecodeCall:
    keys, values = (replace(buffer(name), tail=bf16(2, 2, 32, 64), sink_tokens=2) for name in ("int8", "int4_g32"))
    options = AttentionOptions(0.5, 30.0, torch.zeros(8), 20, ints(2), ints(2), torch.zeros(8))
    return DecodeCall(query(), keys, values, ints(2), ints(2), ints(2, 4), options)


ATTENTION = Suite(
    op=DECODE,
    full=attended,
    run=lambda **given: decode_attention(**given, return_lse=True),
    plain=lambda: {"q": query(), "cache": cache()},
    options={
        "plain": dict,
        "numbers": lambda: {"sm_scale": 0.3, "window": 9, "softcap": 20.0},
        "heads": lambda: {"alibi_slopes": torch.rand(8), "sinks": torch.rand(8)},
        "places": lambda: {"starts": ints(2) + 1, "query_start": ints(2) + 30},
        "gluon": lambda: {"impl": "gluon"},
        "a tail": lambda: {"cache": cache(keys="int4_channel")},
        "pages": lambda: {"cache": cache(paged=True)},
        "rotated": lambda: {"cache": cache(rotate_keys=True)},
        "all": lambda: {
            "alibi_slopes": torch.rand(8),
            "sinks": torch.rand(8),
            "starts": ints(2),
            "query_start": ints(2),
            "window": 1,
            "softcap": 3.0,
            "sm_scale": 1.0,
        },
    },
    unstored={
        "starts of 64 bits": lambda: {"starts": ints(2).long()},
        "query_start of 64 bits": lambda: {"query_start": ints(2).long()},
        "slopes of 16 bits": lambda: {"alibi_slopes": torch.rand(8).half()},
        "sinks not contiguous": lambda: {"sinks": torch.rand(16)[::2]},
        "lengths not contiguous": lambda: {"cache": cache(lengths=ints(4)[::2])},
        "deterministic": lambda: {"deterministic_batch": True},
    },
    aliased={"starts for query_start": lambda: dict.fromkeys(("starts", "query_start"), ints(2))},
    bad={
        "window 0": ({"window": 0}, "window=0"),
        "window True": ({"window": True}, "window=True"),
        "window 3.0": ({"window": 3.0}, "window=3.0"),
        "softcap 0": ({"softcap": 0.0}, "softcap=0"),
        "softcap NaN": ({"softcap": float("nan")}, "softcap=nan"),
        "sm_scale infinite": ({"sm_scale": float("inf")}, "sm_scale=inf"),
        "sm_scale a string": ({"sm_scale": "1"}, "sm_scale='1'"),
    },
    results=lambda given: [(given["q"].shape, given["q"].dtype), (given["q"].shape[:3], torch.float32)],
    first="q",
    gradients=("q",),
)


def appended() -> AppendCall:
    where, rope = (
        (*(replace(buffer(name), tail=bf16(2, 2, 9, 64)) for name in ("int8_tensor", "int4_g32")), ints(2), ints(2), ints(2, 4)),
        Rope(torch.zeros(1, 32), torch.zeros(1, 32)),
    )
    more = {"norms": norms(), "transform": transform()}
    return AppendCall(token(), token(), *where, rotate_keys=False, rope=rope, q=query(), measure=False, **more)


def transform() -> KeyTransform:
    return KeyTransform(bf16(2, 64, 64), bf16(2, 64, 64), torch.rand(2, 64))


def norms() -> HeadNorms:
    return HeadNorms(torch.rand(64).bfloat16(), torch.rand(64).bfloat16(), 1e-6, "rounded")


def run_append(cache: KVCache, **given: Any) -> Sequence[torch.Tensor]:
    rotated = cache.append(**given)
    return [] if rotated is None else [rotated]


def rotation() -> Arguments:
    return {"rope": (torch.rand(2, 1, 32), torch.rand(2, 1, 32)), "q": query()}


APPEND = Suite(
    op=APPEND_OP,
    full=appended,
    run=run_append,
    plain=lambda: {"cache": cache(), "k": token(), "v": token()},
    options={
        "plain": dict,
        "counts": lambda: {"counts": ints(2)},
        "rope": lambda: {"rope": (torch.rand(1, 32), torch.rand(1, 32))},
        "queries": rotation,
        "neighbors": lambda: {"rope": Rope(torch.rand(1, 32), torch.rand(1, 32), interleaved=True)},
        "normalized heads": lambda: {**rotation(), "norms": norms()},
        "calibrated keys": lambda: {**rotation(), "norms": norms(), "transform": transform()},
        "pages": lambda: {"cache": cache(paged=True)},
        "sink and recent tokens": lambda: {"cache": cache(sink_tokens=2, recent_tokens=4)},
        "all": lambda: {"counts": ints(2) + 1, **rotation()},
    },
    unstored={
        "a scale to measure": lambda: {"cache": cache(keys="int8_tensor")},
        "per-channel keys": lambda: {"cache": cache(keys="int4_channel")},
        "more tokens than one program takes": lambda: {"k": token(48), "v": token(48)},
        "counts of 64 bits": lambda: {"counts": ints(2).long()},
        "rope not contiguous": lambda: {"rope": (torch.rand(1, 64)[:, ::2],) * 2},
    },
    aliased={
        "k for v": lambda: dict.fromkeys(("k", "v"), token()),
        "cosines for sines": lambda: {"rope": (torch.rand(2, 1, 32),) * 2},
    },
    bad={
        "a rope of one": ({"rope": (torch.zeros(1, 32),)}, "rope is"),
        "a rope of four": ({"rope": (torch.zeros(1, 32),) * 4}, "rope is"),
        "interleaved by a number": ({"rope": (torch.zeros(1, 32), torch.zeros(1, 32), 1)}, "interleaved=1"),
        "norms without queries": ({"q": None, "norms": norms()}, "norms was given without"),
        "norms a tuple": ({**rotation(), "norms": (torch.rand(64), torch.rand(64))}, "norms is a tuple"),
    },
    results=lambda given: [(given["q"].shape, given["q"].dtype)] if "q" in given else [],
    first="k",
    gradients=("q",),
    refuses=True,
    workspace=False,
)


def slotted() -> AppendCall:
    """A call as `append_slots` makes it of its arguments: tokens are no sequences yet."""
    where = buffer("int8"), buffer("int4_g32"), ints(2).long()
    rope = Rope(torch.zeros(2, 32), torch.zeros(2, 32))
    return AppendCall(bf16(2, 2, 64), bf16(2, 2, 64), *where, rope=rope, q=bf16(2, 8, 64), measure=False, by_slot=True)


def run_append_slots(**given: Any) -> Sequence[torch.Tensor]:
    rotated = append_slots(**given)
    return [] if rotated is None else [rotated]


APPEND_SLOTS = Suite(
    op=APPEND_OP,
    full=slotted,
    run=run_append_slots,
    plain=lambda: {
        "k": bf16(2, 2, 64),
        "v": bf16(2, 2, 64),
        "keys": buffer("int8"),
        "values": buffer("int4_g32"),
        "slot_mapping": ints(2).long(),
    },
    options={
        "plain": dict,
        "rope": lambda: {"rope": (torch.rand(2, 32), torch.rand(2, 32))},
        "slots of 32 bits": lambda: {"slot_mapping": ints(2)},
        "many tokens": lambda: {"k": bf16(48, 2, 64), "v": bf16(48, 2, 64), "slot_mapping": ints(48).long()},
        "all": lambda: {"rope": (torch.rand(2, 32), torch.rand(2, 32)), "q": bf16(2, 8, 64)},
        "calibrated keys": lambda: {"q": bf16(2, 8, 64), "transform": transform()},
    },
    unstored={
        "a scale to measure": lambda: {"keys": buffer("int8_tensor")},
        "rope not contiguous": lambda: {"rope": (torch.rand(2, 64)[:, ::2],) * 2},
    },
    aliased={
        "k for v": lambda: dict.fromkeys(("k", "v"), bf16(2, 2, 64)),
        "cosines for sines": lambda: {"rope": (torch.rand(2, 32),) * 2},
    },
    bad={"a rope of one": ({"rope": (torch.zeros(2, 32),)}, "rope is")},
    results=APPEND.results,
    first="k",
    gradients=("q",),
    refuses=True,
    workspace=False,
)


def weight(fmt: str = "int4_g64", n: int = 64, k: int = 1024) -> QuantTensor:
    parts = expected_parts(WEIGHT_FORMATS[fmt], (n, k))
    return QuantTensor(WEIGHT_FORMATS[fmt], (n, k), **{name: torch.zeros(*of, dtype=d) for name, (of, d) in parts.items()})


def multiplied(*formats: str) -> LinearCall:
    return LinearCall(bf16(4, 1024), tuple(map(weight, formats)), tuple(bf16(64) for _ in formats))


#: The format, the shape of x, and whether there is a bias. The last is two launches, of which the first orders x.
SHAPES: dict[str, tuple[str, tuple[int, ...], bool]] = {
    "one row": ("int4_sym_g128", (1, 1024), False),
    "a batch of rows, zero points and a bias": ("int4_g64", (2, 4, 1024), True),
    "a tensor scale": ("nvfp4", (16, 1024), False),
    "warp groups": ("int4_sym_g128", (2, 20, 1024), True),
    "rows of a prompt": ("int4_sym_g128", (2, 128, 1024), True),
}


def single(fmt: str, shape: tuple[int, ...], biased: bool) -> Given:
    return lambda: {"x": bf16(*shape), "weight": weight(fmt, 96), "bias": bf16(96) if biased else None}


def fused(fmt: str, shape: tuple[int, ...], biased: bool) -> Given:
    weights, biases = (lambda: tuple(weight(fmt, n) for n in (96, 32, 32))), (lambda: tuple(map(bf16, (96, 32, 32))))
    return lambda: {"x": bf16(*shape), "weights": weights(), "biases": biases() if biased else (None,) * 3}


LINEAR = Suite(
    op=LINEAR_OP,
    full=lambda: multiplied("int4_g64"),
    run=lambda **given: [linear(**given)],
    plain=lambda: {"x": bf16(4, 1024), "weight": weight()},
    options={**{name: single(*of) for name, of in SHAPES.items()}, "all": lambda: {"bias": bf16(64)}},
    unstored={
        "x not contiguous": lambda: {"x": bf16(1024, 4).T},
        "x not aligned": lambda: {"x": misaligned(bf16(4, 1024))},
        "act-order": lambda: {"weight": replace(weight(), perm=torch.arange(1024).int())},
        "nested scales": lambda: {"weight": weight("nf4_dq")},
        "row_invariant": lambda: {"row_invariant": True},
        "a bias not contiguous": lambda: {"bias": bf16(128)[::2]},
    },
    aliased={},
    bad={"a bias too long": ({"bias": bf16(65)}, "bias has shape")},
    results=lambda given: [((*given["x"].shape[:-1], given["weight"].shape[0]), given["x"].dtype)],
    first="x",
    gradients=("x", "bias"),
)
PROJECTIONS = replace(
    LINEAR,
    full=lambda: multiplied("int4_g64", "nvfp4", "nf4"),
    run=lambda **given: qkv_projection(**given),
    plain=lambda: {"x": bf16(4, 1024), "weights": (weight(), weight(), weight())},
    options={**{name: fused(*of) for name, of in SHAPES.items()}, "all": lambda: {"biases": (bf16(64), bf16(64), bf16(64))}},
    unstored={
        **{
            name: given for name, given in LINEAR.unstored.items() if name in ("x not contiguous", "x not aligned", "row_invariant")
        },
        "nested scales": lambda: {"weights": (weight("nf4_dq"),) * 3},
        "a bias missing": lambda: {"biases": (bf16(64), None, bf16(64))},
        "formats mixed": lambda: {"weights": (weight(), weight("nf4"), weight())},
    },
    aliased={"one weight": lambda: {"weights": (weight(),) * 3}, "one bias": lambda: {"biases": (bf16(64),) * 3}},
    bad={"a bias too long": ({"biases": (bf16(64), bf16(65), bf16(64))}, "the k bias has shape")},
    results=lambda given: [((*given["x"].shape[:-1], w.shape[0]), given["x"].dtype) for w in given["weights"]],
    gradients=("x", "biases.1"),
)

OPS = {"attention": ATTENTION, "append": APPEND, "append_slots": APPEND_SLOTS, "linear": LINEAR, "projections": PROJECTIONS}

#: Without a public op of torch.library.
UNPACK = replace(
    APPEND_SLOTS,
    op=UNPACK_OP,
    run=lambda **given: unpack_pages(**given) or (),
    plain=lambda: {
        "cache": PagedView(buffer("int8"), buffer("int4_g32"), ints(2), ints(2, 4), False),
        "cu_seqlens_k": ints(3),
        "keys": bf16(40, 2, 64),
        "values": bf16(40, 2, 64),
    },
    options={"plain": dict, "all": lambda: {"new": (bf16(5, 2, 64), bf16(5, 2, 64), ints(3))}},
    aliased={"values for keys": lambda: dict.fromkeys(("keys", "values"), bf16(40, 2, 64))},
    results=lambda given: [],
    first="keys",
)


def projection(features: int, width: int, fmt: str = "int4_g64", biased: bool = False) -> Projection:
    """Of 32 experts."""
    parts = expected_parts(WEIGHT_FORMATS[fmt], (32, features, width))
    return Projection([torch.zeros(*of, dtype=d) for of, d in parts.values()], fmt, bf16(32, features) if biased else None)


def spread(p: Projection) -> Projection:
    """With codes that are no neighbors in memory."""
    return p._replace(parts=[torch.stack([t, t], -1)[..., 0] if i == 0 else t for i, t in enumerate(p.parts)])


def mixture(tokens: int, inner: int = 128, fmt: str = "int4_g64", biased: bool = False) -> Arguments:
    up, down = projection(2 * inner, 128, fmt, biased), projection(128, inner, fmt, biased)
    return {"x": bf16(tokens, 128), "up": up, "down": down, "ids": ints(tokens, 2), "gates": torch.rand(tokens, 2)}


#: Its prompts; a step is two launches that are not stored.
MIXTURE = replace(
    UNPACK,
    op=EXPERTS_MLP,
    run=lambda **given: [experts_mlp(**given, activation=Activation("silu"))],
    plain=lambda: mixture(4096),
    options={
        "few rows an expert": lambda: mixture(128, 256),
        "few, and columns to clear": lambda: mixture(128),
        "ids of 64 bits, and biases": lambda: mixture(4096, biased=True) | {"ids": ints(4096, 2).long()},
        "all": dict,
    },
    unstored={
        "gates not contiguous": lambda: {"gates": torch.rand(2, 4096).T},
        "ids not contiguous": lambda: {"ids": ints(2, 4096).T},
        "codes not contiguous": lambda: {"up": spread(projection(256, 128))},
        "a kernel without a plan": lambda: mixture(4096, fmt="nf4_dq"),
    },
    aliased={},
    results=lambda given: [(given["x"].shape, given["x"].dtype)],
    first="x",
)


def in_compiled_code(op: Suite) -> Suite:
    """`linear` or `projections`, as compiled code calls it."""

    def run(x: torch.Tensor, weights: Sequence[QuantTensor], biases: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor]:
        return projections_of_parts(x, [[*w.parts().values()] for w in weights], biases, [w.format.name for w in weights])

    def run_plain(x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
        return run(x, [weight], [bias])

    def run_three(x: torch.Tensor, weights: Sequence[QuantTensor], biases: Any = (None, None, None)) -> Sequence[torch.Tensor]:
        return run(x, weights, biases)

    return replace(op, run=run_plain if op is LINEAR else run_three)
